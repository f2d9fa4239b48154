//! The configuration, as a caller other than the command line fills it.
#![allow(clippy::unwrap_used, reason = "a test may")]

use std::time::Duration;

use kickless_daemon::{DeviceConfig, Notation, PoolConfig, Switch};
use kickless_worker::Poll;
use serde_json::{Value, from_value, json, to_value};

#[test]
fn a_device_and_back() {
    for config in [
        json!({ "name": "b", "socket-path": "/run/b.sock", "blk-file": "mem:64M" }),
        json!({
            "kind": "blk", "name": "b", "socket-path": "/run/b.sock", "blk-file": "fault:eio@1%:/srv/b.img",
            "read-only": true, "serial": "b-1", "num-queues": 4, "queue-size": 256, "cache": "writeback",
            "merge": "off", "lock": "off", "incoming": true, "memory-max": "64G", "allow-slow-memory": true,
            "socket-mode": "0660", "socket-group": "kvm", "weight": 7,
        }),
    ] {
        let device: DeviceConfig = from_value(config.clone()).unwrap();
        let shown = to_value(&device).unwrap();
        assert_eq!(from_value::<DeviceConfig>(shown.clone()).unwrap(), device, "{shown}");
        for (key, value) in config.as_object().unwrap() {
            // A size is shown in bytes.
            assert!(shown[key] == *value || key == "memory-max" || key == "blk-file", "{key}: {shown}");
        }
    }
    let device: DeviceConfig = from_value(json!({ "blk-file": "null:1G" })).unwrap();
    assert_eq!((device.num_queues, device.queue_size, device.weight), (64, 1024, 1));
    assert_eq!((device.merge, device.lock, device.memory_max), (Switch::On, Switch::On, 16 << 40));
}

#[test]
fn a_pool_and_back() {
    let config = json!({
        "engine": "threads", "workers": 4, "cpu": "8,0-1", "poll": "rate", "poll-stop-idle": "1.5ms",
        "call-coalesce": "20us",
    });
    let pool: PoolConfig = from_value(config).unwrap();
    let shown = to_value(&pool).unwrap();
    assert_eq!(from_value::<PoolConfig>(shown.clone()).unwrap(), pool, "{shown}");
    let options = pool.worker_options(3, Notation::Keys).unwrap();
    assert_eq!((options.workers, options.cpus, options.engine.owners), (4, vec![8, 0, 1], 3));
    assert!(!options.engine.lone_owner && pool.worker_options(1, Notation::Keys).unwrap().engine.lone_owner);
    let stop_idle = Duration::from_micros(1500);
    assert_eq!(options.poll, Poll::Rate { start_per_sec: Poll::START_PER_SEC, stop_idle });
    assert_eq!(from_value::<PoolConfig>(json!({})).unwrap(), PoolConfig::default());
}

#[test]
fn a_wrong_value_is_refused_as_on_the_command_line() {
    for (key, value, said) in [
        ("num-queues", json!(257), "it must be a number from 1 to 256"),
        ("num-queues", json!(-1), "it must be a number from 1 to 256"),
        ("num-queues", json!("4"), "a whole number"),
        ("queue-size", json!(300), "a power of two"),
        ("blk-file", json!("null:1000"), "not a multiple of 512"),
        ("blk-file", json!(1), "text"),
        ("lock", json!("maybe"), "it must be on or off"),
        ("kind", json!("net"), "the only kind of device is blk"),
        ("memory-max", json!("97T"), "96T at most"),
        ("name", json!("a b"), "it must be 1 to 64 letters"),
        ("fd", json!(3), "unknown field `fd`"),
    ] {
        let mut config = json!({ "blk-file": "null:1G" });
        config[key] = Value::clone(&value);
        let refused = from_value::<DeviceConfig>(config).unwrap_err().to_string();
        assert!(refused.contains(said), "{key} = {value}: {refused}");
    }
}
