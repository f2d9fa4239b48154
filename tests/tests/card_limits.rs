//! Limits the frames of a card of the real daemon, and changes the limits while a driver uses it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::process::Command;
use std::time::{Duration, Instant};

use kickless_driver::{Card, CardOptions, Interest, Outgoing, QueuePair};
use kickless_tests::daemon::{CardConfig, Daemon, card_counter, kickless_binary};
use kickless_tests::hostile_backend::{LIMIT, returns_in_time};
use serde_json::{Value, json};
use tempfile::TempDir;

fn options(daemon: &Daemon) -> CardOptions {
    CardOptions { connect_timeout: LIMIT, reconnect_limit: LIMIT, ..CardOptions::new(daemon.socket()) }
}

fn send(pair: &mut QueuePair, count: usize) -> Duration {
    let (start, bytes) = (Instant::now(), [7; 1000]);
    let mut left = count;
    while left > 0 {
        left -= pair.send(&vec![Outgoing::from(&bytes[..]); left.min(32)]).unwrap();
        if left > 0 {
            assert!(pair.wait(Interest::Send, Some(LIMIT)).unwrap(), "no room");
        }
    }
    assert!(pair.flush(Some(LIMIT)).unwrap(), "frames stay in flight");
    start.elapsed()
}

fn ctl(control: &str, method: &str, params: &Value) -> Value {
    let words = ["ctl", control, method, &params.to_string()];
    let output = Command::new(kickless_binary().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{method}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn sent_frames_are_limited_and_cost_no_spinning() {
    returns_in_time(|| {
        let dir = TempDir::new().unwrap();
        let control = format!("--control={}", dir.path().join("control.sock").display());
        let config = CardConfig::new("null").with(&["--frames-transmit=1000", &control]);
        let daemon = Daemon::start_card(&config).unwrap();
        let card = Card::connect(options(&daemon)).unwrap();
        let mut pair = card.pair(0).unwrap();
        // 2000 frames need 1.9 s, because the bucket has a tenth of a second.
        let took = send(&mut pair, 2000);
        assert!(took >= Duration::from_millis(1850), "{took:?}");
        let stats = ctl(&control, "stats.get", &json!({}));
        let queue = &stats["devices"][0]["queues"][1];
        assert!(queue["throttled_ns"].as_u64() > Some(1_000_000_000), "{stats}");
        // A spinning worker has more than one poll for each microsecond.
        let polls = u128::from(queue["polls_without_work"].as_u64().unwrap());
        assert!(polls < took.as_micros() / 10, "{polls}");
        assert_eq!(stats["devices"][0]["limits"], json!({ "frames-transmit": 1000 }));
        // Bytes instead: 2 MB at 1 MiB a second.
        let changed = json!({ "name": "net", "frames-transmit": null, "bps": "1M" });
        assert_eq!(ctl(&control, "device.set", &changed)["bps"], "1048576");
        let took = send(&mut pair, 2000);
        assert!(took >= Duration::from_millis(1700), "{took:?}");
        ctl(&control, "device.set", &json!({ "name": "net", "bps": null }));
        send(&mut pair, 10_000);
        drop((pair, card));
        let (_, log) = daemon.stop().unwrap();
        assert_eq!(card_counter(&log, "sent_frames").unwrap(), 14_000);
    });
}

/// The card drops what its port has and the limit does not admit, as a slow link does.
#[test]
fn received_frames_are_limited() {
    returns_in_time(|| {
        let config = CardConfig::new("null,rate=50000").with(&["--frames-receive=1000"]);
        let daemon = Daemon::start_card(&config).unwrap();
        let card = Card::connect(options(&daemon)).unwrap();
        let mut pair = card.pair(0).unwrap();
        let (start, mut frames) = (Instant::now(), 0);
        while frames < 2000 {
            assert!(pair.wait(Interest::Receive, Some(LIMIT)).unwrap(), "no frame comes");
            frames += pair.receive(64, |_| {}).unwrap();
        }
        assert!(start.elapsed() >= Duration::from_millis(1850), "{:?}", start.elapsed());
    });
}
