//! A change of the memory of a vring.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_device::{Areas, Update, Vring};
use kickless_memory::{UserAddr, View};
use kickless_testing::{guest_memory, vring_parts};
use kickless_virtqueue::device::{Addresses, Options};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const USER: u64 = 0x7e00_0000_0000;

/// A worker that drops the last reference to replaced memory does not unmap it. That can take seconds, and
/// other devices of the worker would wait.
#[test]
fn a_worker_does_not_unmap_replaced_memory() {
    let view = guest_memory(0x10_000, USER);
    let released = view.map().slots()[0].mapping().released();
    let [desc, avail, used] = [0, 0x1000, 0x2000].map(|at| UserAddr(USER + at));
    let areas = Areas::User(Addresses { desc, avail, used, log: None });
    let options = Options::new(64, false, false).unwrap();
    let mut vring = Vring::new(vring_parts(&view, options, areas)).unwrap();
    drop(view);
    assert!(!released.is_unused());
    let worker = thread::spawn(move || vring.apply(Update::Memory(Arc::new(View::default()))));
    let id = worker.thread().id();
    worker.join().unwrap();
    assert!(released.is_unused());
    assert!(released.wait(Duration::from_secs(60)));
    assert_ne!(released.unmapped_by().unwrap().id(), id);
}
