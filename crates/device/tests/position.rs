//! A ring goes on from its position, with the same owner or another one.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_device::{Position, Update, Vring, VringParts};
use kickless_memory::View;
use kickless_testing::{GuestRing, Random, guest_memory};
use kickless_virtqueue::device::Options;
use kickless_virtqueue::driver::Buffer;
use kickless_virtqueue::{Chain, ChainId};
use std::collections::VecDeque;
use std::sync::Arc;

const SIZE: u16 = 16;

/// A ring of one of the kinds: packed, event indices, in order.
fn ring([packed, event_idx, in_order]: [bool; 3]) -> GuestRing {
    let options = if packed { Options::packed } else { Options::new };
    let options = options(SIZE, event_idx, false).unwrap().with_in_order(in_order);
    GuestRing::new(guest_memory(0x2_0000, GuestRing::USER), options)
}

fn kinds() -> impl Iterator<Item = [bool; 3]> {
    (0..8).map(|bits| [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0])
}

/// Adds chains of one to three buffers while there is room, and returns their ids.
fn submit(ring: &mut GuestRing, random: &mut Random) -> Vec<u16> {
    let mut ids = Vec::new();
    let buffer = Buffer { addr: GuestRing::BUFFERS, len: 64, writable: true };
    for _ in 0..random.below(8) {
        let buffers = vec![buffer; 1 + random.below(3) as usize];
        ids.extend(ring.submitter.add(&buffers, None).ok());
    }
    let _ = ring.submitter.publish();
    ids
}

/// Takes what the driver sees, which is what the device completed next.
fn check_used(ring: &mut GuestRing, expected: &mut VecDeque<(u16, u32)>) {
    while let Some(done) = ring.completer.pop().unwrap() {
        assert_eq!(Some((done.id, done.len)), expected.pop_front());
        ring.completer.give_back(done.id);
    }
}

/// Makes a vring that learns its position late.
fn begun_at(ring: &GuestRing, position: &Position) -> Vring {
    let mut vring = Vring::unmapped(ring.parts());
    assert_eq!((vring.resubmissions(), vring.pending()), (0, 0));
    vring.begin_at(position);
    vring.begin();
    vring
}

/// The owner changes at random points, all of which are parks. Each chain is completed once, and credit is
/// found again, however often the indices wrap.
#[test]
fn another_owner_goes_on_where_the_last_one_was() {
    for kind in kinds() {
        let (mut ring, mut random) = (ring(kind), Random(5));
        let mut vring = Vring::new(ring.parts()).unwrap();
        vring.disarm();
        // Chains that were offered and not completed, and completions that the driver has not taken.
        let (mut offered, mut used) = (VecDeque::new(), VecDeque::new());
        let (mut chain, mut written) = (Chain::default(), 0);
        for _ in 0..5000 {
            offered.extend(submit(&mut ring, &mut random));
            let mut credit = Vec::<ChainId>::new();
            while !random.one_in(5) && vring.pop_credit(&mut chain) {
                credit.push(chain.id);
            }
            let count = random.below(credit.len() as u64 + 1) as usize;
            assert!(vring.use_credit(count as u16));
            for id in &credit[..count] {
                written += 1;
                vring.push(*id, written % 64);
                used.push_back((offered.pop_front().unwrap(), written % 64));
            }
            vring.publish();
            let is_armed = random.one_in(2);
            if is_armed {
                let _ = vring.arm();
            }
            let Position { next_avail, in_flight, unpublished, is_broken } = vring.position();
            assert_eq!((vring.credit(), in_flight, &unpublished[..], is_broken), (0, 0, &[][..], false));
            if random.one_in(2) {
                // The next owner is made before or after the position is known.
                vring = match random.one_in(2) {
                    true => Vring::new(VringParts { next_avail, ..ring.parts() }).unwrap(),
                    false => begun_at(&ring, &Position { next_avail, in_flight, unpublished, is_broken }),
                };
                assert!(kind[0] || vring.continue_from_used().is_none(), "the used index is another one");
            }
            vring.disarm();
            if !random.one_in(3) {
                check_used(&mut ring, &mut used);
            }
        }
        check_used(&mut ring, &mut used);
        assert!(used.is_empty());
    }
}

/// Completions that wait for the ring's memory are told, and this owner still has them. It also has the last
/// chain, which is in flight.
#[test]
fn unpublished_completions_go_to_another_owner() {
    for kind in kinds() {
        for goes_on in [false, true] {
            let (mut ring, mut random) = (ring(kind), Random(5));
            let mut vring = Vring::new(ring.parts()).unwrap();
            let batches = std::iter::from_fn(|| Some(submit(&mut ring, &mut random)));
            let offered: Vec<u16> = batches.take(4).flatten().collect();
            let mut chain = Chain::default();
            let popped: Vec<_> = std::iter::from_fn(|| vring.pop(&mut chain).then_some(chain.id)).collect();
            let kept = usize::from(goes_on);
            vring.apply(Update::Memory(Arc::<View>::default()));
            popped[..popped.len() - kept].iter().for_each(|id| vring.push(*id, 3));
            vring.publish();
            let position = vring.position();
            assert_eq!((usize::from(position.in_flight), position.is_broken), (kept, false));
            // With IN_ORDER, an element can stand for several chains.
            assert!((1..=popped.len() - kept).contains(&position.unpublished.len()));
            assert_eq!(vring.position(), position);
            if goes_on {
                vring.apply(Update::Memory(ring.view.clone()));
                vring.push(popped[popped.len() - 1], 3);
            } else {
                vring = begun_at(&ring, &position);
            }
            vring.publish();
            let seen: Vec<u16> =
                std::iter::from_fn(|| ring.completer.pop().unwrap()).map(|done| done.id).collect();
            assert_eq!(seen, offered);
        }
    }
}

/// A ring that its driver has broken says so, and stays so when it goes on.
#[test]
fn a_broken_ring_tells_it() {
    let ring = ring([false; 3]);
    let mut vring = Vring::new(ring.parts()).unwrap();
    ring.view.map().write(kickless_memory::Gpa(GuestRing::AVAIL + 2), &(SIZE + 1).to_le_bytes()).unwrap();
    assert!(!vring.pop(&mut Chain::default()));
    let position = vring.position();
    assert_eq!((position.next_avail, position.in_flight, position.is_broken), (0, 0, true));
    assert!(vring.is_broken());
    let mut next = begun_at(&ring, &position);
    assert!(next.is_broken() && !next.pop(&mut Chain::default()));
    assert_eq!(next.counters().broken.get(), 0, "it is counted once");
}
