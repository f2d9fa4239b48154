//! Frames in chains of several buffers that a receiver on the same worker must not take directly, and the
//! limits of those that it takes.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, Limit, Limits, Neighbours, Next, Operate, Parcel, Rate};
use kickless_memory::{Gpa, Marks};
use kickless_spec::features::Features;
use kickless_spec::net::{FRAME_MAX, GSO_TCPV4, HDR_F_NEEDS_CSUM, Header, NetFeatures};
use kickless_virtqueue::driver::Buffer;
use rig::pair::{HEADER, Pair, SIZE, packet, plain};
use rig::switch::{FIRST_TASK, TRANSMIT, mac};
use rig::{Beside, Guest, Kind, MEMORY, Rig, counter, kinds};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

const KIND: Kind = Kind { packed: true, event_idx: true, in_order: false };
/// The bit of the feature with which a header has its full length.
const MERGES: u64 = NetFeatures::MRG_RXBUF.bits();
const NONE: [NetFeatures; 2] = [NetFeatures::empty(); 2];

/// Sends a packet of `len` bytes in buffers of `cut` bytes. Returns the number of packets that went directly,
/// and the lengths of the frames that arrived.
fn pass(pair: &mut Pair, len: usize, cut: usize) -> (u64, Vec<usize>) {
    let sent = packet(len, 1);
    pair.transmit.send_indirect(&sent, cut).unwrap();
    let direct = pair.poll_beside(1000);
    let received = pair.receive();
    assert!(received.iter().all(|(_, frame)| frame.len() != len || *frame == sent[HEADER..]));
    (direct, received.into_iter().map(|(_, frame)| frame.len()).collect())
}

#[test]
fn a_refusal_is_followed_by_one_packet_in_a_batch() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, NONE);
        pair.refill(&[2048]);
        assert!(pair.passes_directly(), "{kind:?}");
        pair.receive.set_location(Some((0, 99)));
        assert!(!pair.passes_directly());
        pair.receive.set_location(Some((0, FIRST_TASK)));
        assert!(!pair.passes_directly());
        assert!(pair.passes_directly() && pair.passes_directly());
    }
}

/// The sender pays for the receiver's look at a packet that it refuses, and for a copy that was made in vain.
#[test]
fn a_refused_packet_is_charged() {
    fn cost(pair: &mut Pair) -> u32 {
        pair.transmit.send_indirect(&packet(19_988, 1), 2048).unwrap();
        let polled = pair.transmit.poll_beside(1000, Beside(vec![(FIRST_TASK, &mut pair.receive)]));
        pair.transmit.take().unwrap();
        polled.cost
    }
    for kind in kinds() {
        let mut pair = Pair::new(kind, NONE);
        pair.refill(&[2048]);
        // A packet of this length costs 5, and as much again if it goes directly.
        assert_eq!(cost(&mut pair), 10, "{kind:?}");
        pair.receive.set_location(Some((0, 99)));
        assert_eq!([(); 3].map(|()| cost(&mut pair)), [6, 5, 6], "a refusal and a pause in turn");
        let mut pair = Pair::new(kind, NONE);
        for _ in 0..9 {
            pair.receive.offer(&[2048], true).unwrap();
        }
        pair.receive.offer_outside(2048);
        // The frame was copied but for its last part.
        assert_eq!(cost(&mut pair), 5 + 1 + 5, "{kind:?}");
        assert_eq!(pair.sent_directly(), 0);
    }
}

/// The same for frames of one buffer each. The sender has read their heads.
#[test]
fn refused_frames_are_charged() {
    for kind in kinds() {
        let mut pair = Pair::new(kind, NONE);
        pair.receive.task.vring().publish();
        let mut cost = |receivers: u32| {
            for number in 0..32 {
                pair.transmit.send(&plain(1514, number), 4096).unwrap();
            }
            let polled = pair.transmit.poll_beside(1000, Beside(vec![(receivers, &mut pair.receive)]));
            while pair.transmit.take().is_some() {}
            (polled.served, polled.cost)
        };
        // 32 heads and a decision, and then seven batches as usual.
        assert_eq!(cost(FIRST_TASK), (32, 2 + 3), "{kind:?}");
        assert_eq!(cost(FIRST_TASK), (32, 2), "{kind:?}");
        // Half of the frames are taken. They cost 1 on each side, and the other half as much as before.
        let mut pair = Pair::new(kind, NONE);
        pair.receive.task.vring().publish();
        for _ in 0..16 {
            pair.receive.offer(&[2048], true).unwrap();
        }
        for number in 0..32 {
            pair.transmit.send(&plain(1514, number), 4096).unwrap();
        }
        let polled = pair.transmit.poll_beside(1000, Beside(vec![(FIRST_TASK, &mut pair.receive)]));
        assert_eq!((pair.sent_directly(), polled.cost), (16, 2 + 2 + 1), "{kind:?}");
    }
}

/// A change that keeps a packet from going directly, and the one that lets it go again.
type Change = fn(&mut Pair);

#[test]
fn a_packet_goes_in_a_batch_where_it_cannot_go_directly() {
    fn limit(pair: &Pair, card: usize, is_on: bool) {
        let rate = if is_on { Rate { per_second: 1_000_000, burst: 1000 } } else { Rate::default() };
        let limit = Limit { sustained: rate, peak: Rate::default() };
        let limits =
            if is_on { Limits { requests: [limit; 3], ..Limits::default() } } else { Limits::default() };
        [&pair.transmit, &pair.receive][card].limiter.set(&limits);
    }
    fn capture(pair: &Pair, card: usize, is_on: bool) {
        let dir = tempfile::tempdir().unwrap();
        let to = CaptureTo { path: &dir.path().join("capture"), device: "card", len_max: 100 };
        pair.cards[card].set_capture(is_on.then_some(&to)).unwrap();
    }
    let (nowhere, other_worker, other_task): (Change, Change, Change) = (
        |pair| pair.receive.set_location(None),
        |pair| pair.receive.set_location(Some((1, FIRST_TASK))),
        |pair| pair.receive.set_location(Some((0, 0))),
    );
    let near: Change = |pair| pair.receive.set_location(Some((0, FIRST_TASK)));
    let changes: [(Change, Change); 9] = [
        (nowhere, near),
        (other_worker, near),
        (other_task, near),
        (|pair| limit(pair, 0, true), |pair| limit(pair, 0, false)),
        (|pair| limit(pair, 1, true), |pair| limit(pair, 1, false)),
        (|pair| capture(pair, 0, true), |pair| capture(pair, 0, false)),
        (|pair| capture(pair, 1, true), |pair| capture(pair, 1, false)),
        // The receiver filters.
        (|pair| pair.command(&[0, 0, 0]), |pair| pair.command(&[0, 0, 1])),
        // It does not accept packets to segment, and its driver gets the segments.
        (
            |pair| pair.set_offloads(NetFeatures::GUEST_CSUM),
            |pair| pair.set_offloads(NetFeatures::GUEST_OFFLOADS),
        ),
    ];
    let mut pair = Pair::new(KIND, NONE);
    for (number, (prevent, permit)) in changes.into_iter().enumerate() {
        pair.refill(&[2048]);
        assert!(pair.passes_directly(), "{number}");
        prevent(&mut pair);
        for _ in 0..3 {
            let (direct, received) = pass(&mut pair, 20_000, 2048);
            assert_eq!((direct, received.len()), (0, if number == 8 { 14 } else { 1 }), "{number}");
            pair.refill(&[2048]);
        }
        permit(&mut pair);
        while !pair.passes_directly() {}
    }
}

#[test]
fn short_packets_and_many_buffers_go_in_a_batch() {
    let mut pair = Pair::new(KIND, NONE);
    pair.refill(&[2048]);
    for (len, cut, direct) in [(4096, 1000, 1), (4095, 1000, 0), (20_000, 313, 1), (20_000, 312, 0)] {
        while !pair.passes_directly() {}
        // The chains have 5, 5, 64 and 65 buffers.
        assert_eq!(pass(&mut pair, len, cut), (direct, vec![len]));
        pair.refill(&[2048]);
    }
}

/// Frames that are too short or too long end the offer before them, and are lost alone.
#[test]
fn frames_of_impossible_lengths_do_not_go_directly() {
    const LONG: usize = FRAME_MAX + 1;
    for len in [1, HEADER - 1, HEADER, HEADER + 13, LONG] {
        let mut pair = Pair::new(KIND, NONE);
        pair.refill(&[LONG as u32 + 1000]);
        let (good, mut bad) = (plain(1514, 1), plain(LONG, 2));
        bad.truncate(len);
        pair.transmit.send(&good, LONG).unwrap();
        pair.transmit.send(&bad, LONG).unwrap();
        pair.transmit.send(&good, LONG).unwrap();
        assert_eq!(pair.poll_beside(1000), 1, "{len}");
        let lens: Vec<_> = pair.receive().iter().map(|(_, frame)| frame.len()).collect();
        assert_eq!(lens, [1514, 1514], "{len}");
        assert_eq!(counter(&pair.cards[0], "sent_invalid"), 1, "{len}");
    }
}

/// A packet does not overtake one of the same poll that is in the batch, one in the inbox, or one that waits
/// for buffers.
#[test]
fn a_packet_does_not_overtake_another() {
    let mut pair = Pair::new(KIND, NONE);
    pair.refill(&[2048]);
    assert!(pair.passes_directly());
    pair.transmit.send(&plain(60, 1), 4096).unwrap();
    assert_eq!(pass(&mut pair, 20_000, 2048), (0, vec![60, 20_000]));
    pair.refill(&[2048]);
    while !pair.passes_directly() {}
    // The receiver is not polled in between.
    for len in [60, 20_000] {
        pair.transmit.send(&plain(len, 1), 4096).unwrap();
        assert_eq!(pair.poll_beside(1000), 0);
    }
    assert_eq!(pair.receive().iter().map(|(_, frame)| frame.len()).collect::<Vec<_>>(), [60, 20_000]);
    // Two buffers are left of those that a packet needs.
    while pair.receive.with_device() > 2 {
        pair.transmit.send(&plain(60, 1), 4096).unwrap();
        pair.poll_beside(1000);
        pair.receive();
    }
    assert_eq!(pass(&mut pair, 20_000, 2048), (0, vec![]));
    pair.refill(&[2048]);
    pair.transmit.send_indirect(&packet(10_000, 1), 2048).unwrap();
    assert_eq!(pair.poll_beside(1000), 0);
    assert_eq!(pair.receive().iter().map(|(_, frame)| frame.len()).collect::<Vec<_>>(), [20_000, 10_000]);
}

/// The receiver has one buffer too few, so it takes nothing, and the driver sees nothing.
#[test]
fn a_packet_is_taken_as_a_whole_or_not_at_all() {
    for kind in kinds() {
        for (room, is_taken) in [(10, true), (9, false), (1, false), (0, false)] {
            let mut pair = Pair::new(kind, NONE);
            pair.receive.task.vring().publish();
            for _ in 0..room {
                pair.receive.offer(&[2000], true).unwrap();
            }
            // 20 000 bytes with the header.
            let sent = packet(19_988, 1);
            pair.transmit.send_indirect(&sent, 4096).unwrap();
            assert_eq!(pair.poll_beside(1000), u64::from(is_taken));
            let taken = pair.take();
            assert_eq!(taken.len(), usize::from(is_taken), "{kind:?}, {room}");
            let number = taken.first().map(|(header, _)| header.num_buffers.get());
            assert!(number.is_none_or(|number| number == 10));
            pair.receive.offer(&[2000], true).unwrap();
            assert!(room != 9 || pair.receive().iter().all(|(_, frame)| *frame == sent[HEADER..]));
            pair.refill(&[2000]);
            // It comes once.
            pair.receive();
            assert_eq!(counter(&pair.cards[1], "received_frames"), 2, "{kind:?}, {room}");
        }
    }
}

/// A buffer of either side is not in memory: at any position.
#[test]
fn a_packet_that_leaves_memory_is_lost_alone() {
    let outside = [MEMORY - 256, MEMORY + 4096, u64::MAX - 100];
    for (position, addr) in (0..5).flat_map(|position| outside.map(|addr| (position, addr))) {
        // Of the sender.
        let mut pair = Pair::new(KIND, NONE);
        pair.refill(&[2048]);
        assert!(pair.passes_directly());
        let (sent, id) = (packet(10_000 - HEADER, 1), pair.transmit.next_id().unwrap());
        let buffers = (0..5).map(|number| {
            let at = Guest::chain_at(id).0 + number * 4096;
            let bytes = &sent[number as usize * 2000..][..2000];
            pair.transmit.view.write(Gpa(at), bytes, &mut Marks::off()).unwrap();
            Buffer { addr: if number == position { addr } else { at }, len: 2000, writable: false }
        });
        let buffers = buffers.collect();
        pair.transmit.add(id, buffers).unwrap();
        assert_eq!((pair.poll_beside(1000), pair.receive().len()), (0, 0));
        assert_eq!(counter(&pair.cards[0], "sent_invalid"), 1, "{position}, {addr:x}");
        while !pair.passes_directly() {}
        // Of the receiver. The driver gets the buffers back without a frame, as from a batch.
        let mut pair = Pair::new(KIND, NONE);
        for number in 0..5 {
            let id = pair.receive.next_id().unwrap();
            let addr = if number == position { addr } else { Guest::chain_at(id).0 };
            pair.receive.add(id, vec![Buffer { addr, len: 2000, writable: true }]).unwrap();
        }
        pair.transmit.send_indirect(&sent, 2048).unwrap();
        assert_eq!(pair.poll_beside(1000), 0);
        let mut lens = Vec::new();
        for _ in 0..2 {
            lens.extend(std::iter::from_fn(|| pair.receive.take().map(|(_, _, len)| len)));
            pair.receive.poll_once(1000);
        }
        assert_eq!(lens, [0; 5], "{position}, {addr:x}");
        pair.refill(&[2048]);
        while !pair.passes_directly() {}
        assert!(!pair.receive.task.vring().is_broken() && !pair.transmit.task.vring().is_broken());
    }
}

/// The header is in memory, and the next buffer is not. It is short, so that the copied head has bytes behind
/// it.
#[test]
fn a_packet_without_the_rest_of_its_head_is_lost_alone() {
    let mut pair = Pair::new(KIND, NONE);
    pair.refill(&[2048]);
    for len in [54, 116, 200] {
        while !pair.passes_directly() {}
        let (sent, id) = (packet(10_000, 1), pair.transmit.next_id().unwrap());
        let at = Guest::chain_at(id).0;
        pair.transmit.view.write(Gpa(at), &sent, &mut Marks::off()).unwrap();
        let (header, rest) = (HEADER as u32, 10_000 - len);
        let buffers = [(at, header), (MEMORY, len), (at + u64::from(header + len), rest)];
        let buffers = buffers.map(|(addr, len)| Buffer { addr, len, writable: false });
        pair.transmit.add(id, buffers.into()).unwrap();
        let invalid = counter(&pair.cards[0], "sent_invalid");
        assert_eq!((pair.poll_beside(1000), pair.receive().len()), (0, 0), "{len}");
        assert_eq!(counter(&pair.cards[0], "sent_invalid"), invalid + 1);
    }
}

/// The header of a driver without the features of virtio 1 is two bytes shorter.
#[test]
fn a_packet_with_a_short_header_goes_in_a_batch() {
    let kind = Kind { packed: false, ..KIND };
    let mut pair = Pair::new(kind, NONE);
    pair.refill(&[2048]);
    let guest = Guest::prepare(kind, SIZE);
    let vring = guest.vring(TRANSMIT, guest.first_avail(), None);
    let features = pair.cards[0].features() - Features::VERSION_1 - Features::from_bits_retain(MERGES);
    pair.transmit = Rig::start_on(&pair.cards[0], guest, vring, features);
    pair.transmit.set_location(Some((0, 0)));
    for number in 0..4 {
        let sent = packet(20_000, number);
        let short = [&sent[..HEADER - 2], &sent[HEADER..]].concat();
        pair.transmit.send_indirect(&short, 2048).unwrap();
        assert_eq!(pair.poll_beside(1000), 0);
        let received = pair.receive();
        assert!(received.len() == 1 && received[0].1 == sent[HEADER..], "{number}");
        pair.refill(&[2048]);
    }
}

/// The sender is charged for both sides: a packet of 64 KiB costs 32.
#[test]
fn a_packet_that_goes_directly_is_charged_twice() {
    for (budget, packets) in [(1, 1), (32, 1), (33, 2), (64, 2), (65, 3)] {
        let mut pair = Pair::new(KIND, NONE);
        pair.refill(&[65_562]);
        (0..4).for_each(|number| {
            pair.transmit.send_indirect(&packet(65_000, number), 2048).unwrap();
        });
        assert_eq!((pair.poll_beside(budget), pair.transmit.last), (packets, Next::More), "{budget}");
        assert_eq!(pair.take().len() as u64, packets);
    }
}

/// A driver that does not merge buffers gets packets into buffers of their length.
#[test]
fn a_buffer_for_all_of_a_packet_is_enough() {
    for kind in kinds() {
        for (len, taken) in [(20_012, 1), (65_562, 1), (20_011, 0)] {
            let mut pair = Pair::new(kind, [NetFeatures::empty(), NetFeatures::MRG_RXBUF]);
            pair.refill(&[len]);
            for _ in 0..2 {
                let (direct, lens) = pass(&mut pair, 20_000, 2048);
                assert_eq!((direct, lens.len() as u64), (taken, taken), "{kind:?}, {len}");
            }
            // The packet is too long for any of the buffers.
            assert_eq!(counter(&pair.cards[1], "dropped_long"), 2 - 2 * taken);
        }
    }
}

/// Checks that a ring of such a guest sends directly, and that one takes nothing directly.
fn check_one_way(prepare: impl Fn(Guest) -> Guest) {
    for kind in kinds() {
        for card in [0, 1] {
            let guests = [0, 1].map(|number| {
                let guest = Guest::prepare(kind, SIZE);
                if number == card { prepare(guest) } else { guest }
            });
            let mut pair = Pair::with_guests(guests, kind, NONE);
            pair.refill(&[2048]);
            for _ in 0..3 {
                assert_eq!(pair.passes_directly(), card == 0, "{kind:?}, {card}");
            }
        }
    }
}

#[test]
fn a_ring_with_an_in_flight_region_sends_directly_and_takes_nothing() {
    check_one_way(Guest::with_inflight);
}

#[test]
fn a_ring_behind_an_iommu_sends_directly_and_takes_nothing() {
    check_one_way(|guest| {
        let mut guest = guest.behind_iommu();
        guest.translate_all();
        guest
    });
}

/// The process is killed after the receiver has taken the packet, and before the sender completes its chain.
#[test]
fn a_packet_of_a_killed_process_is_sent_again() {
    struct Killed<'a>(Beside<'a>);
    impl Neighbours for Killed<'_> {
        fn offer(&mut self, task: u32, parcel: &Parcel<'_>) -> u32 {
            assert_eq!(self.0.offer(task, parcel), 1);
            panic_any("killed");
        }

        fn wake(&mut self, _task: u32) {}
    }
    for kind in kinds() {
        let guests = [Guest::prepare(kind, SIZE).with_inflight(), Guest::prepare(kind, SIZE)];
        let mut pair = Pair::with_guests(guests, kind, NONE);
        pair.refill(&[2048]);
        let sent = packet(20_000, 1);
        pair.transmit.send_indirect(&sent, 2048).unwrap();
        let mut killed = Killed(Beside(vec![(FIRST_TASK, &mut pair.receive)]));
        let poll = AssertUnwindSafe(|| pair.transmit.poll_among(1000, &mut killed));
        assert_eq!(catch_unwind(poll).unwrap_err().downcast_ref(), Some(&"killed"));
        pair.receive.task.vring().publish();
        let guest = pair.transmit.kill();
        let vring = guest.vring(TRANSMIT, 1, None);
        assert_eq!(vring.resubmissions(), 1, "{kind:?}");
        pair.transmit = Rig::start_on(&pair.cards[0], guest, vring, pair.cards[0].features());
        pair.transmit.set_location(Some((0, 0)));
        // A ring that stops offers nothing.
        pair.transmit.poll_beside(0, Beside(vec![(FIRST_TASK, &mut pair.receive)]));
        assert_eq!(pair.sent_directly(), 0);
        assert_eq!(pair.transmit.take().map(|(_, _, len)| len), Some(0));
        pair.refill(&[2048]);
        let received: Vec<_> = pair.receive().into_iter().map(|(_, frame)| frame).collect();
        assert!(received.iter().all(|frame| *frame == sent[HEADER..]));
        assert_eq!(received.len(), 2);
    }
}

/// The guest changes the header and the addresses of a packet all the time. The other one gets only headers
/// that are valid, and the source that was judged.
#[test]
fn a_packet_that_changes_while_it_is_judged_keeps_its_head() {
    const LEN: usize = 8000;
    const ENOUGH: u64 = 20;
    let mut pair = Pair::new(Kind::default(), NONE);
    let (view, is_over, chain) = (pair.transmit.view.clone(), AtomicBool::new(false), AtomicU16::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A packet to segment, one with segments of no bytes, and one without offloads.
            let headers = [(1, GSO_TCPV4, 1448), (1, GSO_TCPV4, 0), (0, 0, 9)].into_iter().cycle();
            for (number, (flags, gso_type, size)) in [1, 0, 0, 0].into_iter().cycle().zip(headers) {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let at = Guest::chain_at(chain.load(Ordering::Relaxed)).0;
                let write = |at: u64, bytes: &[u8]| view.write(Gpa(at), bytes, &mut Marks::off()).unwrap();
                write(at, &[flags, gso_type, 54, 0, size as u8, (size >> 8) as u8, 34, 0, 16, 0]);
                // The other card's own address is a source that is refused.
                write(at + (HEADER + 11) as u64, &[number]);
                write(at + 1000, &[number; 200]);
            }
        });
        let mut passed = [0; 2];
        kickless_testing::eventually("packets pass directly, and packets are refused", || {
            for number in 0..100 {
                let id = pair.transmit.send(&packet(LEN, number), 4096).unwrap();
                chain.store(id, Ordering::Relaxed);
                pair.refill(&[2048]);
                pair.poll_beside(1000);
                for (header, frame) in pair.receive() {
                    assert_eq!((&frame[6..12], frame.len()), (&mac(0)[..], LEN));
                    let num_buffers = 4.into();
                    let plain = Header { num_buffers, ..Header::default() };
                    let segmented = Header {
                        flags: HDR_F_NEEDS_CSUM,
                        gso_type: GSO_TCPV4,
                        hdr_len: 54.into(),
                        gso_size: header.gso_size,
                        csum_start: 34.into(),
                        csum_offset: 16.into(),
                        num_buffers,
                    };
                    assert!(
                        header == plain || header == segmented && header.gso_size.get() > 0,
                        "{header:?}"
                    );
                    passed[usize::from(header == segmented)] += 1;
                }
            }
            let names = ["sent_directly", "sent_spoofed", "sent_invalid"];
            let counters = names.map(|name| counter(&pair.cards[0], name));
            passed.iter().chain(&counters).all(|count| *count >= ENOUGH)
        });
        is_over.store(true, Ordering::Relaxed);
    });
}
