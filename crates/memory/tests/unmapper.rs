//! Tests of the threads that unmap memory.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::quota::AddressSpace;
use kickless_memory::{Gpa, Iov, Map, Mapper, Marks, PinnedByte, Released, Slot, UserAddr, View};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

const PAGE: u64 = 4096;
const LEN: u64 = 16 * PAGE;
/// A time after which a test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// Holds back the other tests, because some count the threads of this process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn file(name: &str, len: u64) -> OwnedFd {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

/// Returns the mapper of a device that may map this many bytes.
fn device(bytes_max: u64) -> Mapper {
    Mapper::within(Arc::new(AddressSpace::default()).join(bytes_max))
}

fn slot(mapper: &Mapper, len: u64) -> Slot {
    mapper.slot(file("guest", len), 0, Gpa(0), UserAddr(0), len, &[]).unwrap()
}

fn view(mapper: &Mapper) -> (Arc<View>, Released) {
    let slot = slot(mapper, LEN);
    let released = slot.mapping().released();
    (Arc::new(View::new(Map::new(vec![slot]).unwrap())), released)
}

/// Drops the last reference on a thread named "worker". Returns the thread that has unmapped the memory.
fn dropped_by_worker(last: impl Send + 'static, released: &Released) -> Thread {
    let worker = thread::Builder::new().name("worker".into()).spawn(move || drop(last)).unwrap();
    worker.join().unwrap();
    assert!(released.is_unused());
    assert!(released.wait(LIMIT));
    released.unmapped_by().unwrap()
}

/// Returns the number of threads that unmap memory, once it is `expected` or the limit is over.
fn threads(expected: usize) -> usize {
    let count = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name == "unmap\n").count()
    };
    for _ in 0..LIMIT.as_millis() {
        if count() == expected {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    count()
}

#[test]
fn memory_of_no_device_is_unmapped_where_it_is_dropped() {
    let _turn = turn();
    let slot = Slot::map(file("driver", LEN), 0, Gpa(0), UserAddr(0), LEN).unwrap();
    assert_eq!(threads(0), 0);
    let released = slot.mapping().released();
    assert_eq!(dropped_by_worker(slot, &released).name(), Some("worker"));
    assert_eq!(threads(0), 0);
}

#[test]
fn the_holder_of_the_last_reference_unmaps_nothing() {
    let _turn = turn();
    let mapper = device(1 << 30);
    let mut by = Vec::new();

    let (last, released) = view(&mapper);
    assert!(!released.is_unused() && released.unmapped_by().is_none());
    by.push(dropped_by_worker(last, &released));
    let (whole, released) = view(&mapper);
    let area = whole.map().area(UserAddr(0), 16, 16).unwrap();
    drop(whole);
    by.push(dropped_by_worker(area, &released));
    let (whole, released) = view(&mapper);
    let mut iov = Iov::default();
    iov.push(&whole, Gpa(0), 16).unwrap();
    drop(whole);
    by.push(dropped_by_worker(iov, &released));
    let (whole, released) = view(&mapper);
    let mut status = PinnedByte::default();
    status.set(&whole, Gpa(0));
    drop(whole);
    by.push(dropped_by_worker(status, &released));

    let log = Arc::new(mapper.log(file("log", PAGE), 0, PAGE).unwrap());
    let released = log.released();
    let mut marks = Marks::off();
    marks.set_view(&View::default().with_log(Some(log)).unwrap());
    by.push(dropped_by_worker(marks, &released));
    let inflight = mapper.inflight(file("inflight", PAGE), 0, PAGE).unwrap();
    let (records, released) = (inflight.records(0, 64).unwrap(), inflight.released());
    drop(inflight);
    by.push(dropped_by_worker(records, &released));

    for thread in &by {
        assert_eq!(thread.name(), Some("unmap"));
        assert_eq!(thread.id(), by[0].id(), "a device has one thread");
    }
    let other = device(1 << 30);
    let (last, released) = view(&other);
    assert_ne!(dropped_by_worker(last, &released).id(), by[0].id(), "each device has its own thread");
}

#[test]
fn threads_end_with_their_devices() {
    let _turn = turn();
    let before = threads(0);
    let devices: Vec<_> = (0..4).map(|_| device(1 << 30)).collect();
    assert_eq!(threads(before), before, "a device that has mapped nothing needs no thread");
    let slots: Vec<_> = devices.iter().flat_map(|device| [slot(device, LEN), slot(device, LEN)]).collect();
    assert_eq!(threads(before + 4), before + 4);
    drop(devices);
    assert_eq!(threads(before + 4), before + 4, "memory is still mapped");
    drop(slots);
    assert_eq!(threads(before), before);
}

#[test]
fn memory_of_many_pieces_is_unmapped_wholly() {
    let _turn = turn();
    const NAME: &str = "many-pieces";
    let listed = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(NAME)).count()
    };
    let (mapper, len) = (device(1 << 40), (1 << 30) + 3 * PAGE);
    let slot = mapper.slot(file(NAME, len), PAGE - 8, Gpa(0), UserAddr(0), len - PAGE, &[]).unwrap();
    let released = slot.mapping().released();
    assert_eq!(listed(), 1);
    drop(slot);
    assert!(released.wait(LIMIT));
    assert_eq!(listed(), 0);
}

#[test]
fn a_device_at_its_quota_can_replace_its_memory() {
    let _turn = turn();
    let mapper = device(LEN);
    for _ in 0..500 {
        // The slot before was dropped, and may still be mapped.
        let slot = slot(&mapper, LEN);
        let refused = mapper.slot(file("more", PAGE), 0, Gpa(0), UserAddr(0), PAGE, &[]);
        refused.unwrap_err();
        drop(slot);
    }
    assert!(mapper.unused().wait(LIMIT));
}
