//! Runs a card with the port `user` as a user without any privilege.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, Outgoing};
use kickless_testing::{add_uplink, dhcp_discover, eventually, has_passt, in_network_namespace};
use kickless_tests::daemon::{CardConfig, Daemon};
use std::fs;

/// Returns the value of a field in the status of a process.
fn status_of(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn a_guest_has_a_network_without_root() {
    if !has_passt() || !rustix::process::geteuid().is_root() {
        println!("skipped: this needs passt, and root to become another user");
        return;
    }
    in_network_namespace(|| {
        add_uplink();
        let config = CardConfig { is_unprivileged: true, ..CardConfig::new("user,-4") };
        let daemon = Daemon::start_card(&config).unwrap();
        let pid = daemon.pid();
        assert_eq!([status_of(pid, "Uid:"), status_of(pid, "CapEff:")], ["65534", "0000000000000000"]);
        let card = Card::connect(CardOptions::new(daemon.socket())).unwrap();
        let mut pair = card.pair(0).unwrap();
        let discover = dhcp_discover();
        eventually("an address is offered", || {
            pair.send(&[Outgoing::from(&discover[..])]).unwrap();
            let mut is_offered = false;
            pair.receive(64, |frame| {
                let frame = frame.to_vec();
                is_offered |= frame.len() > 62 && frame[36..38] == [0, 68] && frame[58..62] == [10, 78, 0, 2];
            })
            .unwrap();
            is_offered
        });
        drop((pair, card));
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    });
}
