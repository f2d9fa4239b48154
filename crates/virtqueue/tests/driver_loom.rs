//! Models of the driver's two halves and their shared tables (`driver::chain_tables`), in every order that
//! the memory model allows. `tests/loom.rs` has the models of notifications.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-virtqueue --release --test driver_loom`
#![cfg(loom)]
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests")]

use kickless_virtqueue::driver::chain_tables::{ChainTables, Record};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU16;
use loom::thread;
use std::sync::atomic::Ordering;

/// Number of descriptors, and of ids.
const SIZE: u16 = 2;
/// Number of chains. Some ids are used twice.
const CHAINS: u32 = 3;

/// The two tables, and memory that belongs to each id (a status byte, the owner of a buffer).
struct Halves {
    tables: ChainTables,
    memory: [UnsafeCell<u32>; SIZE as usize],
    /// Number of chains that the device has used, if it tells.
    used: AtomicU16,
}

// SAFETY: the memory is handed over with its id. loom checks each access to it.
unsafe impl Sync for Halves {}

impl Halves {
    fn new(in_order: bool) -> Self {
        Self {
            tables: ChainTables::new(SIZE, in_order),
            memory: [UnsafeCell::new(0), UnsafeCell::new(0)],
            used: AtomicU16::new(0),
        }
    }

    fn write(&self, id: u16, value: u32) {
        // SAFETY: loom checks that no other thread accesses it. That is the property under test.
        self.memory[usize::from(id)].with_mut(|memory| unsafe { *memory = value });
    }

    fn read(&self, id: u16) -> u32 {
        // SAFETY: as above.
        self.memory[usize::from(id)].with(|memory| unsafe { *memory })
    }

    /// Adds all chains, each as soon as there is an id. `show` tells the device about each.
    fn submit(&self, show: impl Fn(&Self, u32)) {
        let mut free: Vec<u16> = (0..SIZE).rev().collect();
        let mut taken = 0;
        for number in 0..CHAINS {
            while free.is_empty() {
                free.extend(self.tables.returned(taken));
                taken = taken.wrapping_add(free.len() as u32);
                if free.is_empty() {
                    thread::yield_now();
                }
            }
            let id = free.pop().unwrap();
            self.write(id, number);
            self.tables.add(id, number, Record { descriptors: 1, writable: number });
            show(self, number);
        }
    }

    /// The device says that it has used `id`, which may be true.
    fn complete(&self, id: u16, record: Record) {
        assert_eq!(self.read(id), record.writable, "another chain's");
        self.tables.take(id);
        assert_eq!(self.tables.in_flight(id.into()), None, "twice");
        self.write(id, u32::MAX);
        self.tables.give_back(id);
    }
}

/// A device that says of every id, all the time, that it has used it. Only the tables keep the halves apart.
#[test]
fn a_lying_device() {
    loom::model(|| {
        let halves = Arc::new(Halves::new(false));
        let submitter = thread::spawn({
            let halves = halves.clone();
            move || halves.submit(|_, _| {})
        });
        let mut done = 0;
        while done < CHAINS {
            let before = done;
            for id in 0..u32::from(SIZE) + 1 {
                if let Some((id, record)) = halves.tables.in_flight(id) {
                    halves.complete(id, record);
                    done += 1;
                }
            }
            if done == before {
                thread::yield_now();
            }
        }
        submitter.join().unwrap();
        assert!((0..u32::from(SIZE)).all(|id| halves.tables.in_flight(id).is_none()));
    });
}

/// Runs a device that uses chains in their order, and tells only how many. The device's index passes the data
/// from the submitter to the completer.
#[test]
fn in_order() {
    loom::model(|| {
        let halves = Arc::new(Halves::new(true));
        let submitter = thread::spawn({
            let halves = halves.clone();
            move || halves.submit(|halves, number| halves.used.store(number as u16 + 1, Ordering::Release))
        });
        let mut done = 0;
        while done < CHAINS {
            let used = u32::from(halves.used.load(Ordering::Acquire));
            if used == done {
                thread::yield_now();
            }
            for number in done..used {
                let (id, record) = halves.tables.in_flight(halves.tables.ordered(number).into()).unwrap();
                assert_eq!(record.writable, number);
                halves.complete(id, record);
            }
            done = used;
        }
        submitter.join().unwrap();
    });
}

/// As [`in_order`], but the device names the last chain of a batch, of which it was never told.
#[test]
fn an_impossible_batch() {
    loom::model(|| {
        let halves = Arc::new(Halves::new(true));
        let submitter = thread::spawn({
            let halves = halves.clone();
            move || halves.submit(|_, _| {})
        });
        let mut done = 0;
        while done < CHAINS {
            let last = (0..u32::from(SIZE)).rev().find_map(|id| halves.tables.in_flight(id));
            let Some((last, _)) = last else {
                thread::yield_now();
                continue;
            };
            loop {
                let (id, record) = halves.tables.in_flight(halves.tables.ordered(done).into()).unwrap();
                assert_eq!(record.writable, done);
                halves.complete(id, record);
                done += 1;
                if id == last {
                    break;
                }
            }
        }
        submitter.join().unwrap();
    });
}
