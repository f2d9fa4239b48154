//! Connections that come in masses or end in the middle leave nothing behind. This is one test, because it
//! counts what the process holds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::io::Write;
use std::net::Shutdown;

use common::{Rig, call};
use kickless_control::server::CLIENTS_MAX;
use kickless_testing::{Random, Resources, eventually};
use serde_json::json;

#[test]
fn connections_leave_nothing() {
    a_thousand_connections_do_not_keep_an_operator_out();
    clients_that_leave_in_the_middle();
}

fn a_thousand_connections_do_not_keep_an_operator_out() {
    let rig = Rig::new();
    let before = Resources::now();
    let mut silent = Vec::new();
    for n in 0..1000 {
        let stream = rig.stream();
        if n % 2 == 0 {
            // The daemon may have disconnected this one already.
            let _ = (&stream).write_all(b"{\"half\":");
        }
        silent.push(stream);
    }
    let mut client = rig.client();
    for _ in 0..10 {
        call(&mut client, "daemon.info", json!({})).unwrap();
    }
    let ours = before.descriptors + silent.len() + 1;
    eventually("the daemon has too many connections", || Resources::now().descriptors <= ours + CLIENTS_MAX);
    drop((silent, client));
    before.wait_until_back();
}

fn clients_that_leave_in_the_middle() {
    let rig = Rig::new();
    let before = Resources::now();
    for seed in 0..100 {
        let mut random = Random(seed);
        let mut stream = rig.stream();
        let add = json!({ "jsonrpc": "2.0", "id": 1, "method": "device.add", "params": rig.toy("a") });
        let remove =
            json!({ "jsonrpc": "2.0", "id": 2, "method": "device.remove", "params": { "name": "a" } });
        let text = format!("{add}\n{remove}\n{add}\n");
        let cut = random.below(text.len() as u64 + 1) as usize;
        let _ = stream.write_all(&text.as_bytes()[..cut]);
        if random.below(2) == 0 {
            let _ = stream.shutdown(Shutdown::Write);
        }
        drop(stream);
    }
    let mut client = rig.client();
    // Calls of clients that have left may still be executed, and add the device again. This client has a
    // thread.
    eventually("something stays", || {
        call(&mut client, "device.remove", json!({ "name": "a" })).is_ok()
            && Resources::now().threads <= before.threads + 1
            && Resources::now().descriptors <= before.descriptors + 2
    });
    drop(client);
    before.wait_until_back();
}
