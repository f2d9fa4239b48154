//! Counts in the guest the notifications that polling avoids.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::scratch::numbers;
use rustix::thread::{CpuSet, sched_getaffinity};

const READS: u64 = 500;
/// A polled ring causes no notification. One may be on its way when polling begins.
const STRAY_NOTIFICATIONS: u64 = 2;

fn serve(poll: &str) -> Daemon {
    // All daemons that poll share one CPU, because the emulated guest needs another.
    let arguments = vec![format!("--poll={poll}"), format!("--cpu={}", first_cpu())];
    Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new("mem:64M") }).unwrap()
}

fn first_cpu() -> usize {
    let all = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap()
}

#[test]
fn a_guest_notifies_only_a_daemon_that_does_not_poll() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has these ways of polling");
        return;
    }
    let daemons = ["always", "always", "never", "never"].map(serve);
    let rings = ["event_idx=on", "event_idx=off"];
    let disks = daemons.iter().zip(rings.iter().cycle());
    let disks = disks.map(|(daemon, ring)| DiskConfig::new(daemon.socket(), &format!("num-queues=1,{ring}")));
    let task = format!("kl.task=notify kl.disks=vda,vdb,vdc,vdd kl.reads={READS} kl.depth=1");
    let results = Guest::start(&GuestConfig::new(&task, disks.collect())).unwrap().finish().unwrap();
    let number = |key: String| numbers(&results, &key).unwrap().iter().sum::<u64>();
    for (disk, ring) in ["vda", "vdb", "vdc", "vdd"].into_iter().zip(rings.into_iter().cycle()) {
        let [reads, notified] =
            ["reads", "notifications"].map(|what| number(format!("{disk}.depth1.{what}")));
        println!("{disk}, {ring}: {reads} reads, {notified} notifications");
        assert!(reads >= READS, "{disk}: {reads} reads");
        if disk <= "vdb" {
            assert!(
                notified <= STRAY_NOTIFICATIONS,
                "{disk} is always polled, but its guest sent {notified} notifications"
            );
        } else {
            assert!(notified > 0, "{disk} is never polled, but its guest sent no notification");
        }
    }
    for daemon in daemons {
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
}
