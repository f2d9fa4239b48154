//! Our driver of network cards with a back-end that breaks the rules: each fault is an error that names
//! it, or a frame that is dropped and counted.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::time::Duration;

use kickless_driver::{Card, CardOptions, Choice, Error, Interest, Outgoing, QueuePair, UsedError, Waiting};
use kickless_spec::net;
use kickless_testing::parse_test_frame;
use kickless_tests::hostile_backend::faults::{RingFault, Rules};
use kickless_tests::hostile_backend::{HostileBackend, LIMIT, returns_in_time};

/// The ring format and order.
#[derive(Clone, Copy, Debug)]
struct Shape {
    packed: bool,
    in_order: bool,
}

const SPLIT: Shape = Shape { packed: false, in_order: false };
const PACKED: Shape = Shape { packed: true, in_order: false };
const ALL: [Shape; 4] =
    [SPLIT, PACKED, Shape { in_order: true, ..SPLIT }, Shape { in_order: true, ..PACKED }];

fn options(backend: &HostileBackend, shape: Shape) -> CardOptions {
    let choice = |on| if on { Choice::On } else { Choice::Off };
    CardOptions {
        queue_size: 8,
        packed: choice(shape.packed),
        in_order: choice(shape.in_order),
        reconnect_limit: Duration::ZERO,
        reply_timeout: Duration::from_secs(2),
        ..CardOptions::new(backend.socket())
    }
}

/// Connects a card whose back-end makes a fault in its ninth chain. That is the first one after the eight
/// that the receive ring holds at first, so all earlier ones are shown before it.
fn card_with_fault(shape: Shape, fault: RingFault) -> (HostileBackend, Card, QueuePair) {
    let rules = Rules { ring: Some((8, fault)), ..Rules::card(1) };
    let backend = HostileBackend::start(rules).unwrap();
    let card = Card::connect(options(&backend, shape)).unwrap();
    let pair = card.pair(0).unwrap();
    (backend, card, pair)
}

/// Receives until the card dies. Returns the reason.
fn death(card: &Card, pair: &mut QueuePair) -> String {
    let error = loop {
        if let Err(error) = pair.wait(Interest::Receive, Some(LIMIT)) {
            break error;
        }
        let received = pair.receive(4, |frame| {
            parse_test_frame(&frame.to_vec()).unwrap();
        });
        if let Err(error) = received {
            break error;
        }
    };
    assert!(matches!(error, Error::Dead(_)), "{error}");
    assert!(pair.receive(1, |_| {}).is_err() && pair.send(&[]).is_err());
    card.failure().unwrap().to_string()
}

#[test]
fn impossible_ids_lengths_and_indices_are_found() {
    returns_in_time(|| {
        for shape in ALL {
            for fault in
                [RingFault::IdOutOfRange, RingFault::TooLong, RingFault::IndexJump, RingFault::IndexBack]
            {
                if shape.packed && matches!(fault, RingFault::IndexJump | RingFault::IndexBack) {
                    continue;
                }
                let (backend, card, mut pair) = card_with_fault(shape, fault);
                let reason = death(&card, &mut pair);
                let source = match &*card.failure().unwrap() {
                    Error::InvalidUsed { queue: 0, source } => *source,
                    _ => panic!("{shape:?} {fault:?}: {reason}"),
                };
                match fault {
                    RingFault::IdOutOfRange => assert_eq!(source, UsedError::Id { id: 8 }),
                    RingFault::TooLong => {
                        assert!(matches!(source, UsedError::Length { len: 2049, room: 2048, .. }));
                    }
                    _ => assert!(matches!(source, UsedError::Index { size: 8, .. })),
                }
                drop((pair, card));
                assert_eq!(backend.faults(), [""; 0]);
            }
        }
    });
}

/// All ids of a receive ring are in flight, so this needs the transmit ring.
#[test]
fn an_id_that_is_not_in_flight_is_found() {
    returns_in_time(|| {
        for shape in ALL {
            for fault in [RingFault::IdNotInFlight, RingFault::Twice] {
                let backend = HostileBackend::start(Rules::card(1)).unwrap();
                let card = Card::connect(options(&backend, shape)).unwrap();
                let mut pair = card.pair(0).unwrap();
                // The back-end fills the eight receive buffers, and waits for others.
                while backend.requests() < 8 {
                    std::thread::yield_now();
                }
                backend.rules().ring = Some((8, fault));
                pair.send(&[Outgoing::from(&[7; 60][..])]).unwrap();
                while pair.flush(Some(LIMIT)).is_ok() {}
                let failure = card.failure().unwrap();
                assert!(
                    matches!(&*failure, Error::InvalidUsed { queue: 1, source: UsedError::Id { id: 0..8 } }),
                    "{shape:?} {fault:?}: {failure}"
                );
                drop((pair, card));
                assert_eq!(backend.faults(), [""; 0]);
            }
        }
    });
}

#[test]
fn impossible_numbers_of_buffers_and_lengths_of_headers_are_found() {
    returns_in_time(|| {
        for shape in ALL {
            for (fault, text) in [
                (RingFault::Buffers(0), "a frame in 0 buffers"),
                (RingFault::Buffers(9), "a frame in 9 buffers"),
                (RingFault::Buffers(u16::MAX), "a frame in 65535 buffers"),
                (RingFault::NoHeader, "the back-end wrote 11 bytes into buffer"),
            ] {
                let (_backend, card, mut pair) = card_with_fault(shape, fault);
                let reason = death(&card, &mut pair);
                assert!(reason.contains(text), "{shape:?} {fault:?}: {reason}");
            }
        }
    });
}

#[test]
fn a_header_that_makes_no_sense_costs_one_frame() {
    returns_in_time(|| {
        for shape in ALL {
            let (_backend, card, mut pair) = card_with_fault(shape, RingFault::Header);
            let mut got = 0;
            while got < 30 {
                assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap());
                got += pair.receive(4, |_| {}).unwrap();
            }
            assert_eq!(pair.counters().received_invalid, 1, "{shape:?}");
            assert!(card.failure().is_none());
        }
    });
}

#[test]
fn a_ring_error_and_a_closed_connection_are_reported() {
    returns_in_time(|| {
        let (_backend, card, mut pair) = card_with_fault(SPLIT, RingFault::RingError);
        death(&card, &mut pair);
        assert!(matches!(&*card.failure().unwrap(), Error::RingError));
        let (_backend, card, mut pair) = card_with_fault(SPLIT, RingFault::Closed);
        death(&card, &mut pair);
        assert!(matches!(&*card.failure().unwrap(), Error::Closed));
    });
}

#[test]
fn commands_are_answered_refused_or_time_out() {
    returns_in_time(|| {
        // With one queue pair, MQ is not negotiated.
        let backend = HostileBackend::start(Rules::card(1)).unwrap();
        let card = Card::connect(options(&backend, SPLIT)).unwrap();
        assert!(matches!(card.set_pairs(1), Err(Error::NotOffered { .. })));
        let connect = |shape| {
            let backend = HostileBackend::start(Rules::card(2)).unwrap();
            let card = Card::connect(CardOptions { pairs: 2, ..options(&backend, shape) }).unwrap();
            (backend, card)
        };
        let next_fails = |backend: &HostileBackend, fault| {
            let at = backend.requests();
            backend.rules().ring = Some((at, fault));
        };
        let (backend, card) = connect(SPLIT);
        next_fails(&backend, RingFault::Status(net::ERR));
        assert!(matches!(card.set_pairs(1), Err(Error::CommandRefused)));
        card.set_pairs(1).unwrap();
        next_fails(&backend, RingFault::Silence);
        assert!(matches!(card.set_pairs(2), Err(Error::CommandTimeout { .. })));
        assert!(card.failure().is_none());
        let (backend, card) = connect(PACKED);
        next_fails(&backend, RingFault::Status(7));
        assert!(card.set_pairs(1).is_err());
        assert!(matches!(&*card.failure().unwrap(), Error::CommandAnswer { answer: 7 }));
    });
}

#[test]
fn the_number_of_pairs_is_told_again_after_a_reconnection() {
    returns_in_time(|| {
        let backend = HostileBackend::start(Rules::card(2)).unwrap();
        let card = CardOptions { pairs: 2, reconnect_limit: LIMIT, ..options(&backend, SPLIT) };
        let card = Card::connect(card).unwrap();
        let mut pair = card.pair(0).unwrap();
        backend.drop_connection();
        while backend.connections() < 2 {
            let _ = pair.wait(Interest::Receive, Some(Duration::from_millis(1))).unwrap();
            pair.receive(8, |_| {}).unwrap();
        }
        assert_eq!(card.mac().unwrap(), Some([2, 0, 0, 0, 0, 7]));
        // The control queue works again after the reconnection.
        while let Err(error) = card.set_pairs(2) {
            assert!(matches!(error, Error::Closed), "{error}");
        }
        let mut got = 0;
        while got < 30 {
            assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap());
            got += pair.receive(4, |_| {}).unwrap();
        }
        assert_eq!(backend.faults(), [""; 0]);
    });
}

#[test]
fn impossible_configurations_are_refused() {
    returns_in_time(|| {
        for pairs in [0, 0x8001, u16::MAX] {
            let mut rules = Rules::card(2);
            if let Some(config) = &mut rules.card {
                config.max_virtqueue_pairs = pairs.into();
            }
            let backend = HostileBackend::start(rules).unwrap();
            let options = CardOptions { pairs: 2, ..options(&backend, SPLIT) };
            let error = Card::connect(options).unwrap_err();
            assert!(
                matches!(error, Error::ConfigField { field: "max_virtqueue_pairs", value } if value == u64::from(pairs)),
                "{error}"
            );
        }
    });
}

/// Uses one card from connecting to closing, with a back-end that answers at random. Returns whether it
/// connected.
fn life(seed: u64) -> bool {
    let rules = Rules { chaos: Some(seed), ..Rules::card(2) };
    let backend = HostileBackend::start(rules).unwrap();
    let choice = |bit: u64| if seed >> bit & 1 == 0 { Choice::Auto } else { Choice::Off };
    let options = CardOptions {
        pairs: 1 + (seed % 2) as u16,
        queue_size: 4 << (seed % 4),
        packed: choice(0),
        in_order: choice(1),
        event_idx: choice(2),
        mergeable: choice(3),
        receive_offloads: choice(4),
        waiting: if seed.is_multiple_of(5) {
            Waiting::Spin(Duration::from_millis(1))
        } else {
            Waiting::Sleep
        },
        reconnect_limit: Duration::from_millis(if seed.is_multiple_of(3) { 0 } else { 150 }),
        reply_timeout: Duration::from_millis(500),
        ..CardOptions::new(backend.socket())
    };
    let Ok(card) = Card::connect(options) else { return false };
    std::thread::scope(|scope| {
        for index in 0..card.pairs() {
            let mut pair = card.pair(index).unwrap();
            scope.spawn(move || {
                let bytes = [7; 300];
                for round in 0..200 {
                    let _ = pair.send(&[Outgoing::from(&bytes[..]); 3]);
                    let _ = match round % 3 {
                        0 => pair.forward(8, |frame| frame.len() > 20),
                        _ => pair.receive(8, |frame| drop(frame.to_vec())),
                    };
                    let _ = pair.wait(Interest::Receive, Some(Duration::from_micros(500)));
                }
            });
        }
        for pairs in 0..20 {
            let _ = card.set_pairs(pairs);
            let _ = card.mtu();
        }
    });
    true
}

/// Runs consecutive seeds. `KICKLESS_CHAOS_SEED` and `KICKLESS_CHAOS_RUNS` select others.
#[test]
fn random_answers_neither_hang_nor_panic() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    let (seed, runs) = (number("KICKLESS_CHAOS_SEED", 1), number("KICKLESS_CHAOS_RUNS", 60));
    let mut connected = 0;
    for seed in seed..seed + runs {
        println!("seed {seed}");
        connected += u64::from(returns_in_time(move || life(seed)));
    }
    assert!(runs < 10 || connected > runs / 2, "only {connected} of {runs} got past the handshake");
}
