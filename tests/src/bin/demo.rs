//! Demonstrates a disk and network cards in stock Linux guests. kickless serves a scratch disk; the guest
//! makes a filesystem on it, uses it and measures the disk. Then it connects two guests by a switch, and
//! one of them to the host as a user without rights. `guest/demo` runs this program.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kickless_tests::daemon::{Daemon, DaemonConfig, card_counter};
use kickless_tests::guest::cards::{self, Outcome, follow};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::guest::scratch::numbers;
use kickless_tests::guest::{Accel, Assets, image_dir, make_image};

const CPUS: u32 = 4;
const DISK_MIB: u64 = 256;
/// How long each fio run lasts.
const FIO_SECONDS: u32 = 8;
/// Values of `--poll` for further disks. The guest reads each of these disks to count its notifications.
const POLLED: [&str; 2] = ["never", "auto"];
const READS: u32 = 60000;
const DEPTH: u32 = 32;
/// How long iperf3 runs.
const IPERF_SECONDS: u32 = 5;

const NEXT: &str = "next, try:
  make demo-migrate       a guest moves to another QEMU and another kickless while it works
  make demo-upgrade       a new kickless takes a working guest over
  docs/install.md         a disk and a card for a guest of your own";

fn main() -> ExitCode {
    match demonstrate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate() -> Result<()> {
    let started = Instant::now();
    let say = |text: &str| println!("[{:5.1} s] {text}", started.elapsed().as_secs_f64());
    say("looking for a way to run guests");
    let assets = Assets::get()?;
    let accel = match assets.accel() {
        Accel::Kvm => "KVM",
        Accel::Tcg => "TCG, an emulated CPU: KVM does not work for this guest here",
    };
    say(&format!("guests run under {accel}"));

    let dir = image_dir()?;
    let image = dir.path().join("demo.img");
    make_image(&image, DISK_MIB, DISK_MIB)?;
    let daemon = Daemon::start(&DaemonConfig::new(&image))?;
    say(&format!("kickless serves a scratch disk of {DISK_MIB} MiB (process {})", daemon.pid()));

    let disk = DiskConfig::new(daemon.socket(), "");
    let task = format!("kl.task=demo kl.seconds={FIO_SECONDS}");
    let guest = Guest::start(&GuestConfig::new(&task, vec![disk]).cpus(CPUS))?;
    say(&format!("QEMU boots Linux with {CPUS} CPUs on a vhost-user-blk-pci disk"));
    let outcome = follow(&guest, say).and_then(|()| guest.finish());
    let (status, log) = daemon.stop()?;
    let results = outcome.with_context(|| format!("the daemon said:\n{}", log.join("\n")))?;
    say("guest powered off");
    let table = Table::of(&results, &log)?;
    println!("\n{}", table.render(assets.accel(), &image));
    ensure!(status.success(), "the daemon ended with {status}");
    ensure!(table.errors == 0, "the daemon answered {} requests with an error", table.errors);
    ensure!(results.get("checksum.before") == results.get("checksum.after"), "the files differ");
    println!("{}", notifications(say)?);
    println!("{}", cards(say)?);
    println!("{NEXT}");
    Ok(())
}

/// Reads disks in memory that are polled in different ways, and returns a table. It shows the notifications
/// that the guest counted and the kicks that each daemon counted.
///
/// The guest has one CPU, so that a host with two CPUs has one left for polling.
fn notifications(say: impl Fn(&str)) -> Result<String> {
    let serve = |poll: &&str| {
        let arguments = vec![format!("--poll={poll}")];
        Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new("mem:256M") })
    };
    let daemons: Vec<Daemon> = POLLED.iter().map(serve).collect::<Result<_>>()?;
    let disks = daemons.iter().map(|daemon| DiskConfig::new(daemon.socket(), ""));
    let task = format!("kl.task=notify kl.disks=vda,vdb kl.reads={READS} kl.depth={DEPTH}");
    let guest = Guest::start(&GuestConfig::new(&task, disks.collect()))?;
    say("QEMU boots a guest with a disk for each way to poll");
    let results = follow(&guest, say).and_then(|()| guest.finish())?;
    let mut text = format!(
        "\n{:<14}  {:>7}  {:>22}  {:>14}\n",
        "notifications", "reads", "by the guest, per read", "daemon's kicks"
    );
    for ((poll, daemon), disk) in POLLED.iter().zip(daemons).zip(["vda", "vdb"]) {
        let (_, log) = daemon.stop()?;
        let number = |key: &str| -> Result<u64> {
            Ok(numbers(&results, &format!("{disk}.depth{DEPTH}.{key}"))?.iter().sum())
        };
        let (reads, notified) = (number("reads")?, number("notifications")?);
        let each = notified as f64 / reads.max(1) as f64;
        let kicks = sum_of(&log, "kicks=")?;
        text += &format!("  --poll={poll:<5}  {reads:>7}  {notified:>13}, {each:>7.4}  {kicks:>14}\n");
    }
    Ok(text)
}

/// Connects two guests by a switch, one of which fetches a page of the host, and returns a table.
fn cards(say: impl Fn(&str)) -> Result<String> {
    let Outcome { results, log } = cards::run("", IPERF_SECONDS, say)?;
    let text = |key: &str| results.get(key).map(String::as_str).with_context(|| format!("no {key}"));
    let rows = [
        (
            "iperf3, guest to guest",
            format!("{} Mbit/s, {} packets sent again", text("iperf.mbits")?, text("iperf.resent")?),
        ),
        ("frames over the switch", frames_of(&log)?),
        ("address by DHCP", text("eth1.address")?.to_owned()),
        ("page of the host", format!("{} bytes, identical", text("eth1.page_bytes")?)),
    ];
    let mut table = String::from("\ncards: two guests on a switch, and one as a user without rights\n");
    for (what, value) in rows {
        table += &format!("  {what:<23}  {value}\n");
    }
    Ok(table)
}

/// Returns the frames that the first card of the log sent and received.
fn frames_of(log: &[String]) -> Result<String> {
    let (sent, received) = (card_counter(log, "sent_frames")?, card_counter(log, "received_frames")?);
    Ok(format!("{sent} sent, {received} received"))
}

/// The rows of the closing table.
struct Table {
    rows: Vec<(String, String)>,
    errors: u64,
}

impl Table {
    fn of(results: &Results, log: &[String]) -> Result<Table> {
        let text = |key: &str| results.get(key).map(String::as_str).with_context(|| format!("no {key}"));
        let number = |key: &str| -> Result<f64> { text(key)?.parse().with_context(|| key.to_owned()) };
        let mut rows = Vec::new();
        let mut row = |what: &str, value: String| rows.push((what.to_owned(), value));
        row("mkfs.ext4", format!("{} s", text("mkfs.seconds")?));
        row(
            "files written",
            format!("{} files, {} MiB, {} s", text("files")?, text("files.mib")?, text("write.seconds")?),
        );
        row("unmounted, fsck", format!("clean, {} s", text("fsck.seconds")?));
        let sum = text("checksum.after")?;
        row("mounted again, compared", format!("identical, sha256 {}...", sum.get(..12).unwrap_or(sum)));
        for (name, key) in [("fio random reads", "randread"), ("fio random writes", "randwrite")] {
            let rate = number(&format!("{key}.iops"))?;
            let mib = number(&format!("{key}.kib_per_second"))? / 1024.0;
            let latency = number(&format!("{key}.latency_us"))?;
            row(name, format!("{rate:.0} a second, {mib:.1} MiB/s, {latency:.0} us each"));
        }
        let by_queue = numbers(results, "vda.interrupts")?;
        let count = |key: &str| sum_of(log, key);
        row("requests", format!("{} on {} queues", count("requests=")?, text("vda.mq")?));
        let shares: Vec<String> = by_queue.iter().map(u64::to_string).collect();
        row(
            "interrupts in the guest",
            format!("{} (by queue {})", by_queue.iter().sum::<u64>(), shares.join(" + ")),
        );
        row("kicks to the daemon", count("kicks=")?.to_string());
        row("calls from the daemon", count("calls=")?.to_string());
        let errors = count("errors=")?;
        row("errors", errors.to_string());
        Ok(Table { rows, errors })
    }

    fn render(&self, accel: Accel, image: &Path) -> String {
        let width = self.rows.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
        let mut text = format!(
            "ext4 on kickless, {} MiB in {}\n",
            DISK_MIB,
            image.parent().unwrap_or(image).parent().unwrap_or(image).display()
        );
        let guest = if accel == Accel::Tcg { ", an emulated CPU" } else { "" };
        text += &format!("speeds: a build without optimizations{guest}, not a measurement\n");
        for (what, value) in &self.rows {
            text += &format!("  {what:width$}  {value}\n");
        }
        text
    }
}

/// Adds up a `key=value` field of the daemon's closing summary, which has one line per queue.
fn sum_of(log: &[String], key: &str) -> Result<u64> {
    let summary: Vec<&String> = log.iter().filter(|line| line.contains("summary")).collect();
    ensure!(!summary.is_empty(), "the daemon printed no summary");
    Ok(summary
        .iter()
        .flat_map(|line| line.split_whitespace())
        .filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok())
        .sum())
}
