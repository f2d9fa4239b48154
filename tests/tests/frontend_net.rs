//! A network card and a front-end without a guest: messages that only cards know, rings that are drained, and
//! stops, resets and new memory while a receive ring is idle and full of credit.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use std::time::Instant;

use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_tests::daemon::{CardConfig, Daemon, DaemonConfig, card_counter};
use kickless_tests::driver::Queue;
use kickless_tests::driver::memory::Ram;
use kickless_tests::frontend::card::{Card, CardShape};
use kickless_tests::frontend::machine::{Machine, RAM_BASE, Shape};
use kickless_tests::frontend::{Answer, Frontend, LIMIT};
use kickless_vhost_user::{FrontendMessage as Message, VringState};
use kickless_virtqueue::packed::RingPosition;
use rustix::process::Signal;

const PAIR: CardShape = CardShape { pairs: 1, packed: false };
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// The warning about a packed ring that was served before, without an in-flight buffer.
const GOES_ON: &str = "a packed ring continues from the front-end's index, but it was served before";

fn idle() -> Daemon {
    Daemon::start_card(&CardConfig::new("null")).unwrap()
}

fn flowing() -> Daemon {
    Daemon::start_card(&CardConfig::new("null,rate=500")).unwrap()
}

/// Ends a daemon. Returns its log, which must have no warning and no error but lines with `expected` words.
fn end(daemon: Daemon, expected: &str) -> Vec<String> {
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    // A busy machine can make a wait long.
    let is_trouble = |line: &&String| {
        (line.contains(" WARN ") && !line.contains("still waiting")) || line.contains(" ERROR ")
    };
    let trouble = log.iter().filter(is_trouble);
    let trouble: Vec<_> = trouble.filter(|line| expected.is_empty() || !line.contains(expected)).collect();
    assert!(trouble.is_empty(), "{trouble:#?}");
    log
}

/// Ends a daemon. Returns its only warning, which is of a packed ring that goes on.
fn only_warning(daemon: Daemon) -> String {
    let mut log = end(daemon, GOES_ON);
    log.retain(|line| line.contains(GOES_ON));
    assert_eq!(log.len(), 1, "{log:#?}");
    log.remove(0)
}

fn says(daemon: &Daemon, from: usize, words: &[&str]) {
    let has_all = |line: &str| words.iter().all(|word| line.contains(word)).then_some(());
    daemon.log().wait_from(from, &format!("saying {words:?}"), LIMIT, has_all).unwrap();
}

/// Starts a card and waits until it has all its receive buffers as credit.
fn full_of_credit(daemon: &Daemon, shape: CardShape) -> Card {
    let mut card = Card::prepare(daemon.socket(), shape).unwrap();
    card.fill(RECEIVE).unwrap();
    for ring in [RECEIVE, TRANSMIT] {
        card.resume(ring).unwrap();
    }
    // The worker looks at both rings in each pass, so a sent frame shows that it has polled the receive ring.
    for _ in 0..3 {
        card.send(TRANSMIT).unwrap();
    }
    card
}

#[test]
fn rings_are_counted_and_limited() {
    for (pairs, count) in [(1, 3), (2, 5), (64, 129), (127, 255)] {
        let option = format!("--num-queue-pairs={pairs}");
        let daemon = Daemon::start_card(&CardConfig::new("null").with(&[&option])).unwrap();
        let mut card = Card::prepare(daemon.socket(), PAIR).unwrap();
        assert_eq!(card.frontend.number(&Message::GetQueueNum).unwrap(), count, "{pairs} pairs");
        let mut says_size =
            |index: u32| card.frontend.attempt(&Message::SetVringNum(VringState { index, num: 64 })).unwrap();
        let count = count as u32;
        assert_eq!([says_size(0), says_size(count - 1)], [Answer::Done; 2]);
        for index in [count, count + 1, u32::from(u16::MAX), 1 << 16, u32::MAX] {
            let seen = daemon.log().len();
            assert_eq!(says_size(index), Answer::Refused, "ring {index}");
            let words = [&format!("ring index {index}, "), &format!("{count} rings"), "QEMU: queues="];
            says(&daemon, seen, &words.map(|word| word as &str));
        }
        drop(card);
        end(daemon, "SET_VRING_NUM");
    }
}

/// With two pairs, the third pair of a front-end that wants more begins at the number of the control ring.
#[test]
fn a_pair_too_many_is_refused_with_advice() {
    let daemon = Daemon::start_card(&CardConfig::new("null").with(&["--num-queue-pairs=2"])).unwrap();
    let mut card = Card::prepare(daemon.socket(), CardShape { pairs: 3, packed: false }).unwrap();
    for ring in 0..4 {
        card.resume(ring).unwrap();
    }
    assert!(card.resume(4).is_err());
    says(&daemon, 0, &[" WARN ", "ring 4 cannot start", "QEMU: queues="]);
    assert!(card.resume(5).is_err());
    says(&daemon, 0, &[" WARN ", "ring index 5", "QEMU: queues="]);
    // The others go on.
    card.send(1).unwrap();
    card.send(3).unwrap();
    drop(card);
    end(daemon, "message refused");
}

#[test]
fn the_advice_for_a_disk_is_that_of_disks() {
    let config = DaemonConfig { queues: 2, ..DaemonConfig::new("null:1M") };
    let daemon = Daemon::start(&config).unwrap();
    let mut frontend = Frontend::connect(daemon.socket()).unwrap();
    frontend.negotiate(Features::VERSION_1).unwrap();
    let size = Message::SetVringNum(VringState { index: 2, num: 64 });
    assert_eq!(frontend.attempt(&size).unwrap(), Answer::Refused);
    says(&daemon, 0, &["ring index 2, but there are 2 rings", "QEMU: num-queues="]);
}

#[test]
fn the_front_end_of_a_disk_is_refused_with_advice() {
    let daemon = idle();
    let mut frontend = Frontend::connect(daemon.socket()).unwrap();
    frontend.negotiate(Features::VERSION_1).unwrap();
    assert!(frontend.config().is_err());
    says(
        &daemon,
        0,
        &["message refused", "than a network card has: it is the front-end of another kind of device"],
    );
    end(daemon, "message refused");
}

#[test]
fn the_front_end_of_a_card_gets_a_line_from_a_disk() {
    let config = DaemonConfig { queues: 2, ..DaemonConfig::new("null:1M") };
    let daemon = Daemon::start(&config).unwrap();
    let mut card = Card::prepare(daemon.socket(), PAIR).unwrap();
    card.fill(RECEIVE).unwrap();
    card.resume(RECEIVE).unwrap();
    says(&daemon, 0, &[" WARN ", "a buffer without a request, as network cards do"]);
    drop(card);
    end(daemon, "a buffer without a request");
}

/// Kicks a ring until the daemon has counted a kick, with nothing in the ring.
fn kick_in_vain(daemon: &Daemon, queue: &mut Queue) {
    let deadline = Instant::now() + LIMIT;
    let counters = |line: &str| line.contains(" counters queue").then(|| line.contains(" kicks="));
    loop {
        assert!(Instant::now() < deadline, "no kick is counted");
        let seen = daemon.log().len();
        queue.kick();
        daemon.signal(Signal::USR1).unwrap();
        // Only queues that were used have a line with kicks.
        if daemon.log().wait_from(seen, "counters", LIMIT, counters).unwrap() {
            break;
        }
    }
}

/// A guest whose memory is not shared kicks, and its rings stay empty.
#[test]
fn the_advice_about_private_memory_names_the_device() {
    const ADVICE: &str = "no request was in its rings; if it waits for its";
    let daemon = idle();
    let mut card = Card::start(daemon.socket(), PAIR).unwrap();
    kick_in_vain(&daemon, &mut card.rings[TRANSMIT].queue);
    drop(card);
    says(&daemon, 0, &[" WARN ", ADVICE, "its network card, start"]);
    end(daemon, ADVICE);

    let daemon = Daemon::start(&DaemonConfig::new("null:1M")).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    kick_in_vain(&daemon, &mut machine.queues[0]);
    drop(machine);
    says(&daemon, 0, &[" WARN ", ADVICE, "its disk, start"]);
    end(daemon, ADVICE);
}

/// The advice is not for a guest whose writes arrive. QEMU kicks every ring that it starts.
#[test]
fn a_guest_that_shares_its_memory_is_not_advised() {
    let daemon = Daemon::start(&DaemonConfig::new("null:1M")).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    kick_in_vain(&daemon, &mut machine.queues[0]);
    let at = machine.ram.take(8, 8).unwrap();
    machine.ram.map().write(at, b"firmware").unwrap();
    drop(machine);
    end(daemon, "");
}

/// The advice is not for a guest that has receive buffers in its ring and has not sent anything yet.
#[test]
fn a_guest_that_has_nothing_to_send_is_not_advised() {
    let daemon = idle();
    let mut card = Card::start(daemon.socket(), PAIR).unwrap();
    card.fill(RECEIVE).unwrap();
    kick_in_vain(&daemon, &mut card.rings[RECEIVE].queue);
    drop(card);
    end(daemon, "");
}

#[test]
fn an_mtu_is_one_front_ends() {
    let daemon = Daemon::start_card(&CardConfig::new("null").with(&["--mtu=1400"])).unwrap();
    for _ in 0..2 {
        let mut card = Card::start(daemon.socket(), PAIR).unwrap();
        assert_eq!(card.mtu().unwrap(), 1400, "what an earlier front-end said is over");
        for mtu in [68, 1500, 65_535] {
            card.frontend.order(&Message::NetSetMtu(mtu)).unwrap();
            assert_eq!(u64::from(card.mtu().unwrap()), mtu);
        }
        card.frontend.order(&Message::NetSetMtu(9000)).unwrap();
        for mtu in [0, 67, 65_536, 65_536 + 1500, u64::MAX] {
            let seen = daemon.log().len();
            assert_eq!(card.frontend.attempt(&Message::NetSetMtu(mtu)).unwrap(), Answer::Refused, "{mtu}");
            assert_eq!(card.mtu().unwrap(), 9000, "after {mtu}");
            says(&daemon, seen, &["NET_SET_MTU", &format!("an MTU of {mtu} bytes"), "68", "65535"]);
        }
        card.send(TRANSMIT).unwrap();
    }
    end(daemon, "NET_SET_MTU");
}

/// A transmit ring that is started and disabled is drained (vhost-user specification, "Ring states").
#[test]
fn frames_in_a_disabled_ring_are_discarded() {
    const ROUNDS: u64 = 100;
    for shape in CardShape::BOTH {
        let daemon = idle();
        let mut card = Card::prepare(daemon.socket(), shape).unwrap();
        card.frontend.start_disabled(&card.rings[TRANSMIT].queue).unwrap();
        card.send(TRANSMIT).unwrap();
        for _ in 0..ROUNDS {
            // Each is in force when it is answered.
            card.frontend.enable(&card.rings[TRANSMIT].queue, true).unwrap();
            card.send(TRANSMIT).unwrap();
            card.frontend.enable(&card.rings[TRANSMIT].queue, false).unwrap();
            card.send(TRANSMIT).unwrap();
        }
        card.stop(TRANSMIT).unwrap();
        drop(card);
        let log = end(daemon, "");
        let counted = ["sent_disabled", "sent_frames", "sent_invalid"].map(|name| card_counter(&log, name));
        assert_eq!(counted.map(Result::unwrap), [ROUNDS + 1, ROUNDS, 0], "{shape:?}");
    }
}

/// Nothing is delivered once ENABLE(0) is answered.
#[test]
fn a_disabled_receive_ring_is_left_alone() {
    for shape in CardShape::BOTH {
        let daemon = Daemon::start_card(&CardConfig::new("null,rate=100000")).unwrap();
        let mut card = full_of_credit(&daemon, shape);
        for _ in 0..20 {
            // Each start of a ring begins with frame 0.
            assert_eq!(card.receive(RECEIVE).unwrap(), 0);
            card.fill(RECEIVE).unwrap();
            card.frontend.enable(&card.rings[RECEIVE].queue, false).unwrap();
            while card.rings[RECEIVE].take(&card.ram).unwrap().is_some() {}
            card.fill(RECEIVE).unwrap();
            for _ in 0..3 {
                card.send(TRANSMIT).unwrap();
            }
            assert_eq!(card.rings[RECEIVE].queue.used_ready(), 0, "{shape:?}");
            card.frontend.enable(&card.rings[RECEIVE].queue, true).unwrap();
        }
        drop(card);
        end(daemon, "");
    }
}

#[test]
fn a_stop_returns_credit() {
    for shape in CardShape::BOTH {
        for (daemon, frames) in [(idle(), false), (flowing(), true)] {
            let mut card = full_of_credit(&daemon, shape);
            let mut next = 0;
            for _ in 0..3 {
                if frames {
                    for _ in 0..5 {
                        // Each start of a ring begins with frame 0.
                        assert_eq!(card.receive(RECEIVE).unwrap(), next);
                        next += 1;
                    }
                }
                card.stop(RECEIVE).unwrap();
                card.stop(TRANSMIT).unwrap();
                next = 0;
                card.fill(RECEIVE).unwrap();
                card.resume(RECEIVE).unwrap();
                card.resume(TRANSMIT).unwrap();
                card.send(TRANSMIT).unwrap();
            }
            drop(card);
            let log = end(daemon, "");
            assert_eq!(card_counter(&log, "received_frames").unwrap() > 0, frames);
            assert_eq!(card_counter(&log, "sent_frames").unwrap(), 6);
        }
    }
}

#[test]
fn new_memory_does_not_wait_for_credit() {
    for shape in CardShape::BOTH {
        let daemon = idle();
        let mut card = full_of_credit(&daemon, shape);
        let one = daemon.holdings().unwrap().1;
        for round in 1..4 {
            let more = Ram::new(RAM_BASE + (round << 32), 1 << 20).unwrap();
            card.frontend.share(&[&card.ram, &more]).unwrap();
            assert_eq!(daemon.holdings().unwrap().1, one + 1);
            // A pass with the new memory: the credit is popped again.
            for _ in 0..3 {
                card.send(TRANSMIT).unwrap();
            }
            // The reply to this message comes after the removed memory is unmapped.
            card.frontend.share(&[&card.ram]).unwrap();
            assert_eq!(daemon.holdings().unwrap().1, one, "{shape:?}: credit keeps memory");
            card.send(TRANSMIT).unwrap();
        }
        card.stop(RECEIVE).unwrap();
        drop(card);
        end(daemon, "");
    }
}

#[test]
fn frames_go_on_in_new_memory() {
    for shape in CardShape::BOTH {
        let daemon = flowing();
        let mut card = full_of_credit(&daemon, shape);
        let mut next = 0;
        for round in 1..5 {
            let more = Ram::new(RAM_BASE + (round << 32), 1 << 20).unwrap();
            card.frontend.share(&[&card.ram, &more]).unwrap();
            for _ in 0..10 {
                assert_eq!(card.receive(RECEIVE).unwrap(), next);
                next += 1;
                card.fill(RECEIVE).unwrap();
            }
        }
        drop(card);
        end(daemon, "");
    }
}

#[test]
fn a_reset_returns_credit() {
    for shape in CardShape::BOTH {
        for (daemon, frames) in [(idle(), false), (flowing(), true)] {
            let mut card = full_of_credit(&daemon, shape);
            for _ in 0..3 {
                card.frontend.order(&Message::ResetDevice).unwrap();
                let mut old = card.replace(RECEIVE).unwrap();
                while old.take(&card.ram).unwrap().is_some() {}
                card.replace(TRANSMIT).unwrap();
                card.fill(RECEIVE).unwrap();
                card.resume(RECEIVE).unwrap();
                card.resume(TRANSMIT).unwrap();
                card.send(TRANSMIT).unwrap();
                if frames {
                    assert_eq!(card.receive(RECEIVE).unwrap(), 0);
                }
                assert_eq!(old.queue.used_ready(), 0, "the ring from before the reset moves");
            }
            card.stop(RECEIVE).unwrap();
            card.stop(TRANSMIT).unwrap();
            drop(card);
            let log = end(daemon, "");
            assert_eq!(card_counter(&log, "sent_frames").unwrap(), 6);
        }
    }
}

/// Without an in-flight buffer, the card cannot know whether the front-end's index is right.
#[test]
fn a_packed_ring_that_goes_on_is_a_warning() {
    let daemon = idle();
    let mut card = Card::prepare(daemon.socket(), CardShape { pairs: 1, packed: true }).unwrap();
    card.rings[TRANSMIT].queue.begin_at_position(RingPosition { index: 5, wrap: false }).unwrap();
    card.resume(RECEIVE).unwrap();
    card.resume(TRANSMIT).unwrap();
    card.send(TRANSMIT).unwrap();
    drop(card);
    // A split ring has its index in memory.
    let mut card = Card::prepare(daemon.socket(), PAIR).unwrap();
    card.rings[TRANSMIT].queue.begin_at(5).unwrap();
    card.resume(TRANSMIT).unwrap();
    card.send(TRANSMIT).unwrap();
    drop(card);
    let warning = only_warning(daemon);
    assert!(warning.contains(" WARN ") && warning.contains("queue=1"), "{warning}");
}

/// QEMU does not know how far a killed back-end came in a packed ring, and names the first position. A
/// receive ring is full, so it has no used descriptors.
#[test]
fn a_packed_ring_whose_position_is_lost_is_a_warning() {
    let daemon = idle();
    let mut card = Card::prepare(daemon.socket(), CardShape { pairs: 1, packed: true }).unwrap();
    let queue = &mut card.rings[RECEIVE].queue;
    let begins = queue.base();
    queue.begin_at_position(RingPosition { index: 5, wrap: true }).unwrap();
    queue.set_base(begins);
    card.fill(RECEIVE).unwrap();
    card.resume(RECEIVE).unwrap();
    card.resume(TRANSMIT).unwrap();
    card.send(TRANSMIT).unwrap();
    drop(card);
    let warning = only_warning(daemon);
    assert!(warning.contains(" WARN ") && warning.contains("queue=0"), "{warning}");
}

/// QEMU stops a ring that the driver resets (virtio 1.3, section 2.6.1), and starts it at its beginning when
/// the driver enables it again, with another size. The other ring runs meanwhile.
#[test]
fn a_ring_that_is_reset_leaves_the_other_one_alone() {
    for shape in CardShape::BOTH {
        let daemon =
            Daemon::start_card(&CardConfig::new("null,rate=500").with(&["--ring-reset=on"])).unwrap();
        let mut card = full_of_credit(&daemon, shape);
        assert!(card.frontend.features().contains(Features::RING_RESET));
        let mut sent = 3;
        for size in [64, 16, 32] {
            // The receive ring is reset while it is full of credit, and frames are sent.
            card.receive(RECEIVE).unwrap();
            card.stop(RECEIVE).unwrap();
            let old = card.resize(RECEIVE, size).unwrap();
            card.send(TRANSMIT).unwrap();
            card.fill(RECEIVE).unwrap();
            card.resume(RECEIVE).unwrap();
            assert_eq!(card.receive(RECEIVE).unwrap(), 0, "each start begins with frame 0");
            assert_eq!(old.queue.used_ready(), 0, "the ring from before the reset moves");
            // The transmit ring is reset while frames come.
            card.stop(TRANSMIT).unwrap();
            card.resize(TRANSMIT, size).unwrap();
            card.fill(RECEIVE).unwrap();
            assert_eq!(card.receive(RECEIVE).unwrap(), 1);
            card.resume(TRANSMIT).unwrap();
            for _ in 0..2 * size {
                card.send(TRANSMIT).unwrap();
            }
            sent += 1 + 2 * u64::from(size);
        }
        card.stop(RECEIVE).unwrap();
        card.stop(TRANSMIT).unwrap();
        drop(card);
        let log = end(daemon, "");
        assert_eq!(card_counter(&log, "sent_frames").unwrap(), sent);
    }
}

/// The daemon is killed while frames pass in both directions. The front-end has no in-flight buffer, and each
/// head comes back once: a head that is used again is one that the device does not have.
#[test]
fn no_head_is_used_twice_over_kills() {
    let config = CardConfig::new("null,rate=200000");
    let mut daemon = Daemon::start_card(&config).unwrap();
    let mut card = Card::start(daemon.socket(), PAIR).unwrap();
    for round in 1..=10 {
        let (mut sent, mut received) = (0, 0);
        let begun = Instant::now();
        while sent < 2000 || received < 500 {
            assert!(begun.elapsed() < LIMIT, "{sent} frames are sent, {received} received");
            sent += card.send_more(TRANSMIT).unwrap();
            while card.rings[RECEIVE].take(&card.ram).unwrap().is_some() {
                received += 1;
            }
            card.fill(RECEIVE).unwrap();
        }
        // Both rings are full.
        daemon.kill_and_restart_card(&config).unwrap();
        card.reconnect(daemon.socket(), PAIR).unwrap();
        println!("kill {round}: {sent} frames sent, {received} received");
    }
    card.wait_until_sent(TRANSMIT).unwrap();
    card.stop(RECEIVE).unwrap();
    // The card has given back all others.
    assert!(card.rings[RECEIVE].queue.in_flight() <= usize::from(card.rings[RECEIVE].queue.size()));
    assert_eq!(card.rings[TRANSMIT].queue.in_flight(), 0);
    drop(card);
    end(daemon, "");
}

/// A card's queues leave no requests, so it does not offer what lets disks do so.
#[test]
fn a_card_leaves_no_requests() {
    let daemon = idle();
    let mut frontend = Frontend::connect(daemon.socket()).unwrap();
    let offered = frontend.number(&Message::GetProtocolFeatures).unwrap();
    let leaves = ProtocolFeatures::GET_VRING_BASE_INFLIGHT | ProtocolFeatures::GET_VRING_BASE_SKIP_DRAIN;
    assert!(!ProtocolFeatures::from_bits_retain(offered).intersects(leaves));
    drop(frontend);
    end(daemon, "");
}

/// QEMU offers the feature to guests that the back-end offers it, and does not stop rings that they reset.
#[test]
fn the_reset_of_rings_is_offered_on_request_only() {
    let daemon = idle();
    let card = Card::start(daemon.socket(), PAIR).unwrap();
    assert!(!card.frontend.offered().contains(Features::RING_RESET));
    drop(card);
    end(daemon, "");
}
