//! Loads arbitrary bytes as a device's state. An accepted state must be within its bounds, and saving it
//! must give the same bytes.
#![no_main]

use kickless_vhost::state::{Bounds, SavedState};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let [queues_max, order, bytes @ ..] = data else { return };
    let bounds = Bounds { queues_max: u16::from(*queues_max) + 1, queue_size_max: 1 << (order % 16) };
    let Ok(state) = SavedState::from_bytes(bytes, &bounds) else { return };
    assert_eq!(state.to_bytes(), bytes);
    assert!(bytes.len() <= bounds.bytes_max());
    for ring in &state.rings {
        assert!(ring.index < bounds.queues_max && ring.size <= bounds.queue_size_max);
        let descriptors: usize = ring.unpublished.iter().map(|used| usize::from(used.descriptors)).sum();
        assert!(ring.unpublished.len().max(descriptors) <= usize::from(ring.size));
    }
});
