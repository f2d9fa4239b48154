//! Passes cards from one process to the next. Both are this one, but for the uplink of a switch.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, DeviceMessage, HandOver, Interest, Next, Operate};
use kickless_handover::{Giving, Part, v1};
use kickless_memory::Iov;
use kickless_net::{Net, PortError};
use kickless_net_port::{Tap, TapQueue};
use kickless_spec::net::{Header, NetFeatures};
use kickless_testing::{
    LIMIT, add_uplink, dhcp_discover, eventually, has_passt, in_network_namespace, ip, parse_pcapng,
};
use rig::handing::{final_port, give, give_final, open, receive_final, record_of_port, take, take_captured};
use rig::stream::{frame, framed, plain, read_frame};
use rig::{Kind, Rig, SIZE_MAX, counter};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, thread};
use tempfile::TempDir;
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
/// The source address of frames of these tests. The kernel sends other frames too.
const SOURCE: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn start(card: &Arc<Net>, index: u16) -> Rig {
    Rig::start(card, index, SPLIT, SIZE_MAX, card.features())
}

fn fill(rig: &mut Rig) {
    while rig.offer(&[2048], true).is_some() {}
}

/// Returns a broadcast frame with a number. Different flows can go to different queues of a TAP.
fn numbered(number: u32, len: usize, flow: u8) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &SOURCE, &[8, 0, 0x45, 0, 0, 86, 0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    frame.extend([10, 0, 0, 1, 10, 0, 0, flow]);
    // A bridge can drop packets whose header has another checksum.
    let sum: u32 = frame[14..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame.extend([1, flow, 2, 2, 0, 66, 0, 0]);
    frame.extend(number.to_le_bytes());
    frame.resize(len, 0x5a);
    frame
}

/// Returns the numbers of the frames of these tests that a ring has delivered since the last call.
fn taken(rig: &mut Rig) -> Vec<u32> {
    let mut numbers = Vec::new();
    while let Some((_, frame)) = rig.receive(12) {
        if frame[6..12] == SOURCE {
            numbers.push(u32::from_le_bytes(*frame[42..].first_chunk().unwrap()));
        }
    }
    numbers
}

/// Polls a ring until it has delivered this number of frames.
fn receive(rig: &mut Rig, count: usize) -> Vec<u32> {
    let mut numbers = Vec::new();
    eventually("the frames arrive", || {
        fill(rig);
        rig.poll();
        numbers.extend(taken(rig));
        numbers.len() >= count
    });
    numbers
}

/// A bridge with the TAP `card`, and a peer.
struct Network {
    peer: TapQueue,
    number: u32,
}

impl Network {
    /// Connects the TAP, which exists.
    fn new() -> Self {
        let peer = Tap::open("peer", 1).unwrap();
        ip("link add bridge type bridge forward_delay 0 mcast_snooping 0");
        ip("link set dev bridge up");
        for name in ["card", "peer"] {
            ip(&format!("link set dev {name} up mtu 65521 master bridge"));
        }
        peer.set(kickless_net_port::Offloads::empty(), |_| true);
        Self { peer: peer.queue(0).unwrap(), number: 0 }
    }

    /// Sends frames of many flows. Returns their numbers.
    fn send(&mut self, count: u32) -> Vec<u32> {
        let numbers: Vec<_> = (self.number..self.number + count).collect();
        for number in &numbers {
            let frame = numbered(*number, 100, *number as u8);
            self.peer.send_copy(&Header::default(), &frame).unwrap();
        }
        self.number += count;
        numbers
    }

    /// Sends frames until one arrives, and waits for the last one.
    fn wait_until_attached(&mut self, rig: &mut Rig) {
        eventually("the queue is attached", || {
            self.send(1);
            fill(rig);
            rig.poll();
            !taken(rig).is_empty()
        });
        let last = self.send(1);
        while !receive(rig, 1).ends_with(&last) {}
    }

    /// Returns whether the peer has got a frame of this length.
    fn got(&mut self, len: usize) -> bool {
        let mut bytes = vec![0; 70_000];
        std::iter::from_fn(|| self.peer.receive(&mut Header::default(), &mut Iov::default(), &mut bytes).ok())
            .any(|got| got == len)
    }
}

#[test]
fn a_tap_keeps_the_frames_in_its_queue() {
    in_network_namespace(|| {
        let old = open("tap:card", 2);
        let mut network = Network::new();
        old.open().unwrap();
        let mut receiving = start(&old, RECEIVE);
        network.wait_until_attached(&mut receiving);
        // The new process makes all before the pause, while the old one serves.
        let new = take("tap:card", 2, give(&old)).unwrap();
        let mut new_receiving = start(&new, RECEIVE);
        let sent = network.send(20);
        assert_eq!(receive(&mut receiving, 20), sent);
        old.settle().unwrap();
        old.hold();
        // The pause: neither process reads.
        let waiting = network.send(200);
        let state = give_final(&old);
        receive_final(&new, state);
        new.begin();
        // The follower has its first look at the rings, or not yet.
        thread::sleep(Duration::from_millis(50));
        assert_eq!(receive(&mut new_receiving, 200), waiting);
        // The queue of the other pair is still detached, so no flow goes there.
        let sent = network.send(100);
        assert_eq!(receive(&mut new_receiving, 100), sent);
        let mut transmit = start(&new, TRANSMIT);
        transmit.send(&[Header::default().as_bytes(), &numbered(0, 100, 0)].concat(), 4096).unwrap();
        transmit.poll();
        eventually("the peer gets a frame", || network.got(100));
        // The card goes on as any other: its follower attaches the queue of a ring that starts.
        let mut second = start(&new, 2);
        eventually("frames arrive at both", || {
            fill(&mut second);
            fill(&mut new_receiving);
            network.send(64);
            second.poll();
            new_receiving.poll();
            !taken(&mut second).is_empty() && !taken(&mut new_receiving).is_empty()
        });
        // The end of the old process closes its descriptors, and does nothing else.
        std::mem::forget(old);
    });
}

#[test]
fn the_old_process_goes_on_after_each_step() {
    in_network_namespace(|| {
        let old = open("tap:card", 2);
        let mut network = Network::new();
        old.open().unwrap();
        let mut receiving = start(&old, RECEIVE);
        network.wait_until_attached(&mut receiving);
        for steps in 0..6 {
            let new = take("tap:card", 2, give(&old)).unwrap();
            let tasks = [RECEIVE, 2].map(|index| start(&new, index));
            let sent = network.send(50);
            if steps > 0 {
                old.settle().unwrap();
            }
            if steps > 1 {
                old.hold();
            }
            if steps > 2 {
                // The follower may not attach this ring's queue any more.
                let second = start(&old, 2);
                let settings: v1::TapFinal = final_port(give_final(&old)).read().unwrap();
                assert_eq!(settings.attached, [true, false]);
                drop(second);
            }
            if steps > 3 {
                receive_final(&new, give_final(&old));
            }
            // The new process fails. It ends without destructors, but drops what it makes again.
            if steps < 5 {
                drop((tasks, new));
            } else {
                std::mem::forget((tasks, new));
            }
            old.take_back().unwrap();
            assert_eq!(receive(&mut receiving, 50), sent, "{steps}");
        }
        // The follower works again.
        let mut second = start(&old, 2);
        eventually("frames arrive at both", || {
            fill(&mut second);
            fill(&mut receiving);
            network.send(64);
            second.poll();
            receiving.poll();
            !taken(&mut second).is_empty() && !taken(&mut receiving).is_empty()
        });
        old.hold();
        old.close().unwrap();
    });
}

fn refused(port: &str, pairs: u16, giving: Giving, part: Part) -> String {
    let refused: PortError = take(port, pairs, record_of_port(giving, part)).unwrap_err();
    refused.to_string()
}

#[test]
fn another_port_than_the_configured_one_is_refused() {
    in_network_namespace(|| {
        let old = open("tap:card", 2);
        let named = take("tap:other", 2, give(&old)).unwrap_err().to_string();
        assert_eq!(named, "the other process gives the TAP card, and the port is the TAP other");
        let pairs = take("tap:card", 3, give(&old)).unwrap_err().to_string();
        assert_eq!(
            pairs,
            "the other process gives 2 queues of the TAP card, and the card has 3 pairs of queues"
        );
        let other = take("loop", 2, give(&old)).unwrap_err().to_string();
        assert_eq!(other, "the other process gives the state of another port than loop");
        assert!(take("stream:/run/x", 1, give(&old)).is_err());
        assert!(take("tap:card", 2, give(&open("null", 2))).is_err());
        // Descriptors of a queue have no name.
        let new = take("tap-fd:a,b", 2, give(&old)).unwrap();
        assert!(final_port(give_final(&new)).read::<v1::TapFinal>().is_ok());
        let mut giving = Giving::default();
        let (dir, tap) =
            (fs::File::open("/").unwrap(), v1::Tap { name: "card".into(), ..Default::default() });
        let tap = v1::Tap { queues: vec![giving.fd(dir).unwrap()], ..tap };
        assert_eq!(
            refused("tap:card", 1, giving, Part::new(&tap).unwrap()),
            "the descriptor is of no TAP that exists; if the TAP was deleted, remove the device and add it again"
        );
    });
}

/// A listener of a stream port, and a card that is connected to it.
struct Stream {
    old: Arc<Net>,
    peer: UnixStream,
    name: String,
    listener: UnixListener,
    _directory: TempDir,
}

impl Stream {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("peer");
        let listener = UnixListener::bind(&path).unwrap();
        let name = format!("stream:{}", path.display());
        let old = open(&name, 1);
        old.open().unwrap();
        let (peer, _) = listener.accept().unwrap();
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        let stream = Self { old, peer, name, listener, _directory: directory };
        let mut transmit = start(&stream.old, TRANSMIT);
        stream.peer.set_nonblocking(true).unwrap();
        eventually("the card sends", || {
            transmit.send(&plain(&frame(14, 0)), 4096).unwrap();
            transmit.poll();
            transmit.take().unwrap();
            (&stream.peer).read_exact(&mut [0; 18]).is_ok()
        });
        stream.peer.set_nonblocking(false).unwrap();
        stream
    }
}

/// Polls a receive ring until it has delivered this number of frames.
fn receive_frames(rig: &mut Rig, count: usize) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    eventually("the frames arrive", || {
        fill(rig);
        rig.poll();
        frames.extend(std::iter::from_fn(|| rig.receive(12)).map(|(_, frame)| frame));
        frames.len() >= count
    });
    frames
}

/// Fills the socket until a frame is sent in part. Returns the number of frames.
fn fill_socket(transmit: &mut Rig) -> u8 {
    let mut sent = 0u8;
    while transmit.last != Next::Quiet {
        transmit.send(&plain(&frame(15_140, sent)), 4096).unwrap();
        transmit.poll();
        sent += u8::try_from(std::iter::from_fn(|| transmit.take()).count()).unwrap();
    }
    assert_eq!(transmit.interest(), Some(Interest::Readable));
    sent
}

#[test]
fn a_stream_stays_in_step() {
    for is_taken_back in [false, true] {
        let stream = Stream::new();
        let Stream { old, peer, name, .. } = &stream;
        let (mut transmit, mut receiving) = (start(old, TRANSMIT), start(old, RECEIVE));
        // A frame that waits for chains, with a header for the driver in the place of its length, and a half.
        let incoming = [framed(&frame(60, 1)), framed(&frame(9000, 2)), framed(&frame(61, 3))].concat();
        let (before, after) = incoming.split_at(4000);
        { peer }.write_all(before).unwrap();
        eventually("a frame waits for chains", || {
            receiving.poll();
            receiving.last == Next::Idle
        });
        let sent = fill_socket(&mut transmit);
        let new = take(name, 1, give(old)).unwrap();
        let mut new_rigs = [TRANSMIT, RECEIVE].map(|index| start(&new, index));
        old.hold();
        receive_final(&new, give_final(old));
        // Bytes in the socket wait.
        { peer }.write_all(after).unwrap();
        if is_taken_back {
            drop(new);
            old.take_back().unwrap();
            new_rigs = [transmit, receiving];
        } else {
            new.begin();
        }
        let [transmit, receiving] = &mut new_rigs;
        let frames = receive_frames(receiving, 3);
        assert!(frames == [frame(60, 1), frame(9000, 2), frame(61, 3)], "{is_taken_back}");
        transmit.send(&plain(&frame(77, 9)), 4096).unwrap();
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                for number in 0..sent {
                    assert!(read_frame(peer) == frame(15_140, number), "{number}");
                }
                // The old process may have one more frame in its ring, which it has not taken.
                let next = read_frame(peer);
                if next == frame(15_140, sent) { read_frame(peer) } else { next }
            });
            eventually("all is sent", || {
                transmit.poll();
                while transmit.take().is_some() {}
                reader.is_finished()
            });
            assert!(reader.join().unwrap() == frame(77, 9));
        });
        if !is_taken_back {
            // The peer still has one connection, which ends with the new process.
            stream.listener.set_nonblocking(true).unwrap();
            assert!(stream.listener.accept().is_err());
        }
    }
}

#[test]
fn a_connection_that_was_lost_is_made_again() {
    let stream = Stream::new();
    let before = stream.old.changes();
    let new = take(&stream.name, 1, give(&stream.old)).unwrap();
    let mut receiving = start(&new, RECEIVE);
    // The old process meets the end of the connection after it has given it.
    stream.peer.shutdown(std::net::Shutdown::Both).unwrap();
    let mut old_receiving = start(&stream.old, RECEIVE);
    eventually("the end is found", || {
        old_receiving.poll();
        stream.old.changes() != before
    });
    stream.old.hold();
    receive_final(&new, give_final(&stream.old));
    new.begin();
    // One connection is that of the old process, which has not ended in this test.
    let connections: Vec<_> = (0..2).map(|_| stream.listener.accept().unwrap().0).collect();
    for connection in &connections {
        (&mut { connection }).write_all(&framed(&frame(60, 5))).unwrap();
    }
    assert!(receive_frames(&mut receiving, 1)[0] == frame(60, 5));
}

#[test]
fn only_a_connection_of_a_stream_is_taken() {
    let refuse = |giving: Giving, fd| {
        let stream = v1::Stream { socket: Some(fd), errors: None };
        refused("stream:/run/x", 1, giving, Part::new(&stream).unwrap())
    };
    let no_connection = "the other process gives a descriptor that is no connection of a unix stream socket";
    let (one, _other) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let directory = TempDir::new().unwrap();
    let listener = UnixListener::bind(directory.path().join("x")).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    let file = memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
    for index in 0..4 {
        let mut giving = Giving::default();
        let fd = match index {
            0 => giving.fd(&one),
            1 => giving.fd(&listener),
            2 => giving.fd(&connected),
            _ => giving.fd(&file),
        };
        assert_eq!(refuse(giving, fd.unwrap()), no_connection, "{index}");
    }
    // Bytes of a connection that was not given, and too many.
    let final_of = |is_connected, len: usize| {
        let mut giving = Giving::default();
        let (received, unsent) = (giving.bytes(&vec![0; len]).unwrap(), Default::default());
        let port = Part::new(&v1::StreamFinal { is_connected, received, unsent }).unwrap();
        let settings = giving.bytes(&open("null", 1).save()).unwrap();
        let own = Part::new(&v1::CardFinal { settings, port, ..v1::CardFinal::default() }).unwrap();
        let record = giving.record(&v1::Final { own, ..v1::Final::default() }).unwrap();
        let (state, given): (v1::Final, _) = record.read().unwrap();
        let none = record_of_port(Giving::default(), Part::new(&v1::Stream::default()).unwrap());
        take("stream:/run/x", 1, none).unwrap().receive_final(state.own, &given)
    };
    assert!(final_of(false, 0).is_ok());
    assert_eq!(final_of(true, 0).unwrap_err().to_string(), no_connection);
    assert!(final_of(true, 1 << 20).unwrap_err().to_string().contains("too many"));
}

/// A card with a control ring, whose driver and front-end have changed all that they can.
#[test]
fn a_card_keeps_the_settings_of_its_driver() {
    let old = open("null,rate=1000", 2);
    old.open().unwrap();
    let mut control = start(&old, 4);
    for command in [
        &[4, 0, 2, 0][..],
        &[&[5, 0][..], &NetFeatures::GUEST_CSUM.bits().to_le_bytes()].concat(),
        &[0, 0, 0],
        &[0, 5, 1],
        &[1, 1, 2, 3, 4, 5, 6, 7],
        &[2, 0, 5, 0],
    ] {
        let id = control.command(command);
        control.poll();
        assert_eq!(control.answer(id), 0);
        control.take().unwrap();
    }
    old.message(DeviceMessage::SetMtu(9000)).unwrap();
    (0..20).for_each(|_| old.message(DeviceMessage::SendRarp(SOURCE)).unwrap());
    let mut transmit = start(&old, TRANSMIT);
    transmit.send(&plain(&frame(60, 1)), 4096).unwrap();
    transmit.poll();
    let new = take("null,rate=1000", 2, give(&old)).unwrap();
    // Rings are made before the pause, when the MTU is known already.
    let mut receiving = start(&new, RECEIVE);
    old.hold();
    receive_final(&new, give_final(&old));
    new.begin();
    assert_eq!(new.save(), old.save());
    let config = |card: &Net| {
        let mut config = [0; 12];
        card.read_config(0, &mut config);
        config
    };
    assert_eq!(config(&new), config(&old));
    assert_eq!(config(&new)[10..], 9000u16.to_le_bytes());
    assert_eq!(new.counters(), old.counters());
    assert_eq!((counter(&new, "commands"), counter(&new, "sent_frames")), (6, 1));
    // The pace of announcements goes on too.
    let limited = counter(&new, "announcements_limited");
    (0..20).for_each(|_| new.message(DeviceMessage::SendRarp(SOURCE)).unwrap());
    assert!(counter(&new, "announcements_limited") >= limited + 10);
    // Its filter refuses the test frames, which are broadcasts.
    fill(&mut receiving);
    eventually("frames are filtered", || {
        receiving.poll();
        counter(&new, "dropped_filtered") > 0
    });
    assert!(receiving.receive(12).is_none());
    // A state of a card with other pairs is no state of this one.
    let one = take("null", 1, give(&open("null", 1))).unwrap();
    let (state, given): (v1::Final, _) = give_final(&old).read().unwrap();
    let error = one.receive_final(state.own, &given).unwrap_err().to_string();
    assert_eq!(error, "the other process gives settings of the driver that are no settings of this card");
}

#[test]
fn a_port_without_a_state_is_made_anew() {
    for port in ["null", "loop"] {
        let old = open(port, 1);
        old.open().unwrap();
        assert_eq!((old.refuses(), old.gives_slowly()), (None, false));
        let new = take(port, 1, give(&old)).unwrap();
        let (mut transmit, mut receiving) = (start(&new, TRANSMIT), start(&new, RECEIVE));
        old.settle().unwrap();
        old.hold();
        receive_final(&new, give_final(&old));
        new.begin();
        fill(&mut receiving);
        for number in 0..10 {
            transmit.send(&plain(&frame(60, number)), 4096).unwrap();
        }
        transmit.poll();
        receiving.poll();
        let returned = std::iter::from_fn(|| receiving.receive(12)).count();
        assert_eq!(returned, if port == "loop" { 10 } else { 0 });
        old.take_back().unwrap();
    }
}

/// Both switches are in this process here, so the new one has another name.
#[test]
fn the_cards_of_a_switch_meet_in_the_new_process() {
    let old = [(); 2].map(|()| open("switch:old", 1));
    let new = [0, 1].map(|card: usize| take("switch:new", 1, give(&old[card])).unwrap());
    let rings = |cards: &[Arc<Net>; 2]| [start(&cards[0], TRANSMIT), start(&cards[1], RECEIVE)];
    let broadcast = |number| plain(&[&[0xff; 6][..], &SOURCE, &frame(50, number)].concat());
    let mut old_rings = rings(&old);
    let mut new_rings = rings(&new);
    let pass = |[transmit, receiving]: &mut [Rig; 2], number: u8| {
        fill(receiving);
        transmit.send(&broadcast(number), 4096).unwrap();
        transmit.poll();
        receiving.poll();
        std::iter::from_fn(|| receiving.receive(12))
            .map(|(_, frame)| frame[12..].to_vec())
            .collect::<Vec<_>>()
    };
    assert_eq!(pass(&mut old_rings, 1), [frame(50, 1)]);
    old.iter().for_each(|card| card.hold());
    for (new, old) in new.iter().zip(&old) {
        receive_final(new, give_final(old));
        new.begin();
    }
    assert_eq!(pass(&mut new_rings, 2), [frame(50, 2)]);
    // Nothing of it comes to the old one, which can go on.
    old.iter().for_each(|card| card.take_back().unwrap());
    assert_eq!(pass(&mut old_rings, 3), [frame(50, 3)]);
}

#[test]
fn a_capture_goes_on_at_its_end() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("card.pcapng");
    let to = CaptureTo { path: &path, device: "card", len_max: 65_550 };
    let other = open("null", 1);
    let is_locked = || other.set_capture(Some(&to)).is_err();
    let old = open("null", 1);
    old.set_capture(Some(&to)).unwrap();
    let mut transmit = start(&old, TRANSMIT);
    let send = |transmit: &mut Rig, numbers: std::ops::Range<u8>| {
        for number in numbers {
            transmit.send(&plain(&frame(60, number)), 4096).unwrap();
            transmit.poll();
            transmit.take().unwrap();
        }
    };
    send(&mut transmit, 0..10);
    // The file is not given while a thread writes it.
    let too_early = take_captured("null", 1, give(&old), Some(&to)).unwrap();
    let before = old.changes();
    old.settle().unwrap();
    assert!(old.changes() > before);
    drop(too_early);
    send(&mut transmit, 10..13);
    let whole = fs::read(&path).unwrap();
    // A card that is made and dropped changes nothing, and leaves the lock alone.
    let made = take_captured("null", 1, give(&old), Some(&to)).unwrap();
    receive_final(&made, give_final(&old));
    drop(made);
    assert!(fs::read(&path).unwrap() == whole && is_locked());
    // The old process goes on, and gives it again.
    old.take_back().unwrap();
    send(&mut transmit, 13..18);
    old.settle().unwrap();
    let new = take_captured("null", 1, give(&old), Some(&to)).unwrap();
    let mut new_transmit = start(&new, TRANSMIT);
    old.hold();
    send(&mut transmit, 18..20);
    receive_final(&new, give_final(&old));
    std::mem::forget(old);
    new.begin();
    send(&mut new_transmit, 20..30);
    assert!(is_locked());
    new.set_capture(None).unwrap();
    let contents = parse_pcapng(&fs::read(&path).unwrap());
    let captured: Vec<_> = contents.frames.iter().map(|frame| frame.bytes.clone()).collect();
    let expected: Vec<_> = (0..10).chain(13..18).chain(20..30).map(|number| frame(60, number)).collect();
    assert!(captured == expected);
    assert_eq!((contents.received, contents.dropped), (30, 5));
    assert!(!is_locked());
}

#[test]
fn lies_about_a_capture_are_refused() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("card.pcapng");
    let to = CaptureTo { path: &path, device: "card", len_max: 100 };
    let refused = |file: &std::fs::File, capture| {
        let mut giving = Giving::default();
        let file = giving.fd(file).unwrap();
        let state = v1::Capture { file, statistics_at: 0, end: 0, counts: Default::default() };
        let card = v1::Card { mtu: 1500, capture: Some(state), port: Part::default() };
        let own = Part::new(&card).unwrap();
        let record = giving.record(&v1::Device { own, ..v1::Device::default() }).unwrap();
        take_captured("null", 1, record, capture).unwrap_err().to_string()
    };
    let null = fs::File::open("/dev/null").unwrap();
    assert!(refused(&null, Some(&to)).ends_with("is no regular file"));
    assert_eq!(
        refused(&null, None),
        "the other process gives a capture of a card whose configuration has none"
    );
    let owner = open("null", 1);
    owner.set_capture(Some(&to)).unwrap();
    assert!(refused(&fs::File::open(&path).unwrap(), Some(&to)).contains("another capture"));
}

/// Returns the children of this process that are passt.
fn passts() -> Vec<i32> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids: Vec<i32> = lists
        .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
        .collect();
    let is_passt = |pid: &i32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end().starts_with("passt"))
    };
    pids.into_iter().filter(is_passt).collect()
}

#[test]
fn passt_goes_on_with_its_socket() {
    if !has_passt() {
        println!("skipped, because passt is not installed");
        return;
    }
    in_network_namespace(|| {
        add_uplink();
        let answers = |card: &Arc<Net>, [transmit, receiving]: &mut [Rig; 2]| {
            eventually("an address is offered", || {
                transmit.send(&plain(&dhcp_discover()), 4096).unwrap();
                transmit.poll();
                transmit.take().unwrap();
                fill(receiving);
                receiving.poll();
                let mut frames = std::iter::from_fn(|| receiving.receive(12));
                frames.any(|(_, frame)| frame.len() > 62 && frame[36..38] == [0, 68])
            });
            let _ = card;
        };
        let old = open("user,-4", 1);
        old.open().unwrap();
        answers(&old, &mut [TRANSMIT, RECEIVE].map(|index| start(&old, index)));
        let first = passts();
        assert_eq!(first.len(), 1);
        let new = take("user,-4", 1, give(&old)).unwrap();
        let mut rigs = [TRANSMIT, RECEIVE].map(|index| start(&new, index));
        old.hold();
        receive_final(&new, give_final(&old));
        // The old process ends without destructors.
        std::mem::forget(old);
        new.begin();
        answers(&new, &mut rigs);
        assert_eq!(passts(), first);
        // It ends, and the new process starts one of its own.
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(first[0]).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        eventually("another process is there", || {
            rigs[1].poll();
            passts().iter().any(|pid| *pid != first[0])
        });
        answers(&new, &mut rigs);
        new.close().unwrap();
        assert!(passts().iter().all(|pid| *pid == first[0]));
    });
}
