//! A state survives the conversion to bytes, and other bytes are refused.

use kickless_vhost::state::{Bounds, RingState, SavedState, StateError};
use kickless_virtqueue::device::UnpublishedUsed;
use proptest::prelude::*;

const BOUNDS: Bounds = Bounds { queues_max: 8, queue_size_max: 64 };
/// The offsets of the version and of the number of rings.
const VERSION_AT: usize = 8;
const RINGS_AT: usize = 12;

fn ring(index: u16, packed: bool) -> impl Strategy<Value = RingState> {
    (0u32..=6, any::<u16>(), prop::collection::vec((any::<u16>(), any::<u32>()), 0..=4)).prop_map(
        move |(order, next_avail, unpublished)| {
            let size = 1u16 << order;
            let next_avail =
                if packed { (next_avail & 0x8000) | ((next_avail & 0x7fff) % size) } else { next_avail };
            let unpublished = unpublished.into_iter().take(size.into()).map(|(id, len)| UnpublishedUsed {
                id: if packed { id } else { id % size },
                len,
                descriptors: packed.into(),
            });
            RingState { index, size, next_avail, unpublished: unpublished.collect() }
        },
    )
}

fn state() -> impl Strategy<Value = SavedState> {
    let rings = |packed| {
        prop::collection::btree_set(0u16..8, 0..=8).prop_flat_map(move |indices| {
            indices.into_iter().map(|index| ring(index, packed)).collect::<Vec<_>>()
        })
    };
    let device = prop::collection::vec(any::<u8>(), 0..20);
    (any::<bool>(), device).prop_flat_map(move |(packed, device)| {
        rings(packed).prop_map(move |rings| SavedState { packed, device: device.clone(), rings })
    })
}

proptest! {
    #[test]
    fn comes_back(state in state()) {
        let bytes = state.to_bytes();
        prop_assert!(bytes.len() <= BOUNDS.bytes_max());
        prop_assert_eq!(SavedState::from_bytes(&bytes, &BOUNDS), Ok(state));
    }

    #[test]
    fn neither_shorter_nor_longer(state in state(), more in 1usize..20, cut in any::<prop::sample::Index>()) {
        let mut bytes = state.to_bytes();
        let len = bytes.len();
        prop_assert_eq!(SavedState::from_bytes(&bytes[..cut.index(len)], &BOUNDS), Err(StateError::Short));
        bytes.resize(len + more, 0);
        prop_assert_eq!(SavedState::from_bytes(&bytes, &BOUNDS), Err(StateError::Long(more)));
    }

    /// Bytes that are accepted as a state are one, and convert back to the same bytes.
    #[test]
    fn changed_bytes(state in state(), at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let mut bytes = state.to_bytes();
        let at = at.index(bytes.len());
        bytes[at] = value;
        if let Ok(state) = SavedState::from_bytes(&bytes, &BOUNDS) {
            prop_assert_eq!(state.to_bytes(), bytes);
            for ring in &state.rings {
                prop_assert!(ring.index < BOUNDS.queues_max && ring.size <= BOUNDS.queue_size_max);
                prop_assert!(ring.unpublished.len() <= ring.size.into());
            }
        }
    }
}

#[test]
fn errors_name_the_wrong_value() {
    let unpublished = vec![UnpublishedUsed { id: 3, len: 1, descriptors: 0 }];
    let good = RingState { index: 1, size: 16, next_avail: 40_000, unpublished };
    let state = SavedState { packed: false, device: vec![7], rings: vec![good.clone()] };
    let bytes = state.to_bytes();
    let refused = |bytes: &[u8]| SavedState::from_bytes(bytes, &BOUNDS).unwrap_err().to_string();

    let mut foreign = bytes.clone();
    foreign[0] ^= 1;
    assert_eq!(refused(&foreign), "it is no state of a kickless device");
    let mut future = bytes.clone();
    future[VERSION_AT] = 2;
    assert_eq!(refused(&future), "it has version 2, and this back-end knows version 1");
    let mut many = bytes.clone();
    many[RINGS_AT] = 9;
    assert_eq!(refused(&many), "its number of rings cannot be 9");
    assert_eq!(refused(&[]), "it ends in the middle");

    let with = |ring: RingState| refused(&SavedState { rings: vec![ring], ..state.clone() }.to_bytes());
    assert_eq!(with(RingState { index: 8, ..good.clone() }), "the index of its ring 8 cannot be 8");
    assert_eq!(with(RingState { size: 128, ..good.clone() }), "the size of its ring 1 cannot be 128");
    assert_eq!(with(RingState { size: 0, ..good.clone() }), "the size of its ring 1 cannot be 0");
    let owes = |unpublished: Vec<UnpublishedUsed>| with(RingState { unpublished, ..good.clone() });
    let one = UnpublishedUsed { id: 16, len: 0, descriptors: 0 };
    assert_eq!(owes(vec![one]), "the completed head of its ring 1 cannot be 16");
    let sixteen = vec![UnpublishedUsed { id: 0, ..one }; 17];
    assert_eq!(owes(sixteen), "the count of completions of its ring 1 cannot be 17");
    let twice = SavedState { rings: vec![good.clone(), good], ..state.clone() };
    assert_eq!(refused(&twice.to_bytes()), "its order of rings cannot be 1");
    let packed = SavedState { packed: true, ..state };
    assert_eq!(refused(&packed.to_bytes()), "the place of its ring 1 cannot be 40000");
}
