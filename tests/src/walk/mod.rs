//! Walks at random through everything that a front-end and a guest can do to a daemon.
//!
//! [`walk`] starts a daemon with disks of several kinds and cards on several ports. Each has a hostile
//! session ([`session`]) that sends messages in any order with any parameters and descriptors, changes its
//! memory under running rings, writes rings, requests and frames that lie, and leaves at any moment. An
//! honest disk and two honest cards on the same workers verify their data after each [`STEPS_BETWEEN_CHECKS`]
//! steps.
//!
//! A step draws its numbers from the seed and its own number. So a walk with the same seed does the same
//! steps, although the threads of the daemon find them at other moments. A failure names both.

pub mod descriptors;
pub mod device_rings;
pub mod frames;
pub mod honest;
pub mod messages;
pub mod requests;
pub mod ring;
pub mod session;
pub mod totals;
pub mod wire;

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kickless_testing::Random;
use tempfile::TempDir;

use crate::daemon::Daemon;
use crate::frontend::LIMIT;
use crate::guest::image_dir;
use crate::qcow2::qemu_img;
use crate::walk::device_rings::Kind;
use crate::walk::honest::{Honest, answers};
use crate::walk::session::Attacked;
use crate::walk::totals::{Goals, Totals};

/// Steps between two checks of the honest devices.
pub const STEPS_BETWEEN_CHECKS: u64 = 2000;
/// Steps of the walk before the resources of the daemon are counted.
const STEPS_OF_WARM_UP: u64 = 3000;
/// Sessions of which one is followed by an honest front-end of the same device.
const SESSIONS_PER_CHECK: u64 = 32;
/// Bytes of memory that the daemon may have more after the walk than before: caches and heaps of threads.
const GROWTH_MAX: u64 = 96 << 20;

/// Part of the steps that a device gets, of [`PARTS`]. Those that answer at once get most, because a walk has
/// a number of requests to do.
fn part(name: &str) -> u64 {
    match name {
        "memory" => 40,
        "null" => 24,
        "file" | "qcow2" => 8,
        _ => 4,
    }
}

/// The sum of all parts.
const PARTS: u64 = 100;

/// The devices that are attacked: name, kind and lines of the configuration.
fn devices(dir: &TempDir) -> Result<Vec<(&'static str, Kind, String)>> {
    let image = |name: &str| -> Result<String> {
        let path = dir.path().join(name);
        File::create_new(&path)?.set_len(64 << 20)?;
        Ok(path.display().to_string())
    };
    let disk = |file: &str| format!("blk-file = '{file}'\nnum-queues = 4");
    let faults = "fault:seed=7,eio@1%,short@1%,eagain@1%,delay=1ms@0.1%";
    let mut devices = vec![
        ("memory", Kind::Disk, disk("mem:64M")),
        ("null", Kind::Disk, disk("null:64M")),
        ("file", Kind::Disk, disk(&image("file.img")?)),
        ("faulty", Kind::Disk, disk(&format!("{faults}:{}", image("faulty.img")?))),
        ("left", Kind::Card(2), "port = 'switch:walk'\nnum-queue-pairs = 2".to_owned()),
        ("right", Kind::Card(1), "port = 'switch:walk,vlan=5'\nmac = '02:00:00:00:06:01'".to_owned()),
        ("loop", Kind::Card(1), "port = 'loop'".to_owned()),
        ("source", Kind::Card(1), "port = 'null,rate=2000'".to_owned()),
    ];
    if qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "image.qcow2", "64M"]).is_ok() {
        let path = dir.path().join("image.qcow2");
        devices.push(("qcow2", Kind::Disk, disk(&format!("qcow2:{}", path.display()))));
    }
    Ok(devices)
}

/// Walks from `seed` until the goals are reached. Returns the counts.
///
/// # Errors
/// The daemon hangs, panics, ends, keeps resources, or serves an honest device wrongly. The error names the
/// seed and the step.
pub fn walk(seed: u64, goals: &Goals) -> Result<Totals> {
    kickless_memory::fault::guard()?;
    let dir = image_dir()?;
    let devices = devices(&dir)?;
    let honest = [
        ("honest", "blk-file = 'mem:16M'"),
        ("honest-a", "port = 'switch:walk'\nmac = '02:00:00:00:05:01'"),
        ("honest-b", "port = 'switch:walk'\nmac = '02:00:00:00:05:02'"),
    ];
    let all = devices.iter().map(|(name, _, lines)| (*name, lines.as_str())).chain(honest);
    let all: Vec<(&str, &str)> = all.collect();
    let daemon = Daemon::serve_with(&["--control"], "workers = 2", &all)?;
    let attacked =
        |(name, kind, _): &(&'static str, Kind, String)| Attacked::new(name, *kind, daemon.socket_of(name));
    let attacked = devices.iter().map(attacked).collect();
    let mut walk = Walk { daemon, attacked, seed, totals: Totals::default() };
    let result = walk
        .run(goals)
        .with_context(|| format!("WALK_SEED={seed}, step {} after {:?}", walk.totals.steps, walk.totals));
    if result.is_err() {
        walk.daemon.log().dump();
    }
    result?;
    let Walk { daemon, totals, .. } = walk;
    let (status, log) = daemon.stop()?;
    ensure!(status.code() == Some(0), "WALK_SEED={seed}: the daemon ended with {status}");
    check_log(&log).with_context(|| format!("WALK_SEED={seed}"))?;
    Ok(totals)
}

/// A daemon under attack.
struct Walk {
    daemon: Daemon,
    attacked: Vec<Attacked>,
    seed: u64,
    totals: Totals,
}

impl Walk {
    fn run(&mut self, goals: &Goals) -> Result<()> {
        let mut honest = Some(Honest::connect(&self.daemon)?);
        let mut before = None;
        while before.is_none() || !self.totals.reach(goals) {
            self.step()?;
            let steps = self.totals.steps;
            if steps.is_multiple_of(STEPS_BETWEEN_CHECKS)
                && let Some(honest) = &mut honest
            {
                honest.check().context("an honest device")?;
                self.totals.checks += 1;
                ensure!(self.daemon.is_running()?, "the daemon has ended");
            }
            if steps == STEPS_OF_WARM_UP {
                self.leave();
                drop(honest.take());
                before = Some(self.settled()?);
                honest = Some(Honest::connect(&self.daemon)?);
            }
        }
        self.leave();
        drop(honest);
        let before = before.context("the walk was too short")?;
        self.check_resources(before)?;
        check_log(&self.daemon.log().lines())?;
        let answer = honest::control(&self.daemon.socket_of("control"))?;
        ensure!(answer.contains("\"result\""), "the control socket answers {answer}");
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        self.totals.steps += 1;
        let step = self.totals.steps;
        let mut random =
            Random(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ step.wrapping_mul(0xd134_2543_de82_ef95));
        let mut left = random.below(PARTS);
        let is_chosen = |attacked: &Attacked| match left.checked_sub(part(attacked.name)) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        };
        // Without a program for qcow2 images, the first device takes their part.
        let at = self.attacked.iter().position(is_chosen).unwrap_or(0);
        let attacked = &mut self.attacked[at];
        let has_ended = attacked.step(&mut random, &mut self.totals).context(attacked.name)?;
        if has_ended && random.one_in(SESSIONS_PER_CHECK) {
            answers(attacked.kind, &attacked.socket)
                .with_context(|| format!("{} after a session", attacked.name))?;
            self.totals.checks += 1;
        }
        Ok(())
    }

    fn leave(&mut self) {
        self.attacked.iter_mut().for_each(Attacked::leave);
    }

    /// Counts the resources of the daemon when no front-end is connected.
    fn settled(&self) -> Result<Held> {
        let mut held = Held::of(&self.daemon)?;
        let start = Instant::now();
        // Sessions end on threads of their own.
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = Held::of(&self.daemon)?;
            if now.mappings == 0 && (now.descriptors, now.threads) == (held.descriptors, held.threads) {
                return Ok(now);
            }
            ensure!(start.elapsed() < LIMIT, "the daemon keeps memory of guests: {now:?}");
            held = now;
        }
    }

    fn check_resources(&self, before: Held) -> Result<()> {
        let start = Instant::now();
        loop {
            let now = Held::of(&self.daemon)?;
            let is_back = now.descriptors <= before.descriptors
                && now.threads <= before.threads
                && now.mappings <= before.mappings
                && now.resident <= before.resident + GROWTH_MAX;
            if is_back {
                return Ok(());
            }
            ensure!(start.elapsed() < LIMIT, "the daemon had {before:?} before the walk, and has {now:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Resources of the daemon.
#[derive(Clone, Copy, Debug)]
struct Held {
    descriptors: usize,
    /// Threads, without those of engines, which come on demand up to a fixed number.
    threads: usize,
    /// Mappings of memory of guests.
    mappings: usize,
    resident: u64,
}

impl Held {
    fn of(daemon: &Daemon) -> Result<Held> {
        let (descriptors, mappings) = daemon.holdings()?;
        let process = format!("/proc/{}", daemon.pid());
        let tasks = std::fs::read_dir(format!("{process}/task"))?;
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let threads = names.filter(|name| !name.starts_with("io-")).count();
        let status = std::fs::read_to_string(format!("{process}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = resident.trim().trim_end_matches(" kB").parse()?;
        Ok(Held { descriptors, threads, mappings, resident: kib << 10 })
    }
}

/// Checks that nothing in the log is a fault of the daemon.
fn check_log(log: &[String]) -> Result<()> {
    let wrong: Vec<&String> = log.iter().filter(|line| line.contains("panicked")).collect();
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}
