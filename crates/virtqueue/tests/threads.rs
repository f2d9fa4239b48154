//! Runs a driver and a device on two threads. Each sleeps whenever the ring allows it. A lost kick or call
//! would leave both asleep.
#![allow(clippy::unwrap_used, reason = "tests")]

mod model;

use kickless_testing::Random;
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::Options;
use model::{Buf, Driver};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

/// A timeout that is long enough for any machine. Only a lost notification takes that long.
const LOST: Duration = Duration::from_secs(20);

/// Signals as an eventfd does: a signal that is already set stays set.
fn signal(to: &SyncSender<()>) {
    match to.try_send(()) {
        Ok(()) | Err(TrySendError::Full(()) | TrySendError::Disconnected(())) => {}
    }
}

/// Waits for a signal. Returns whether the other end still exists.
fn wait(from: &Receiver<()>, what: &str) -> bool {
    match from.recv_timeout(LOST) {
        Ok(()) => true,
        Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => unreachable!("a {what} was lost"),
    }
}

fn run(log_size: u32, event_idx: bool, polls: bool, requests: u32) {
    let options = Options::new(1 << log_size, event_idx, true).unwrap();
    let mut driver = Driver::new(options, 65_500);
    let mut queue = driver.device();
    let view = driver.view.clone();
    let (kick, kicked) = sync_channel(1);
    let (call, called) = sync_channel(1);
    let device = std::thread::spawn(move || {
        let (mut chain, mut random, mut served) = (Chain::default(), Random(1), 0u32);
        loop {
            let before = served;
            while queue.pop(&view, &mut chain).unwrap() {
                // The driver's number of the request, in both of its buffers.
                let number = served as u64;
                assert_eq!((chain.readable()[0].addr.0, chain.writable()[0].addr.0), (number, !number));
                queue.push(chain.id, served);
                served += 1;
                if random.one_in(4) && queue.publish() {
                    signal(&call);
                }
            }
            if queue.publish() {
                signal(&call);
            }
            if served != before && polls {
                queue.disarm();
                continue;
            }
            if !queue.arm() {
                if !wait(&kicked, "kick") {
                    break served;
                }
                queue.disarm();
            }
        }
    });
    let (mut random, mut added, mut done) = (Random(2), 0u32, 0u32);
    while done < requests {
        for _ in 0..=random.below(8) {
            let number = u64::from(added);
            let bufs =
                [(number, false), (!number, true)].map(|(addr, writable)| Buf { addr, len: 8, writable });
            if added == requests || driver.add(&bufs, 0).is_none() {
                break;
            }
            added += 1;
        }
        if driver.publish() {
            signal(&kick);
        }
        driver.disable_calls();
        let before = done;
        while let Some((_, len)) = driver.take() {
            assert_eq!(len, done, "used in order by this device");
            done += 1;
        }
        if done == before && (driver.free() == 0 || added == requests) && !driver.enable_calls() {
            assert!(wait(&called, "call"));
        }
    }
    drop(kick);
    assert_eq!(device.join().unwrap(), requests);
}

#[test]
fn two_threads() {
    for event_idx in [false, true] {
        for polls in [false, true] {
            for log_size in [0, 1, 5] {
                run(log_size, event_idx, polls, 20_000);
            }
        }
    }
}
