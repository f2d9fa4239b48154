//! Model of the table of translations: a queue reads it while it changes, in every order that the memory
//! model allows.
//!
//! A node has two entries here.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-memory --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use super::table::Table;
use super::{Access, Iotlb, IovaRange, UpdateError};
use crate::{Iova, UserAddr};
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use std::sync::Arc;

/// Returns the front-end's address of a page, if the table has it.
fn translate(table: &Table, page: u64) -> Option<u64> {
    table.get(page).map(|leaf| leaf.user)
}

const PAGE: u64 = 4096;
/// Returns the front-end's address that a page translates to.
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

    /// Answers the work item, if there is one. Returns whether there was one.
    fn answer(&self) -> bool {
        let asked = self.asked.load(Ordering::Acquire);
        if asked {
            self.answered.store(true, Ordering::Release);
        }
        asked
    }
}

/// Takes the translation of page 0 back, so that it reads as `now`, and reuses its nodes for page `next`.
///
/// The queue never takes a translation of `next` for one of page 0. It does not see the old translation of
/// page 0 after it has answered.
fn nodes_are_reused(withdraw: fn(&mut Iotlb), now: Option<u64>, next: u64) {
    check(move || {
        // As many nodes as one page needs.
        let mut iotlb = Iotlb::new(2);
        update(&mut iotlb, 0).unwrap();
        // In the same node, because `evict` drops a whole node.
        if next == 2 {
            update(&mut iotlb, 1).unwrap();
        }
        let (table, mail) = (iotlb.table().clone(), Arc::new(Mail::default()));
        let queue = thread::spawn({
            let mail = mail.clone();
            move || {
                loop {
                    let found = translate(&table, 0);
                    let is_own = found.is_none_or(|at| at == user(0) || Some(at) == now);
                    assert!(is_own, "another page's: {found:?}");
                    if mail.answer() {
                        break;
                    }
                    thread::yield_now();
                }
                assert_eq!(translate(&table, 0), now, "in use after it was taken back");
                let found = translate(&table, next);
                assert!(found.is_none_or(|at| at == user(next)), "another page's: {found:?}");
            }
        });
        withdraw(&mut iotlb);
        assert!(iotlb.has_nodes_in_limbo());
        assert!(update(&mut iotlb, next).is_err(), "nodes in limbo are not used");
        mail.ask();
        iotlb.quiesced();
        update(&mut iotlb, next).unwrap();
        assert_eq!(translate(iotlb.table(), next + 1), None, "left over from another page");
        queue.join().unwrap();
    });
}

#[test]
fn nodes_of_invalidated_translations_are_reused() {
    nodes_are_reused(|iotlb| iotlb.invalidate(IovaRange::new(Iova(0), PAGE)), None, 4);
}

#[test]
fn evicted_nodes_are_reused() {
    nodes_are_reused(|iotlb| assert!(iotlb.evict(|_| false)), None, 2);
}

#[test]
fn nodes_below_a_larger_leaf_are_reused() {
    let larger = |iotlb: &mut Iotlb| {
        iotlb.update(Iova(0), 2 * PAGE, UserAddr(user(8)), Access::BOTH).unwrap();
    };
    nodes_are_reused(larger, Some(user(8)), 2);
}

/// Splits a leaf over two pages into one for each. A queue sees the old leaf or the new one.
#[test]
fn a_leaf_that_is_split_by_an_update() {
    check(|| {
        let mut iotlb = Iotlb::new(4);
        iotlb.update(Iova(0), 2 * PAGE, UserAddr(user(0)), Access::BOTH).unwrap();
        let table = iotlb.table().clone();
        let queue = thread::spawn(move || {
            for page in [0, 1] {
                let found = translate(&table, page);
                assert!(found.is_none_or(|at| at == user(page) || at == user(8)), "{page}: {found:?}");
            }
        });
        iotlb.update(Iova(PAGE), PAGE, UserAddr(user(8)), Access::BOTH).unwrap();
        queue.join().unwrap();
    });
}
