//! Checks that neither a card nor its driver allocates memory for a frame. First the card is in another
//! process, so that each allocation is the driver's. Then both are in this one, with a worker between them.
//! One test only, because the counter is one for the whole program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kickless_device::Device;
use kickless_driver::{Card, CardOptions, Choice, Interest, Outgoing, QueuePair};
use kickless_io::{EngineKind, EngineOptions};
use kickless_net::{Net, Opening, Options, PortName};
use kickless_testing::{eventually, in_network_namespace, ip};
use kickless_tests::allocations::Counting;
use kickless_tests::daemon::{CardConfig, Daemon};
use kickless_tests::driver::Eventfd;
use kickless_tests::hostile_backend::returns_in_time;
use kickless_vhost::Server;
use kickless_worker::{Poll, WorkerPool};

#[global_allocator]
static COUNTING: Counting = Counting;

const FRAMES: usize = 5000;
/// The frames of a driver whose card is in another process.
const FRAMES_OF_DRIVER: usize = 20_000;
/// A null port that delivers frames.
const DELIVERING: &str = "null,rate=100000,length=60-5000";
/// The time between two comparisons of loads, and the most allocations of one: three lists that grow.
const COMPARISON: Duration = Duration::from_millis(100);
const PER_COMPARISON: u64 = 8;
/// Frames on their way at a time. Each queue on the way has room for them.
const ROUND: usize = 32;

/// Stops the servers when the test ends or fails.
struct Stop(Eventfd);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.signal();
    }
}

/// Serves cards with these ports on one worker, and runs `test` with a pair of queues of each.
fn with_cards(ports: &[&str], packed: Choice, test: impl FnOnce(&mut [QueuePair])) {
    let dir = tempfile::tempdir().unwrap();
    let engine = EngineOptions::new(EngineKind::Threads, 8);
    let options = kickless_worker::Options { workers: 1, engine, cpus: Vec::new(), poll: Poll::Never };
    let pool = Arc::new(WorkerPool::start(&options).unwrap());
    let mut cards = Vec::new();
    thread::scope(|scope| {
        let stop = Stop(Eventfd::new().unwrap());
        for (number, port) in ports.iter().enumerate() {
            let port = port.parse::<PortName>().unwrap();
            let descriptor = |_: &str| unreachable!("there is no descriptor");
            let opening =
                Opening { pairs: 1, mac: None, descriptor: &descriptor, handed: Default::default() };
            let port = port.open(&opening).unwrap();
            let options = Options {
                mac: None,
                mtu: None,
                pairs_max: 1,
                queue_size_max: 1024,
                offload: true,
                ring_reset: false,
                port,
            };
            let device: Arc<dyn Device> = Arc::new(Net::new(options));
            let server = Server::new(device, pool.clone().executor(number as u32));
            let socket = dir.path().join(number.to_string());
            let listener = UnixListener::bind(&socket).unwrap();
            let stop = stop.0.try_clone().unwrap();
            scope.spawn(move || server.serve(&listener, stop.as_fd()));
            let options = CardOptions { packed, receive_offloads: Choice::On, ..CardOptions::new(socket) };
            cards.push(Card::connect(options).unwrap());
        }
        let mut pairs: Vec<_> = cards.iter().map(|card| card.pair(0).unwrap()).collect();
        test(&mut pairs);
    });
}

/// The most allocations of inboxes that grow because more frames wait there than ever before, which a busy
/// host can cause at any time. The bytes of an inbox double up to 16 times, its list of frames up to 6 times,
/// and there are two inboxes.
const GROWTH: u64 = 44;

/// Runs `load` with a number of frames, first to fill all buffers, then to count allocations. The worker may
/// make some by itself, each time that it compares loads.
fn count(what: &str, mut load: impl FnMut(usize)) {
    load(FRAMES / 10);
    let (before, begun) = (Counting::count(), Instant::now());
    load(FRAMES);
    let times = begun.elapsed().div_duration_f64(COMPARISON) as u64 + 1;
    let allocations = Counting::count() - before;
    assert!(
        allocations <= times * PER_COMPARISON + GROWTH,
        "{allocations} allocations for {FRAMES} frames: {what}"
    );
}

fn send(pair: &mut QueuePair, frames: usize, bytes: &[u8]) {
    let batch = [Outgoing::from(bytes); ROUND];
    let mut left = frames;
    while left > 0 {
        left -= pair.send(&batch[..left.min(ROUND)]).unwrap();
        if left > 0 {
            pair.wait(Interest::Send, None).unwrap();
        }
    }
    pair.flush(None).unwrap();
}

fn receive(pair: &mut QueuePair, frames: usize, forward: bool) {
    let mut left = frames;
    let mut place = [0; 64];
    while left > 0 {
        pair.wait(Interest::Any, None).unwrap();
        left -= match forward {
            true => pair.forward(left, |frame| frame.read(0, &mut place) > 0),
            false => pair.receive(left, |frame| assert!(frame.read(0, &mut place) > 0)),
        }
        .unwrap();
    }
}

/// Sends frames from one pair, or from the only one, and receives them from the last one.
fn pass(pairs: &mut [QueuePair], frames: usize, bytes: &[u8]) {
    for _ in 0..frames / ROUND {
        send(&mut pairs[0], ROUND, bytes);
        receive(pairs.last_mut().unwrap(), ROUND, false);
    }
}

/// Sends frames to a null port, and receives some of those that it delivers.
fn exchange(pair: &mut QueuePair, frames: usize, short: &[u8], long: &[u8]) {
    send(pair, frames, short);
    send(pair, frames / 10, long);
    receive(pair, frames / 4, false);
    receive(pair, frames / 4, true);
}

fn the_driver_alone(packed: Choice, short: &[u8], long: &[u8]) {
    let daemon = Daemon::start_card(&CardConfig::new(DELIVERING)).unwrap();
    let options = CardOptions { packed, receive_offloads: Choice::On, ..CardOptions::new(daemon.socket()) };
    let card = Card::connect(options).unwrap();
    let mut pair = card.pair(0).unwrap();
    exchange(&mut pair, 1000, short, long);
    let before = Counting::count();
    exchange(&mut pair, FRAMES_OF_DRIVER, short, long);
    assert_eq!(Counting::count() - before, 0, "allocations for {FRAMES_OF_DRIVER} frames");
}

/// Makes a TAP whose bridge returns its frames.
fn returning_tap() {
    ip("tuntap add dev card mode tap");
    ip("link set card up");
    ip("link add bridge up type bridge forward_delay 0 mcast_snooping 0");
    ip("link set card master bridge");
    ip("link set card type bridge_slave hairpin on learning off");
}

/// Waits until the bridge returns frames, and until the last frame of this wait has returned.
fn wait_for_the_bridge(pair: &mut QueuePair, first: &[u8], last: &[u8]) {
    eventually("the bridge returns frames", || {
        pair.send(&[Outgoing::from(first)]).unwrap();
        pair.receive(ROUND, |_| {}).unwrap() > 0
    });
    let mut is_back = false;
    pair.send(&[Outgoing::from(last)]).unwrap();
    while !is_back {
        pair.wait(Interest::Any, None).unwrap();
        pair.receive(1, |frame| is_back = frame.len() == last.len()).unwrap();
    }
}

#[test]
fn frames_do_not_allocate() {
    let frame = |len| {
        let mut frame = vec![7; len];
        frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
        frame
    };
    returns_in_time(move || {
        for packed in [Choice::Off, Choice::On] {
            let (short, long) = (frame(60), frame(9000));
            the_driver_alone(packed, &short, &long);
            with_cards(&[DELIVERING], packed, |pairs| {
                count("a null port", |frames| exchange(&mut pairs[0], frames, &short, &long));
            });
            for ports in [&["loop"][..], &["switch:lan", "switch:lan"]] {
                with_cards(ports, packed, |pairs| {
                    for len in [60, 1514, 9000] {
                        let frame = frame(len);
                        count(ports[0], |frames| pass(pairs, frames, &frame));
                    }
                });
            }
            in_network_namespace(|| {
                returning_tap();
                with_cards(&["tap:card"], packed, |pairs| {
                    wait_for_the_bridge(&mut pairs[0], &frame(60), &frame(61));
                    for len in [60, 1514] {
                        let frame = frame(len);
                        count("a TAP", |frames| pass(pairs, frames, &frame));
                    }
                });
            });
        }
    });
}
