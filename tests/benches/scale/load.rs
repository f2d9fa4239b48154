//! Measures requests to many devices of one worker: as many as it can serve, and at rates of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kickless_control::Client;
use kickless_tests::daemon::Daemon;
use kickless_tests::driver::load::{self, Kind, Load, Run, random_sectors};
use kickless_tests::frontend::machine::{Machine, Shape as MachineShape};
use serde_json::Map;

use crate::Bench;
use crate::common::BLOCK;
use crate::curve::{Curve, Group, Panel, Shape};

/// Devices with requests.
const DEVICES: [u64; 4] = [1, 8, 64, 512];
/// Devices with requests at rates of their own, and these rates: thousands of requests a second of all
/// devices together. 10 guests with 1000 each are the first cell of the table for planning.
const PACED_DEVICES: [u64; 3] = [8, 64, 512];
pub(crate) const RATES: [u64; 4] = [10, 30, 100, 300];
/// Requests in flight on each device.
const DEPTHS: [u16; 2] = [1, 32];
/// The memory of a guest: a queue, and twice [`DEPTHS`] requests.
const MEMORY: u64 = 2 << 20;
const SIZE: u64 = 1 << 30;
/// A turn is long enough for `--poll=auto` to have found its way, and for ticks of 4 ms not to show.
const TURN: Duration = Duration::from_millis(500);
/// The least share of the requested rate with which a point counts.
const REACHED_MIN: f64 = 0.9;
/// The heading of the panel that planning uses.
pub(crate) const BUSY: &str = "% of a core";

/// A daemon on one worker, with its guests.
struct Served {
    daemon: Daemon,
    machines: Vec<Machine>,
}

/// Serves this number of disks that answer at once.
pub(crate) fn serve(bench: &Bench, devices: u64, arguments: &[&str]) -> Result<(Daemon, Vec<String>)> {
    bench.serve(devices, &format!("blk-file = \"null:{SIZE}\"\nnum-queues = 1"), arguments)
}

impl Served {
    fn start(bench: &Bench, devices: u64) -> Result<Served> {
        let (daemon, names) = serve(bench, devices, &["--control"])?;
        let shape = MachineShape { memory: MEMORY, ..MachineShape::LINUX };
        let machines = names.iter().map(|name| Machine::start(&daemon.socket_of(name), &shape));
        let machines = machines.collect::<Result<_>>()?;
        Ok(Served { daemon, machines })
    }

    /// Writes the descriptors of the requests.
    fn loads(&mut self, depth: u16) -> Result<Vec<Load<'_>>> {
        let kind = Kind { depth, block: BLOCK, write: false };
        let each = self.machines.iter_mut().map(|Machine { queues, ram, .. }| {
            Load::prepare(queues.first_mut().context("no queue")?, ram, kind)
        });
        each.collect()
    }
}

/// Runs a turn. Returns it, and the growth of a number of seconds meanwhile.
pub(crate) fn turn(
    seconds: impl Fn() -> Result<f64>,
    run: impl FnOnce() -> Result<Run>,
) -> Result<(Run, f64)> {
    let before = seconds()?;
    let run = run()?;
    ensure!(run.failed == 0, "{} requests failed", run.failed);
    Ok((run, seconds()? - before))
}

/// Measures the load.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Group>> {
    let axis = bench.axis(&DEVICES);
    let served = axis.iter().map(|devices| Served::start(bench, *devices));
    let mut served = served.collect::<Result<Vec<_>>>()?;
    let pids: Vec<u32> = served.iter().map(|served| served.daemon.pid()).collect();
    let sockets: Vec<PathBuf> = served.iter().map(|served| served.daemon.socket_of("control")).collect();
    let time = TURN.min(bench.plan.time);
    let mut panels = ["thousand requests a second", "ns of work for each"]
        .map(|figure| Panel { figure, curves: Vec::new() });
    let mut paced = Panel { figure: BUSY, curves: Vec::new() };
    for depth in DEPTHS {
        let mut loads = served.iter_mut().map(|served| served.loads(depth)).collect::<Result<Vec<_>>>()?;
        let [rates, costs] = bench.rounds(axis.len(), |at| {
            let run = || load::run(&mut loads[at], time, random_sectors(SIZE, BLOCK));
            let (run, work) = turn(|| work_seconds(&sockets[at]), run)?;
            Ok([run.rate() / 1e3, work / run.requests as f64 * 1e9])
        })?;
        let [rate, cost] = &mut panels;
        let name = format!("{depth} in flight on each");
        rate.curves.push(Curve::new(&name, Shape::Kept, &axis, rates));
        cost.curves.push(Curve::new(&name, Shape::Flat, &axis, costs));
        if depth == DEPTHS[1] {
            paced.curves = at_rates(bench, &axis, &mut loads, &pids)?;
        }
    }
    let devices = Group { axis: "devices", panels: panels.into() };
    Ok(vec![devices, Group { axis: "thousand requests a second", panels: vec![paced] }])
}

/// Measures requests at random times, whose number a second is given.
fn at_rates(bench: &Bench, axis: &[u64], loads: &mut [Vec<Load<'_>>], pids: &[u32]) -> Result<Vec<Curve>> {
    let rates = bench.axis(&RATES);
    let time = (2 * TURN).min(bench.plan.time);
    let mut curves = Vec::new();
    for (at, devices) in axis.iter().enumerate().filter(|(_, devices)| PACED_DEVICES.contains(devices)) {
        let [busy, reached] = bench.rounds(rates.len(), |rate| {
            let mean = 1e-3 / rates[rate] as f64;
            let gap = || Duration::from_secs_f64(-mean * (1.0 - fastrand::f64()).ln());
            let run = || load::run_paced(&mut loads[at], time, gap, random_sectors(SIZE, BLOCK));
            let (run, cpu) = turn(|| cpu_seconds(pids[at]), run)?;
            let reached = run.rate() / (rates[rate] as f64 * 1e3);
            Ok([cpu / run.time.as_secs_f64() * 100.0 / reached, reached])
        })?;
        let mut curve = Curve::new(format!("{devices} devices"), Shape::Linear, &rates, busy);
        // Two busy threads on one processor send fewer requests, in batches, and their cost means nothing.
        let mut reached = reached.iter().map(|reached| reached.median > REACHED_MIN);
        curve.points.retain(|_| reached.next().unwrap_or(false));
        curves.push(curve);
    }
    Ok(curves)
}

/// Returns the processor time of a process in seconds. Unlike /proc/PID/stat, this counts no ticks.
pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends meanwhile does not work for the load.
        let Ok(text) = fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        sum += text.split_whitespace().next().context("an empty schedstat")?.parse::<u64>()?;
    }
    Ok(sum as f64 / 1e9)
}

/// Returns the seconds that the workers of a daemon have worked. When both ends poll and the driver is the
/// slower one, the processor time has the looks at empty queues too.
pub(crate) fn work_seconds(control: &Path) -> Result<f64> {
    let stats = Client::connect(control)?.call("stats.get", Map::new())?;
    let workers = stats["workers"].as_array().context("no workers")?;
    let each = workers.iter().map(|worker| worker["work_ns"].as_u64().context("no work_ns"));
    Ok(each.sum::<Result<u64>>()? as f64 / 1e9)
}
