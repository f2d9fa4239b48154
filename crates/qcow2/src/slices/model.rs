//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-qcow2 --release --lib slices::model`

use super::*;
use crate::format::entry::encode;
use crate::format::geometry::Version;
use kickless_sync::loom::{self, thread};
use std::sync::Arc;

fn part(host: u64) -> RawEntry {
    let mapping = Mapping::Parts { host: Some(HostOffset(host)), copied: true, allocated: 1, zero: 0 };
    encode(geometry(), mapping)
}

fn geometry() -> Geometry {
    Geometry::new(Version::V3, 14, 4, true).unwrap()
}

/// Runs a look-up of a cached entry at `FIRST` against a change. All switches of threads but the first
/// `SWITCHES` are where a thread waits.
fn check(change: impl Fn(&Slices, WayIndex) + Send + Sync + 'static, allowed: Vec<Look>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(SWITCHES);
    builder.check(move || {
        let slices = Arc::new(Slices::new(geometry(), 16, 0));
        let at = WayIndex(0, 0);
        slices.fill(at, SliceIndex(0), true, [part(FIRST)].into_iter());
        let reader = {
            let slices = Arc::clone(&slices);
            thread::spawn(move || slices.look(GuestOffset(0), 512))
        };
        change(&slices, at);
        let look = reader.join().unwrap();
        assert!(allowed.contains(&look), "{look:?}");
    });
}

const FIRST: u64 = 0x8000;
const SWITCHES: usize = 3;
const MISS: Look = Look::Miss(SliceIndex(0));

const fn data(host: u64) -> Look {
    Look::Data { host: HostOffset(host), len: 512, in_place: true }
}

/// A look-up sees an entry of two words before a change or after it.
#[test]
fn an_entry_is_never_torn() {
    // Without its bitmap, the new entry is below; with the old one, the old bitmap is data.
    let all = |_, _| RawEntry { word: part(0x10000).word, bitmap: 1 << 32 };
    check(move |slices, at| slices.edit(at, 0..1, all), vec![data(FIRST), Look::Zero { len: 512 }, MISS]);
}

/// A look-up never sees an entry of the slice that takes the way.
#[test]
fn another_slice_is_never_seen() {
    check(
        |slices, at| slices.fill(at, SliceIndex(1), true, [part(0x20000)].into_iter()),
        vec![data(FIRST), MISS],
    );
}
