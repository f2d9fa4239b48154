//! Frames between cards of a switch that pass from one guest's memory to the other's.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Operate, Update};
use kickless_memory::{Gpa, Log, Map, Marks, View};
use kickless_net::Net;
use kickless_spec::net::Header;
use kickless_virtqueue::driver::Buffer;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rig::switch::{FIRST_TASK, RECEIVE, TRANSMIT, ethernet, mac, name};
use rig::{Beside, Guest, Kind, Rig, counter, kinds};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use zerocopy::IntoBytes;

const HEADER: usize = size_of::<Header>();
const SIZE: u16 = 64;

/// Returns a frame behind its header.
fn frame(to: usize, from: usize, len: usize, number: usize) -> Vec<u8> {
    let mut frame = ethernet(to, from);
    frame.extend((14..len).map(|n| (n * 7 + number) as u8));
    frame
}

/// A card with its rings, which are on the worker 0.
struct Member {
    card: Arc<Net>,
    receive: Rig,
    transmit: Rig,
}

impl Member {
    fn new(switch: &str, number: usize, address: Option<[u8; 6]>, guests: [Guest; 2]) -> Self {
        let card = rig::card_with(address, 1, rig::switch::open(switch));
        let [receive, transmit] = guests;
        let features = card.features();
        let start = |index: u16, guest: Guest, task: u32| {
            let vring = guest.vring(index, guest.first_avail(), None);
            let mut rig = Rig::start_on(&card, guest, vring, features);
            rig.set_location(Some((0, task)));
            rig
        };
        let receive = start(RECEIVE, receive, FIRST_TASK + number as u32);
        let transmit = start(TRANSMIT, transmit, 0);
        Self { card, receive, transmit }
    }

    fn refill(&mut self) {
        while self.receive.offer(&[2048], true).is_some() {}
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.card, name)
    }

    /// Returns the frames that the driver has received.
    fn take(&mut self) -> Vec<Vec<u8>> {
        self.take_with_headers().into_iter().map(|(_, frame)| frame).collect()
    }

    fn take_with_headers(&mut self) -> Vec<(Header, Vec<u8>)> {
        std::iter::from_fn(|| self.receive.receive(HEADER)).collect()
    }
}

/// Two cards of a switch.
struct Two([Member; 2]);

impl Two {
    fn new(kind: Kind) -> Self {
        let name = name();
        let mut two = Self([0, 1].map(|number| {
            let guests = [(); 2].map(|()| Guest::prepare(kind, SIZE));
            Member::new(&name, number, None, guests)
        }));
        two.meet();
        two
    }

    /// Each card sends a frame to the other one, which goes in a batch. So the switch has learned where they
    /// are, and the transmit rings have found each other near.
    fn meet(&mut self) {
        for from in [1, 0, 1] {
            self.0[from].transmit.send(&frame(1 - from, from, 60, 0), 4096).unwrap();
            self.0[from].transmit.poll_once(1000);
            self.0[from].transmit.take().unwrap();
            self.receive(1 - from);
        }
    }

    /// Polls the receive ring of a card, which gets buffers before. Returns the frames.
    fn receive(&mut self, card: usize) -> Vec<Vec<u8>> {
        let member = &mut self.0[card];
        member.refill();
        member.receive.poll_once(1000);
        member.take()
    }

    /// Polls the transmit ring of a card beside the receive ring of the other one.
    fn poll_beside(&mut self, from: usize) {
        let [first, second] = &mut self.0;
        let (sender, receiver) = if from == 0 { (first, second) } else { (second, first) };
        let beside = Beside(vec![(FIRST_TASK + 1 - from as u32, &mut receiver.receive)]);
        sender.transmit.poll_beside(1000, beside);
    }
}

#[test]
fn a_frame_goes_directly_while_nothing_is_in_its_way() {
    for kind in kinds() {
        let mut two = Two::new(kind);
        let send = |two: &mut Two, number: usize, len: usize| {
            let sent = frame(1, 0, len, number);
            two.0[0].transmit.send(&sent, 4096).unwrap();
            sent[HEADER..].to_vec()
        };
        two.0[1].refill();
        let sent = [send(&mut two, 1, 1514), send(&mut two, 2, 60), send(&mut two, 3, 600)];
        two.poll_beside(0);
        assert_eq!((two.0[0].counter("sent_directly"), two.0[0].counter("sent_frames")), (3, 4), "{kind:?}");
        assert_eq!(two.0[1].take(), sent);
    }
}

/// Frames go in a batch if they are short, if others wait before them, or if the receiver is elsewhere or has
/// no buffers.
#[test]
fn a_frame_goes_in_a_batch_where_it_cannot_go_directly() {
    let kind = Kind::default();
    let mut two = Two::new(kind);
    let mut number = 0;
    let mut pass = |two: &mut Two, len: usize, prepare: &dyn Fn(&mut Vec<u8>)| {
        // The frames before have ended each pause.
        for _ in 0..8 {
            two.0[0].transmit.send(&frame(1, 0, 1000, 0), 4096).unwrap();
            two.poll_beside(0);
            two.0[0].transmit.take().unwrap();
            two.receive(1);
        }
        number += 1;
        let mut sent = frame(1, 0, len, number);
        prepare(&mut sent);
        two.0[1].refill();
        let before = two.0[0].counter("sent_directly");
        two.0[0].transmit.send(&sent, 4096).unwrap();
        two.poll_beside(0);
        let direct = two.0[0].counter("sent_directly") - before;
        let received = two.receive(1);
        assert_eq!((received.len(), received.last().map(|frame| &frame[..])), (1, Some(&sent[HEADER..])));
        direct
    };
    assert_eq!(pass(&mut two, 1514, &|_| {}), 1);
    assert_eq!(pass(&mut two, 400, &|_| {}), 0, "a short frame");
    let with_checksum = |frame: &mut Vec<u8>| {
        let header = Header { flags: 1, csum_start: 14.into(), csum_offset: 2.into(), ..Header::default() };
        frame[..HEADER].copy_from_slice(header.as_bytes());
    };
    assert_eq!(pass(&mut two, 1514, &with_checksum), 1, "the receiver accepts it");
    assert_eq!(pass(&mut two, 1514, &|_| {}), 1);
    for location in [None, Some((1, FIRST_TASK + 1)), Some((0, FIRST_TASK))] {
        two.0[1].receive.set_location(location);
        assert_eq!(pass(&mut two, 1514, &|_| {}), 0, "the receiver is elsewhere");
    }
    two.0[1].receive.set_location(Some((0, FIRST_TASK + 1)));
    assert_eq!(pass(&mut two, 1514, &|_| {}), 1);
    // A frame that waits in the inbox comes first.
    two.0[0].transmit.send(&frame(1, 0, 60, 1), 4096).unwrap();
    two.poll_beside(0);
    two.0[0].transmit.send(&frame(1, 0, 1514, 2), 4096).unwrap();
    let before = two.0[0].counter("sent_directly");
    two.poll_beside(0);
    assert_eq!(two.0[0].counter("sent_directly"), before);
    assert_eq!(two.receive(1).iter().map(Vec::len).collect::<Vec<_>>(), [60, 1514]);
}

/// A receiver with few buffers takes as many frames. The others stay in their ring, and go in a batch.
#[test]
fn the_frames_that_are_not_taken_stay_in_their_ring() {
    for kind in kinds() {
        let mut two = Two::new(kind);
        two.0[1].take();
        let left = two.0[1].receive.with_device();
        let sent: Vec<_> = (0..SIZE as usize - 4).map(|number| frame(1, 0, 1514, number)).collect();
        for frame in &sent {
            two.0[0].transmit.send(frame, 4096).unwrap();
        }
        // All but ten of the buffers are used up.
        let mut taken = Vec::new();
        if left > 10 {
            two.0[1].refill();
        }
        two.poll_beside(0);
        taken.extend(two.0[1].take());
        let direct = two.0[0].counter("sent_directly");
        assert!(direct > 0, "{kind:?}");
        while taken.len() < sent.len() {
            let before = taken.len();
            taken.extend(two.receive(1));
            two.poll_beside(0);
            taken.extend(two.0[1].take());
            assert!(taken.len() > before, "{kind:?}: {} frames are lost", sent.len() - taken.len());
        }
        assert!(taken.iter().zip(&sent).all(|(taken, sent)| *taken == sent[HEADER..]), "{kind:?}");
        while two.0[0].transmit.take().is_some() {}
        assert_eq!(two.0[0].transmit.with_device(), 0);
    }
}

/// The guest changes the source, the type, the payload and the header of a frame all the time. The other one
/// gets only frames with the source that was judged, and with headers that are valid.
#[test]
fn a_frame_that_changes_while_it_is_judged_keeps_its_source() {
    const SOURCE_AT: u64 = (HEADER + 11) as u64;
    const TYPE_AT: u64 = (HEADER + 12) as u64;
    const LEN: usize = 1514;
    /// Frames that pass directly, and that are refused, until the test has seen enough.
    const ENOUGH: u64 = 20;
    let name = name();
    let guests = || [(); 2].map(|()| Guest::prepare(Kind::default(), SIZE));
    let mut two = Two([0, 1].map(|number| Member::new(&name, number, Some(mac(number)), guests())));
    two.meet();
    let (view, is_over, chain) = (two.0[0].transmit.view.clone(), AtomicBool::new(false), AtomicU16::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A checksum in the frame, one outside of it, and none.
            let headers = [[1, 34], [1, 0xff], [0, 0]].into_iter().cycle();
            for (number, [flags, start]) in [9, 0, 0, 0].into_iter().cycle().zip(headers) {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let at = Guest::chain_at(chain.load(Ordering::Relaxed)).0;
                let write = |at: u64, bytes: &[u8]| view.write(Gpa(at), bytes, &mut Marks::off()).unwrap();
                write(at + SOURCE_AT, &[number]);
                write(at + TYPE_AT, if number == 9 { &[0x86, 0xdd] } else { &[0x88, 0xb5] });
                write(at + 1000, &[number; 200]);
                write(at, &[flags, 0, 0, 0, 0, 0, start, start & 0xf, 16, 0]);
            }
        });
        let (mut passed, mut with_checksum) = (0, 0);
        kickless_testing::eventually("frames pass directly, and frames are refused", || {
            for number in 0..100 {
                let id = two.0[0].transmit.send(&frame(1, 0, LEN, number), 4096).unwrap();
                chain.store(id, Ordering::Relaxed);
                two.0[1].refill();
                two.poll_beside(0);
                two.0[0].transmit.take().unwrap();
                two.0[1].receive.poll_once(1000);
                for (header, frame) in two.0[1].take_with_headers() {
                    assert_eq!((&frame[6..12], frame.len()), (&mac(0)[..], LEN));
                    let valid = Header { num_buffers: 1.into(), ..Header::default() };
                    let partial =
                        Header { flags: 1, csum_start: header.csum_start, csum_offset: 16.into(), ..valid };
                    let is_inside = usize::from(header.csum_start.get()) <= LEN - 18;
                    assert!(header == valid || header == partial && is_inside, "{header:?}");
                    (passed, with_checksum) = (passed + 1, with_checksum + u64::from(header.flags));
                }
            }
            let names = ["sent_directly", "sent_spoofed", "sent_invalid"];
            let counters = names.map(|name| two.0[0].counter(name));
            passed.min(with_checksum) >= ENOUGH && counters.iter().all(|count| *count >= ENOUGH)
        });
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Three cards, of which the guest of one cuts the file of its memory short.
fn with_file(number_with_file: usize, ring: u16) -> ([Member; 3], std::fs::File) {
    kickless_memory::fault::guard().unwrap();
    let file = std::fs::File::from(kickless_testing::memfd(rig::MEMORY));
    let name = name();
    let cards = [0, 1, 2].map(|number| {
        let guests = [RECEIVE, TRANSMIT].map(|index| {
            if (number, index) == (number_with_file, ring) {
                Guest::in_file(Kind::default(), SIZE, file.try_clone().unwrap().into())
            } else {
                Guest::prepare(Kind::default(), SIZE)
            }
        });
        Member::new(&name, number, None, guests)
    });
    (cards, file)
}

/// Sends a frame, and polls the ring beside the receive rings of the others.
fn send_beside(cards: &mut [Member; 3], from: usize, to: usize, len: usize) {
    let task = |number: usize| FIRST_TASK + number as u32;
    cards[from].transmit.send(&frame(to, from, len, 0), 4096).unwrap();
    let mut receivers = Vec::new();
    let mut sender = None;
    for (number, card) in cards.iter_mut().enumerate() {
        receivers.push((task(number), &mut card.receive));
        if number == from {
            sender = Some(&mut card.transmit);
        }
    }
    sender.unwrap().poll_beside(1000, Beside(receivers));
}

fn receive_all(cards: &mut [Member; 3]) -> [usize; 3] {
    cards.each_mut().map(|card| {
        card.receive.poll_once(1000);
        let frames = card.take().len();
        card.refill();
        frames
    })
}

#[test]
fn a_receiver_whose_memory_is_cut_short_stops_alone() {
    let (mut cards, file) = with_file(1, RECEIVE);
    receive_all(&mut cards);
    for (from, to) in [(1, 0), (0, 1), (2, 0)] {
        send_beside(&mut cards, from, to, 60);
        receive_all(&mut cards);
    }
    // The rings stay, and the buffers go.
    file.set_len(Guest::chain_at(0).0).unwrap();
    send_beside(&mut cards, 0, 1, 1514);
    assert!(cards[1].receive.task.vring().is_broken());
    assert!(cards[0].transmit.take().is_some());
    assert!(!cards[0].transmit.task.vring().is_broken());
    assert!(cards[1].take().is_empty());
    // The others go on.
    send_beside(&mut cards, 0, 2, 1514);
    assert_eq!(receive_all(&mut cards)[2], 1);
}

#[test]
fn a_sender_whose_memory_is_cut_short_stops_alone() {
    let (mut cards, file) = with_file(0, TRANSMIT);
    receive_all(&mut cards);
    for (from, to) in [(1, 0), (0, 1), (2, 1)] {
        send_beside(&mut cards, from, to, 60);
        cards[from].transmit.take().unwrap();
        receive_all(&mut cards);
    }
    // The head of the frame stays, and the rest goes.
    let at = Guest::chain_at(0).0 + 4096 - 256;
    let bytes = frame(1, 0, 1514, 0);
    cards[0].transmit.view.write(Gpa(at), &bytes, &mut Marks::off()).unwrap();
    let id = cards[0].transmit.next_id().unwrap();
    let buffer = Buffer { addr: at, len: bytes.len() as u32, writable: false };
    cards[0].transmit.add(id, vec![buffer]).unwrap();
    file.set_len(Guest::chain_at(0).0 + 4096).unwrap();
    let [sender, receiver, _] = &mut cards;
    sender.transmit.poll_beside(1000, Beside(vec![(FIRST_TASK + 1, &mut receiver.receive)]));
    assert!(sender.transmit.task.vring().is_broken());
    assert!(!receiver.receive.task.vring().is_broken());
    assert_eq!(sender.counter("sent_directly"), 1);
    // The rest of its frame is lost.
    assert_eq!(
        receiver.take().iter().map(|frame| frame[..200] == bytes[HEADER..][..200]).collect::<Vec<_>>(),
        [true]
    );
    for _ in 0..2 {
        send_beside(&mut cards, 2, 1, 1514);
        cards[2].transmit.take().unwrap();
    }
    assert_eq!(receive_all(&mut cards)[1], 2);
    assert!(cards[2].counter("sent_directly") > 0);
}

/// A frame of a sequence that both ways carry.
#[derive(Clone, Debug)]
struct Sent {
    to: usize,
    from: usize,
    len: usize,
    /// The tag of a VLAN.
    vlan: Option<u8>,
    is_ipv6: bool,
    has_checksum: bool,
    cut: usize,
}

impl Sent {
    fn bytes(&self, number: usize) -> Vec<u8> {
        let mut bytes = frame(self.to, self.from, self.len, number);
        if self.is_ipv6 {
            bytes[HEADER + 12..HEADER + 14].copy_from_slice(&[0x86, 0xdd]);
        }
        if let Some(vlan) = self.vlan {
            bytes.splice(HEADER + 12..HEADER + 12, [0x81, 0, 0, vlan]);
        }
        if self.has_checksum {
            let header =
                Header { flags: 1, csum_start: 14.into(), csum_offset: 2.into(), ..Header::default() };
            bytes[..HEADER].copy_from_slice(header.as_bytes());
        }
        bytes
    }
}

/// Frames of a card, for a poll of its transmit ring.
fn burst() -> impl Strategy<Value = (usize, Vec<Sent>)> {
    let len = prop_oneof![2 => 40..100usize, 2 => 490..520usize, 4 => 1000..1514usize];
    (0..2usize, 1..40usize, 0..12u8).prop_flat_map(move |(card, count, kind)| {
        // Most bursts are alike, and some frames are others.
        let sent = (len.clone(), 0..200u8).prop_map(move |(len, odd)| Sent {
            to: if odd == 1 { 3 } else { 1 - card },
            // A card that claims the other one's address loses frames, and it depends on the way which ones.
            from: if odd == 2 { 4 } else { card },
            len: if kind < 8 { len.max(500) } else { len },
            vlan: (odd == 3 || kind == 9).then_some(7),
            is_ipv6: odd == 4 || kind == 10,
            has_checksum: odd == 5,
            cut: if odd == 6 { 300 } else { 4096 },
        });
        (Just(card), prop::collection::vec(sent, count))
    })
}

/// Everything that the two ways must have in common.
#[derive(Debug, PartialEq)]
struct Seen {
    frames: [Vec<(Header, Vec<u8>)>; 2],
    counters: [Vec<(&'static str, u64)>; 2],
    /// The pages of the receivers that are marked in the log.
    dirty: [Vec<u64>; 2],
}

/// Carries bursts, directly where that is possible, or in batches only. Returns also the number of frames
/// that went directly.
fn carry(kind: Kind, address: bool, bursts: &[(usize, Vec<Sent>)], is_direct: bool) -> (Seen, u64) {
    let name = name();
    let mut two = Two([0, 1].map(|number| {
        let guests = [(); 2].map(|()| Guest::prepare(kind, SIZE));
        let address = (address && number == 0).then(|| mac(0));
        Member::new(&name, number, address, guests)
    }));
    let logs = two.0.each_mut().map(|member| {
        let len = (rig::MEMORY / 4096).div_ceil(8).next_multiple_of(4096);
        let log = Arc::new(Log::map(kickless_testing::memfd(len), 0, len).unwrap());
        let map = Map::new(member.receive.view.map().slots().to_vec()).unwrap();
        let view = Arc::new(View::new(map).with_log(Some(log.clone())).unwrap());
        member.receive.apply(Update::Memory(view.clone()));
        member.receive.view = view;
        log
    });
    two.meet();
    let mut frames = [Vec::new(), Vec::new()];
    for (number, (card, burst)) in bursts.iter().enumerate() {
        for sent in burst {
            two.0[*card].transmit.send(&sent.bytes(number), sent.cut).unwrap();
        }
        two.0[1 - card].refill();
        if is_direct {
            two.poll_beside(*card);
        } else {
            two.0[*card].transmit.poll_once(1000);
        }
        frames[1 - card].extend(two.0[1 - card].take_with_headers());
        for _ in 0..2 {
            for (member, frames) in two.0.iter_mut().zip(&mut frames) {
                member.refill();
                member.receive.poll_once(1000);
                frames.extend(member.take_with_headers());
            }
        }
        while two.0[*card].transmit.take().is_some() {}
        assert_eq!(two.0[*card].transmit.with_device(), 0);
    }
    let direct = two.0.iter().map(|member| member.counter("sent_directly")).sum();
    let counters = two.0.each_ref().map(|member| {
        member.card.counters().into_iter().filter(|(name, _)| *name != "sent_directly").collect()
    });
    let dirty =
        logs.map(|log| (0..rig::MEMORY / 4096).filter(|page| log.is_marked(Gpa(page * 4096))).collect());
    (Seen { frames, counters, dirty }, direct)
}

#[test]
fn frames_arrive_alike_directly_and_in_batches() {
    let cases = (0..16u8, prop::collection::vec(burst(), 1..20));
    let direct = AtomicU32::new(0);
    let result = TestRunner::new(ProptestConfig::with_cases(60)).run(&cases, |(bits, bursts)| {
        let is = |bit: u8| bits & 1 << bit != 0;
        let kind = Kind { packed: is(0), event_idx: is(1), in_order: is(2) };
        let (one, frames) = carry(kind, is(3), &bursts, true);
        let (other, none) = carry(kind, is(3), &bursts, false);
        prop_assert_eq!(none, 0);
        prop_assert!(one == other, "{:?} or {:?}", one.counters, other.counters);
        direct.fetch_add(frames as u32, Ordering::Relaxed);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let direct = direct.into_inner();
    assert!(direct > 200, "only {direct} frames went directly");
}
