//! Parses the parameters of calls.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::time::Duration;

use common::toys;
use kickless_control::{Call, Method, Remove};
use kickless_daemon::{REMOVE_TIMEOUT, RemoveMode};
use serde_json::{Value, json};

fn parse(name: &str, params: Value) -> Result<Call, String> {
    let Value::Object(params) = params else { panic!("{params}") };
    Method::find(name).and_then(|method| method.parse(params, &toys())).map_err(|error| error.message)
}

#[test]
fn devices_are_described_by_the_keys_of_a_file() {
    let added = parse("device.add", json!({ "socket-path": "/run/a.sock", "toy": "car", "weight": 3 }));
    let Ok(Call::DeviceAdd(config)) = added else { panic!("{added:?}") };
    assert_eq!((config.name(), config.share.weight), (Some("a"), 3));
    for (params, said) in [
        (json!({ "socket-path": "/a.sock" }), "toy: a toy needs one"),
        (json!({ "toy": "car" }), "socket-path"),
        (json!({ "socket-path": "/a.sock", "toy": "car", "weight": 0 }), "weight: "),
        (json!({ "socket-path": "/a.sock", "toy": "car", "weight": "1" }), "weight: "),
        (json!({ "socket-path": "/a.sock", "toy": "car", "queue-size": 100 }), "queue-size: "),
        (json!({ "socket-path": "/a.sock", "toy": "car", "colour": 1 }), "colour"),
        (json!({ "socket-path": "/a b.sock", "toy": "car" }), "socket-path: no name"),
    ] {
        let refused = parse("device.add", params).unwrap_err();
        assert!(refused.contains(said), "{refused}");
    }
}

#[test]
fn removals_have_a_mode_and_a_deadline() {
    let removed = parse("device.remove", json!({ "name": "a" }));
    assert!(
        matches!(
            removed,
            Ok(Call::DeviceRemove(Remove { mode: RemoveMode::Refuse, timeout: REMOVE_TIMEOUT, .. }))
        ),
        "{removed:?}"
    );
    let removed = parse("device.remove", json!({ "name": "a", "mode": "force", "timeout": "2s" }));
    let two = Duration::from_secs(2);
    assert!(
        matches!(removed, Ok(Call::DeviceRemove(Remove { mode: RemoveMode::Force, timeout, .. })) if timeout == two),
        "{removed:?}"
    );
    for params in [
        json!({}),
        json!({ "name": "" }),
        json!({ "name": 7 }),
        json!({ "name": "a", "mode": "gently" }),
        json!({ "name": "a", "timeout": 2 }),
        json!({ "name": "a", "timeout": "2h" }),
        json!({ "name": "a", "more": 1 }),
    ] {
        assert!(parse("device.remove", params.clone()).is_err(), "{params}");
    }
}

#[test]
fn the_keys_of_the_pool_are_those_of_a_file() {
    assert!(parse("pool.set", json!({ "poll": "never" })).is_ok());
    assert!(parse("pool.set", json!({ "poll": "sometimes" })).unwrap_err().starts_with("poll: "));
    assert!(parse("pool.set", json!({ "pool": 1 })).unwrap_err().contains("pool"));
    assert!(parse("pool.set", json!({ "workers": 2 })).unwrap_err().starts_with("workers: "));
    assert!(parse("pool.set", json!({ "sqpoll": true })).unwrap_err().starts_with("sqpoll: it was removed"));
    assert!(parse("pool.set", json!({ "poll": "never", "poll-latency": "1ms" })).is_err());
    assert!(parse("pool.set", json!({})).is_err());
    assert!(parse("daemon.info", json!({ "a": 1 })).is_err());
    assert!(parse("stats.get", json!({})).is_ok() && parse("stats.get", json!({ "name": "a" })).is_ok());
}
