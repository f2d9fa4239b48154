//! Runs cards whose port is a stream socket, with a peer that listens, or with passt.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{CaptureTo, Device, DeviceMessage, Interest, Next, Operate};
use kickless_net::Net;
use kickless_net::offload::complete_checksum;
use kickless_net_port::StreamPort;
use kickless_spec::net::Header;
use kickless_testing::{
    LIMIT, add_uplink, dhcp_discover, eventually, has_passt, in_network_namespace, parse_pcapng,
};
use kickless_virtqueue::Chain;
use rig::packets::{explosive, segments, tcp, whole};
use rig::stream::{frame, framed, plain, read_frame};
use rig::{Guest, Kind, Rig, SIZE_MAX, card_on, counter, kinds};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use tempfile::TempDir;
use zerocopy::IntoBytes;

const SPLIT: Kind = Kind { packed: false, event_idx: true, in_order: false };
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

/// A card whose port is connected to a listener.
struct Network {
    card: Arc<Net>,
    listener: UnixListener,
    _directory: TempDir,
}

impl Network {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("peer");
        let listener = UnixListener::bind(&path).unwrap();
        let card = card_on(1, StreamPort::to(&path).unwrap());
        card.open().unwrap();
        Self { card, listener, _directory: directory }
    }

    fn accept(&self) -> UnixStream {
        let (peer, _) = self.listener.accept().unwrap();
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        peer
    }

    fn start(&self, index: u16, kind: Kind) -> Rig {
        Rig::start(&self.card, index, kind, SIZE_MAX, self.card.features())
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.card, name)
    }
}

/// Sends frames until the card has a connection.
fn wait_until_connected(transmit: &mut Rig, peer: &UnixStream) {
    peer.set_nonblocking(true).unwrap();
    eventually("the card sends", || {
        transmit.send(&plain(&frame(14, 0)), 4096).unwrap();
        transmit.poll();
        transmit.take().unwrap();
        (&*peer).read_exact(&mut [0; 18]).is_ok()
    });
    peer.set_nonblocking(false).unwrap();
}

/// Polls a receive ring until it delivers a frame.
fn receive(rig: &mut Rig) -> Vec<u8> {
    loop {
        rig.poll();
        if let Some((header, frame)) = rig.receive(12) {
            assert_eq!(Header { num_buffers: 0.into(), ..header }, Header::default());
            return frame;
        }
        assert_eq!((rig.last, rig.interest()), (Next::Quiet, Some(Interest::Readable)));
        rig.wait_readable();
    }
}

#[test]
fn frames_pass_in_both_directions() {
    let network = Network::new();
    let mut peer = network.accept();
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("card.pcapng");
    network.card.set_capture(Some(&CaptureTo { path: &path, device: "card", len_max: 14 })).unwrap();
    for kind in kinds() {
        let mut transmit = network.start(TRANSMIT, kind);
        let mut receiving = network.start(RECEIVE, kind);
        wait_until_connected(&mut transmit, &peer);
        for (number, (len, cut)) in (0..).zip([(14, 5), (60, 12), (1514, 100), (9000, 4096), (65_550, 4096)])
        {
            transmit.send(&plain(&frame(len, number)), cut).unwrap();
            assert_eq!((transmit.poll(), transmit.take().unwrap().2), (1, 0));
            while receiving.offer(&[1530], true).is_some() {}
            // The longest frame does not fit into the socket at once.
            std::thread::scope(|scope| {
                let arrived = scope.spawn(|| read_frame(&peer));
                eventually("the frame is sent", || {
                    transmit.poll();
                    transmit.interest() == Some(Interest::None)
                });
                assert!(arrived.join().unwrap() == frame(len, number), "{kind:?} {len}");
            });
            let mut writer = peer.try_clone().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || writer.write_all(&framed(&frame(len, number + 100))).unwrap());
                assert!(receive(&mut receiving) == frame(len, number + 100), "{kind:?} {len}");
            });
        }
        // A frame in single bytes, then one that is too short.
        for byte in framed(&frame(60, 7)) {
            peer.write_all(&[byte]).unwrap();
            receiving.poll();
        }
        assert!(receiving.receive(12).is_some_and(|(_, bytes)| bytes == frame(60, 7)));
        peer.write_all(&framed(&[0; 13])).unwrap();
        receiving.wait_readable();
        receiving.poll();
        for rig in [transmit, receiving] {
            let offered = rig.with_device();
            assert_eq!(rig.stop().1, offered);
        }
    }
    network.card.set_capture(None).unwrap();
    let contents = parse_pcapng(&std::fs::read(&path).unwrap());
    let of = |direction| {
        // The frames that find out whether there is a connection have 14 bytes.
        let frames = contents.frames.iter().filter(|frame| frame.direction == direction && frame.len > 14);
        frames.map(|frame| frame.len).collect::<Vec<_>>()
    };
    assert_eq!(of(1), [60, 1514, 9000, 65_550, 60].repeat(kinds().count()));
    assert_eq!(of(2), [60, 1514, 9000, 65_550].repeat(kinds().count()));
    assert_eq!(network.counter("dropped_unread"), kinds().count() as u64);
    for name in ["sent_refused", "sent_invalid", "dropped_long", "dropped_late"] {
        assert_eq!(network.counter(name), 0, "{name}");
    }
}

#[test]
fn offloads_are_undone() {
    let network = Network::new();
    let peer = network.accept();
    let mut transmit = network.start(TRANSMIT, SPLIT);
    wait_until_connected(&mut transmit, &peer);
    for (payload, size) in [(500, 0), (20_000, 1448), (1448, 1448), (40_000, 400)] {
        let (header, mut packet) = tcp(payload, size);
        transmit.send(&[header.as_bytes(), &packet].concat(), 4096).unwrap();
        std::thread::scope(|scope| {
            let expected = scope.spawn(|| {
                if size == 0 {
                    let at = kickless_net::Checksum { start: 34, offset: 16 };
                    assert!(complete_checksum(&mut packet, at));
                    assert!(read_frame(&peer) == packet);
                    return;
                }
                for segment in segments(&header, &packet) {
                    assert!(read_frame(&peer) == segment);
                }
            });
            eventually("the packet is sent", || {
                transmit.poll();
                transmit.interest() == Some(Interest::None)
            });
            expected.join().unwrap();
        });
        transmit.take().unwrap();
    }
    // A packet that is not what its header says.
    let (header, mut packet) = tcp(2000, 1448);
    packet[23] = 17;
    transmit.send(&[header.as_bytes(), &packet].concat(), 4096).unwrap();
    assert_eq!((transmit.poll(), network.counter("sent_refused")), (1, 1));
}

/// The peer gets no packet that would become too many frames. The driver pays for each frame of another.
#[test]
fn segments_are_bounded_and_paid() {
    let network = Network::new();
    let peer = network.accept();
    let mut transmit = network.start(TRANSMIT, SPLIT);
    wait_until_connected(&mut transmit, &peer);
    for (number, packet) in (1..).zip(explosive()) {
        transmit.send(&packet, 9000).unwrap();
        let polled = transmit.poll_once(10_000);
        assert!(polled.served == 1 && polled.cost <= 20, "{polled:?}");
        assert_eq!(network.counter("sent_refused"), number);
    }
    // As many frames by themselves cost as much.
    let packet = tcp(64_000, 500);
    for _ in 0..2 {
        transmit.send(&whole(&packet), 20_000).unwrap();
    }
    for _ in 0..2 {
        let polled = transmit.poll_once(100);
        assert_eq!((polled.served, polled.cost, polled.next), (1, 128, Next::More));
    }
    let waits = std::thread::spawn(move || {
        for segment in [(); 2].into_iter().flat_map(|()| segments(&packet.0, &packet.1)) {
            assert!(read_frame(&peer) == segment);
        }
    });
    eventually("the packets are sent", || {
        transmit.poll();
        transmit.interest() == Some(Interest::None)
    });
    waits.join().unwrap();
    assert_eq!(network.counter("sent_segments"), 2 * 127);
}

/// The card copies such a packet before it finds that nobody takes its segments.
#[test]
fn a_packet_without_a_peer_is_paid() {
    let directory = tempfile::tempdir().unwrap();
    let card = card_on(1, StreamPort::to(&directory.path().join("peer")).unwrap());
    let mut transmit = Rig::start(&card, TRANSMIT, SPLIT, SIZE_MAX, card.features());
    let packet = whole(&tcp(64_000, 60_000));
    (0..8).for_each(|_| _ = transmit.send(&packet, 65_000).unwrap());
    let polled = transmit.poll_once(2);
    assert!(polled.served == 1 && polled.cost >= 15, "{polled:?}");
    transmit.poll();
    assert_eq!(counter(&card, "sent_down"), 8);
}

/// A ring that stops takes what an earlier process had in flight. The peer does not read, so there is no room
/// for the segments of most packets.
#[test]
fn a_stop_makes_no_segments_without_room() {
    const PACKETS: u16 = 32;
    let network = Network::new();
    let peer = network.accept();
    let mut first = network.start(TRANSMIT, SPLIT);
    wait_until_connected(&mut first, &peer);
    first.stop();
    let before = network.counter("sent_frames");
    let mut guest = Guest::prepare(SPLIT, SIZE_MAX).with_inflight();
    let packet = whole(&tcp(64_000, 500));
    (0..PACKETS).for_each(|_| _ = guest.send(&packet, 20_000).unwrap());
    let (mut killed, mut chain) = (guest.vring(TRANSMIT, 0, None), Chain::default());
    while killed.pop(&mut chain) {}
    drop(killed);
    let vring = guest.vring(TRANSMIT, PACKETS, None);
    assert_eq!(vring.resubmissions(), PACKETS);
    Rig::start_on(&network.card, guest, vring, network.card.features()).stop();
    let (sent, dropped) = (network.counter("sent_frames") - before, network.counter("dropped_late"));
    assert_eq!(sent + dropped, u64::from(PACKETS));
    assert!(dropped >= u64::from(PACKETS) / 2, "{sent} packets wait for a peer that does not read");
}

#[test]
fn a_lost_connection_is_made_again() {
    let network = Network::new();
    let mut transmit = network.start(TRANSMIT, SPLIT);
    let mut receiving = network.start(RECEIVE, SPLIT);
    while receiving.offer(&[1530], true).is_some() {}
    let impossible = [&framed(&frame(60, 1))[..], &[0xff; 8]].concat();
    for (last_words, frames) in [(&framed(&frame(60, 1))[..63], 0), (&impossible, 1), (&[], 0)] {
        let mut peer = network.accept();
        wait_until_connected(&mut transmit, &peer);
        peer.write_all(last_words).unwrap();
        let mut delivered = 0;
        if last_words.len() < impossible.len() {
            drop(peer);
        } else {
            // The card closes a stream that it cannot follow. This end may be reset.
            eventually("the card disconnects", || {
                receiving.poll();
                delivered += std::iter::from_fn(|| receiving.receive(12)).count();
                peer.set_nonblocking(true).unwrap();
                !matches!(peer.read(&mut [0; 100]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
            });
        }
        eventually("frames are dropped", || {
            receiving.poll();
            delivered += std::iter::from_fn(|| receiving.receive(12)).count();
            let before = network.counter("sent_down");
            transmit.send(&plain(&frame(60, 1)), 100).unwrap();
            transmit.poll();
            transmit.take().unwrap();
            network.counter("sent_down") > before
        });
        assert_eq!(delivered, frames);
    }
    let mut peer = network.accept();
    peer.write_all(&framed(&frame(99, 2))).unwrap();
    assert!(receive(&mut receiving) == frame(99, 2));
    // The card ends its thread, and disconnects.
    network.card.close().unwrap();
    assert_eq!(peer.read_to_end(&mut Vec::new()).unwrap_or_default(), 0);
}

#[test]
fn a_peer_that_stops_reading_keeps_no_chain() {
    let network = Network::new();
    let peer = network.accept();
    for kind in kinds() {
        let mut transmit = network.start(TRANSMIT, kind);
        wait_until_connected(&mut transmit, &peer);
        let mut sent = 0u8;
        while transmit.last != Next::Quiet {
            transmit.send(&plain(&frame(1514, sent)), 4096).unwrap();
            sent = sent.wrapping_add(1);
            assert!(network.counter("sent_frames") < 10_000, "frames are not bounded");
            transmit.poll();
            while transmit.take().is_some() {}
        }
        assert_eq!((transmit.interest(), transmit.task.in_flight()), (Some(Interest::Readable), 0));
        // Frames behind that one stay in the ring, which stops at once.
        for number in 0..3 {
            transmit.send(&plain(&frame(100, number)), 4096).unwrap();
        }
        transmit.poll();
        assert_eq!((transmit.last, transmit.with_device()), (Next::Quiet, 3));
        let (next_avail, mut guest) = transmit.stop_task();
        assert!(guest.take().is_none());
        let vring = guest.vring(TRANSMIT, next_avail, None);
        let mut transmit = Rig::start_on(&network.card, guest, vring, network.card.features());
        transmit.poll();
        assert_eq!(transmit.last, Next::Quiet);
        // The peer reads, and gets each frame once, in order.
        let frames = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut frames = Vec::new();
                while !frames.ends_with(&[frame(100, 2)]) {
                    frames.push(read_frame(&peer));
                }
                frames
            });
            while transmit.with_device() > 0 || transmit.interest() == Some(Interest::Readable) {
                transmit.poll();
                while transmit.take().is_some() {}
                if transmit.interest() == Some(Interest::Readable) {
                    transmit.wait_readable();
                }
            }
            reader.join().unwrap()
        });
        let (long, short) = frames.split_at(frames.len() - 3);
        assert!(long.iter().zip(0u8..=255).all(|(got, number)| *got == frame(1514, number)));
        assert!(short.iter().zip(0..).all(|(got, number)| *got == frame(100, number)));
        transmit.stop();
    }
}

#[test]
fn a_ring_does_not_wait_for_a_peer_that_is_gone() {
    let network = Network::new();
    let peer = network.accept();
    let mut transmit = network.start(TRANSMIT, SPLIT);
    let mut receiving = network.start(RECEIVE, SPLIT);
    wait_until_connected(&mut transmit, &peer);
    while transmit.last != Next::Quiet {
        transmit.send(&plain(&frame(1514, 0)), 4096).unwrap();
        transmit.poll();
        while transmit.take().is_some() {}
    }
    transmit.send(&plain(&frame(60, 0)), 4096).unwrap();
    transmit.poll();
    assert_eq!((transmit.last, transmit.with_device()), (Next::Quiet, 1));
    drop(peer);
    receiving.poll();
    // The receive ring has found this out. The transmit ring is woken.
    eventually("the frame is dropped", || {
        transmit.wait_readable();
        transmit.poll();
        transmit.last == Next::Idle
    });
    transmit.take().unwrap();
}

#[test]
fn the_address_of_a_guest_is_announced() {
    let network = Network::new();
    let peer = network.accept();
    let mut transmit = network.start(TRANSMIT, SPLIT);
    wait_until_connected(&mut transmit, &peer);
    network.card.message(DeviceMessage::SendRarp([2, 3, 4, 5, 6, 7])).unwrap();
    assert_eq!(read_frame(&peer)[6..14], [2, 3, 4, 5, 6, 7, 0x80, 0x35]);
}

/// Returns the children of this process with this name.
fn children(name: &str) -> Vec<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let pids =
        lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>());
    pids.filter(|pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|comm| comm.trim_end().starts_with(name))
    })
    .collect()
}

#[test]
fn passt_answers_and_is_started_again() {
    if !has_passt() {
        println!("skipped, because passt is not installed");
        return;
    }
    in_network_namespace(|| {
        add_uplink();
        let card = card_on(1, "user,-4");
        assert!(children("passt").is_empty());
        card.open().unwrap();
        let mut transmit = Rig::start(&card, TRANSMIT, SPLIT, SIZE_MAX, card.features());
        let mut receiving = Rig::start(&card, RECEIVE, SPLIT, SIZE_MAX, card.features());
        for round in 0..2 {
            eventually("an address is offered", || {
                transmit.send(&plain(&dhcp_discover()), 4096).unwrap();
                transmit.poll();
                transmit.take().unwrap();
                while receiving.offer(&[1530], true).is_some() {}
                receiving.poll();
                std::iter::from_fn(|| receiving.receive(12)).any(|(_, frame)| {
                    frame.len() > 62 && frame[36..38] == [0, 68] && frame[58..62] == [10, 78, 0, 2]
                })
            });
            if round == 0 {
                let pids = children("passt");
                assert_eq!(pids.len(), 1);
                let pid = rustix::process::Pid::from_raw(pids[0]).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
                eventually("another process is there", || {
                    receiving.poll();
                    children("passt").iter().any(|other| *other != pids[0])
                });
            }
        }
        card.close().unwrap();
        assert!(children("passt").is_empty(), "passt outlives its card");
    });
}
