//! Measures how long drivers wait when another process takes over the daemon that serves them.
//! `tools/bench-upgrade` runs this program and says what it prints.

#![allow(clippy::print_stderr, reason = "a program of its own")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kickless_driver::{Card, CardOptions, Disk, Options, Outgoing, Queue, QueuePair, Request};
use kickless_testing::in_network_namespace;
use kickless_tests::arp;
use kickless_tests::daemon::Daemon;
use kickless_tests::transcript::Transcript;
use kickless_tests::unit::Unit;
use rustix::process::Signal;

/// The time between two looks at all rings. A gap is exact to about this time.
const LOOK: Duration = Duration::from_micros(100);
/// The time without an upgrade that is measured before each of them, for comparison.
const QUIET: Duration = Duration::from_millis(200);
/// The time after the end of an upgrade, so that the gap that it made is over.
const AFTER: Duration = Duration::from_millis(50);
/// The time between two samples of the run delay of the process that ends.
const SAMPLE: Duration = Duration::from_millis(5);
/// Time limit of each step.
const LIMIT: Duration = Duration::from_secs(60);
/// The time after which a frame that did not come back is sent again.
const LOST_AFTER: Duration = Duration::from_millis(500);
const BLOCK: usize = 4096;
const ZRAM_LEN: &str = "64M";
const ZRAM: &str = "/sys/class/zram-control";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-upgrade: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (of, devices, upgrades, restarts) = match &arguments[..] {
        [of, devices, upgrades] => (of, devices, upgrades, false),
        [of, devices, upgrades, way] if way == "restart" => (of, devices, upgrades, true),
        _ => bail!("usage: tools/bench-upgrade DISK_OR_PORT DEVICES UPGRADES [restart]"),
    };
    let devices: usize = devices.parse().context("DEVICES")?;
    let upgrades: u32 = upgrades.parse().context("UPGRADES")?;
    ensure!(devices > 0 && upgrades > 0, "DEVICES and UPGRADES are at least 1");
    if of != "tap" {
        return measure(of, devices, upgrades, restarts);
    }
    ensure!(devices <= 250, "at most 250 TAPs have an address");
    let mut measured = Ok(());
    let entered = in_network_namespace(|| measured = measure(of, devices, upgrades, restarts));
    ensure!(entered, "a TAP needs a network namespace, and so root");
    measured
}

/// Compressed disks in memory. Dropping them removes them.
struct Zrams(Vec<String>);

impl Zrams {
    #[expect(clippy::disallowed_methods, reason = "this program makes the disks, before it serves them")]
    fn new(count: usize) -> Result<Zrams> {
        let mut zrams = Zrams(Vec::new());
        for _ in 0..count {
            let number = fs::read_to_string(Path::new(ZRAM).join("hot_add"));
            let number =
                number.context("no zram device can be made here: this needs root, and the module zram")?;
            zrams.0.push(number.trim().to_owned());
            fs::write(format!("/sys/block/zram{}/disksize", number.trim()), ZRAM_LEN)?;
        }
        Ok(zrams)
    }
}

impl Drop for Zrams {
    fn drop(&mut self) {
        for number in &self.0 {
            // The daemon that used it may not have ended yet.
            let _ = fs::write(Path::new(ZRAM).join("hot_remove"), number);
        }
    }
}

/// Serves the devices, drives them, and upgrades the daemon again and again. Prints the results.
fn measure(of: &str, devices: usize, upgrades: u32, restarts: bool) -> Result<()> {
    let zrams = if of == "zram" { Zrams::new(devices)? } else { Zrams(Vec::new()) };
    let names: Vec<String> = (0..devices).map(|number| format!("d{number}")).collect();
    let lines: Vec<String> = (0..devices)
        .map(|number| match of {
            "tap" => format!("port = 'tap:upgrade{number}'"),
            "loop" => "port = 'loop'".to_owned(),
            "zram" => format!("blk-file = '/dev/zram{}'", zrams.0[number]),
            disk => format!("blk-file = '{disk}'"),
        })
        .collect();
    let served: Vec<(&str, &str)> =
        names.iter().zip(&lines).map(|(name, lines)| (name.as_str(), lines.as_str())).collect();
    let mut served = if restarts {
        Served::Unit(Restarted::start(&served)?)
    } else {
        Served::Daemon(Daemon::serve_with(&["--control"], "", &served)?)
    };
    let mut driven = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let socket = served.socket_of(name);
        driven.push(match of {
            "tap" => Driven::card(&socket, Some(number as u8))?,
            "loop" => Driven::card(&socket, None)?,
            _ => Driven::disk(&socket)?,
        });
    }
    let gaps: Vec<AtomicU64> = (0..devices).map(|_| AtomicU64::new(0)).collect();
    let (is_over, mut results) = (AtomicBool::new(false), Results::default());
    let lost = thread::scope(|scope| {
        let driver = scope.spawn(|| drive(driven, &gaps, &is_over));
        let upgraded = (0..upgrades).try_for_each(|_| results.upgrade(&mut served, &gaps));
        is_over.store(true, Ordering::Relaxed);
        let driven = driver.join().map_err(|_| anyhow::anyhow!("the driver panicked"))?;
        upgraded.and(driven)
    })?;
    served.stop()?;
    let done = if restarts { "restarts" } else { "upgrades" };
    println!("{of}: {devices} devices, {upgrades} {done}, {lost} frames lost; milliseconds");
    results.print();
    Ok(())
}

/// A daemon that another process takes over from.
enum Served {
    /// An upgrade hands it over.
    Daemon(Daemon),
    /// A restart of its unit hands it over, through the descriptor store.
    Unit(Restarted),
}

impl Served {
    fn socket_of(&self, name: &str) -> PathBuf {
        match self {
            Self::Daemon(daemon) => daemon.socket_of(name),
            Self::Unit(of) => of.unit.path(&format!("{name}.sock")),
        }
    }

    fn pid(&self) -> Result<u32> {
        match self {
            Self::Daemon(daemon) => Ok(daemon.pid()),
            Self::Unit(of) => Ok(of.unit.manager.main_pid()?.as_raw_nonzero().get() as u32),
        }
    }

    /// Has the next process take over, and waits until it serves.
    fn pass_on(&mut self) -> Result<()> {
        match self {
            Self::Daemon(daemon) => daemon.upgrade().map(drop),
            Self::Unit(of) => of.restart(),
        }
    }

    /// Returns the pause of the rings as the log of the next process has it, in milliseconds.
    fn stall_ms(&self) -> Result<f64> {
        match self {
            Self::Daemon(daemon) => daemon.stall_ms(),
            Self::Unit(of) => Ok(of.stall_ms),
        }
    }

    fn stop(self) -> Result<()> {
        match self {
            Self::Daemon(daemon) => {
                let (status, log) = daemon.stop()?;
                ensure!(status.success(), "the daemon ended, {status}: {}", log.join("\n"));
            }
            Self::Unit(of) => {
                let status = of.unit.manager.end_main(Signal::TERM)?;
                ensure!(status.exit_status() == Some(0), "the daemon ended: {:?}", of.log.lines());
            }
        }
        Ok(())
    }
}

/// A unit of a small service manager, and its main process.
struct Restarted {
    unit: Unit,
    log: Transcript,
    stall_ms: f64,
}

impl Restarted {
    /// Starts a unit with these devices, which have a name and the lines of their configuration.
    fn start(devices: &[(&str, &str)]) -> Result<Self> {
        let unit = Unit::new(devices)?;
        let log = unit.start()?;
        Ok(Self { unit, log, stall_ms: 0.0 })
    }

    /// Does what `systemctl restart` does: runs the stop of the unit, waits for the process, and starts the
    /// next one.
    fn restart(&mut self) -> Result<()> {
        let manager = &self.unit.manager;
        let (status, said) = manager.run(&self.unit.store_words())?;
        ensure!(status.success(), "the store failed: {:?}", said.wait_for_end(LIMIT)?);
        manager.wait_for_main()?;
        self.log = manager.start(&self.unit.words(&[]))?;
        let taken = |line: &str| {
            let (_, after) = line.split_once("took over from the store")?;
            after.split_whitespace().find_map(|word| word.strip_prefix("stall_ms=")?.parse().ok())
        };
        self.stall_ms = self.log.wait_for("that it has taken over", LIMIT, taken)?;
        Ok(())
    }
}

/// A device, and what its driver has in flight: one request or one frame.
enum Driven {
    Disk { _disk: Disk, queue: Queue },
    Card { _card: Card, pair: Box<QueuePair>, number: Option<u8>, id: u32, sent: Instant, has_answered: bool },
}

impl Driven {
    fn disk(socket: &Path) -> Result<Self> {
        // A connection that breaks is an error.
        let options = Options {
            queues: 1,
            buffer_memory: 2 << 20,
            reconnect_limit: Duration::ZERO,
            ..Options::new(socket)
        };
        let disk = Disk::connect(options)?;
        let queue = disk.queue(0);
        let driven = Self::Disk { _disk: disk, queue };
        driven.read()?;
        Ok(driven)
    }

    /// Connects to a card. The kernel answers the frames of the TAP with this number; without one, the card
    /// returns them itself.
    fn card(socket: &Path, number: Option<u8>) -> Result<Self> {
        if let Some(number) = number {
            arp::join(&format!("upgrade{number}"), number);
        }
        let card =
            Card::connect(CardOptions { reconnect_limit: Duration::ZERO, ..CardOptions::new(socket) })?;
        let pair = Box::new(card.pair(0).context("no pair")?);
        let mut driven =
            Self::Card { _card: card, pair, number, id: 0, sent: Instant::now(), has_answered: false };
        driven.send()?;
        Ok(driven)
    }

    fn read(&self) -> Result<()> {
        let Self::Disk { _disk: disk, queue } = self else { return Ok(()) };
        queue.submit_or_wait(&mut vec![Request::read(0, disk.buffer(BLOCK)?).token(0)])?;
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let Self::Card { pair, number, id, sent, .. } = self else { return Ok(()) };
        *id += 1;
        *sent = Instant::now();
        pair.send(&[Outgoing::from(&arp::request(number.unwrap_or_default(), *id)[..])])?;
        Ok(())
    }

    /// Looks for an answer. Returns whether it has come; the next one is on its way then. Adds to `lost` the
    /// frames that did not come back.
    fn look(&mut self, now: Instant, lost: &mut u32) -> Result<bool> {
        match self {
            Self::Disk { queue, .. } => {
                let mut failed = None;
                if queue.poll(1, |completion| failed = completion.result.err())? == 0 {
                    return Ok(false);
                }
                if let Some(error) = failed {
                    bail!("a read failed: {error}");
                }
                self.read()?;
            }
            Self::Card { pair, number, id, sent, has_answered, .. } => {
                let (wanted, loops) = (*id, number.is_none());
                let mut is_there = false;
                pair.receive(64, |frame| {
                    is_there |= loops || arp::answered(&frame.to_vec()) == Some(wanted)
                })?;
                let is_lost = !is_there && now - *sent > LOST_AFTER;
                // A port drops the frames of a ring that does not run yet.
                *lost += u32::from(is_lost && *has_answered);
                *has_answered |= is_there;
                if is_there || is_lost {
                    self.send()?;
                }
                return Ok(is_there);
            }
        }
        Ok(true)
    }
}

/// Drives all devices until it is over. Keeps the longest gap between two answers of each, in microseconds.
/// Returns the number of lost frames.
fn drive(mut devices: Vec<Driven>, gaps: &[AtomicU64], is_over: &AtomicBool) -> Result<u32> {
    let mut last = vec![Instant::now(); devices.len()];
    let mut lost = 0;
    while !is_over.load(Ordering::Relaxed) {
        for ((device, last), gap) in devices.iter_mut().zip(&mut last).zip(gaps) {
            let now = Instant::now();
            if device.look(now, &mut lost)? {
                gap.fetch_max((now - *last).as_micros() as u64, Ordering::Relaxed);
                *last = now;
            }
        }
        thread::sleep(LOOK);
    }
    Ok(lost)
}

/// The measured times, in microseconds.
#[derive(Default)]
struct Results {
    /// The longest gap of each device around each upgrade.
    stalls: Vec<u64>,
    /// The same in the time without an upgrade before.
    quiet: Vec<u64>,
    /// The pause of each upgrade, as the log has it.
    pauses: Vec<u64>,
    /// The time that the threads of each process wanted a CPU and had none, during an upgrade.
    delays: [Vec<u64>; 2],
}

impl Results {
    /// Upgrades the daemon once.
    fn upgrade(&mut self, served: &mut Served, gaps: &[AtomicU64]) -> Result<()> {
        let take = || gaps.iter().map(|gap| gap.swap(0, Ordering::Relaxed)).collect::<Vec<_>>();
        take();
        thread::sleep(QUIET);
        self.quiet.extend(take());
        let (old, is_over) = (served.pid()?, AtomicBool::new(false));
        let old_delay = thread::scope(|scope| {
            let sampler = scope.spawn(|| delay_until(old, &is_over));
            let passed_on = served.pass_on();
            is_over.store(true, Ordering::Relaxed);
            let delay = sampler.join().unwrap_or_default();
            passed_on.map(|()| delay)
        })?;
        self.delays[0].push(old_delay);
        self.delays[1].push(delays_of(served.pid()?).values().sum());
        thread::sleep(AFTER);
        self.stalls.extend(take());
        self.pauses.push((served.stall_ms()? * 1000.0) as u64);
        Ok(())
    }

    fn print(self) {
        println!("{:30}{:>9}{:>9}{:>9}", "", "median", "p99", "largest");
        let [old, new] = self.delays;
        for (name, mut all) in [
            ("longest gap", self.stalls),
            ("longest gap before", self.quiet),
            ("pause of the rings, by the log", self.pauses),
            ("run delay, old process", old),
            ("run delay, new process", new),
        ] {
            all.sort_unstable();
            let at =
                |part: f64| all[(((all.len() as f64 * part).ceil() as usize).max(1) - 1).min(all.len() - 1)];
            let [median, p99, largest] = [at(0.5), at(0.99), at(1.0)].map(|us| us as f64 / 1000.0);
            println!("{name:30}{median:9.2}{p99:9.2}{largest:9.2}");
        }
    }
}

/// Returns the run delay of each thread of a process, in microseconds.
fn delays_of(pid: u32) -> HashMap<String, u64> {
    let mut delays = HashMap::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let Ok(text) = fs::read_to_string(task.path().join("schedstat")) else { continue };
        let ns = text.split_whitespace().nth(1).and_then(|ns| ns.parse::<u64>().ok());
        delays.insert(task.file_name().to_string_lossy().into_owned(), ns.unwrap_or_default() / 1000);
    }
    delays
}

/// Samples the run delay of a process until it is over or the process has ended. Returns what it grew by.
fn delay_until(pid: u32, is_over: &AtomicBool) -> u64 {
    let before = delays_of(pid);
    let mut last = before.clone();
    while !is_over.load(Ordering::Relaxed) {
        thread::sleep(SAMPLE);
        last.extend(delays_of(pid));
    }
    let grown =
        |(task, us): (&String, &u64)| us.saturating_sub(before.get(task).copied().unwrap_or_default());
    last.iter().map(grown).sum()
}
