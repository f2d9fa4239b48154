//! Runs cards with the port `xdp:IFNAME` at both ends of a pair of interfaces, with real workers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use kickless_driver::{Card, CardOptions, Interest, Outgoing, QueuePair};
use kickless_testing::{LIMIT, eventually, in_network_namespace, ip};
use kickless_tests::daemon::{CardConfig, Daemon, card_counter, child_command, kickless_binary};
use std::time::Duration;

/// Frames that are on their way at the same time, of which an interface has room for 1024.
const IN_FLIGHT: usize = 100;

fn frame(len: usize, number: u64) -> Vec<u8> {
    let head = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 0x88, 0xb5], &number.to_le_bytes()].concat();
    head.iter().copied().chain(0u8..=255).cycle().take(len).collect()
}

/// Returns the options of a card. A sandbox has no room for a library that loads programs into the kernel.
fn card(port: &str, arguments: &[&str]) -> CardConfig {
    CardConfig::new(port).with(&[&["--sandbox=off"], arguments].concat())
}

fn connect(daemon: &Daemon) -> (Card, QueuePair) {
    let card = Card::connect(CardOptions::new(daemon.socket())).unwrap();
    let pair = card.pair(0).unwrap();
    (card, pair)
}

/// Sends frames with these numbers, of several lengths, and takes each at the other card.
fn carry(from: &mut QueuePair, to: &mut QueuePair, numbers: std::ops::Range<u64>) {
    let len = |number: u64| [60, 61, 1000, 1514][(number % 4) as usize];
    let (mut sent, mut received) = (numbers.start, numbers.start);
    while received < numbers.end {
        while sent < numbers.end && sent - received < IN_FLIGHT as u64 {
            let bytes = frame(len(sent), sent);
            if from.send(&[Outgoing::from(&bytes[..])]).unwrap() == 0 {
                break;
            }
            sent += 1;
        }
        assert!(to.wait(Interest::Receive, Some(Duration::from_secs(30))).unwrap(), "no frame comes");
        to.receive(64, |got| {
            assert!(got.to_vec() == frame(len(received), received), "{received}");
            received += 1;
        })
        .unwrap();
    }
}

#[test]
fn frames_pass_between_two_interfaces_and_after_a_kill() {
    in_network_namespace(|| {
        ip("link add left type veth peer name right");
        for name in ["left", "right"] {
            ip(&format!("link set {name} up"));
        }
        let config = card("xdp:left", &[]);
        let mut left = Daemon::start_card(&config).unwrap();
        let right = Daemon::start_card(&card("xdp:right,queue=0", &["--poll=never"])).unwrap();
        let (_right_card, mut to) = connect(&right);
        let (card, mut from) = connect(&left);
        carry(&mut from, &mut to, 0..5000);
        carry(&mut to, &mut from, 0..5000);
        drop((card, from));
        // The kernel takes the program and the queue away from a process that is killed.
        left.kill_and_restart_card(&config).unwrap();
        let (_left_card, mut from) = connect(&left);
        let mut is_through = false;
        eventually("a frame comes", || {
            from.send(&[Outgoing::from(&frame(60, 1)[..])]).unwrap();
            to.receive(64, |got| is_through |= got.to_vec() == frame(60, 1)).unwrap();
            is_through
        });
        while to.wait(Interest::Receive, Some(Duration::from_millis(50))).unwrap() {
            to.receive(64, |_| {}).unwrap();
        }
        carry(&mut from, &mut to, 0..2000);
        // A card that nobody reads from costs the sender nothing.
        for number in 0..5000 {
            from.send(&[Outgoing::from(&frame(60, number)[..])]).unwrap();
        }
        eventually("all frames are sent", || from.send(&[Outgoing::from(&frame(60, 9)[..])]).unwrap() == 1);
        // Both workers sleep, or will.
        ip("link del left");
        for daemon in [&left, &right] {
            let says = |line: &str| line.contains("the interface was deleted or moved").then_some(());
            daemon.log().wait_for("the interface is gone", LIMIT, says).unwrap();
        }
        for daemon in [left, right] {
            let (status, log) = daemon.stop().unwrap();
            assert_eq!(status.code(), Some(0));
            assert_eq!(card_counter(&log, "sent_refused").unwrap_or(0), 0);
            assert!(!log.iter().any(|line| line.contains("panicked")));
        }
    });
}

/// Root of a user namespace has all capabilities there, and none that counts.
#[test]
fn root_of_a_user_namespace_is_told_that_the_host_decides() {
    let dir = tempfile::tempdir().unwrap();
    let script = "ip link add left type veth peer name right || exit 7
        ulimit -l 64; exec \"$0\" net --sandbox=off --port=xdp:left --socket-path=\"$1/socket\"";
    let output = child_command("unshare")
        .args(["--user", "--map-root-user", "--net", "sh", "-c", script])
        .args([kickless_binary().unwrap().as_os_str(), dir.path().as_os_str()])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    if output.status.code() != Some(1) || error.contains("unshare:") {
        println!("skipped, because there is no user namespace: {error}");
        return;
    }
    assert!(error.contains("needs the capability CAP_BPF of the host"), "{error}");
}

#[test]
fn an_operator_without_privileges_gets_one_sentence() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: this needs root to become another user");
        return;
    }
    in_network_namespace(|| {
        ip("link add left type veth peer name right");
        let config = CardConfig { is_unprivileged: true, ..card("xdp:left", &[]) };
        let error = format!("{:#}", Daemon::start_card(&config).err().unwrap());
        let sentence = "port xdp:left: AF_XDP needs privileges that this process lacks (CAP_NET_ADMIN, CAP_NET_RAW, \
                        CAP_BPF): start it as root";
        assert!(error.contains(sentence), "{error}");
    });
}
