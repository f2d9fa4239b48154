//! Runs a card with the port `user` as a user without any privilege.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, Outgoing};
use kickless_testing::{eventually, in_network_namespace, ip};
use kickless_tests::daemon::{CardConfig, Daemon};
use std::fs;
use std::path::Path;

/// Returns a broadcast that asks for an address (RFC 2131).
fn discover() -> Vec<u8> {
    let mac = [2, 0, 0, 0, 0, 7];
    let mut bootp = vec![1, 1, 6, 0, 1, 2, 3, 4];
    bootp.resize(28, 0);
    bootp.extend(mac);
    bootp.resize(236, 0);
    bootp.extend([99, 130, 83, 99, 53, 1, 1, 255]);
    let udp_len = (8 + bootp.len()) as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255];
    packet[2..4].copy_from_slice(&(20 + udp_len).to_be_bytes());
    let sum: u32 = packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    packet[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    packet.extend([0, 68, 0, 67]);
    packet.extend(udp_len.to_be_bytes());
    packet.extend([0, 0]);
    [&[0xff; 6], &mac[..], &[8, 0], &packet, &bootp].concat()
}

/// Returns the value of a field in the status of a process.
fn status_of(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn a_guest_has_a_network_without_root() {
    let has_passt = ["/usr/bin/passt", "/usr/local/bin/passt"].iter().any(|path| Path::new(path).exists());
    if !has_passt || !rustix::process::geteuid().is_root() {
        println!("skipped: this needs passt, and root to become another user");
        return;
    }
    in_network_namespace(|| {
        ip("link set dev lo up");
        ip("link add up0 type veth peer name up1");
        for command in ["link set up1 up", "link set up0 up", "addr add 10.78.0.2/24 dev up0"] {
            ip(command);
        }
        ip("route add default via 10.78.0.1");
        let config = CardConfig { is_unprivileged: true, ..CardConfig::new("user,-4") };
        let daemon = Daemon::start_card(&config).unwrap();
        let pid = daemon.pid();
        assert_eq!([status_of(pid, "Uid:"), status_of(pid, "CapEff:")], ["65534", "0000000000000000"]);
        let card = Card::connect(CardOptions::new(daemon.socket())).unwrap();
        let mut pair = card.pair(0).unwrap();
        let discover = discover();
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
