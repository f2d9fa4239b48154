//! Clients that break the protocol, send too much, or leave at the wrong time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{Rig, answer, call, is_closed};
use kickless_control::LINE_BYTES_MAX;
use serde_json::json;

#[test]
fn half_lines_and_lines_in_pieces() {
    let rig = Rig::new();
    let mut stream = rig.stream();
    for piece in ["{\"jsonrpc\":\"2.", "0\",\"id\":1,\"meth", "od\":\"daemon.info\"}", "\n"] {
        stream.write_all(piece.as_bytes()).unwrap();
    }
    assert_eq!(answer(&stream)["id"], 1);
    // A half line, and then the end.
    stream.write_all(b"{\"jsonrpc\":").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    is_closed(&stream);
    // Requests before the end are answered.
    let mut stream = rig.stream();
    stream.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"device.list\"}\n\n\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(answer(&stream)["result"], json!([]));
    is_closed(&stream);
}

#[test]
fn a_line_of_100_megabytes_is_refused_and_not_kept() {
    let rig = Rig::new();
    let mut stream = rig.stream();
    let piece = vec![b'a'; 1 << 20];
    let mut sent = 0;
    let refused = loop {
        match stream.write(&piece) {
            Ok(len) => sent += len,
            Err(error) => break error,
        }
        assert!(sent < 100 << 20, "it was read to its end");
    };
    assert!(matches!(refused.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{refused}");
    assert!(call(&mut rig.client(), "daemon.info", json!({})).is_ok());
}

#[test]
fn the_longest_line_is_served_and_one_byte_more_is_not() {
    let rig = Rig::new();
    for (more, served) in [(0, true), (1, false)] {
        let request = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.info\"}";
        let blanks = " ".repeat(LINE_BYTES_MAX + more - request.len());
        let mut stream = rig.stream();
        stream.write_all(format!("{request}{blanks}\n").as_bytes()).unwrap();
        let answer = answer(&stream);
        assert_eq!(answer["result"].is_object(), served, "{answer}");
        if !served {
            assert!(answer["error"]["message"].as_str().unwrap().contains("longer"), "{answer}");
            is_closed(&stream);
        }
    }
}

#[test]
fn wrong_types_get_errors() {
    let rig = Rig::new();
    let mut client = rig.client();
    for method in kickless_control::METHODS {
        for value in [json!(null), json!(7), json!("x"), json!([]), json!({}), json!(true), json!(1e300)] {
            for key in ["name", "mode", "timeout", "socket-path", "toy", "poll", "filter", "zz"] {
                // `stats.get` serves no such device, and `log.set` knows no such filter.
                let refused = call(&mut client, method.name, json!({ key: value }));
                assert!(refused.is_err() || method.name == "device.remove", "{} {key} {value}", method.name);
            }
        }
        let mut stream = rig.stream();
        for params in ["7", "[7]", "\"x\"", "true"] {
            let line = format!(
                "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{}\",\"params\":{params}}}\n",
                method.name
            );
            stream.write_all(line.as_bytes()).unwrap();
            assert_eq!(answer(&stream)["error"]["code"], -32602, "{line}");
        }
    }
    assert!(rig.registry.list().is_empty());
}

#[test]
fn clients_that_never_read_take_one_answer_each() {
    let rig = Rig::new();
    let mut client = rig.client();
    let mut silent: Vec<UnixStream> = (0..8).map(|_| rig.stream()).collect();
    for stream in &mut silent {
        stream.set_nonblocking(true).unwrap();
        let line = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"rpc.discover\"}\n";
        // Until neither the kernel nor the daemon takes more.
        while stream.write(line).is_ok() {}
        assert!(call(&mut client, "daemon.info", json!({})).is_ok());
    }
}

#[test]
fn many_clients_at_once() {
    let (rig, over) = (&Rig::new(), &AtomicBool::new(false));
    thread::scope(|scope| {
        for name in ["a", "b", "c", "d"] {
            scope.spawn(move || {
                let mut client = rig.client();
                for _ in 0..50 {
                    call(&mut client, "device.add", rig.toy(name)).unwrap();
                    let removed = call(&mut client, "device.remove", json!({ "name": name }));
                    assert_eq!(removed, Ok(json!({ "removed": true })));
                }
                over.store(true, Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            let mut client = rig.client();
            while !over.load(Ordering::Relaxed) {
                call(&mut client, "daemon.snapshot", json!({})).unwrap();
                call(&mut client, "config.save", json!({})).unwrap();
            }
        });
    });
    assert!(rig.registry.list().is_empty());
}
