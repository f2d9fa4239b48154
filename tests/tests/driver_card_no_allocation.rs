//! Checks that the driver allocates no memory for a frame. One test only, because the counter is one for the
//! whole program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, Choice, Interest, Outgoing, QueuePair};
use kickless_tests::allocations::Counting;
use kickless_tests::daemon::{CardConfig, Daemon};
use kickless_tests::hostile_backend::returns_in_time;

#[global_allocator]
static COUNTING: Counting = Counting;

const FRAMES: usize = 20_000;

fn send(pair: &mut QueuePair, frames: usize, bytes: &[u8]) {
    let batch = [Outgoing::from(bytes); 32];
    let mut left = frames;
    while left > 0 {
        left -= pair.send(&batch[..left.min(32)]).unwrap();
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

#[test]
fn frames_do_not_allocate() {
    returns_in_time(|| {
        let daemon = Daemon::start_card(&CardConfig::new("null,rate=100000,length=60-5000")).unwrap();
        for packed in [Choice::Off, Choice::On] {
            let receive_offloads = Choice::On;
            let options = CardOptions { packed, receive_offloads, ..CardOptions::new(daemon.socket()) };
            let card = Card::connect(options).unwrap();
            let mut pair = card.pair(0).unwrap();
            let all = |pair: &mut QueuePair, frames| {
                send(pair, frames, &[7; 60]);
                send(pair, frames / 10, &[7; 9000]);
                receive(pair, frames / 4, false);
                receive(pair, frames / 4, true);
            };
            all(&mut pair, 1000);
            let before = Counting::count();
            all(&mut pair, FRAMES);
            assert_eq!(Counting::count() - before, 0, "allocations for {FRAMES} frames");
        }
    });
}
