//! Judges the frames that come from a port. Has no side effects.

use super::neighbour;
use crate::card::filter::Address;
use crate::frame::protocols::{ETHERTYPE_ARP, ETHERTYPE_IPV6, ETHERTYPE_SERVICE, ETHERTYPE_VLAN};
use kickless_spec::net::{ETHERNET_HEADER_LEN, MAC_LEN, VLAN_TAG_LEN};

const ETHERTYPE_AT: usize = 2 * MAC_LEN;
/// The bits of a tag with the number of the VLAN.
const VLAN_BITS: u16 = 0xfff;
/// A number that no VLAN has (IEEE 802.1Q, table 9-2).
const VLAN_RESERVED: u16 = 0xfff;
/// Offset of the sender's hardware address in an ARP packet (RFC 826, with Ethernet addresses).
const ARP_SENDER: usize = 8;
/// The addresses from this one on, which differ in the last four bits, are for the two ends of a cable. A
/// bridge passes them to no other port (IEEE 802.1Q, table 8-1).
const LINK_LOCAL: Address = [0x01, 0x80, 0xc2, 0, 0, 0];

/// The bytes of a frame that are enough to judge most frames: both addresses, a tag, and a packet of ARP.
pub(crate) const HEAD_LEN: usize = 64;

/// The rules for the frames of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rule {
    /// The VLAN of an access port. A port without one is a trunk: it carries all VLANs, with tags.
    pub(crate) vlan: Option<u16>,
    /// The only source address of the frames of the port.
    pub(crate) address: Option<Address>,
}

/// The reason for which the switch does not take a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Its source is not the address of the port, is that of another port, or is no address of one card. Or
    /// it is a packet of ARP or of neighbour discovery that names another address.
    Spoofed,
    /// It has a VLAN tag and came from an access port, or its tag names no VLAN. Or it has a second tag, or
    /// one of a service provider, and came from a port with an address.
    Tagged,
    /// It is for the other end of the cable only.
    LinkLocal,
}

/// The parts of a frame that decide where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) destination: Address,
    pub(crate) source: Address,
    /// The VLAN, or 0 for untagged frames of a trunk.
    pub(crate) vlan: u16,
    /// The frame has a tag of this VLAN.
    pub(crate) is_tagged: bool,
}

/// The header of a frame: both addresses and the EtherType.
pub(crate) type EthernetHeader = [u8; ETHERNET_HEADER_LEN];

impl Head {
    /// Returns whether the destination is a group or everybody.
    pub(crate) fn is_for_many(&self) -> bool {
        self.destination[0] & 1 == 1
    }
}

impl Rule {
    /// Returns whether frames of this VLAN leave through the port.
    pub(crate) fn carries(&self, vlan: u16) -> bool {
        self.vlan.is_none_or(|own| own == vlan)
    }

    /// Returns the header of a frame, if all frames with the same header are judged alike.
    pub(crate) fn decides_by_header(&self, frame: &[u8]) -> Option<EthernetHeader> {
        let header = frame.first_chunk::<ETHERNET_HEADER_LEN>()?;
        match word(header, ETHERTYPE_AT)? {
            ETHERTYPE_VLAN | ETHERTYPE_SERVICE => None,
            ETHERTYPE_ARP | ETHERTYPE_IPV6 if self.address.is_some() => None,
            _ => Some(*header),
        }
    }

    /// Returns whether [`Rule::judge`] may read a frame beyond its first [`HEAD_LEN`] bytes. Only in messages
    /// of ICMPv6, the part that names an address can be behind them. Extension headers can be before these
    /// messages.
    pub(crate) fn reads_far(&self, frame: &[u8]) -> bool {
        let payload = payload_at(frame);
        self.address.is_some()
            && word(frame, payload - 2) == Some(ETHERTYPE_IPV6)
            && neighbour::reads_on(frame.get(payload..).unwrap_or_default())
    }

    /// Judges a frame of at least the length of an Ethernet header.
    pub(crate) fn judge(&self, frame: &[u8]) -> Result<Head, Refusal> {
        let (Some(destination), Some(source)) = (address(frame, 0), address(frame, MAC_LEN)) else {
            return Err(Refusal::Spoofed);
        };
        if source[0] & 1 == 1 || source == Address::default() || self.address.is_some_and(|own| own != source)
        {
            return Err(Refusal::Spoofed);
        }
        if destination[..5] == LINK_LOCAL[..5] && destination[5] & 0xf0 == LINK_LOCAL[5] {
            return Err(Refusal::LinkLocal);
        }
        let kind = word(frame, ETHERTYPE_AT);
        let is_tag = kind == Some(ETHERTYPE_VLAN);
        let (vlan, is_tagged) = match self.vlan {
            Some(_) if is_tag || kind == Some(ETHERTYPE_SERVICE) => return Err(Refusal::Tagged),
            Some(own) => (own, false),
            // Without its tag, the frame must still have the length of a header.
            None if is_tag && frame.len() < ETHERNET_HEADER_LEN + VLAN_TAG_LEN => {
                return Err(Refusal::Tagged);
            }
            None if is_tag => {
                let vlan = word(frame, ETHERNET_HEADER_LEN).ok_or(Refusal::Tagged)? & VLAN_BITS;
                (vlan, vlan != 0)
            }
            None => (0, false),
        };
        if vlan == VLAN_RESERVED {
            return Err(Refusal::Tagged);
        }
        let payload = payload_at(frame);
        if let Some(own) = self.address {
            let is_forged = match word(frame, payload - 2) {
                // Linux removes any number of tags of VLAN 0, so they could hide a packet.
                Some(ETHERTYPE_VLAN | ETHERTYPE_SERVICE) => return Err(Refusal::Tagged),
                Some(ETHERTYPE_ARP) => address(frame, payload + ARP_SENDER) != Some(own),
                Some(ETHERTYPE_IPV6) => {
                    neighbour::names_another(frame.get(payload..).unwrap_or_default(), own)
                }
                _ => false,
            };
            if is_forged {
                return Err(Refusal::Spoofed);
            }
        }
        Ok(Head { destination, source, vlan, is_tagged })
    }
}

/// Returns the offset of what is behind the Ethernet header and a tag. The two bytes before say what it is.
fn payload_at(frame: &[u8]) -> usize {
    ETHERNET_HEADER_LEN + if word(frame, ETHERTYPE_AT) == Some(ETHERTYPE_VLAN) { VLAN_TAG_LEN } else { 0 }
}

fn address(frame: &[u8], at: usize) -> Option<Address> {
    frame.get(at..)?.first_chunk().copied()
}

fn word(frame: &[u8], at: usize) -> Option<u16> {
    frame.get(at..)?.first_chunk().copied().map(u16::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: Address = [2, 0, 0, 0, 0, 1];
    const B: Address = [2, 0, 0, 0, 0, 2];

    fn frame(destination: Address, source: Address, rest: &[u8]) -> Vec<u8> {
        [&destination[..], &source, rest, &[0; 46]].concat()
    }

    fn arp(sender: Address) -> Vec<u8> {
        [&[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &sender[..]].concat()
    }

    #[test]
    fn a_port_with_an_address_sends_from_it_alone() {
        let (fixed, free) = (Rule { vlan: None, address: Some(A) }, Rule::default());
        let head = Head { destination: B, source: A, vlan: 0, is_tagged: false };
        assert_eq!(fixed.judge(&frame(B, A, &[8, 0])), Ok(head));
        assert_eq!(fixed.judge(&frame(A, B, &[8, 0])), Err(Refusal::Spoofed));
        assert!(free.judge(&frame(A, B, &[8, 0])).is_ok());
        for source in [[3, 0, 0, 0, 0, 1], [0xff; 6], [0; 6]] {
            assert_eq!(free.judge(&frame(A, source, &[8, 0])), Err(Refusal::Spoofed));
        }
        assert!(fixed.judge(&frame(B, A, &arp(A))).is_ok());
        assert_eq!(fixed.judge(&frame(B, A, &arp(B))), Err(Refusal::Spoofed), "it answers for another");
        assert_eq!(
            fixed.judge(&frame(B, A, &[&[0x81, 0, 0, 5][..], &arp(B)].concat())),
            Err(Refusal::Spoofed)
        );
        assert_eq!(fixed.judge(&frame(B, A, &[8, 6])[..20]), Err(Refusal::Spoofed), "a part of a packet");
        assert!(free.judge(&frame(B, A, &arp(B))).is_ok());
    }

    #[test]
    fn a_port_with_an_address_answers_neighbours_for_it_alone() {
        let rule = Rule { vlan: None, address: Some(A) };
        for (address, is_forged) in [(A, false), (B, true)] {
            // An advertisement with the hardware address of its target.
            let mut packet = vec![0x60, 0, 0, 0, 0, 32, 58, 255];
            packet.resize(40, 0);
            packet.push(136);
            packet.resize(64, 0);
            packet.extend([2, 1]);
            packet.extend(address);
            for tag in [&[][..], &[0x81, 0, 0, 5]] {
                let head = [tag, &[0x86, 0xdd]].concat();
                let judged = rule.judge(&[&B[..], &A, &head, &packet].concat());
                assert_eq!(judged == Err(Refusal::Spoofed), is_forged, "{address:?}");
            }
            assert!(Rule::default().judge(&[&B[..], &A, &[0x86, 0xdd], &packet].concat()).is_ok());
        }
    }

    #[test]
    fn tags_choose_the_vlan_of_a_trunk_only() {
        let (access, trunk) = (Rule { vlan: Some(5), address: None }, Rule::default());
        let vlan =
            |rule: Rule, rest: &[u8]| rule.judge(&frame(A, B, rest)).map(|head| (head.vlan, head.is_tagged));
        assert_eq!(vlan(access, &[8, 0]), Ok((5, false)));
        for tag in [&[0x81, 0, 0, 5], &[0x81, 0, 0, 0], &[0x88, 0xa8, 0, 5]] {
            assert_eq!(vlan(access, tag), Err(Refusal::Tagged));
        }
        assert_eq!(vlan(trunk, &[0x81, 0, 0xe0, 7]), Ok((7, true)));
        assert_eq!(vlan(trunk, &[0x81, 0, 0xe0, 0]), Ok((0, false)));
        assert_eq!(vlan(trunk, &[8, 0]), Ok((0, false)));
        assert_eq!(vlan(trunk, &[0x81, 0, 0xff, 0xff]), Err(Refusal::Tagged));
        for len in [14, 16, 17] {
            assert_eq!(trunk.judge(&frame(A, B, &[0x81, 0, 0, 5])[..len]), Err(Refusal::Tagged));
        }
        assert!(trunk.judge(&frame(A, B, &[0x81, 0, 0, 5])[..18]).is_ok());
        assert!(access.carries(5) && !access.carries(0) && trunk.carries(0) && trunk.carries(5));
    }

    /// Returns an EtherType. Most are those that the rules know.
    fn kind() -> impl Strategy<Value = u16> {
        let known = [ETHERTYPE_VLAN, ETHERTYPE_SERVICE, ETHERTYPE_ARP, ETHERTYPE_IPV6];
        prop_oneof![4 => prop::sample::select(known.to_vec()), 1 => any::<u16>()]
    }

    proptest! {
        /// Frames with the same header, of which only one is judged.
        #[test]
        fn a_header_decides_about_all_frames_that_have_it(
            kind in kind(),
            first in 0u8..3,
            rests in proptest::array::uniform2(proptest::collection::vec(any::<u8>(), 0..60)),
            vlan in proptest::option::of(Just(5)),
            own in proptest::option::of(Just(A)),
        ) {
            let rule = Rule { vlan, address: own };
            let header = [&B[..], &[[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 9], [3; 6]][usize::from(first)]].concat();
            let frames = rests.map(|rest| [&header[..], &kind.to_be_bytes(), &rest].concat());
            if let Some(known) = rule.decides_by_header(&frames[0]) {
                prop_assert!(frames[1].starts_with(&known));
                prop_assert_eq!(rule.judge(&frames[0]), rule.judge(&frames[1]));
                prop_assert!(!rule.reads_far(&frames[0]));
            }
        }

        /// Advertisements that name an address, behind extension headers of any lengths, or behind what would
        /// be one if the packet did not begin with another protocol.
        #[test]
        fn the_head_of_a_packet_is_judged_as_all_of_it(
            is_tagged: bool,
            first in prop_oneof![
                2 => prop::sample::select(vec![0u8, 6, 17, 43, 44, 51, 58, 60]),
                1 => any::<u8>(),
            ],
            units in prop::collection::vec(0u8..16, 0..4),
            named in prop_oneof![Just(A), Just(B)],
        ) {
            let tag: &[u8] = if is_tagged { &[0x81, 0, 0, 5] } else { &[] };
            let mut frame = [&B[..], &A, tag, &[0x86, 0xdd]].concat();
            let (packet, all) = (frame.len(), units.len());
            frame.resize(packet + 40, 0);
            frame[packet + 6] = first;
            for (number, units) in (1..).zip(&units) {
                let next = if number == all { 58 } else { 60 };
                frame.extend([next, *units]);
                frame.resize(frame.len() + usize::from(*units) * 8 + 6, 0);
            }
            frame.push(136);
            frame.resize(frame.len() + 23, 0);
            frame.extend([2, 1]);
            frame.extend(named);
            let rule = Rule { vlan: None, address: Some(A) };
            if !rule.reads_far(&frame) {
                prop_assert_eq!(rule.judge(&frame[..HEAD_LEN]), rule.judge(&frame));
            }
            prop_assert!(!matches!(first, 6 | 17) || !rule.reads_far(&frame));
            let free = Rule { vlan: None, address: None };
            prop_assert!(!free.reads_far(&frame));
        }

        #[test]
        fn the_head_of_a_frame_is_judged_as_all_of_it(
            kinds in proptest::array::uniform2(kind()),
            source in prop_oneof![Just(A), Just(B)],
            rest in proptest::collection::vec(any::<u8>(), 0..200),
            vlan in proptest::option::of(Just(5)),
            own in proptest::option::of(Just(A)),
        ) {
            let rule = Rule { vlan, address: own };
            let [kind, behind_tag] = kinds.map(u16::to_be_bytes);
            let frame = [&B[..], &source, &kind, &[0, 5], &behind_tag, &rest].concat();
            if !rule.reads_far(&frame) {
                prop_assert_eq!(rule.judge(&frame[..frame.len().min(HEAD_LEN)]), rule.judge(&frame));
            }
        }
    }

    #[test]
    fn tags_hide_nothing_from_a_port_with_an_address() {
        let (fixed, free) = (Rule { vlan: None, address: Some(A) }, Rule::default());
        for tags in [
            &[0x81, 0, 0, 0, 0x81, 0, 0, 0][..],
            &[0x81, 0, 0, 5, 0x81, 0, 0, 0],
            &[0x81, 0, 0, 5, 0x88, 0xa8, 0, 0],
            &[0x88, 0xa8, 0, 0],
            &[0x88, 0xa8, 0, 5],
        ] {
            let frame = frame(B, A, &[tags, &arp(B)].concat());
            assert_eq!(fixed.judge(&frame), Err(Refusal::Tagged), "{tags:?}");
            assert!(free.judge(&frame).is_ok());
        }
    }

    #[test]
    fn frames_for_one_cable_are_not_passed_on() {
        for (last, refused) in [(0, true), (0xe, true), (0xf, true), (0x10, false), (0x21, false)] {
            let judged = Rule::default().judge(&frame([1, 0x80, 0xc2, 0, 0, last], A, &[8, 0]));
            assert_eq!(judged == Err(Refusal::LinkLocal), refused, "{last}");
        }
    }
}
