//! Chooses the received frames that the driver wants, by their addresses and VLAN tags (virtio 1.3, section
//! 5.1.6.5). Has no side effects.

use crate::frame::protocols::ETHERTYPE_VLAN;
use bitflags::bitflags;
use kickless_spec::net::{CTRL_RX_ALLMULTI, CTRL_RX_ALLUNI, CTRL_RX_NOBCAST, CTRL_RX_NOMULTI, CTRL_RX_NOUNI};
use kickless_spec::net::{CTRL_RX_PROMISC, MAC_LEN};
use std::sync::Arc;

/// The most addresses that a table compares. A longer table accepts all addresses of its kind.
const TABLE_MAX: usize = 64;
/// Stands for a table of all addresses in a saved state.
const EVERYTHING: u16 = u16::MAX;
/// The number of VLANs, in words of 64 bits.
const VLAN_WORDS: usize = 4096 / 64;
const BROADCAST: Address = [0xff; MAC_LEN];

/// An Ethernet address.
pub type Address = [u8; MAC_LEN];

bitflags! {
    /// The receive modes of CTRL_RX.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Modes: u8 {
        /// Accepts all frames.
        const PROMISC = 1 << CTRL_RX_PROMISC;
        /// Accepts all frames to groups.
        const ALLMULTI = 1 << CTRL_RX_ALLMULTI;
        /// Accepts all frames to single addresses.
        const ALLUNI = 1 << CTRL_RX_ALLUNI;
        /// Refuses all frames to groups, except for broadcasts.
        const NOMULTI = 1 << CTRL_RX_NOMULTI;
        /// Refuses all frames to single addresses.
        const NOUNI = 1 << CTRL_RX_NOUNI;
        /// Refuses broadcasts.
        const NOBCAST = 1 << CTRL_RX_NOBCAST;
    }
}

/// The frames that a driver wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// The receive modes.
    pub modes: Modes,
    /// The address of the card. While it is not known, all single addresses are accepted.
    pub address: Option<Address>,
    unicast: Table,
    multicast: Table,
    /// A bit for each VLAN whose frames are accepted.
    vlans: [u64; VLAN_WORDS],
}

/// Further addresses that are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Table {
    #[default]
    Nothing,
    /// These.
    Addresses(Arc<[Address]>),
    /// All, because there were too many.
    Everything,
}

impl Table {
    fn new(addresses: &[Address]) -> Self {
        match addresses.len() {
            0 => Self::Nothing,
            1..=TABLE_MAX => Self::Addresses(addresses.into()),
            _ => Self::Everything,
        }
    }

    /// Reads a saved table. Returns the bytes behind it too.
    fn load(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (count, rest) = bytes.split_first_chunk()?;
        let count = u16::from_le_bytes(*count);
        if count == EVERYTHING {
            return Some((Self::Everything, rest));
        }
        let (addresses, rest) = rest.split_at_checked(usize::from(count) * MAC_LEN)?;
        (usize::from(count) <= TABLE_MAX).then(|| (Self::new(addresses.as_chunks().0), rest))
    }

    fn accepts(&self, address: Address) -> bool {
        match self {
            Self::Nothing => false,
            Self::Addresses(addresses) => addresses.contains(&address),
            Self::Everything => true,
        }
    }
}

impl Filter {
    /// Returns the filter of a fresh driver, which accepts all frames. Once it is no longer promiscuous, it
    /// accepts those to `address`, broadcasts, and frames without a tag.
    pub fn new(address: Option<Address>) -> Self {
        let (unicast, multicast) = (Table::Nothing, Table::Nothing);
        Self { modes: Modes::PROMISC, address, unicast, multicast, vlans: [0; VLAN_WORDS] }
    }

    /// Forgets what narrows the filter, because the driver has set it in an unknown way. The filter accepts
    /// all addresses and VLANs that the driver may want, until the driver sets them again.
    pub(crate) fn distrust(&mut self) {
        let (unicast, multicast) = (Table::Everything, Table::Everything);
        *self =
            Self { modes: Modes::PROMISC, address: None, unicast, multicast, vlans: [u64::MAX; VLAN_WORDS] };
    }

    /// Appends the filter to a saved state: the modes, whether the address is known and the address, both
    /// tables (the number of addresses in two bytes, or 0xffff for everything, and the addresses), and the
    /// words of the VLANs.
    pub(crate) fn save(&self, bytes: &mut Vec<u8>) {
        bytes.extend([self.modes.bits(), self.address.is_some().into()]);
        bytes.extend(self.address.unwrap_or_default());
        for table in [&self.unicast, &self.multicast] {
            let addresses = match table {
                Table::Nothing => &[][..],
                Table::Addresses(addresses) => addresses,
                Table::Everything => {
                    bytes.extend(EVERYTHING.to_le_bytes());
                    continue;
                }
            };
            // There are at most `TABLE_MAX` of them.
            bytes.extend((addresses.len() as u16).to_le_bytes());
            bytes.extend(addresses.as_flattened());
        }
        self.vlans.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    }

    /// Reads a whole saved filter. Returns `None` if the bytes are not one.
    pub(crate) fn load(bytes: &[u8]) -> Option<Self> {
        let (&[modes, has_address], rest) = bytes.split_first_chunk()?;
        let (address, rest) = rest.split_first_chunk()?;
        let (unicast, rest) = Table::load(rest)?;
        let (multicast, rest) = Table::load(rest)?;
        let (words, []) = rest.as_chunks() else { return None };
        let words: &[_; VLAN_WORDS] = words.try_into().ok()?;
        let address = match has_address {
            0 if *address == Address::default() => None,
            1 => Some(*address),
            _ => return None,
        };
        let vlans = words.map(u64::from_le_bytes);
        Some(Self { modes: Modes::from_bits(modes)?, address, unicast, multicast, vlans })
    }

    /// Replaces both tables.
    pub fn set_tables(&mut self, unicast: &[Address], multicast: &[Address]) {
        self.unicast = Table::new(unicast);
        self.multicast = Table::new(multicast);
    }

    /// Accepts or refuses the frames of a VLAN. Numbers have 12 bits.
    pub fn set_vlan(&mut self, vlan: u16, is_accepted: bool) {
        if let Some(word) = self.vlans.get_mut(usize::from(vlan / 64)) {
            let bit = 1 << (vlan % 64);
            *word = if is_accepted { *word | bit } else { *word & !bit };
        }
    }

    /// Returns whether the driver wants the frame that begins with these bytes. VLANs matter only if
    /// `filters_vlans`.
    pub fn accepts(&self, head: &[u8], filters_vlans: bool) -> bool {
        if self.modes.contains(Modes::PROMISC) {
            return true;
        }
        if filters_vlans && !self.accepts_tag(head) {
            return false;
        }
        let Some(address) = head.first_chunk::<MAC_LEN>().copied() else { return false };
        if address == BROADCAST {
            return !self.modes.contains(Modes::NOBCAST);
        }
        // The first bit on the wire tells a group from a single address.
        if address[0] & 1 == 1 {
            return !self.modes.contains(Modes::NOMULTI)
                && (self.modes.contains(Modes::ALLMULTI) || self.multicast.accepts(address));
        }
        let is_own = self.address.is_none_or(|own| own == address);
        !self.modes.contains(Modes::NOUNI)
            && (is_own || self.modes.contains(Modes::ALLUNI) || self.unicast.accepts(address))
    }

    fn accepts_tag(&self, head: &[u8]) -> bool {
        let [.., kind_0, kind_1, tag_0, tag_1] = head.first_chunk::<16>().copied().unwrap_or_default();
        if u16::from_be_bytes([kind_0, kind_1]) != ETHERTYPE_VLAN {
            return true;
        }
        let vlan = u16::from_be_bytes([tag_0, tag_1]) & 0xfff;
        self.vlans.get(usize::from(vlan / 64)).is_some_and(|word| word & 1 << (vlan % 64) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Address = [2, 0, 0, 0, 0, 1];
    const OTHER: Address = [2, 0, 0, 0, 0, 2];
    const GROUP: Address = [3, 0, 0, 0, 0, 3];

    fn to(address: Address) -> Vec<u8> {
        [&address[..], &[0; 6], &[8, 0], &[0; 4]].concat()
    }

    fn verdicts(filter: &Filter) -> [bool; 4] {
        [OWN, OTHER, GROUP, BROADCAST].map(|address| filter.accepts(&to(address), true))
    }

    #[test]
    fn modes_are_those_of_the_specification() {
        let mut filter = Filter::new(Some(OWN));
        for (modes, expected) in [
            (Modes::PROMISC, [true; 4]),
            (Modes::PROMISC | Modes::NOUNI | Modes::NOMULTI | Modes::NOBCAST, [true; 4]),
            (Modes::empty(), [true, false, false, true]),
            (Modes::ALLUNI, [true, true, false, true]),
            (Modes::ALLMULTI, [true, false, true, true]),
            (Modes::NOUNI | Modes::ALLUNI, [false, false, false, true]),
            (Modes::NOMULTI | Modes::ALLMULTI, [true, false, false, true]),
            (Modes::NOBCAST, [true, false, false, false]),
        ] {
            filter.modes = modes;
            assert_eq!(verdicts(&filter), expected, "{modes:?}");
        }
        filter.modes = Modes::empty();
        filter.address = None;
        assert_eq!(verdicts(&filter), [true, true, false, true]);
    }

    #[test]
    fn tables_add_addresses() {
        let mut filter = Filter { modes: Modes::empty(), ..Filter::new(Some(OWN)) };
        filter.set_tables(&[[2; 6], OTHER], &[GROUP]);
        assert_eq!(verdicts(&filter), [true; 4]);
        filter.set_tables(&[[2; 6]], &[[3; 6]]);
        assert_eq!(verdicts(&filter), [true, false, false, true]);
        // A table that is too long accepts everything of its kind.
        filter.set_tables(&[[2; 6]; TABLE_MAX + 1], &[[3; 6]; TABLE_MAX]);
        assert_eq!(verdicts(&filter), [true, true, false, true]);
    }

    #[test]
    fn an_unknown_filter_is_narrowed_by_commands_only() {
        let mut filter = Filter::new(Some(OWN));
        filter.set_tables(&[OTHER], &[GROUP]);
        filter.distrust();
        filter.modes = Modes::empty();
        assert_eq!(verdicts(&filter), [true; 4]);
        filter.address = Some(OWN);
        assert_eq!(verdicts(&filter), [true; 4], "the table is unknown");
        filter.set_tables(&[], &[]);
        assert_eq!(verdicts(&filter), [true, false, false, true]);
        let tagged = [&OWN[..], &[0; 6], &[0x81, 0, 0, 5]].concat();
        assert!(filter.accepts(&tagged, true));
        filter.set_vlan(5, false);
        assert!(!filter.accepts(&tagged, true));
    }

    #[test]
    fn tags_are_compared_with_the_vlans() {
        let tagged = |vlan: u16| {
            let [high, low] = (vlan | 0xe000).to_be_bytes();
            [&OWN[..], &[0; 6], &[0x81, 0, high, low, 8, 0]].concat()
        };
        let mut filter = Filter { modes: Modes::empty(), ..Filter::new(Some(OWN)) };
        for vlan in [0, 1, 63, 64, 4095] {
            assert!(!filter.accepts(&tagged(vlan), true));
            assert!(filter.accepts(&tagged(vlan), false), "the driver did not ask for a filter");
            filter.set_vlan(vlan, true);
            assert!(filter.accepts(&tagged(vlan), true));
            assert!(!filter.accepts(&tagged(vlan ^ 2), true));
            filter.set_vlan(vlan, false);
            assert!(!filter.accepts(&tagged(vlan), true));
        }
        filter.set_vlan(4096, true);
        filter.set_vlan(u16::MAX, true);
        assert!(filter.accepts(&to(OWN), true));
        // A frame without the bytes of a tag has none.
        assert!(!filter.accepts(&[], true));
        assert!(filter.accepts(&OWN, true));
    }
}
