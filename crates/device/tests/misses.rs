//! Translations that queues behind a vIOMMU wait for.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_device::{IotlbMisses, RefusedMiss, Waker};
use kickless_memory::{Access, Iova, IovaRange, Miss};

fn miss(page: u64, access: Access) -> Miss {
    Miss { page: Iova(page << 12), access }
}

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova(page << 12), pages << 12)
}

fn misses() -> IotlbMisses {
    IotlbMisses::new(Waker::new().unwrap())
}

fn sent(misses: &IotlbMisses) -> Vec<Miss> {
    misses.take_unsent().into_iter().map(|(_, miss)| miss).collect()
}

#[test]
fn queues_share_a_miss() {
    let misses = misses();
    let (a, b) = (miss(1, Access::READ), miss(2, Access::WRITE));
    misses.ask(0, &[a, b], &[range(1, 2)]);
    misses.ask(0, &[a, b], &[range(1, 2)]);
    misses.ask(1, &[a], &[range(1, 1)]);
    assert_eq!(sent(&misses), [a, b]);
    assert!(sent(&misses).is_empty());
    // Too few permissions are no answer. More than asked for are one.
    assert!(misses.answered(range(1, 1), Access::WRITE).is_empty());
    assert_eq!(misses.answered(range(0, 2), Access::BOTH), [1]);
    assert_eq!(misses.answered(range(2, 1), Access::WRITE), [0]);
    assert!(misses.answered(range(0, 9), Access::BOTH).is_empty(), "no queue waits");
}

#[test]
fn a_miss_without_an_answer_is_refused() {
    let misses = misses();
    let a = miss(1, Access::WRITE);
    misses.ask(3, &[a], &[]);
    let [(number, _)] = misses.take_unsent()[..] else { panic!("one miss") };
    misses.answered(range(1, 1), Access::READ);
    assert_eq!(misses.replied(number, &a), Some(RefusedMiss { miss: a, queues: vec![3] }));
    assert_eq!(misses.replied(number, &a), None);
    // After a second request, the reply to the first is none to the second.
    misses.ask(3, &[a], &[]);
    let [(again, _)] = misses.take_unsent()[..] else { panic!("one miss") };
    assert_eq!(misses.replied(number, &a), None);
    assert_eq!(misses.answered(range(1, 1), Access::BOTH), [3]);
    assert_eq!(misses.replied(again, &a), None, "it was answered");
}

#[test]
fn a_queue_that_stops_is_forgotten() {
    let misses = misses();
    let (a, b) = (miss(1, Access::READ), miss(2, Access::READ));
    misses.ask(0, &[a, b], &[range(1, 2)]);
    misses.ask(1, &[b], &[range(2, 1)]);
    assert!(misses.is_pinned(range(0, 2)) && !misses.is_pinned(range(3, 1)));
    misses.forget(0);
    assert_eq!(sent(&misses), [b], "the other still waits");
    assert!(!misses.is_pinned(range(1, 1)) && misses.is_pinned(range(2, 1)));
    assert!(misses.answered(range(1, 1), Access::BOTH).is_empty());
    misses.forget(1);
    assert!(misses.answered(range(2, 1), Access::BOTH).is_empty(), "late");
    assert!(sent(&misses).is_empty());
}

#[test]
fn a_watched_range_wakes_once() {
    let misses = misses();
    misses.watch(2, vec![range(5, 1)]);
    assert!(misses.answered(range(6, 1), Access::BOTH).is_empty());
    assert_eq!(misses.answered(range(5, 1), Access::READ), [2]);
    assert!(misses.answered(range(5, 1), Access::READ).is_empty());
}
