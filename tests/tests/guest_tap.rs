//! Runs network cards on TAPs in Linux guests. All networks are in a namespace of the test: a bridge for each
//! card, at which the host has an address with an echo server. Guests send data there and compare what comes
//! back, while they are reset, moved or killed, and while daemons are killed.
//!
//! KICKLESS_MOVES and KICKLESS_KILLS set the number of migrations and of kills.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers fail by panicking")]

use std::time::Instant;
use std::{env, thread};

use kickless_memory::Iov;
use kickless_net_port::{Offloads, Tap, TapQueue};
use kickless_spec::net::Header;
use kickless_testing::{in_network_namespace, ip};
use kickless_tests::daemon::{CardConfig, Daemon, card_counter};
use kickless_tests::guest::migration::Destination;
use kickless_tests::guest::network::{Iperf, network};
use kickless_tests::guest::qemu::{Guest, GuestConfig, LIMIT, NicConfig, Results};
use kickless_tests::guest::scratch::numbers;

/// Kernel option for all guests of these tests.
const QUIET: &str = "ipv6.disable=1";

/// Returns the number of rounds that this variable sets.
fn rounds(variable: &str, default: usize) -> usize {
    env::var(variable).map_or(default, |text| text.parse().unwrap())
}

fn card(tap: &str, pairs: u16) -> CardConfig {
    CardConfig::new(&format!("tap:{tap}")).with(&[&format!("--num-queue-pairs={pairs}")])
}

fn guest(cpus: u32, kib: u32, nics: Vec<NicConfig>) -> GuestConfig {
    let task = format!("{QUIET} kl.task=echo kl.kib={kib} init_on_alloc=0");
    GuestConfig { nics, ..GuestConfig::new(&task, Vec::new()).cpus(cpus) }
}

/// Waits until a guest has echoed data through all its cards twice, after line `seen` of its results. One
/// round is not enough, because it may have begun before that line.
fn wait_for_echo(guest: &Guest, seen: usize) {
    let mut times = 0;
    let twice = |line: &str| match line {
        "KL: end=failed" => panic!("{}", guest.last_words()),
        _ => {
            times += u32::from(line.starts_with("KL: progress.echoed="));
            (times == 2).then_some(())
        }
    };
    guest.results().wait_from(seen, "data that is echoed", LIMIT, twice).unwrap();
}

/// Ends a daemon. Returns its log, which has no error, and no warning but those with the `expected` words.
fn end(daemon: Daemon, expected: &str) -> Vec<String> {
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    let is_trouble = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
    let trouble = log.iter().filter(is_trouble);
    let trouble: Vec<_> = trouble.filter(|line| expected.is_empty() || !line.contains(expected)).collect();
    assert!(trouble.is_empty(), "{trouble:#?}");
    log
}

/// Checks that no frame was invalid, and that some passed in both directions.
fn check_counters(log: &[String]) {
    let counted = |name: &str| card_counter(log, name).unwrap();
    for name in
        ["sent_invalid", "sent_refused", "sent_down", "dropped_long", "dropped_offload", "dropped_unread"]
    {
        assert_eq!(counted(name), 0, "{name}");
    }
    assert!(counted("sent_frames") > 0 && counted("received_frames") > 0);
}

fn check_guest(results: &Results, nic: &str) {
    for key in ["rx_errors", "tx_errors", "tx_dropped"] {
        assert_eq!(numbers(results, &format!("{nic}.{key}")).unwrap()[0], 0, "{nic}.{key}");
    }
}

/// Four cards in one machine: with four pairs, with packed rings of 1024 entries, without offloads of the
/// guest, and with a card that offers none. The machine is reset meanwhile.
#[test]
fn data_passes_through_each_kind_of_card() {
    in_network_namespace(|| {
        let mut daemons = Vec::new();
        let mut nics = Vec::new();
        let no_offloads = "guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,csum=off,\
             host_tso4=off,host_tso6=off,host_ecn=off";
        for (number, (pairs, option, properties)) in [
            (4, "", "packed=off"),
            (1, "", "packed=on,rx_queue_size=1024,tx_queue_size=1024"),
            (1, "", no_offloads),
            (1, "--offload=off", "packed=on,mrg_rxbuf=off"),
        ]
        .into_iter()
        .enumerate()
        {
            let tap = format!("vm{number}");
            network(number, &[&tap], if pairs > 1 { "multi_queue" } else { "" }).unwrap();
            let mut config = card(&tap, pairs);
            config.arguments.extend((!option.is_empty()).then(|| option.to_owned()));
            let daemon = Daemon::start_card(&config).unwrap();
            let mac = format!("mac=52:54:00:00:00:0{number},{properties}");
            nics.push(NicConfig::new(daemon.socket(), pairs, &mac));
            daemons.push(daemon);
        }
        let config = GuestConfig { resets: true, ..guest(4, 300, nics) };
        let mut guest = Guest::start(&config).unwrap();
        wait_for_echo(&guest, 0);
        guest.reset().unwrap();
        let seen = guest.results().len();
        wait_for_echo(&guest, seen);
        guest.tell("enough").unwrap();
        let results = guest.finish().unwrap();
        assert_eq!(results["eth0.pairs_used"], "4");
        assert_eq!(results["eth1.packed"], "1");
        for (number, daemon) in daemons.into_iter().enumerate() {
            check_guest(&results, &format!("eth{number}"));
            check_counters(&end(daemon, ""));
        }
    });
}

/// Reads frames at a bridge until one is an announcement of this address: a RARP packet, or an ARP packet
/// that names the sender's own address.
fn wait_for_announcement(watch: &mut TapQueue, mac: [u8; 6], ethertype: [u8; 2]) {
    let begun = Instant::now();
    loop {
        let mut bytes = vec![0; 70_000];
        match watch.receive(&mut Header::default(), &mut Iov::default(), &mut bytes) {
            Ok(_) => {
                // The sender's and the target's IPv4 address are the same in an announcement by ARP.
                let announces = ethertype == [0x80, 0x35] || bytes[28..32] == bytes[38..42];
                if bytes[..6] == [0xff; 6] && bytes[6..12] == mac && bytes[12..14] == ethertype && announces {
                    return;
                }
            }
            Err(_) => thread::sleep(std::time::Duration::from_millis(5)),
        }
        assert!(begun.elapsed() < LIMIT, "no announcement of {mac:x?}");
    }
}

/// A guest moves to and fro between two QEMUs with other daemons and TAPs at the same bridges. One of its
/// cards announces itself, and for the other one the daemon does. One connection of iperf3 lasts all the
/// time. At the end, QEMU is killed under traffic.
#[test]
fn moves_under_traffic() {
    in_network_namespace(|| {
        network(0, &["a0", "b0"], "").unwrap();
        network(1, &["a1", "b1"], "").unwrap();
        let mut watches = [0, 1].map(|number| {
            let name = format!("watch{number}");
            let tap = Tap::open(&name, 1).unwrap();
            ip(&format!("link set {name} up master br{number}"));
            tap.set(Offloads::empty(), |_| true);
            let queue = tap.queue(0).unwrap();
            (tap, queue)
        });
        let start = |side: &str| [0, 1].map(|n| Daemon::start_card(&card(&format!("{side}{n}"), 1)).unwrap());
        let machine = |daemons: &[Daemon; 2]| {
            let properties = ["mac=52:54:00:00:00:10", "mac=52:54:00:00:00:11,guest_announce=off"];
            let nics = [0, 1].map(|n| NicConfig::new(daemons[n].socket(), 1, properties[n]));
            let task = format!("{QUIET} kl.task=echo kl.kib=40 kl.iperf=10.77.0.1 init_on_alloc=0");
            GuestConfig { nics: nics.into(), ..GuestConfig::new(&task, Vec::new()).cpus(1) }
        };
        let sides = [start("a"), start("b")];
        let before = sides.each_ref().map(|side| side.each_ref().map(|daemon| daemon.holdings().unwrap()));
        let iperf = Iperf::start("10.77.0.1").unwrap();
        let mut guest = Guest::start(&machine(&sides[0])).unwrap();
        wait_for_echo(&guest, 0);
        iperf.wait_for_data().unwrap();
        for round in 1..=rounds("KICKLESS_MOVES", 2) {
            for (_, watch) in &mut watches {
                // Announcements of an earlier move.
                while watch.receive(&mut Header::default(), &mut Iov::default(), &mut [0; 70_000]).is_ok() {}
            }
            let destination = Destination::start(&machine(&sides[round % 2])).unwrap();
            let (moved, finished) = destination.receive(&mut guest, |_| {}).unwrap();
            guest.kill().unwrap();
            guest = moved;
            println!("move {round}: {finished:?}");
            wait_for_announcement(&mut watches[0].1, [0x52, 0x54, 0, 0, 0, 0x10], [8, 6]);
            wait_for_announcement(&mut watches[1].1, [0x52, 0x54, 0, 0, 0, 0x11], [0x80, 0x35]);
            wait_for_echo(&guest, 0);
            iperf.wait_for_data().unwrap();
        }
        assert_eq!(iperf.connections(), 1, "iperf3 has connected anew");
        guest.kill().unwrap();
        for (daemon, before) in sides.into_iter().flatten().zip(before.into_iter().flatten()) {
            daemon.returns_to(before).unwrap();
            check_counters(&end(daemon, ""));
        }
    });
}

/// The daemon is killed and started anew while data passes. The guest's card goes on. Its rings are split.
#[test]
fn goes_on_after_kills() {
    in_network_namespace(|| {
        network(0, &["vm"], "multi_queue").unwrap();
        let config = card("vm", 2);
        let mut daemon = Daemon::start_card(&config).unwrap();
        let nic = NicConfig::new(daemon.socket(), 2, "packed=off").reconnecting();
        let mut guest = Guest::start(&guest(2, 40, vec![nic])).unwrap();
        wait_for_echo(&guest, 0);
        for _ in 0..rounds("KICKLESS_KILLS", 3) {
            let seen = guest.results().len();
            let log = daemon.kill_and_restart_card(&config).unwrap();
            let trouble = log.iter().find(|line| line.contains(" WARN ") || line.contains(" ERROR "));
            assert_eq!(trouble, None);
            wait_for_echo(&guest, seen);
        }
        guest.tell("enough").unwrap();
        check_guest(&guest.finish().unwrap(), "eth0");
        check_counters(&end(daemon, ""));
    });
}

/// A card is unplugged while data passes through its TAP, and plugged in again.
#[test]
fn a_card_is_unplugged_under_traffic() {
    in_network_namespace(|| {
        network(0, &["vm"], "").unwrap();
        let daemon = Daemon::start_card(&card("vm", 1)).unwrap();
        let before = daemon.holdings().unwrap();
        let task = format!("{QUIET} kl.task=echo_cards kl.rounds=2 kl.kib=2000");
        let mut guest = Guest::start(&GuestConfig::new(&task, Vec::new()).cpus(1)).unwrap();
        guest.wait_for("cpus=1").unwrap();
        for (round, properties) in [(1, "packed=off"), (2, "packed=on")] {
            guest.add_nic(&format!("hot{round}"), &NicConfig::new(daemon.socket(), 1, properties)).unwrap();
            guest.wait_for(&format!("cards=flowing {round}")).unwrap();
            guest.remove_nic(&format!("hot{round}")).unwrap();
            guest.wait_for(&format!("cards=gone {round}")).unwrap();
            daemon.returns_to(before).unwrap();
        }
        guest.add_nic("last", &NicConfig::new(daemon.socket(), 1, "")).unwrap();
        guest.wait_for("cards=flowing 3").unwrap();
        guest.tell("enough").unwrap();
        assert_eq!(guest.finish().unwrap()["eth0.echoed"], "yes");
        check_counters(&end(daemon, ""));
    });
}
