//! Subscribers that break the rules: that never read, come in numbers, repeat themselves, or leave at the
//! wrong time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use common::{Rig, call};
use kickless_testing::{LIMIT, eventually};
use serde_json::{Value, json};

/// The most clients of a socket.
const CLIENTS_MAX: usize = 64;

/// Sends a call without reading the answer.
fn send(stream: &mut UnixStream, method: &str, params: &Value) {
    writeln!(stream, "{}", json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params })).unwrap();
}

/// Connects and subscribes. Returns the notifications that come.
fn subscribe(rig: &Rig, methods: &[&str]) -> impl Iterator<Item = Value> + use<> {
    let mut stream = rig.stream();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    methods.iter().for_each(|method| send(&mut stream, method, &json!({})));
    let mut lines = BufReader::new(stream).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
    // The first counters may come before the second answer.
    let mut answers = 0;
    while answers < methods.len() {
        let line: Value = lines.next().unwrap();
        answers += usize::from(line["result"] == json!({ "subscribed": true }));
    }
    lines
}

/// Returns the events of one device among notifications.
fn events(lines: impl Iterator<Item = Value>, device: &str) -> impl Iterator<Item = String> {
    let of = json!(device);
    lines
        .filter(move |line| line["method"] == "event" && line["params"]["device"] == of)
        .map(|line| line["params"]["event"].as_str().unwrap().to_owned())
}

fn add_and_remove(rig: &Rig, name: &str) {
    let mut client = rig.client();
    call(&mut client, "device.add", rig.toy(name)).unwrap();
    // The daemon looks for events four times a second, and must see the device.
    thread::sleep(Duration::from_millis(600));
    call(&mut client, "device.remove", json!({ "name": name })).unwrap();
}

/// It is disconnected ten seconds after it took the last byte. Meanwhile its buffer holds one line, and the
/// others get theirs.
#[test]
fn one_that_never_reads_is_disconnected() {
    let rig = Rig::new();
    let mut client = rig.client();
    (0..16).for_each(|n| _ = call(&mut client, "device.add", rig.toy(&format!("d{n}"))).unwrap());
    let mut silent = rig.stream();
    send(&mut silent, "stats.subscribe", &json!({ "interval": "100ms" }));
    send(&mut silent, "events.subscribe", &json!({}));
    let mut other = subscribe(&rig, &["stats.subscribe"]);
    let start = Instant::now();
    // The kernel's buffer is full after some lines of 16 devices. After the disconnection, nothing can be
    // sent.
    loop {
        let stats = other.next().unwrap();
        assert_eq!(stats["params"]["devices"].as_array().unwrap().len(), 16);
        match silent.write_all(b"\n") {
            Ok(()) => assert!(start.elapsed() < LIMIT, "it is still connected"),
            Err(error) => {
                assert!(
                    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
                    "{error}"
                );
                break;
            }
        }
    }
    assert!(start.elapsed() > Duration::from_secs(9), "too early: {:?}", start.elapsed());
    // It gets whole lines, and then the end.
    let mut rest = String::new();
    silent.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = silent.read_to_string(&mut rest);
    let whole = rest.rsplit_once('\n').unwrap().0;
    whole.lines().for_each(|line| drop(serde_json::from_str::<Value>(line).unwrap()));
}

/// All of them get each event once. One more replaces the one that was idle for longest.
#[test]
fn as_many_as_there_is_room_for() {
    let rig = Rig::new();
    // One client is kept for calls.
    let mut subscribers: Vec<_> =
        (1..CLIENTS_MAX).map(|_| events(subscribe(&rig, &["events.subscribe"]), "a")).collect();
    add_and_remove(&rig, "a");
    for events in &mut subscribers {
        assert_eq!(events.by_ref().take(2).collect::<Vec<_>>(), ["added", "removed"]);
    }
    let mut more: Vec<_> = (0..20).map(|_| events(subscribe(&rig, &["events.subscribe"]), "b")).collect();
    add_and_remove(&rig, "b");
    for events in &mut more {
        assert_eq!(events.by_ref().take(2).collect::<Vec<_>>(), ["added", "removed"]);
    }
    assert!(call(&mut rig.client(), "daemon.info", json!({})).is_ok());
}

#[test]
fn one_that_subscribes_again_and_again_gets_each_event_once() {
    let rig = Rig::new();
    let lines = subscribe(&rig, &["events.subscribe"; 50]);
    add_and_remove(&rig, "a");
    add_and_remove(&rig, "b");
    let events = lines.filter(|line| line["method"] == "event").take(4);
    let words: Vec<String> =
        events.map(|line| format!("{} {}", line["params"]["device"], line["params"]["event"])).collect();
    assert_eq!(words, [r#""a" "added""#, r#""a" "removed""#, r#""b" "added""#, r#""b" "removed""#]);
}

/// Subscribers leave after their call, within the next one, with answers unread, or in one direction only.
#[test]
fn those_that_leave_leave_nothing_behind() {
    let rig = Rig::new();
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let mut watcher = events(subscribe(&rig, &["events.subscribe", "stats.subscribe"]), "a");
    let before = descriptors();
    for round in 0..300 {
        let mut stream = rig.stream();
        send(&mut stream, "events.subscribe", &json!({}));
        send(&mut stream, "stats.subscribe", &json!({ "interval": "100ms" }));
        match round % 4 {
            0 => drop(stream),
            1 => {
                stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":2,\"meth").unwrap();
                drop(stream);
            }
            2 => {
                // The end of what it sends ends the subscription too.
                stream.shutdown(Shutdown::Write).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                stream.read_to_end(&mut Vec::new()).unwrap();
            }
            _ => {
                stream.shutdown(Shutdown::Read).unwrap();
                drop(stream);
            }
        }
    }
    add_and_remove(&rig, "a");
    assert_eq!(watcher.by_ref().take(2).collect::<Vec<_>>(), ["added", "removed"]);
    eventually("descriptors are left", || descriptors() <= before);
}

/// A device that comes and goes all the time makes events for each subscriber, and none of another device.
#[test]
fn devices_that_come_and_go_all_the_time() {
    let rig = &Rig::new();
    let mut watched = subscribe(rig, &["events.subscribe"]);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..200 {
                let mut client = rig.client();
                call(&mut client, "device.add", rig.toy("a")).unwrap();
                call(&mut client, "device.remove", json!({ "name": "a" })).unwrap();
            }
            call(&mut rig.client(), "device.add", rig.toy("last")).unwrap();
        });
        let mut is_there = false;
        loop {
            let event = watched.next().unwrap()["params"].take();
            match (event["device"].as_str().unwrap(), event["event"].as_str().unwrap()) {
                ("a", "added") => assert!(!std::mem::replace(&mut is_there, true), "added twice"),
                ("a", "removed") => assert!(std::mem::replace(&mut is_there, false), "removed twice"),
                // It may be seen while it is removed.
                ("a", _) => assert!(is_there),
                ("last", "added") => break,
                other => panic!("{other:?}"),
            }
        }
    });
}
