//! The saved state of a card: what its driver has set through the control ring.
//!
//! The bytes come from another process and are not trusted. Numbers are little-endian.
//! ```text
//!   "net2"   pairs (2)   offloads (8)   filter (see [`Filter::save`])
//! ```

use crate::card::filter::Filter;
use kickless_spec::net::NetFeatures;

const TAG: [u8; 4] = *b"net2";
/// Stands for an unknown number of pairs that the driver uses.
pub(crate) const PAIRS_UNKNOWN: u16 = u16::MAX;

/// The settings of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SavedState {
    /// The pairs of rings that it uses, or [`PAIRS_UNKNOWN`].
    pub(crate) pairs: u16,
    /// The offloads that it has not switched off.
    pub(crate) offloads: NetFeatures,
    /// The frames that it wants.
    pub(crate) filter: Filter,
}

impl SavedState {
    pub(crate) fn save(&self) -> Vec<u8> {
        let mut bytes = [&TAG[..], &self.pairs.to_le_bytes(), &self.offloads.bits().to_le_bytes()].concat();
        self.filter.save(&mut bytes);
        bytes
    }

    /// Returns `None` if no card with this number of pairs has saved these bytes.
    pub(crate) fn load(bytes: &[u8], pairs_max: u16) -> Option<Self> {
        let rest = bytes.strip_prefix(&TAG)?;
        let (pairs, rest) = rest.split_first_chunk()?;
        let (offloads, rest) = rest.split_first_chunk()?;
        let pairs = u16::from_le_bytes(*pairs);
        let offloads = NetFeatures::from_bits(u64::from_le_bytes(*offloads))?;
        let filter = Filter::load(rest)?;
        let is_known = pairs == PAIRS_UNKNOWN || (1..=pairs_max).contains(&pairs);
        (is_known && NetFeatures::GUEST_OFFLOADS.contains(offloads)).then_some(Self {
            pairs,
            offloads,
            filter,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::filter::Modes;
    use proptest::prelude::*;

    fn filter() -> impl Strategy<Value = Filter> {
        let address = || any::<[u8; 6]>();
        let table = || prop::collection::vec(address(), 0..70);
        let vlans = prop::collection::vec(0..4096u16, 0..9);
        (any::<u8>(), prop::option::of(address()), table(), table(), vlans).prop_map(
            |(modes, address, unicast, multicast, vlans)| {
                let mut filter = Filter::new(address);
                filter.modes = Modes::from_bits_truncate(modes);
                filter.set_tables(&unicast, &multicast);
                vlans.into_iter().for_each(|vlan| filter.set_vlan(vlan, true));
                filter
            },
        )
    }

    proptest! {
        #[test]
        fn a_state_is_loaded_as_it_was_saved(pairs in 1..9u16, offloads: u64, filter in filter(), cut: usize) {
            let offloads = NetFeatures::GUEST_OFFLOADS & NetFeatures::from_bits_truncate(offloads);
            let state = SavedState { pairs, offloads, filter };
            let mut bytes = state.save();
            prop_assert_eq!(SavedState::load(&bytes, 8), Some(state));
            prop_assert_eq!(SavedState::load(&bytes[..cut % bytes.len()], 8), None);
            prop_assert_eq!(SavedState::load(&bytes, pairs - 1), None);
            bytes.push(0);
            prop_assert_eq!(SavedState::load(&bytes, 8), None);
        }

        #[test]
        fn any_bytes_can_be_loaded(mut bytes in prop::collection::vec(any::<u8>(), 0..700), is_tagged: bool) {
            if is_tagged && let Some(tag) = bytes.first_chunk_mut() {
                *tag = TAG;
            }
            if let Some(state) = SavedState::load(&bytes, u16::MAX) {
                prop_assert_eq!(SavedState::load(&state.save(), u16::MAX), Some(state));
            }
        }
    }
}
