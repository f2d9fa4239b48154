//! Measures several devices on one worker.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use kickless_driver::{Completion, Data, Disk as Driver, Options, Queue, Request, Waiting};
use kickless_tests::daemon::{child_command, wait_for_exit};
use kickless_tests::frontend::LIMIT;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::{BLOCK, Cpus};
use crate::compare::{Disk, Figures, Settings, output, turns};
use crate::report::{Goal, Report, ratios};

const TURN: Duration = Duration::from_millis(800);
/// Number of devices, of which one is busy.
const MANY: usize = 64;
/// Requests in flight of two unequal devices, and the number that the driver takes from a ring at once.
const DEPTHS: [u64; 2] = [128, 1];
const BATCH: usize = 16;

/// `kickless serve` with null disks on one worker.
struct Serve {
    child: Child,
    sockets: Vec<PathBuf>,
    _dir: TempDir,
}

impl Serve {
    fn start(settings: &Settings, cpus: &Cpus, devices: usize) -> Result<Serve> {
        let dir = tempfile::tempdir()?;
        let sockets: Vec<PathBuf> = (0..devices).map(|at| dir.path().join(format!("{at}.sock"))).collect();
        let mut config = "[pool]\nworkers = 1\npoll = \"auto\"\n".to_owned();
        for socket in &sockets {
            write!(
                config,
                "\n[[device]]\nsocket-path = \"{}\"\nblk-file = \"null:1G\"\nnum-queues = 1\n",
                socket.display()
            )?;
        }
        let file = dir.path().join("devices.toml");
        fs::write(&file, config)?;
        cpus.for_back_ends()?;
        let mut child = child_command(&settings.kickless)
            .arg("serve")
            .arg(format!("--config={}", file.display()))
            .arg("--log-level=warn")
            .stdin(Stdio::null())
            .spawn()?;
        cpus.for_others()?;
        let deadline = Instant::now() + LIMIT;
        while !sockets.iter().all(|socket| socket.exists()) {
            let ended = child.try_wait()?;
            ensure!(ended.is_none() && Instant::now() < deadline, "kickless serve has not made its sockets");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(Serve { child, sockets, _dir: dir })
    }

    /// Connects to a device. The driver starts no thread, so an idle connection uses no processor time.
    fn connect(&self, device: usize, waiting: Waiting) -> Result<Driver> {
        let options = Options { queues: 1, waiting, reactor: false, ..Options::new(&self.sockets[device]) };
        Ok(Driver::connect(Options { connect_timeout: LIMIT, ..options })?)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if wait_for_exit(&mut self.child, LIMIT).is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Compares one busy device among many connected, idle ones with the same device alone.
pub(crate) fn many(settings: &Settings, _: &[Disk], report: &mut Report) -> Result<()> {
    let cpus = Cpus::get()?;
    let (alone, many) = (Serve::start(settings, &cpus, 1)?, Serve::start(settings, &cpus, MANY)?);
    // Each idle device has been used and may be used again.
    let idle: Vec<Driver> = (1..MANY).map(|at| many.connect(at, Waiting::Sleep)).collect::<Result<_>>()?;
    for driver in &idle {
        driver.read_at(&mut [0; BLOCK as usize], 0)?;
    }
    // The driver polls. With one request in flight, a sleeping driver would sleep at some times and not at
    // others, and its rate would vary with that.
    for depth in [1, 32] {
        let mut figures: [Vec<Figures>; 2] = Default::default();
        for round in 0..settings.rounds {
            for at in [round % 2, (round + 1) % 2] {
                let served = [&alone, &many][at];
                let core_latency = settings.core_latency()?.map(|latency| [latency; 2]);
                let turns = busy(settings, served, depth)?;
                figures[at].extend(turns.into_iter().map(|turn| Figures { core_latency, ..turn }));
            }
        }
        let load = format!("null:, {depth} in flight, polling driver");
        let [alone, many] = &figures;
        report.table(&load, &[("alone", ""), ("one of 64", "")], &figures);
        report.check(
            "throughput, one of 64/alone",
            ratios(many, alone, |turn| turn.iops),
            Goal::AtLeast(0.9),
        );
    }
    Ok(())
}

/// Runs a turn of load on the first device.
fn busy(settings: &Settings, served: &Serve, depth: u16) -> Result<Vec<Figures>> {
    let mut command = Command::new(&settings.kickless);
    command.args(["bench", "blk", "--json"]);
    command.arg(format!("--socket-path={}", served.sockets[0].display()));
    command.arg(format!("--pid={}", served.child.id()));
    command.args([format!("--depth={depth}"), "--wait=poll".into()]);
    command.arg(format!("--time={}us", settings.time(TURN).as_micros()));
    if let Some([driver, _]) = settings.cpus {
        command.arg(format!("--cpu={driver}"));
    }
    turns(&output(command)?["loads"][0]["targets"][0])
}

/// Compares the latency of a device with one request in flight, alone and beside a device with many. One
/// thread drives both devices and never sleeps, so that two drivers do not compete for a CPU.
pub(crate) fn unequal(settings: &Settings, _: &[Disk], report: &mut Report) -> Result<()> {
    let cpus = Cpus::get()?;
    let served = Serve::start(settings, &cpus, 2)?;
    cpus.for_driver()?;
    let drivers = [0, 1].map(|at| served.connect(at, Waiting::Spin(Duration::MAX)));
    let [many, one] = drivers;
    let mut sides = [Side::new(many?, DEPTHS[0])?, Side::new(one?, DEPTHS[1])?];
    let mut medians: [Vec<f64>; 2] = Default::default();
    let mut rates = Vec::new();
    for _ in 0..settings.rounds {
        for (at, beside) in [false, true].into_iter().enumerate() {
            let [many, one] = &mut sides;
            let time = settings.time(TURN);
            let (other, latencies) = run(many, one, beside, time)?;
            medians[at].push(latencies.value_at_quantile(0.5) as f64 / 1e3);
            if beside {
                rates.push(other as f64 / time.as_secs_f64());
            }
        }
    }
    cpus.for_others()?;
    report.begin("null:, a device with 1 in flight, alone and beside one with 128, polling driver");
    let [alone, beside] = &medians;
    println!(
        "  median latency in us: alone {alone:.2?}, beside {beside:.2?}; the other's reads/s: {rates:.0?}"
    );
    let slower = beside.iter().zip(alone).map(|(beside, alone)| beside / alone);
    report.check("median latency, beside/alone", slower, Goal::AtMost(2.0));
    Ok(())
}

/// One of the two devices.
struct Side {
    queue: Queue,
    idle: Vec<(u64, Data)>,
    due: Vec<Instant>,
    reaped: Vec<Completion>,
}

impl Side {
    fn new(driver: Driver, depth: u64) -> Result<Side> {
        let buffer = |token| Ok((token, Data::from(driver.buffer(BLOCK as usize)?)));
        let idle = (0..depth).map(buffer).collect::<Result<_>>()?;
        let due = vec![Instant::now(); depth as usize];
        Ok(Side { queue: driver.queue(0), idle, due, reaped: Vec::new() })
    }

    fn submit(&mut self, now: Instant) -> Result<()> {
        let due = &mut self.due;
        let mut batch: Vec<Request> = self
            .idle
            .drain(..)
            .map(|(token, data)| {
                due[token as usize] = now;
                Request::read(0, data).token(token)
            })
            .collect();
        if !batch.is_empty() {
            self.queue.submit_or_wait(&mut batch)?;
        }
        Ok(())
    }

    /// Takes completions and calls `each` with their latencies.
    fn reap(&mut self, mut each: impl FnMut(Duration)) -> Result<u64> {
        let reaped = &mut self.reaped;
        self.queue.poll(BATCH, |completion| reaped.push(completion))?;
        let count = self.reaped.len() as u64;
        let now = Instant::now();
        for Completion { token, result, data } in self.reaped.drain(..) {
            result.context("a request failed")?;
            each(now - self.due[token as usize]);
            self.idle.push((token, data));
        }
        Ok(count)
    }
}

/// Keeps one request of `one` in flight and, if `beside` is set, many of `many`. Returns the number of
/// requests of `many` and the latencies of `one`.
fn run(many: &mut Side, one: &mut Side, beside: bool, time: Duration) -> Result<(u64, Histogram<u64>)> {
    let mut latencies = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
    let mut others = 0;
    let started = Instant::now();
    loop {
        let now = Instant::now();
        let goes_on = now - started < time;
        if goes_on {
            one.submit(now)?;
            if beside {
                many.submit(now)?;
            }
        } else if many.queue.in_flight() + one.queue.in_flight() == 0 {
            return Ok((others, latencies));
        }
        one.reap(|took| latencies.saturating_record(took.as_nanos() as u64))?;
        others += many.reap(|_| {})?;
    }
}
