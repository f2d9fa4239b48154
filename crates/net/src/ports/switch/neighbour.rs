//! Finds the hardware addresses that neighbour discovery of IPv6 names (RFC 4861). Has no side effects.

use crate::card::filter::Address;
use crate::frame::protocols::{AUTHENTICATION, ICMPV6, IPV6_EXTENSIONS, IPV6_HEADER, IPV6_NEXT_HEADER};

/// The most extension headers of a packet. No packet in use has more. A longer list could hide a message.
const EXTENSIONS_MAX: usize = 8;

/// The types of messages, each with the offset of its options.
const MESSAGES: [(u8, usize); 5] = [(133, 8), (134, 16), (135, 24), (136, 24), (137, 40)];
/// The most options of a message. A message has a handful of them (RFC 4861, 4.1 to 4.5), and a router's
/// with a prefix for each of some networks has ten. A longer list could hide an address, and the switch is
/// locked while it is read.
const OPTIONS_MAX: usize = 32;
/// Options with the hardware address of the source or of the target, behind their type and length.
const ADDRESS_OPTIONS: [u8; 2] = [1, 2];
const OPTION_UNIT: usize = 8;

/// Returns whether [`names_another`] reads more of an IPv6 packet than its fixed header. TCP and UDP without
/// extension headers are decided by the fixed header.
#[inline(never)]
pub(super) fn reads_on(packet: &[u8]) -> bool {
    packet
        .get(IPV6_NEXT_HEADER)
        .is_some_and(|next| *next == ICMPV6 || *next == AUTHENTICATION || IPV6_EXTENSIONS.contains(next))
}

/// Returns whether an IPv6 packet is a message of neighbour discovery that names a hardware address other
/// than `own`, or could be one.
///
/// A message in fragments is none: receivers discard it (RFC 6980).
pub(super) fn names_another(packet: &[u8], own: Address) -> bool {
    let Some(mut next) = packet.get(IPV6_NEXT_HEADER).copied() else { return false };
    let mut at = IPV6_HEADER;
    for _ in 0..EXTENSIONS_MAX {
        let len = match next {
            ICMPV6 => return message_names_another(packet.get(at..).unwrap_or_default(), own),
            next if IPV6_EXTENSIONS.contains(&next) => |len: usize| (len + 1) * 8,
            AUTHENTICATION => |len: usize| (len + 2) * 4,
            _ => return false,
        };
        let Some([following, units]) = packet.get(at..).and_then(|rest| rest.first_chunk()).copied() else {
            return false;
        };
        (next, at) = (following, at + len(units.into()));
    }
    true
}

fn message_names_another(message: &[u8], own: Address) -> bool {
    let kind = message.first();
    let Some((_, options)) = MESSAGES.iter().find(|(known, _)| Some(known) == kind) else { return false };
    let mut options = message.get(*options..).unwrap_or_default();
    for _ in 0..OPTIONS_MAX {
        let [kind, units, body @ ..] = options else { return false };
        let len = usize::from(*units) * OPTION_UNIT;
        if ADDRESS_OPTIONS.contains(kind) && body.first_chunk() != Some(&own) {
            return true;
        }
        // A receiver discards a message with an empty option.
        match options.get(len..) {
            Some(rest) if len > 0 => options = rest,
            _ => return false,
        }
    }
    !options.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OWN: Address = [2, 0, 0, 0, 0, 1];
    const OTHER: Address = [2, 0, 0, 0, 0, 2];

    /// Returns a packet with these extension headers, each of this number of units, and this message.
    fn packet(extensions: &[(u8, u8)], message: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; IPV6_HEADER];
        let kinds: Vec<u8> = extensions.iter().map(|(kind, _)| *kind).chain([ICMPV6]).collect();
        packet[IPV6_NEXT_HEADER] = kinds[0];
        for ((kind, units), next) in extensions.iter().zip(&kinds[1..]) {
            let len = if *kind == AUTHENTICATION { (units + 2) * 4 } else { (units + 1) * 8 };
            packet.extend([*next, *units]);
            packet.extend(vec![0; usize::from(len) - 2]);
        }
        packet.extend(message);
        packet
    }

    /// Returns a message with these options.
    fn message(kind: u8, options: &[(u8, Address)]) -> Vec<u8> {
        let (_, at) = MESSAGES.iter().find(|(known, _)| *known == kind).unwrap();
        let mut message = vec![0; *at];
        message[0] = kind;
        // A nonce is before them.
        message.extend([14, 1, 0, 0, 0, 0, 0, 0]);
        for (kind, address) in options {
            message.extend([*kind, 1]);
            message.extend(address);
        }
        message
    }

    #[test]
    fn each_message_is_searched_for_addresses() {
        for (kind, _) in MESSAGES {
            for option in ADDRESS_OPTIONS {
                let of = |options: &[_]| names_another(&packet(&[], &message(kind, options)), OWN);
                assert!(!of(&[]) && !of(&[(option, OWN)]) && of(&[(option, OTHER)]), "{kind} {option}");
                assert!(of(&[(option, OWN), (option, OTHER)]));
                let mut cut = packet(&[], &message(kind, &[(option, OWN)]));
                cut.pop();
                assert!(names_another(&cut, OWN), "a part of an address");
            }
        }
        let forged = message(136, &[(2, OTHER)]);
        assert!(!names_another(&packet(&[], &[&[128][..], &forged[1..]].concat()), OWN), "an echo request");
    }

    #[test]
    fn extension_headers_hide_nothing() {
        let forged = message(136, &[(2, OTHER)]);
        for extensions in [&[(0, 0)][..], &[(60, 3)], &[(51, 4)], &[(0, 1), (43, 2), (60, 0), (51, 1)]] {
            assert!(names_another(&packet(extensions, &forged), OWN), "{extensions:?}");
            assert!(!names_another(&packet(extensions, &message(136, &[(2, OWN)])), OWN), "{extensions:?}");
        }
        let many = [(60, 0); EXTENSIONS_MAX];
        assert!(names_another(&packet(&many, &message(136, &[(2, OWN)])), OWN), "it could be one");
        assert!(!names_another(&packet(&many[1..], &message(136, &[(2, OWN)])), OWN));
    }

    /// The rest of a long list is not read.
    #[test]
    fn a_long_list_of_options_could_be_forged() {
        let options = |count: usize| packet(&[], &message(136, &vec![(2, OWN); count - 1]));
        assert!(!names_another(&options(OPTIONS_MAX), OWN));
        assert!(names_another(&options(OPTIONS_MAX + 1), OWN));
    }

    #[test]
    fn the_fixed_header_decides_about_tcp_and_udp() {
        for (next, reads) in [(6, false), (17, false), (44, false), (ICMPV6, true), (0, true), (51, true)] {
            let mut packet = packet(&[], &message(136, &[(2, OTHER)]));
            packet[IPV6_NEXT_HEADER] = next;
            assert_eq!(reads_on(&packet), reads, "{next}");
        }
        assert!(!reads_on(&[0; IPV6_NEXT_HEADER]));
    }

    proptest! {
        /// Messages behind any extension headers, and what could be taken for one.
        #[test]
        fn a_packet_that_is_not_read_on_names_nothing(
            extensions in prop::collection::vec((prop::sample::select(vec![0u8, 43, 60, 51]), 0u8..20), 0..10),
            kind in prop::sample::select(vec![133u8, 134, 135, 136, 137]),
            next in prop_oneof![Just(None), any::<u8>().prop_map(Some)],
            len in 0..400usize,
        ) {
            let mut packet = packet(&extensions, &message(kind, &[(1, OTHER)]));
            prop_assert!(reads_on(&packet) && names_another(&packet, OWN));
            if let Some(next) = next {
                packet[IPV6_NEXT_HEADER] = next;
            }
            packet.truncate(len);
            if !reads_on(&packet) {
                prop_assert!(!names_another(&packet, OWN));
            }
            // The fixed header is enough to know.
            prop_assert_eq!(reads_on(&packet), reads_on(&packet[..packet.len().min(IPV6_HEADER)]));
        }

        #[test]
        fn any_bytes_can_be_searched(mut bytes in prop::collection::vec(any::<u8>(), 0..120), is_icmp: bool) {
            if let Some(next) = bytes.get_mut(IPV6_NEXT_HEADER).filter(|_| is_icmp) {
                *next = ICMPV6;
            }
            names_another(&bytes, OWN);
        }
    }
}
