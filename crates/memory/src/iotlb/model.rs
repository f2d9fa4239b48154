//! The table of translations while a queue reads it, in every order that the memory model allows.
//!
//! Atomics are those that loom watches, and nodes have two entries.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-memory --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use super::table::Table;
use super::{Access, Iotlb, IovaRange, UpdateError};
use crate::{Iova, UserAddr};
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use std::sync::Arc;

/// What the front-end has said of a page, if anything.
fn look(table: &Table, page: u64) -> Option<u64> {
    table.get(page).map(|leaf| leaf.user)
}

const PAGE: u64 = 4096;
/// Where a page leads.
const fn user(page: u64) -> u64 {
    (page + 16) * PAGE
}

fn update(iotlb: &mut Iotlb, page: u64) -> Result<(), UpdateError> {
    iotlb.update(Iova(page * PAGE), PAGE, UserAddr(user(page)), Access::BOTH)
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// A work item for the queue, and its answer.
#[derive(Default)]
struct Mail {
    asked: AtomicBool,
    answered: AtomicBool,
}

impl Mail {
    fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        while !self.answered.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }

    /// Whether there was something to answer.
    fn answer(&self) -> bool {
        let asked = self.asked.load(Ordering::Acquire);
        if asked {
            self.answered.store(true, Ordering::Release);
        }
        asked
    }
}

/// The translation of page 0 is taken back, for `now`, and its nodes are used for the page `next`: a queue never takes those for its
/// own, and does not see its own any more once it has answered.
fn nodes_that_are_used_again(take_back: fn(&mut Iotlb), now: Option<u64>, next: u64) {
    check(move || {
        // The nodes that one page needs, and no more.
        let mut iotlb = Iotlb::new(2);
        update(&mut iotlb, 0).unwrap();
        // In the same node, where that goes as a whole.
        if next == 2 {
            update(&mut iotlb, 1).unwrap();
        }
        let (table, mail) = (iotlb.table().clone(), Arc::new(Mail::default()));
        let queue = thread::spawn({
            let mail = mail.clone();
            move || {
                loop {
                    let found = look(&table, 0);
                    let is_own = found.is_none_or(|at| at == user(0) || Some(at) == now);
                    assert!(is_own, "another page's: {found:?}");
                    if mail.answer() {
                        break;
                    }
                    thread::yield_now();
                }
                assert_eq!(look(&table, 0), now, "in use after it was taken back");
                let found = look(&table, next);
                assert!(found.is_none_or(|at| at == user(next)), "another page's: {found:?}");
            }
        });
        take_back(&mut iotlb);
        assert!(iotlb.is_in_limbo());
        assert!(update(&mut iotlb, next).is_err(), "nodes in limbo are not used");
        mail.ask();
        iotlb.quiesced();
        update(&mut iotlb, next).unwrap();
        assert_eq!(look(iotlb.table(), next + 1), None, "left over from another page");
        queue.join().unwrap();
    });
}

#[test]
fn nodes_of_what_was_invalidated_are_used_again() {
    nodes_that_are_used_again(|iotlb| iotlb.invalidate(IovaRange::new(Iova(0), PAGE)), None, 4);
}

#[test]
fn nodes_that_were_evicted_are_used_again() {
    nodes_that_are_used_again(|iotlb| assert!(iotlb.evict(|_| false)), None, 2);
}

#[test]
fn nodes_below_a_larger_leaf_are_used_again() {
    let larger = |iotlb: &mut Iotlb| {
        iotlb.update(Iova(0), 2 * PAGE, UserAddr(user(8)), Access::BOTH).unwrap();
    };
    nodes_that_are_used_again(larger, Some(user(8)), 2);
}

/// A leaf over two pages gives way to one for each of them, and a queue sees one or the other.
#[test]
fn a_leaf_that_is_split_by_an_update() {
    check(|| {
        let mut iotlb = Iotlb::new(4);
        iotlb.update(Iova(0), 2 * PAGE, UserAddr(user(0)), Access::BOTH).unwrap();
        let table = iotlb.table().clone();
        let queue = thread::spawn(move || {
            for page in [0, 1] {
                let found = look(&table, page);
                assert!(found.is_none_or(|at| at == user(page) || at == user(8)), "{page}: {found:?}");
            }
        });
        iotlb.update(Iova(PAGE), PAGE, UserAddr(user(8)), Access::BOTH).unwrap();
        queue.join().unwrap();
    });
}
