//! Reads counters and latencies of a daemon, and exports them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod control;

use control::{Rig, call};
use kickless_control::{Exposition, Stats, exposition};
use kickless_driver::{Disk, Options};
use kickless_testing::{Sample, eventually, parse_openmetrics};
use serde::Deserialize;
use serde_json::json;

fn stats(rig: &Rig) -> Stats {
    Stats::deserialize(call(&mut rig.client(), "stats.get", json!({})).unwrap()).unwrap()
}

fn openmetrics(version: &str, stats: &Stats) -> String {
    exposition(Exposition::OpenMetrics, version, stats, &kickless_kinds::kinds())
}

fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let is_same = |of: &&Sample| {
        of.name == name && labels.iter().all(|(key, value)| of.labels.get(*key).is_some_and(|of| of == value))
    };
    let mut found = samples.iter().filter(is_same);
    let value = found.next().unwrap_or_else(|| panic!("{name} {labels:?}")).value;
    assert!(found.next().is_none(), "{name} {labels:?}");
    value
}

#[test]
fn requests_are_counted_by_operation_and_measured() {
    let rig = Rig::new();
    let file = rig.path("image");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    for (name, disk) in [("in-memory", "mem:1M"), ("in-file", file.to_str().unwrap())] {
        let mut config = rig.disk(name);
        config["blk-file"] = disk.into();
        call(&mut rig.client(), "device.add", config).unwrap();
        let disk = Disk::connect(Options::new(rig.path(name))).unwrap();
        for block in 0..10 {
            disk.write_at(&[7; 4096], block * 4096).unwrap();
        }
        for block in 0..5 {
            disk.read_at(&mut [0; 8192], block * 4096).unwrap();
        }
        disk.flush().unwrap();
    }
    // A request is counted after its answer, at the end of the worker's visit.
    eventually("the statistics show the flushes", || {
        let devices = stats(&rig).devices;
        devices.iter().all(|device| device.operations.iter().any(|of| of.name == "flush" && of.requests == 1))
    });
    let stats = stats(&rig);
    for device in &stats.devices {
        let of = |name: &str| device.operations.iter().find(|of| of.name == name).unwrap().clone();
        assert_eq!((of("read").requests, of("read").bytes), (5, 40960), "{device:?}");
        assert_eq!((of("write").requests, of("write").bytes, of("flush").requests), (10, 40960, 1));
        assert!(device.operations.iter().all(|of| of.errors == 0));
        // A request that the driver saw as answered is counted soon after.
        let (request, io) = (device.request_latency.latencies(), device.io_latency.latencies());
        assert!((15..=16 + of("other").requests).contains(&request.count()), "{}", request.count());
        assert_eq!(io.count() > 0, device.name == "in-file");
        assert!(io.sum_ns <= request.sum_ns && request.quantile_ns(500) < Some(1_000_000_000));
        assert!(device.sum("requests") >= 16);
    }
    assert!(stats.workers[0].work_ns > 0);
    let samples = parse_openmetrics(&openmetrics("1.0", &stats)).unwrap();
    let read = |name: &str, labels: &[(&str, &str)]| value(&samples, name, labels);
    let write = [("device", "in-file"), ("op", "write")];
    assert_eq!(read("kickless_device_requests_total", &write), 10.0);
    assert_eq!(read("kickless_device_bytes_total", &write), 40960.0);
    let state = [("device", "in-memory"), ("kickless_device_state", "ended")];
    assert_eq!(read("kickless_device_state", &state), 0.0);
    let all = [("device", "in-file"), ("le", "+Inf")];
    assert!(read("kickless_device_request_duration_seconds_bucket", &all) >= 15.0);
    assert!(read("kickless_worker_seconds_total", &[("worker", "0"), ("state", "work")]) > 0.0);
}

#[test]
fn both_formats_have_the_same_samples() {
    let rig = Rig::new();
    call(&mut rig.client(), "device.add", rig.disk("a")).unwrap();
    let stats = stats(&rig);
    let prometheus = exposition(Exposition::Prometheus, "1.0", &stats, &kickless_kinds::kinds());
    let samples = |text: &str| -> Vec<String> {
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    };
    assert_eq!(samples(&prometheus), samples(&openmetrics("1.0", &stats)));
    // Each family has its two lines, with the name of its samples and a type that this format knows.
    let mut families = 0;
    let mut lines = prometheus.lines().peekable();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let ["#", "TYPE", name, kind] = words[..] else { panic!("{line}") };
        assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
        assert!(lines.next().is_some_and(|help| help.starts_with(&format!("# HELP {name} "))), "{line}");
        while let Some(sample) = lines.next_if(|line| !line.starts_with('#')) {
            let of = sample.split('{').next().unwrap();
            let suffix = of.strip_prefix(name).unwrap_or_else(|| panic!("{sample} in {name}"));
            let suffixes: &[&str] = if kind == "histogram" { &["_bucket", "_count", "_sum"] } else { &[""] };
            assert!(suffixes.contains(&suffix), "{sample} in {name}");
        }
        families += 1;
    }
    assert!(families > 20, "{prometheus}");
}

#[test]
fn a_name_cannot_break_the_text() {
    let mut stats = Stats::default();
    let name = "a\"b\\c\nd} 7".to_owned();
    stats.devices.push(kickless_control::DeviceStats {
        name: name.clone(),
        kind: "blk".into(),
        ..Default::default()
    });
    let samples = parse_openmetrics(&openmetrics("1\"", &stats)).unwrap();
    assert_eq!(value(&samples, "kickless_device_in_flight", &[("device", &name)]), 0.0);
}

#[test]
fn counters_never_decrease() {
    let rig = Rig::new();
    call(&mut rig.client(), "device.add", rig.disk("a")).unwrap();
    let mut before = stats(&rig);
    for _ in 0..20 {
        let disk = Disk::connect(Options::new(rig.path("a"))).unwrap();
        disk.write_at(&[7; 512], 0).unwrap();
        drop(disk);
        let now = stats(&rig);
        for (old, new) in before.workers.iter().zip(&now.workers) {
            assert!(
                old.work_ns <= new.work_ns
                    && old.looking_ns <= new.looking_ns
                    && old.asleep_ns <= new.asleep_ns
            );
            let sum = new.work_ns + new.looking_ns + new.asleep_ns;
            assert!(sum <= now.time_ns + 1_000_000_000, "{new:?}");
        }
        assert!(before.devices[0].request_latency.sum_ns <= now.devices[0].request_latency.sum_ns);
        before = now;
    }
    assert!(before.devices[0].request_latency.latencies().count() >= 19);
}

#[test]
fn the_dashboard_and_the_alerts_use_metrics_that_exist() {
    let device = json!({
        "name": "a", "kind": "blk", "state": "free", "request_latency": { "sum_ns": 0, "buckets": [] },
        "io_latency": { "sum_ns": 0, "buckets": [] }, "in_flight": 0, "oldest_ns": 0, "queues": [],
        "operations": [{ "name": "read", "requests": 1, "bytes": 1, "errors": 0 }], "device": {}, "kicks_ignored": 0,
    });
    let worker = json!({ "worker": 0, "work_ns": 0, "looking_ns": 0, "asleep_ns": 0 });
    let stats = json!({ "time_ns": 0, "workers": [worker], "devices": [device] });
    let text = openmetrics("1.0", &Stats::deserialize(stats).unwrap());
    for file in ["../../dist/grafana/kickless.json", "../../dist/prometheus/kickless.rules.yml"] {
        let used = std::fs::read_to_string(file).unwrap();
        let words = used.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
        let names: Vec<&str> = words.filter(|word| word.starts_with("kickless_")).collect();
        assert!(names.len() > 5, "{file}");
        for name in names {
            assert!(text.contains(&format!("\n{name}{{")), "{file}: {name}");
        }
    }
}
