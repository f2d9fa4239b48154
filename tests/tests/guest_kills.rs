//! Kills a daemon repeatedly under a guest's verified I/O. `KICKLESS_KILLS` is the number of kills.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::thread;
use std::time::Duration;

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, LIMIT};
use kickless_tests::guest::scratch::Scratch;
use kickless_tests::qcow2::Qcow2Image;

const CPUS: usize = 2;

#[test]
fn split() {
    killed("io_uring", "", false);
}

#[test]
fn packed() {
    killed("threads", "packed=on", false);
}

/// The tables of an image change with each kill. QEMU checks it afterwards.
#[test]
fn qcow2() {
    killed("io_uring", "", true);
}

/// Returns delays between 0 and 400 ms, the same in each run.
fn delays() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(1u64), |seed| Some(seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1)))
        .map(|seed| Duration::from_millis((seed >> 33) % 400))
}

fn killed(engine: &str, properties: &str, is_qcow2: bool) {
    if Program::from_environment() != Program::Kickless {
        return;
    }
    let kills = std::env::var("KICKLESS_KILLS").map_or(10, |kills| kills.parse().unwrap());
    let scratch = Scratch::new().unwrap();
    let raw = scratch.path().to_str().unwrap();
    let image = is_qcow2.then(|| {
        let image = Qcow2Image::empty().unwrap();
        let options = "cluster_size=4096";
        image.img(&["convert", "-f", "raw", "-O", "qcow2", "-o", options, raw, "disk"]).unwrap();
        image
    });
    let under = image.as_ref().map_or(raw.to_owned(), |image| format!("qcow2:{}", image.path().display()));
    // Some requests are slow, so that the requests in flight are not only the newest ones.
    let disk = format!("fault:delay=1ms-30ms@20%:{under}");
    let config = DaemonConfig {
        engine: Some(engine.to_owned()),
        arguments: vec!["--log-level=info,kickless_vhost=debug".to_owned()],
        ..DaemonConfig::new(disk)
    };
    let mut daemon = Daemon::start(&config).unwrap();
    let disk = DiskConfig::new(daemon.socket(), properties).reconnecting();
    let parameters = "kl.task=kills,check kl.size=16";
    let mut guest = Guest::start(&GuestConfig::new(parameters, vec![disk]).cpus(CPUS as u32)).unwrap();
    guest.wait_for("kills=ready").unwrap();
    guest.wait_for("progress.verified=1").unwrap();
    let (mut in_flight, mut again) = (0, 0u64);
    for moment in delays().take(kills) {
        thread::sleep(moment);
        daemon.kill_and_restart(&config).unwrap();
        // When all rings run, QEMU has completed its connection.
        let mut rings = 0;
        let runs = |line: &str| {
            rings += usize::from(line.contains("ring runs"));
            (rings == CPUS).then_some(())
        };
        daemon.log().wait_for("running all rings", LIMIT, runs).unwrap();
        let requests = |line: &String| {
            let (_, count) = line.split_once("requests=")?;
            count.split_whitespace().next()?.parse::<u64>().ok()
        };
        let found: u64 = daemon.log().grep("are done again").iter().filter_map(requests).sum();
        in_flight += u64::from(found > 0);
        again += found;
    }
    guest.tell("stop").unwrap();
    let results = guest.finish().unwrap();
    println!(
        "{kills} kills, {in_flight} of them with requests in flight, {again} done again; verified {} times",
        results["kills.verified"]
    );
    assert!(in_flight > 0, "no request was in flight at any kill");
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    if let Some(image) = image {
        assert_eq!(image.check().unwrap().corruptions, 0);
        image.img(&["convert", "-f", "qcow2", "-O", "raw", "disk", raw]).unwrap();
    }
    scratch.compare(&results, "vda").unwrap();
    assert!(!log.iter().any(|line| line.contains(" ERROR ")), "{log:#?}");
}
