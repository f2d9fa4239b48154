//! Credit and groups of a vring, and when completions are shown.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_device::{Areas, ShowAfter, Update, Vring};
use kickless_memory::{Gpa, UserAddr, View};
use kickless_spec::ring::{DESC_F_WRITE, Desc};
use kickless_testing::{guest_memory, vring_parts};
use kickless_virtqueue::device::{Addresses, Options};
use kickless_virtqueue::{Chain, ChainId};
use std::sync::Arc;

const USER: u64 = 0x7e00_0000_0000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const SIZE: u16 = 64;

fn addresses() -> Areas {
    let [desc, avail, used] = [0, AVAIL, USED].map(|at| UserAddr(USER + at));
    Areas::User(Addresses { desc, avail, used, log: None })
}

/// Makes a ring with all of its chains available, of one buffer each.
fn ring() -> (Vring, Arc<View>) {
    let view = guest_memory(0x10_000, USER);
    for head in 0..SIZE {
        let desc = Desc { addr: 0x8000.into(), len: 64.into(), flags: DESC_F_WRITE.into(), next: 0.into() };
        view.map().write_obj(Gpa(16 * u64::from(head)), &desc).unwrap();
        view.map().write_obj(Gpa(AVAIL + 4 + 2 * u64::from(head)), &head).unwrap();
    }
    view.map().write_obj(Gpa(AVAIL + 2), &SIZE).unwrap();
    let options = Options::new(SIZE, false, false).unwrap();
    let vring = Vring::new(vring_parts(&view, options, addresses()));
    (vring.unwrap(), view)
}

fn pop(vring: &mut Vring, count: u16) -> Vec<ChainId> {
    let mut chain = Chain::default();
    (0..count).filter_map(|_| vring.pop_credit(&mut chain).then_some(chain.id)).collect()
}

fn used_idx(view: &View) -> u16 {
    u16::from_le_bytes(view.map().read_obj(Gpa(USED + 2)).unwrap())
}

#[test]
fn groups_are_shown_whole() {
    let (mut vring, view) = ring();
    let ids = pop(&mut vring, SIZE);
    assert!(vring.use_credit(SIZE));
    let mut ids = ids.into_iter().map(|id| (id, 1));
    let mut pushed = 0;
    // The driver sees the first at once, and then not before there are sixteen more.
    for (count, seen) in [(3, 3), (7, 3), (8, 3), (5, 23), (1, 23), (0, 23), (15, 39)] {
        let group: Vec<_> = ids.by_ref().take(count).collect();
        vring.push_group(&group);
        pushed += count as u16;
        assert_eq!(used_idx(&view), seen);
    }
    vring.publish();
    assert_eq!(used_idx(&view), pushed);
    // A new batch begins; single completions count too.
    for (nth, (id, len)) in (1..).zip(ids.by_ref().take(18)) {
        vring.push(id, len);
        assert_eq!(used_idx(&view), pushed + if nth == 18 { 17 } else { u16::from(nth >= 17) * 16 + 1 });
    }
    vring.push_group(&ids.collect::<Vec<_>>());
    vring.publish();
    assert_eq!(used_idx(&view), SIZE);
}

#[test]
fn a_task_chooses_when_completions_are_shown() {
    let (mut vring, view) = ring();
    let ids = pop(&mut vring, SIZE);
    assert!(vring.use_credit(SIZE));
    vring.show_after(ShowAfter::Publish);
    ids[..40].iter().for_each(|id| vring.push(*id, 0));
    assert_eq!(used_idx(&view), 0);
    vring.publish();
    assert_eq!(used_idx(&view), 40);
    vring.show_after(ShowAfter::Early);
    for (nth, id) in (1..).zip(&ids[40..60]) {
        vring.push(*id, 0);
        assert_eq!(used_idx(&view), 40 + if nth < 17 { 1 } else { 17 });
    }
    vring.publish();
    assert_eq!(used_idx(&view), 60);
}

#[test]
fn credit_is_left_to_the_next() {
    let (mut vring, view) = ring();
    let ids = pop(&mut vring, 10);
    assert!(vring.use_credit(2));
    vring.push_group(&[(ids[0], 1), (ids[1], 1)]);
    vring.publish();
    vring.unpop(3);
    assert_eq!((vring.credit(), pop(&mut vring, 1)[0]), (5, ids[7]));
    // New memory and new addresses take all of it back; a kick or a call does not.
    vring.apply(Update::Poll);
    vring.apply(Update::Call(None));
    assert_eq!(vring.credit(), 6);
    vring.apply(Update::Memory(view.clone()));
    assert_eq!((vring.credit(), vring.use_credit(1)), (0, false));
    assert_eq!(pop(&mut vring, 4), ids[2..6]);
    vring.apply(Update::Addresses(addresses()));
    assert_eq!(vring.credit(), 0);
    assert_eq!(pop(&mut vring, SIZE).len(), usize::from(SIZE) - 2);
    let stopped = vring.stop();
    assert_eq!((stopped.next_avail, stopped.has_work, stopped.unpublished.len()), (2, true, 0));
}
