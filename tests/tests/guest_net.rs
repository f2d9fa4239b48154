//! Runs network cards with a null port in Linux guests: their properties, their frames, and resets, hot
//! plugs, migrations and kills meanwhile.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers fail by panicking")]

use kickless_tests::daemon::{CardConfig, Daemon, card_counter};
use kickless_tests::guest::migration::Destination;
use kickless_tests::guest::qemu::{Guest, GuestConfig, LIMIT, NicConfig, Results};
use kickless_tests::guest::scratch::numbers;
use rustix::process::Signal;

/// The test frames per second to each pair of queues.
const RATE: u32 = 500;
/// Kernel option for all guests of these tests, so that the guest sends no frames by itself.
const QUIET: &str = "ipv6.disable=1";

/// Returns a card that receives test frames.
fn receiving_card() -> CardConfig {
    CardConfig::new(&format!("null,rate={RATE}"))
}

fn guest(task: &str, cpus: u32, nics: Vec<NicConfig>) -> GuestConfig {
    GuestConfig { nics, ..GuestConfig::new(&format!("{QUIET} {task}"), Vec::new()).cpus(cpus) }
}

/// Ends a daemon. Checks that its log has no warning and no error. Returns the log.
fn end(daemon: Daemon) -> Vec<String> {
    let (log, trouble) = end_with_trouble(daemon);
    assert!(trouble.is_empty(), "{trouble:#?}");
    log
}

/// Ends a daemon. Returns its log, and the warnings and errors in it.
fn end_with_trouble(daemon: Daemon) -> (Vec<String>, Vec<String>) {
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    let is_trouble = |line: &&String| line.contains(" WARN ") || line.contains(" ERROR ");
    let trouble = log.iter().filter(is_trouble).cloned().collect();
    (log, trouble)
}

/// Checks that a daemon has released all resources of its guests, then ends it. Returns the log.
fn end_without_guests(daemon: Daemon, before: (usize, usize)) -> Vec<String> {
    daemon.returns_to(before).unwrap();
    end(daemon)
}

fn number(results: &Results, key: &str) -> u64 {
    numbers(results, key).unwrap()[0]
}

/// Compares the counters of a card in its guest with the counters of its daemon.
fn compare_counters(results: &Results, nic: &str, log: &[String], pairs: u64) {
    let of = |key: &str| number(results, &format!("{nic}.{key}"));
    let counted = |name: &str| card_counter(log, name).unwrap();
    assert_eq!(counted("sent_frames"), of("tx_packets"), "{nic}");
    assert_eq!(counted("sent_bytes"), of("tx_bytes"), "{nic}");
    assert_eq!((counted("sent_invalid"), of("tx_errors"), of("tx_dropped")), (0, 0, 0), "{nic}");
    // Frames come until the end, so the daemon has delivered more than the guest counted.
    assert!(counted("received_frames") >= of("rx_packets"), "{nic}");
    assert!(counted("received_bytes") >= of("rx_bytes"), "{nic}");
    // The guest drops frames while no program wants them.
    assert_eq!((of("rx_errors"), counted("dropped_long")), (0, 0), "{nic}");
    assert_eq!((of("gaps"), of("restarts"), of("lost")), (0, 0, 0), "{nic}");
    assert!(of("rx_packets") >= of("frames"), "{nic}");
    assert_eq!(of("pairs"), (1 << pairs) - 1, "{nic}: a bit for each pair that frames came from");
}

/// Runs cards with each ring format, with one pair of queues and with two. Each has the requested properties.
#[test]
fn frames_in_both_directions() {
    // These frames do not fit into one receive buffer, so the driver merges buffers.
    let long =
        CardConfig::new(&format!("null,rate={RATE},length=60-9014")).with(&["--mac=52:54:00:00:00:99"]);
    let mut served = Vec::new();
    let mut nics = Vec::new();
    for (card, pairs, properties) in [
        (receiving_card(), 1, "packed=off,mac=52:54:00:00:00:01"),
        (receiving_card(), 1, "packed=on,mac=52:54:00:00:00:02,host_mtu=1400"),
        (long.clone(), 2, "packed=off,mac=52:54:00:00:00:03,host_mtu=9000"),
        (long, 2, "packed=on,event_idx=off,mac=52:54:00:00:00:04,host_mtu=9000"),
    ] {
        let daemon = Daemon::start_card(&card).unwrap();
        nics.push(NicConfig::new(daemon.socket(), pairs, properties));
        served.push((daemon, u64::from(pairs), properties));
    }
    let results = Guest::start(&guest("kl.task=net kl.frames=200", 2, nics)).unwrap().finish().unwrap();
    for (index, (daemon, pairs, properties)) in served.into_iter().enumerate() {
        let nic = format!("eth{index}");
        let result = |key: &str| results[&format!("{nic}.{key}")].as_str();
        let on = |property: &str| if properties.contains(property) { "1" } else { "0" };
        assert_eq!(result("mac"), format!("52:54:00:00:00:0{}", index + 1));
        assert_eq!(result("mtu"), ["1500", "1400", "9000", "9000"][index]);
        assert_eq!((result("packed"), result("merges")), (on("packed=on"), "1"), "{nic}");
        assert_eq!(
            result("event_idx"),
            if properties.contains("event_idx=off") { "0" } else { "1" },
            "{nic}"
        );
        assert_eq!(
            (result("mq"), result("pairs_used")),
            if pairs > 1 { ("1", "2") } else { ("0", "1") },
            "{nic}"
        );
        assert_eq!(
            result("source"),
            if pairs > 1 { "52:54:00:00:00:99" } else { "02:6b:6b:6c:00:01" },
            "{nic}"
        );
        let longest = number(&results, &format!("{nic}.longest"));
        assert!(if pairs > 1 { longest > 8000 } else { longest > 1300 }, "{nic}: {longest} bytes at most");
        let log = end(daemon);
        compare_counters(&results, &nic, &log, pairs);
    }
}

/// The guest unbinds and binds the driver while one card receives, and the rings of the other cards are idle
/// and full of credit. Then the machine is reset. One idle card is behind a vIOMMU, which invalidates the
/// translation of each frame that this card sends.
#[test]
fn driver_and_machine_resets() {
    const ROUNDS: u32 = 3;
    let busy = Daemon::start_card(&receiving_card()).unwrap();
    let idle = [(); 2].map(|()| Daemon::start_card(&CardConfig::new("null")).unwrap());
    let before = (busy.holdings().unwrap(), idle.each_ref().map(|daemon| daemon.holdings().unwrap()));
    let nics = vec![
        NicConfig::new(busy.socket(), 2, ""),
        NicConfig::new(idle[0].socket(), 1, "packed=on"),
        NicConfig::new(idle[1].socket(), 1, "iommu_platform=on,ats=on,disable-legacy=on"),
    ];
    let task = format!("kl.task=rebind,exchange kl.receivers=eth0 kl.frames=1 kl.rounds={ROUNDS}");
    let config = GuestConfig { resets: true, viommu: true, ..guest(&task, 2, nics) };
    let mut guest = Guest::start(&config).unwrap();
    guest.wait_for("exchange=flowing").unwrap();
    guest.reset().unwrap();
    let seen = guest.results().len();
    let is_flowing = |line: &str| (line == "KL: exchange=flowing").then_some(());
    guest.results().wait_from(seen, "frames after a reset", LIMIT, is_flowing).unwrap();
    guest.tell("enough").unwrap();
    guest.finish().unwrap();
    let log = end_without_guests(busy, before.0);
    assert!(card_counter(&log, "received_frames").unwrap() > 0);
    for (number, (daemon, before)) in idle.into_iter().zip(before.1).enumerate() {
        let log = end_without_guests(daemon, before);
        assert!(card_counter(&log, "sent_frames").unwrap() > 0);
        assert_eq!(card_counter(&log, "received_frames").unwrap(), 0);
        if number == 1 {
            check_invalidations(&log);
        }
    }
}

/// Cards are unplugged while they receive, and while they are idle. The last one stays and is checked.
#[test]
fn plugged_and_unplugged() {
    for (card, frames) in [(receiving_card(), "kl.frames=200"), (CardConfig::new("null"), "")] {
        let daemon = Daemon::start_card(&card).unwrap();
        let before = daemon.holdings().unwrap();
        let task = format!("kl.task=cards kl.rounds=2 {frames}");
        let mut guest = Guest::start(&guest(&task, 1, Vec::new())).unwrap();
        let nic = NicConfig::new(daemon.socket(), 1, "");
        guest.wait_for("cpus=1").unwrap();
        for round in 1..=2 {
            guest.add_nic(&format!("hot{round}"), &nic).unwrap();
            guest.wait_for(&format!("cards=flowing {round}")).unwrap();
            guest.remove_nic(&format!("hot{round}")).unwrap();
            guest.wait_for(&format!("cards=gone {round}")).unwrap();
        }
        guest.add_nic("last", &nic).unwrap();
        let results = guest.finish().unwrap();
        assert_eq!(results["eth0.checked"], "yes");
        end_without_guests(daemon, before);
    }
}

/// Memory is plugged while one card receives and another one is idle.
#[test]
fn memory_plugged() {
    let (busy, idle) = (
        Daemon::start_card(&receiving_card()).unwrap(),
        Daemon::start_card(&CardConfig::new("null")).unwrap(),
    );
    let nics = vec![NicConfig::new(busy.socket(), 1, ""), NicConfig::new(idle.socket(), 1, "packed=on")];
    let mut guest = Guest::start(&guest("kl.task=card_memory kl.receivers=eth0", 1, nics)).unwrap();
    guest.wait_for("memory=ready").unwrap();
    guest.add_memory("dimm1", 256).unwrap();
    let results = guest.finish().unwrap();
    assert!(number(&results, "memory.added") > 0);
    end(busy);
    end(idle);
}

/// A vIOMMU translates the addresses of rings and buffers. It invalidates each translation after the buffer
/// is used.
#[test]
fn behind_a_viommu() {
    let mut served = Vec::new();
    let mut nics = Vec::new();
    for packed in ["off", "on"] {
        let daemon = Daemon::start_card(&receiving_card()).unwrap();
        let properties = format!("iommu_platform=on,ats=on,disable-legacy=on,packed={packed}");
        nics.push(NicConfig::new(daemon.socket(), 2, &properties));
        served.push(daemon);
    }
    let config = GuestConfig { viommu: true, ..guest("kl.task=net kl.frames=100", 2, nics) };
    let results = Guest::start(&config).unwrap().finish().unwrap();
    for (index, daemon) in served.into_iter().enumerate() {
        let log = end(daemon);
        compare_counters(&results, &format!("eth{index}"), &log, 2);
        check_invalidations(&log);
    }
}

/// Checks that a vIOMMU has invalidated translations of a session.
fn check_invalidations(log: &[String]) {
    let translations = log.iter().find(|line| line.contains("translations of a vIOMMU")).unwrap();
    println!("{translations}");
    assert!(!translations.contains("invalidations=0"), "{translations}");
}

/// A guest moves to another QEMU with other daemons while its cards receive and send.
#[test]
fn moves_while_it_receives() {
    let start_daemons = || {
        let cards = [receiving_card(), CardConfig::new(&format!("null,rate={RATE}"))];
        cards.map(|card| Daemon::start_card(&card).unwrap())
    };
    let machine = |daemons: &[Daemon; 2]| {
        let nics = [("packed=off", &daemons[0]), ("packed=on", &daemons[1])];
        let nics = nics.map(|(properties, daemon)| NicConfig::new(daemon.socket(), 1, properties));
        guest("kl.task=exchange kl.receivers=eth0,eth1 init_on_alloc=0", 1, nics.into())
    };
    let (from, to) = (start_daemons(), start_daemons());
    let mut guest = Guest::start(&machine(&from)).unwrap();
    guest.wait_for("exchange=flowing").unwrap();
    let destination = Destination::start(&machine(&to)).unwrap();
    let (mut moved, _) = destination.receive(&mut guest, |_| {}).unwrap();
    guest.kill().unwrap();
    wait_for_exchange(&moved, 0);
    moved.tell("enough").unwrap();
    moved.finish().unwrap();
    for (number, daemon) in from.into_iter().chain(to).enumerate() {
        let (log, trouble) = end_with_trouble(daemon);
        // The packed rings move in without an in-flight buffer.
        let is_expected = |line: &String| number == 3 && line.contains("a packed ring continues");
        assert!(trouble.iter().all(is_expected), "{number}: {trouble:#?}");
        assert!(card_counter(&log, "received_frames").unwrap() > 0);
        assert!(card_counter(&log, "sent_frames").unwrap() > 0);
    }
}

/// Waits until a guest has received and sent on all its cards twice, after line `seen` of its results. One
/// exchange is not enough, because it may have begun before that line.
fn wait_for_exchange(guest: &Guest, seen: usize) {
    let mut times = 0;
    let twice = |line: &str| match line {
        "KL: end=failed" => panic!("{}", guest.last_words()),
        _ => {
            times += u32::from(line.starts_with("KL: progress.exchanged="));
            (times == 2).then_some(())
        }
    };
    guest.results().wait_from(seen, "frames in both directions", LIMIT, twice).unwrap();
}

/// The daemon is killed and restarted several times while frames flow. The guest's card continues.
#[test]
fn continues_after_kills() {
    let card = receiving_card();
    let mut daemon = Daemon::start_card(&card).unwrap();
    let nic = NicConfig::new(daemon.socket(), 2, "").reconnecting();
    let mut guest = Guest::start(&guest("kl.task=exchange kl.receivers=eth0", 2, vec![nic])).unwrap();
    guest.wait_for("exchange=flowing").unwrap();
    for _ in 0..3 {
        let seen = guest.results().len();
        daemon.kill_and_restart_card(&card).unwrap();
        wait_for_exchange(&guest, seen);
    }
    guest.tell("enough").unwrap();
    guest.finish().unwrap();
    let log = end(daemon);
    assert!(card_counter(&log, "received_frames").unwrap() > 0);
    assert!(card_counter(&log, "sent_frames").unwrap() > 0);
}

/// The signal USR1 logs the counters of a card that runs.
#[test]
fn counters_on_demand() {
    let daemon = Daemon::start_card(&CardConfig::new("null")).unwrap();
    daemon.signal(Signal::USR1).unwrap();
    let counters = |line: &str| line.contains(" counters device sent_frames=0 ").then_some(());
    daemon.log().wait_for("counters", LIMIT, counters).unwrap();
    end(daemon);
}
