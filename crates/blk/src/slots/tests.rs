#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use kickless_disk::Extent;
use kickless_testing::guest_memory;

const PAGE: u64 = 4096;

/// Takes a slot with a request of `pieces` pieces. Returns whether there was room for it.
fn take(slots: &mut Slots, view: &Arc<View>, pieces: usize) -> (u32, bool) {
    let slot = slots.next().unwrap();
    let buffers = slots.get(slot).io.buffers_mut();
    buffers.clear(&mut Marks::off());
    for piece in 0..pieces as u64 {
        buffers.push(view, Gpa(piece % 2 * 2 * PAGE), 512).unwrap();
    }
    slots.take_next();
    (slot, slots.reserve(slot))
}

fn release(slots: &mut Slots, slot: u32) {
    slots.get(slot).io.buffers_mut().clear(&mut Marks::off());
    let reserved = slots.get(slot).has_reservation();
    slots.release(slot, reserved);
}

/// Returns the room of all slots beyond what needs no reservation.
fn held(slots: &mut Slots) -> usize {
    (0..slots.slots.len())
        .map(|at| slots.slots[at].io.buffers().capacity())
        .filter(|held| *held > UNCOUNTED_PIECES)
        .sum()
}

#[test]
fn small_requests_take_nothing() {
    let (view, budget) = (guest_memory(1 << 20, 0), Arc::new(Budget::new(0)));
    let mut slots = Slots::new(64, budget.clone());
    (0..64).for_each(|_| assert!(take(&mut slots, &view, UNCOUNTED_PIECES).1));
    assert_eq!(budget.taken(), 0);
    (0..64).for_each(|slot| release(&mut slots, slot));
    assert!(slots.slots.iter().all(|slot| slot.io.buffers().capacity() <= UNCOUNTED_PIECES));
}

#[test]
fn a_queue_waits_for_its_own_requests_only() {
    let (view, budget) = (guest_memory(1 << 20, 0), Arc::new(Budget::new(3000)));
    let (mut greedy, mut other) = (Slots::new(8, budget.clone()), Slots::new(8, budget.clone()));
    let (first, room) = take(&mut greedy, &view, 1000);
    assert!(room && take(&mut greedy, &view, 1000).1);
    let (waits, room) = take(&mut greedy, &view, 1000);
    assert!(!room && !greedy.reserve(waits), "it has two");
    // The other queue has no such request, so it does not wait.
    let (only, room) = take(&mut other, &view, 5000);
    assert!(room && budget.taken() > 3000);
    let (second, room) = take(&mut other, &view, UNCOUNTED_PIECES + 1);
    assert!(!room);
    release(&mut other, only);
    assert!(other.reserve(second));
    release(&mut greedy, first);
    assert!(greedy.reserve(waits));
    assert!(held(&mut greedy) + held(&mut other) <= budget.taken(), "all that is held is accounted for");
    // Dropping the slots returns their reservations.
    drop((greedy, other));
    assert_eq!(budget.taken(), 0);
}

#[test]
fn idle_slots_keep_no_more_than_half() {
    let (view, budget) = (guest_memory(1 << 20, 0), Arc::new(Budget::new(4096)));
    let mut slots = Slots::new(64, budget.clone());
    let all: Vec<u32> = (0..32)
        .map(|_| take(&mut slots, &view, 100))
        .filter(|(_, room)| *room)
        .map(|(slot, _)| slot)
        .collect();
    assert_eq!(all.len(), 32, "32 times room for 128");
    all.iter().for_each(|slot| release(&mut slots, *slot));
    assert!((1..=2048).contains(&budget.taken()), "{}", budget.taken());
    assert!(held(&mut slots) <= budget.taken());
    // Slots reuse the room that they keep, for requests of any size.
    for pieces in [1, 100, 1, 100, 10_000, 100] {
        let (slot, room) = take(&mut slots, &view, pieces);
        assert!(room);
        release(&mut slots, slot);
        assert!(budget.taken() <= 4096 && held(&mut slots) <= budget.taken());
    }
}

#[test]
fn extents_count() {
    let budget = Arc::new(Budget::new(64));
    let mut slots = Slots::new(4, budget);
    let mut take = || {
        let slot = slots.next().unwrap();
        *slots.get(slot).io.extents_mut() = vec![Extent { offset: 0, len: 512, unmap: false }; 30];
        slots.take_next();
        slots.reserve(slot)
    };
    assert!(take());
    assert!(!take());
}

#[test]
fn a_request_that_was_refused_leaves_no_room_behind() {
    let (view, budget) = (guest_memory(1 << 20, 0), Arc::new(Budget::new(64)));
    let mut slots = Slots::new(4, budget);
    let buffers = slots.get(0).io.buffers_mut();
    (0..1000).for_each(|piece| buffers.push(&view, Gpa(piece % 2 * 2 * PAGE), 512).unwrap());
    // The first extent may be the wrong one, when `reserve_exact` has run already.
    slots.get(0).io.extents_mut().reserve_exact(64);
    slots.clear_refused(0, &mut Marks::off());
    assert!(slots.get(0).io.buffers().capacity() <= UNCOUNTED_PIECES);
    assert_eq!(slots.get(0).io.extents_mut().capacity(), 0);
}
