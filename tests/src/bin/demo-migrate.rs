//! Demonstrates live migration. A Linux guest moves between two QEMUs while it reads, writes and verifies.
//! Each QEMU has a kickless of its own; both serve the same image. `guest/demo-migrate` runs this program.

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::guest::migration::{self, Destination, Finished, Progress};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::guest::scratch::Scratch;
use kickless_tests::guest::{Accel, Assets};

const CPUS: u32 = 2;
const NAMES: [&str; 2] = ["A", "B"];
/// Number of moves without an argument: there, back, and there again.
const TIMES: usize = 3;
/// Time between two lines of progress, where the output is no terminal.
const LINE_EVERY: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let times = match std::env::args().nth(1).map(|text| text.parse()) {
        None => TIMES,
        Some(Ok(times)) => times,
        Some(Err(_)) => {
            eprintln!("usage: demo-migrate [MOVES]");
            return ExitCode::from(2);
        }
    };
    match demonstrate(times) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo-migrate: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate(times: usize) -> Result<()> {
    let started = Instant::now();
    let say = |text: &str| println!("[{:5.1} s] {text}", started.elapsed().as_secs_f64());
    say("looking for a way to run guests");
    let accel = match Assets::get()?.accel() {
        Accel::Kvm => "KVM",
        Accel::Tcg => "TCG, an emulated CPU: KVM does not work for this guest here",
    };
    say(&format!("guests run under {accel}"));
    if Assets::get()?.accel() == Accel::Tcg {
        say(
            "each move pauses the guest in the first round: QEMU before 9.0 loses later writes of an emulated CPU",
        );
    }
    let scratch = Scratch::new()?;
    let serve = || {
        let arguments = vec!["--incoming".to_owned()];
        Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new(scratch.path()) })
    };
    let daemons = [serve()?, serve()?];
    let [a, b] = daemons.each_ref().map(Daemon::pid);
    say(&format!("two kickless on one image: A (process {a}) and B (process {b})"));
    let machine = |number: usize| {
        let disk = DiskConfig::new(daemons[number].socket(), "");
        GuestConfig::new(migration::TASK, vec![disk]).cpus(CPUS)
    };
    let mut guest = Guest::start(&machine(0))?;
    say("Linux boots in QEMU on the disk of A");
    guest.wait_for("migrate=ready")?;
    say("the guest writes and verifies, reads through its page cache and compares, and changes its memory");
    migration::wait_for_work(&guest, 0)?;

    let mut moves = Vec::new();
    for number in 1..=times {
        let (from, to) = (NAMES[(number + 1) % 2], NAMES[number % 2]);
        let destination = Destination::start(&machine(number % 2))?;
        say(&format!("move {number} of {times}, from {from} to {to}"));
        let mut line = Line::default();
        let (moved, finished) = destination.receive(&mut guest, |progress| line.show(progress))?;
        line.end();
        // The source's QEMU.
        guest.kill()?;
        guest = moved;
        say(&format!(
            "arrived after {:.1} s, {} rounds and {} MB; the guest was paused for {} ms",
            finished.total.as_secs_f64(),
            finished.rounds,
            finished.bytes / 1_000_000,
            finished.downtime.as_millis()
        ));
        moves.push(finished);
        migration::wait_for_work(&guest, 0)?;
        say(&format!("the guest continues its work on {to}"));
    }

    say("the guest stops its load and checks the disk a last time");
    guest.tell("stop")?;
    let outcome = guest.finish();
    let logs = daemons.into_iter().map(|daemon| Ok(daemon.stop()?.1)).collect::<Result<Vec<_>>>()?;
    let said = || logs.concat().join("\n");
    let results = outcome.with_context(|| format!("the daemons said:\n{}", said()))?;
    let same = scratch.compare(&results, "vda");
    println!("\n{}", table(&results, &moves, &logs)?);
    same
}

/// Shows the progress of a migration. On a terminal, each line replaces the one before.
#[derive(Default)]
struct Line {
    shown: Option<Instant>,
}

impl Line {
    fn show(&mut self, progress: &Progress) {
        if progress.pages == 0 {
            return;
        }
        let Progress { pages_left, pages, dirty_rate, rounds, mbps, downtime } = progress;
        let text = format!(
            "          {pages_left:>7} of {pages} pages left, {mbps:>6.0} Mbit/s; round {rounds}, {dirty_rate:>6} pages/s \
             changed; would stand {:>4} ms",
            downtime.as_millis()
        );
        if stdout().is_terminal() {
            print!("\r{text}\x1b[K");
            // An error here only loses a line of progress.
            let _ = stdout().flush();
        } else if self.shown.is_none_or(|shown| shown.elapsed() >= LINE_EVERY) {
            println!("{text}");
        } else {
            return;
        }
        self.shown = Some(Instant::now());
    }

    fn end(self) {
        if self.shown.is_some() && stdout().is_terminal() {
            println!();
        }
    }
}

fn table(results: &Results, moves: &[Finished], logs: &[Vec<String>]) -> Result<String> {
    let text = |key: &str| results.get(key).map(String::as_str).with_context(|| format!("no {key}"));
    let mut stood: Vec<u128> = moves.iter().map(|finished| finished.downtime.as_millis()).collect();
    stood.sort_unstable();
    let (median, longest) = (stood.get(stood.len() / 2), stood.last());
    let mut rows = vec![
        ("moves", moves.len().to_string()),
        (
            "guest was paused for",
            format!("{} ms median, {} ms at most", median.unwrap_or(&0), longest.unwrap_or(&0)),
        ),
        ("fio runs, each verified", text("migrate.verified")?.to_owned()),
        ("reads through the page cache", format!("{} times 16 MiB, identical", text("migrate.cached")?)),
        ("final check of the disk", "identical from both ends".to_owned()),
    ];
    for (what, log) in ["requests to A", "requests to B"].into_iter().zip(logs) {
        rows.push((what, sum_of(log, "requests=").to_string()));
    }
    let errors: u64 = logs.iter().map(|log| sum_of(log, "errors=")).sum();
    rows.push(("errors", errors.to_string()));
    ensure!(errors == 0, "the daemons answered {errors} requests with an error");
    let width = rows.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
    let lines = rows.iter().map(|(what, value)| format!("  {what:width$}  {value}"));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// Adds up a field of the daemon's closing summary, which has one line per queue.
fn sum_of(log: &[String], key: &str) -> u64 {
    log.iter()
        .filter(|line| line.contains("summary"))
        .flat_map(|line| line.split_whitespace())
        .filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok())
        .sum()
}
