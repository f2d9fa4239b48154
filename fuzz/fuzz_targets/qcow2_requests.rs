//! Runs requests on qcow2 images whose tables point anywhere. The input describes the image, and says when
//! operations complete, which of them fail, and when the disk grows, is closed, or stops by force.
#![no_main]

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use kickless_disk::qcow2_fuzzing::{MEMORY_BYTES, requests};
use kickless_memory::{Gpa, Map, Slot, UserAddr, View};
use libfuzzer_sys::fuzz_target;

fn memfd(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, len).expect("room");
    file
}

static MEMORY: LazyLock<Arc<View>> = LazyLock::new(|| {
    let slot = Slot::map(&memfd(MEMORY_BYTES), 0, Gpa(0), UserAddr(0), MEMORY_BYTES).expect("a mapping");
    Arc::new(View::new(Map::new(vec![slot]).expect("no overlap")))
});

/// The image and its backing image.
static FILES: LazyLock<[OwnedFd; 2]> = LazyLock::new(|| [memfd(0), memfd(0)]);

fuzz_target!(|input: &[u8]| {
    let [disk, below] =
        FILES.each_ref().map(|file| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())));
    requests(&MEMORY, [&disk, &below], input);
});
