//! Runs a card on a real worker. The worker sleeps until the timer expires, and no change waits for the
//! credit of an idle receive ring.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Executor, Update};
use kickless_io::{EngineKind, EngineOptions};
use kickless_memory::{Map, View};
use kickless_net::NullPort;
use kickless_net_port::Tap;
use kickless_testing::{GuestRing, parse_test_frame};
use kickless_worker::{Options, Poll, WorkerPool};
use rig::running::Running;
use rig::{Guest, SIZE_MAX, card, card_on, counter, kinds};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

/// The limit of a wait. Even a slow machine needs less.
const TIMEOUT: Duration = Duration::from_secs(60);

fn pool(poll: Poll) -> Arc<dyn Executor> {
    let engine = EngineOptions::new(EngineKind::Threads, 8);
    let options = Options { workers: 1, engine, cpus: Vec::new(), poll };
    Arc::new(WorkerPool::start(&options).unwrap()).executor(1)
}

#[test]
fn a_sleeping_worker_delivers_frames() {
    for poll in [Poll::Never, Poll::Always] {
        let pool = pool(poll);
        for kind in kinds() {
            let port = NullPort { rate: 2000, lengths: 60..=9000 };
            let card = card(1, port);
            let mut ring = Running::start(&pool, &card, 0, kind);
            let begun = Instant::now();
            let mut number = 0;
            while number < 100 {
                assert!(begun.elapsed() < TIMEOUT, "frame {number} does not arrive");
                ring.fill();
                while let Some((_, frame)) = ring.guest.receive(12) {
                    assert_eq!(parse_test_frame(&frame), Some((0, number)));
                    number += 1;
                }
                thread::sleep(Duration::from_micros(200));
            }
            assert_eq!(counter(&card, "dropped_long"), 0);
            ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
        }
    }
}

/// The longest frame does not fit into half of the ring.
#[test]
fn a_driver_that_refills_at_half_of_its_ring_gets_frames() {
    for poll in [Poll::Never, Poll::Always] {
        let pool = pool(poll);
        for kind in kinds() {
            let card = card(1, NullPort { rate: 10_000, lengths: 60..=1514 });
            let mut ring = Running::start_on(&pool, &card, 0, Guest::prepare(kind, 64));
            ring.fill();
            let begun = Instant::now();
            let mut number = 0;
            while number < 200 {
                assert!(begun.elapsed() < TIMEOUT, "{kind:?}: frame {number} does not arrive");
                while let Some((_, frame)) = ring.guest.receive(12) {
                    assert_eq!(parse_test_frame(&frame), Some((0, number)));
                    number += 1;
                }
                if ring.guest.with_device() <= 32 {
                    ring.fill();
                }
                thread::sleep(Duration::from_micros(200));
            }
            ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
        }
    }
}

#[test]
fn an_invalidation_does_not_wait_for_credit() {
    let pool = pool(Poll::Never);
    for kind in kinds() {
        let card = card(1, NullPort { rate: 10_000, lengths: 60..=60 });
        let mut guest = Guest::prepare(kind, SIZE_MAX).behind_iommu();
        guest.translate_all();
        let mut ring = Running::start_on(&pool, &card, 0, guest);
        let begun = Instant::now();
        for round in 1..=5 {
            let target = counter(&card, "received_frames") + 10;
            while counter(&card, "received_frames") < target {
                assert!(begun.elapsed() < TIMEOUT, "{kind:?}: no frames arrive in round {round}");
                ring.fill();
                while ring.guest.receive(12).is_some() {}
                thread::sleep(Duration::from_micros(200));
            }
            let (invalidate, done) = ring.guest.invalidate_all();
            ring.update(invalidate);
            assert_eq!(
                done.recv_timeout(TIMEOUT),
                Err(RecvTimeoutError::Disconnected),
                "the invalidation waits"
            );
            ring.guest.translate_all();
            ring.update(Update::Poll);
        }
        ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
    }
}

#[test]
fn updates_and_stops_do_not_wait_for_credit() {
    let pool = pool(Poll::Never);
    for kind in kinds() {
        let card = card(1, NullPort { rate: 1, lengths: 60..=60 });
        let mut ring = Running::start(&pool, &card, 0, kind);
        ring.fill();
        // The worker sleeps now, and the task has enough credit.
        thread::sleep(Duration::from_millis(5));
        let view = |guest: &Guest| Arc::new(View::new(Map::new(guest.view.map().slots().to_vec()).unwrap()));
        let new = view(&ring.guest);
        let old = std::mem::replace(&mut ring.guest.view, new);
        ring.update(Update::Memory(ring.guest.view.clone()));
        assert_eq!(Arc::strong_count(&old), 1, "the task keeps the old memory");
        ring.update(Update::Addresses(GuestRing::addresses()));
        ring.update(Update::Poll);
        let offered = ring.guest.with_device();
        let stopped = ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
        while ring.guest.receive(12).is_some() {}
        let taken = offered - ring.guest.with_device();
        let next_avail = usize::from(stopped.next_avail & 0x7fff);
        assert_eq!((next_avail, stopped.has_work), (taken, true), "{kind:?}");
    }
}

/// Returns a port whose queue is a socket, and the other end. Each datagram is a frame with its header. The
/// socket holds some frames only, so that it refuses more for a while, as a TAP does.
fn socket_port() -> (Tap, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
    (Tap::over_sockets(vec![ours], true), peer)
}

/// Frames go to a port that is slow, and come from it in bursts. The worker sleeps in between.
#[test]
fn a_sleeping_worker_moves_frames_of_a_port() {
    const FRAMES: u32 = 3000;
    let frame = |number: u32| [&[0; 12], &number.to_le_bytes()[..], &[7; 56]].concat();
    for poll in [Poll::Never, Poll::Always] {
        let pool = pool(poll);
        for kind in kinds() {
            let (port, peer) = socket_port();
            let card = card_on(1, port);
            card.open().unwrap();
            let mut receive = Running::start(&pool, &card, 0, kind);
            let mut transmit = Running::start(&pool, &card, 1, kind);
            let begun = Instant::now();
            let (mut sent, mut at_peer, mut from_peer, mut received) = (0, 0, 0, 0);
            while at_peer < FRAMES || received < FRAMES {
                assert!(begun.elapsed() < TIMEOUT, "{kind:?}: {sent} {at_peer} {from_peer} {received}");
                while sent < FRAMES && transmit.guest.send(&frame(sent), 100).is_some() {
                    sent += 1;
                }
                transmit.kick();
                while transmit.guest.take().is_some() {}
                receive.fill();
                while let Some((_, bytes)) = receive.guest.receive(12) {
                    assert_eq!(bytes, frame(received)[12..]);
                    received += 1;
                }
                while from_peer < FRAMES && rustix::io::write(&peer, &frame(from_peer)).is_ok() {
                    from_peer += 1;
                }
                // The peer reads slowly, so that the port refuses frames.
                for _ in 0..4 {
                    let mut bytes = [0; 100];
                    let Ok(len) = rustix::io::read(&peer, &mut bytes) else { break };
                    assert_eq!(bytes[..len], frame(at_peer));
                    at_peer += 1;
                }
                if sent % 7 == 0 {
                    thread::sleep(Duration::from_micros(50));
                }
            }
            for ring in [receive, transmit] {
                ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
            }
            assert_eq!(counter(&card, "sent_frames"), u64::from(FRAMES));
        }
    }
}

#[test]
fn a_sleeping_worker_returns_frames() {
    for poll in [Poll::Never, Poll::Always] {
        let pool = pool(poll);
        for kind in kinds() {
            let card = card_on(1, "loop");
            let mut receive = Running::start(&pool, &card, 0, kind);
            let mut transmit = Running::start(&pool, &card, 1, kind);
            let begun = Instant::now();
            for number in 0..300u32 {
                receive.fill();
                let sent = [&[0; 12], &number.to_le_bytes()[..], &[7; 56]].concat();
                transmit.guest.send(&sent, 100).unwrap();
                transmit.kick();
                while transmit.guest.take().is_none() {
                    assert!(begun.elapsed() < TIMEOUT);
                    thread::yield_now();
                }
                loop {
                    assert!(begun.elapsed() < TIMEOUT, "{kind:?}: frame {number} does not return");
                    if let Some((_, bytes)) = receive.guest.receive(12) {
                        assert_eq!(bytes, sent[12..]);
                        break;
                    }
                    thread::yield_now();
                }
            }
            assert_eq!(counter(&card, "dropped_late"), 0);
        }
    }
}

/// One card is flooded, and another one on the same worker returns frames meanwhile. A third one has a driver
/// that never refills, and a port that is always full.
#[test]
fn a_flood_does_not_stop_other_cards() {
    const FRAMES: u64 = 500;
    for poll in [Poll::Never, Poll::Always] {
        let pool = pool(poll);
        let kind = kinds().next().unwrap();
        let (flooded, card) = (rig::card(1, NullPort::default()), card_on(1, "loop"));
        let (port, peer) = socket_port();
        let idle = card_on(1, port);
        idle.open().unwrap();
        let [idle_receive, mut idle_transmit] = [0, 1].map(|index| Running::start(&pool, &idle, index, kind));
        let mut flood = Running::start(&pool, &flooded, 1, kind);
        let mut receive = Running::start(&pool, &card, 0, kind);
        let mut transmit = Running::start(&pool, &card, 1, kind);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    while flood.guest.send(&[0; 1526], 2000).is_some() {}
                    flood.kick();
                    while flood.guest.take().is_some() {}
                    while idle_transmit.guest.send(&[0; 72], 100).is_some() {}
                    idle_transmit.kick();
                    let _ = rustix::io::write(&peer, &[0; 72]);
                }
            });
            let begun = Instant::now();
            for _ in 0..FRAMES {
                receive.fill();
                transmit.guest.send(&[0; 72], 100).unwrap();
                transmit.kick();
                while receive.guest.receive(12).is_none() {
                    assert!(begun.elapsed() < TIMEOUT, "no frame returns beside a flood");
                    thread::yield_now();
                }
                while transmit.guest.take().is_some() {}
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(counter(&card, "received_frames"), FRAMES);
        assert!(counter(&flooded, "sent_frames") > 0);
        for ring in [idle_receive, idle_transmit, flood, receive, transmit] {
            ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
        }
    }
}

#[test]
fn a_sleeping_worker_takes_sent_frames() {
    let pool = pool(Poll::Never);
    for kind in kinds() {
        let card = card(1, NullPort::default());
        let mut ring = Running::start(&pool, &card, 1, kind);
        let begun = Instant::now();
        for sent in 1..=200 {
            ring.guest.send(&[0; 72], 100).unwrap();
            ring.kick();
            while counter(&card, "sent_frames") < sent || ring.guest.take().is_none() {
                assert!(begun.elapsed() < TIMEOUT);
                thread::yield_now();
            }
        }
        ring.update(Update::Enable(false));
        ring.guest.send(&[0; 72], 100).unwrap();
        ring.kick();
        while ring.guest.take().is_none() {
            assert!(begun.elapsed() < TIMEOUT);
        }
        assert_eq!((counter(&card, "sent_frames"), counter(&card, "sent_disabled")), (200, 1));
        ring.handle.stop().recv_timeout(TIMEOUT).expect("a stop does not complete");
    }
}
