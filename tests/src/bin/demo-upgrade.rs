//! Demonstrates upgrades. A Linux guest reads its disk with fio and pings the host through its card, while
//! one kickless after another takes over. `guest/demo-upgrade` runs this program.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use kickless_testing::in_network_namespace;
use kickless_tests::daemon::{Daemon, check_log};
use kickless_tests::guest::network::network;
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, LIMIT, NicConfig};
use kickless_tests::guest::{Accel, Assets, image_dir, make_image};

const UPGRADES: usize = 10;
const DISK_MIB: u64 = 64;
/// The length of a round, in which the guest watches one upgrade.
const SECONDS: u32 = 3;
/// The time from the beginning of a round to its upgrade.
const BEFORE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let upgrades = match std::env::args().nth(1).map(|text| text.parse()) {
        None => UPGRADES,
        Some(Ok(upgrades)) => upgrades,
        Some(Err(_)) => {
            eprintln!("usage: demo-upgrade [UPGRADES]");
            return ExitCode::from(2);
        }
    };
    let mut shown = Ok(());
    if !in_network_namespace(|| shown = demonstrate(upgrades)) {
        eprintln!("demo-upgrade: a TAP needs a network namespace, and so root");
        return ExitCode::FAILURE;
    }
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo-upgrade: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate(upgrades: usize) -> Result<()> {
    let started = Instant::now();
    let say = |text: &str| println!("[{:5.1} s] {text}", started.elapsed().as_secs_f64());
    let accel = match Assets::get()?.accel() {
        Accel::Kvm => "KVM",
        Accel::Tcg => "TCG, an emulated CPU: KVM does not work for this guest here",
    };
    say(&format!("guests run under {accel}"));
    network(0, &["vm"], "")?;
    let dir = image_dir()?;
    let image = dir.path().join("disk.img");
    make_image(&image, DISK_MIB, DISK_MIB)?;
    let disk = format!("blk-file = \"{}\"", image.display());
    let devices = [("disk", disk.as_str()), ("card", "port = \"tap:vm\"")];
    let mut daemon = Daemon::serve_with(&["--control"], "", &devices)?;
    say(&format!("kickless serves a disk and a card with packed rings (process {})", daemon.pid()));
    let disk = DiskConfig::new(&daemon.socket_of("disk"), "packed=on");
    let nics = vec![NicConfig::new(&daemon.socket_of("card"), 1, "packed=on")];
    let task = format!("ipv6.disable=1 kl.task=watch kl.rounds={upgrades} kl.seconds={SECONDS}");
    let guest = Guest::start(&GuestConfig { nics, ..GuestConfig::new(&task, vec![disk]) })?;
    // The first round has no upgrade, for comparison.
    for round in 0..=upgrades {
        guest.wait_for(&format!("round={round}"))?;
        let mut what = "no upgrade".to_owned();
        if round > 0 {
            thread::sleep(BEFORE);
            let before = daemon.pid();
            check_log(&daemon.upgrade()?)?;
            let (after, pause) = (daemon.pid(), daemon.stall_ms()?);
            what = format!("upgrade {round}, process {before} to {after}: pause {pause} ms");
        }
        let key = format!("KL: watch.{round}=");
        let of_round = |line: &str| line.strip_prefix(&key).map(str::to_owned);
        let seen = guest.results().wait_for("the results of a round", LIMIT, of_round)?;
        let numbers = seen.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>();
        let Ok([reads, longest_us, sent, came, longest_ms]) = numbers.as_deref() else { bail!("{seen}") };
        let fio = format!("fio {reads} reads/s, the longest {:.1} ms", longest_us / 1000.0);
        let ping = format!("ping {came} of {sent}, the longest {longest_ms:.1} ms");
        say(&format!("{what}; {fio}; {ping}"));
        // The last one may be on its way at the end of the round.
        ensure!(*came >= *sent - 1.0, "pings are lost");
    }
    guest.finish()?;
    let (status, log) = daemon.stop()?;
    ensure!(status.success(), "the daemon ended with {status}");
    check_log(&log)?;
    say("the guest has lost no read and no ping");
    Ok(())
}
