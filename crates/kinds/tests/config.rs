//! Reads devices and the pool from keys, as files and calls describe them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

use std::time::Duration;

use kickless_daemon::{DeviceConfig, Key, LimitsConfig, Notation, PoolConfig, Switch, Values, check, keys};
use kickless_kinds::{BlkConfig, BlkKind, Frames, NetConfig, kinds};
use kickless_worker::Poll;
use serde_json::{Value, json, to_value};

fn values(json: &Value) -> Values {
    json.as_object().unwrap().iter().map(|(key, value)| (key.clone(), value.into())).collect()
}

/// Reads a device as a call describes it.
fn device(json: &Value) -> Result<DeviceConfig, String> {
    check(&kinds().keys(), &values(json)).map_err(|error| error.to_string())?;
    kinds().read(&values(json)).map_err(|mistake| mistake.to_string())
}

/// Reads the configuration of a pool.
fn pool(json: &Value) -> PoolConfig {
    check(&keys::<PoolConfig>(), &values(json)).unwrap();
    kickless_daemon::read(&values(json)).unwrap()
}

#[test]
fn a_device_is_read_and_shown() {
    for config in [
        json!({ "name": "b", "socket-path": "/run/b.sock", "blk-file": "mem:64M" }),
        json!({
            "kind": "blk", "name": "b", "socket-path": "/run/b.sock", "blk-file": "fault:eio@1%:/srv/b.img",
            "read-only": true, "serial": "b-1", "num-queues": 4, "queue-size": 256, "cache": "writeback",
            "discard": "off", "lock": "off", "logical-block-size": 4096, "incoming": true, "memory-max": "64G", "allow-slow-memory": true,
            "socket-mode": "0660", "socket-group": "kvm", "weight": 7,
        }),
        json!({ "blk-file": "qcow2:/srv/b.qcow2", "blk-size": "68719476736", "cache-size": "1073741824" }),
        json!({ "kind": "net", "port": "null" }),
        json!({
            "name": "n", "socket-path": "/run/n.sock", "port": "null,rate=7,length=60-99", "mtu": 9000,
            "mac": "52:54:00:12:34:56", "num-queue-pairs": 2, "queue-size": 256, "weight": 7,
            "offload": "off", "ring-reset": "on", "capture": "/tmp/n.pcapng", "capture-length": 64,
        }),
    ] {
        let read = device(&config).unwrap();
        let shown = to_value(&read).unwrap();
        assert_eq!(device(&shown).unwrap(), read, "{shown}");
        for (key, value) in config.as_object().unwrap() {
            // A size is shown in bytes.
            assert!(shown[key] == *value || key == "memory-max" || key == "blk-file", "{key}: {shown}");
        }
    }
    let device = device(&json!({ "blk-file": "null:1G" })).unwrap();
    assert_eq!((device.serve.queue_size, device.share.weight, device.serve.memory_max), (1024, 1, 16 << 40));
    let disk = device.kind.options::<BlkKind>().unwrap();
    assert_eq!((disk.num_queues, disk.lock), (64, Switch::On));
    assert_eq!(disk.discard, Switch::On);
}

#[test]
fn a_pool_is_read_and_shown() {
    let config = json!({
        "engine": "threads", "workers": 4, "cpu": "8,0-1", "poll": "rate", "poll-stop-idle": "1.5ms",
    });
    let read = pool(&config);
    let shown = to_value(&read).unwrap();
    assert_eq!(pool(&shown), read, "{shown}");
    let options = read.worker_options(3, Notation::Keys).unwrap();
    assert_eq!((options.workers, options.cpus, options.engine.owners), (4, vec![8, 0, 1], 3));
    assert!(!options.engine.lone_owner && read.worker_options(1, Notation::Keys).unwrap().engine.lone_owner);
    let stop_idle = Duration::from_micros(1500);
    assert_eq!(options.poll, Poll::Rate { start_per_sec: Poll::START_PER_SEC, stop_idle });
    assert_eq!(pool(&json!({})), PoolConfig::default());
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
        ("logical-block-size", json!(1000), "it must be a power of two"),
        ("logical-block-size", json!(8192), "it must be a number from 512 to 4096"),
        ("discard", json!("unmap"), "it must be on or off"),
        ("kind", json!("tpm"), "a kind of device is blk or net"),
        ("kind", json!("net"), "blk-file: it is for disks, and kind is net"),
        ("port", json!("null"), "port: a device is a disk or a network card"),
        ("memory-max", json!("97T"), "from 1M to 96T"),
        ("cache-size", json!("1K"), "it must be from 64K to 64G"),
        ("cache-size", json!(65536), "it must be text, in quotes, such as \"100M\""),
        ("iops", json!("5k"), "write 5000 (without quotes)"),
        ("discard", json!(true), "it must be text, in quotes, such as \"on\""),
        ("socket-mode", json!(432), "it must be text, in quotes, such as \"0660\""),
        ("blk-size", json!("1000"), "not a multiple of 512"),
        ("blk-size", json!("0"), "a disk needs a size above 0"),
        ("name", json!("a b"), "it must be 1 to 64 letters"),
        ("fd", json!(3), "\"fd\" is no key of this call"),
    ] {
        let mut config = json!({ "blk-file": "null:1G" });
        config[key] = Value::clone(&value);
        let refused = device(&config).unwrap_err();
        assert!(refused.contains(said), "{key} = {value}: {refused}");
    }
}

#[test]
fn cards_have_limits_of_frames_and_bytes() {
    let card = |limits: Value| {
        let mut config = json!({ "port": "null" });
        config.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        let config = device(&config)?;
        config.check(Notation::Keys).map_err(|mistake| mistake.to_string())?;
        let again = serde_json::to_value(&config).unwrap();
        assert_eq!(device(&again).unwrap(), config);
        Ok::<_, String>((config.kind.limits(), config.kind.group()))
    };
    let keys = keys::<LimitsConfig<Frames>>();
    let all = keys.iter().map(|key| {
        let value = match key.name() {
            key if key.ends_with("-max-length") => json!("2s"),
            "group" => json!("a"),
            key if key.starts_with("bps") => json!("1M"),
            _ => json!(1000),
        };
        (key.name().to_owned(), value)
    });
    let (limits, group) = card(Value::Object(all.collect())).unwrap();
    assert_eq!(group.as_deref(), Some("a"));
    assert!(limits.requests.iter().all(|limit| limit.peak.per_second == 1000));
    assert!(limits.bytes.iter().all(|limit| limit.sustained.per_second == 1 << 20));
    let (limits, _) = card(json!({ "frames-receive": 5, "bps-transmit": "1K" })).unwrap();
    assert_eq!(limits.requests.map(|limit| limit.sustained.per_second), [0, 5, 0]);
    assert_eq!(limits.bytes.map(|limit| limit.sustained.per_second), [0, 0, 1024]);
    let refused = card(json!({ "frames-receive-max": 5 })).unwrap_err();
    assert!(refused.starts_with("frames-receive: frames-receive-max needs it"), "{refused}");
}

#[test]
fn limits_have_the_names_of_qemu() {
    let disk = |limits: Value| {
        let mut config = json!({ "blk-file": "null:1G" });
        config.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        let config = device(&config)?;
        config.check(Notation::Keys).map_err(|mistake| mistake.to_string())?;
        let again = serde_json::to_value(&config).unwrap();
        assert_eq!(device(&again).unwrap(), config);
        let blk = config.kind.options::<BlkKind>().unwrap();
        Ok::<_, String>(blk.limits.limits())
    };
    let limits = disk(json!({ "iops": 1000, "iops-size": "4K", "bps-read": "1M", "group": "a" })).unwrap();
    assert_eq!((limits.requests[0].sustained.per_second, limits.requests[0].sustained.burst), (1000, 100));
    assert_eq!((limits.bytes[1].sustained.per_second, limits.request_size), (1 << 20, 4096));
    assert_eq!(limits.bytes[0], Default::default());
    let burst = json!({ "iops-write": 1000, "iops-write-max": 3000, "iops-write-max-length": "5s" });
    let burst = disk(burst).unwrap().requests[2];
    assert_eq!((burst.sustained.burst, burst.peak.per_second), (10_000, 3000));
    for (limits, said) in [
        (json!({ "iops": 0 }), "it must be a number from 1"),
        (json!({ "iops": "5" }), "a whole number"),
        (json!({ "bps": 5 }), "text"),
        (json!({ "bps": "0" }), "above 0"),
        (json!({ "iops-max": 5 }), "iops: iops-max needs it"),
        (json!({ "iops": 5, "iops-max": 4 }), "iops: iops-max is for bursts"),
        (json!({ "iops": 5, "iops-max-length": "1s" }), "iops: iops-max-length needs iops-max"),
        (json!({ "iops": 5, "iops-max": 6, "iops-max-length": "1us" }), "from 100ms to 1h"),
        (json!({ "group": "a b" }), "letters"),
    ] {
        let refused = disk(limits.clone()).unwrap_err();
        assert!(refused.contains(said), "{limits}: {refused}");
    }
    let card = json!({ "port": "null", "iops": 5 });
    assert!(device(&card).unwrap_err().starts_with("iops: only disks"));
    assert!(disk(json!({ "frames": 5 })).unwrap_err().starts_with("frames: only network cards"));
}

#[test]
fn each_kind_has_its_own_keys() {
    let numbers = ["num-queues", "mtu", "num-queue-pairs", "capture-length"];
    let value = |key: &str| match key {
        "read-only" | "incoming" => json!(true),
        "discard" | "lock" | "offload" | "ring-reset" => json!("on"),
        "cache" => json!("none"),
        "on-error" => json!("stop"),
        "mac" => json!("52:54:00:12:34:56"),
        "blk-size" | "cache-size" => json!("1G"),
        "logical-block-size" => json!(4096),
        key if numbers.contains(&key) => json!(100),
        key if key.ends_with("-max-length") => json!("2s"),
        key if key.starts_with("bps") || key == "iops-size" => json!("1M"),
        key if key.starts_with("iops") || key.starts_with("frames") => json!(100),
        _ => json!("text"),
    };
    // Only a qcow2 image has a size of its own.
    let disk = json!({ "blk-file": "qcow2:/srv/a.qcow2" });
    let card = json!({ "port": "null" });
    // The keys of limits of bytes and the group are those of both kinds.
    let is_own = |keys: &[Key], name: &str| keys.iter().any(|key| key.name() == name);
    let (of_disks, of_cards) = (keys::<BlkConfig>(), keys::<NetConfig>());
    for (own, other, keys, others, said) in [
        (&disk, &card, &of_disks, &of_cards, "only disks have it"),
        (&card, &disk, &of_cards, &of_disks, "only network cards have it"),
    ] {
        for key in keys.iter().map(|key| key.name()).filter(|key| !["blk-file", "port"].contains(key)) {
            let with = |config: &Value| {
                let mut config = config.clone();
                config[key] = value(key);
                device(&config)
            };
            assert!(with(own).is_ok(), "{key}");
            match with(other) {
                Ok(_) => assert!(is_own(others, key), "{key}"),
                Err(refused) => assert!(refused.starts_with(&format!("{key}: {said}")), "{refused}"),
            }
        }
    }
    let neither = device(&json!({ "name": "a" })).unwrap_err();
    assert_eq!(neither, "blk-file: a disk needs one, and a network card needs a port");
}
