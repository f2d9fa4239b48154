//! Compares our driver with the `virtio-driver` crate of the libblkio project, on the same back-ends:
//! `kickless blk --blk-file=null:1G` and `qemu-storage-daemon` with null-co.
//!
//! One queue of 256 with EVENT_IDX, one thread, reads of 4 KiB, 1 and 32 in flight. The drivers poll the
//! ring or sleep on the eventfd. By default, our driver looks at the ring before it sleeps, as long as that
//! pays; `--at-once` turns this off. Contestants take turns, each with a daemon of its own of each kind.
//! The driver has the first CPU and all back-ends the second.
//!
//! The rings are split. Over vhost-user, the crate (0.6.1) gives 0 as the base of a packed ring, which
//! means wrap counters of 0. Its own counters begin at 1, so the device never finds a request.
//!
//!     cargo bench -p kickless-tests --bench driver_vs_virtio_driver
//!         [-- --quick | --millis=N] [--only=TEXT] [--at-once]
//!
//! `--only` selects the comparisons whose heading contains TEXT.

#[path = "../common/mod.rs"]
mod common;
mod peer;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use common::{BLOCK, Cpus, Plan, Spread, argument, cpu_ns_per_request, cpu_seconds};
use kickless_driver::{Choice, Completion, Data, Disk, Options, Queue, Request, Waiting};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use rustix::time::{ClockId, clock_gettime};

use crate::peer::Peer;

const DISK_SIZE: u64 = 1 << 30;
const QUEUE_SIZE: u16 = 256;

/// The load.
#[derive(Clone, Copy, Debug)]
struct Load {
    depth: u16,
    /// Sleeps when the ring is empty, instead of polling.
    sleep: bool,
    time: Duration,
}

/// The results of a load.
#[derive(Clone, Copy, Debug, Default)]
struct Results {
    requests: u64,
    kicks: u64,
    time: Duration,
}

/// Random offsets, the same for both contestants.
#[derive(Debug)]
struct Offsets(u64);

impl Default for Offsets {
    fn default() -> Offsets {
        Offsets(0x9e37_79b9_7f4a_7c15)
    }
}

impl Offsets {
    #[inline]
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % DISK_SIZE / u64::from(BLOCK) * u64::from(BLOCK)
    }
}

/// A queue of our driver, with memory for its requests.
struct Ours {
    disk: Disk,
    queue: Queue,
    data: Vec<Data>,
    batch: Vec<Request>,
}

impl Ours {
    fn connect(socket: &Path) -> Result<Ours> {
        let packed = Choice::Off;
        let at_once = std::env::args().any(|argument| argument == "--at-once");
        let waiting = if at_once { Waiting::Sleep } else { Waiting::Auto };
        let options = Options { queues: 1, queue_size: QUEUE_SIZE, packed, waiting, ..Options::new(socket) };
        let disk = Disk::connect(options)?;
        let queue = disk.queue(0);
        Ok(Ours { disk, queue, data: Vec::new(), batch: Vec::new() })
    }

    fn run(&mut self, load: &Load) -> Result<Results> {
        let depth = usize::from(load.depth);
        let Ours { disk, queue, data: idle, batch } = self;
        while idle.len() < depth {
            idle.push(disk.buffer(BLOCK as usize)?.into());
        }
        idle.truncate(depth);
        let mut ran = Results::default();
        let mut offsets = Offsets::default();
        let kicks = queue.counters().kicks;
        let mut failed = 0;
        let start = Instant::now();
        let mut over = false;
        while !over || idle.len() < depth {
            if !over && !idle.is_empty() {
                batch.extend(idle.drain(..).map(|data| Request::read(offsets.next(), data)));
                queue.submit(batch)?;
                ensure!(batch.is_empty(), "no room for {depth} requests");
            }
            let each = |completion: Completion| {
                failed += u64::from(completion.result.is_err());
                idle.push(completion.data);
            };
            ran.requests += match load.sleep {
                true => queue.wait(depth, None, each)?,
                false => queue.poll(depth, each)?,
            } as u64;
            if idle.is_empty() {
                std::hint::spin_loop();
            } else {
                over = over || start.elapsed() >= load.time;
            }
        }
        ran.time = start.elapsed();
        ran.kicks = queue.counters().kicks - kicks;
        ensure!(failed == 0, "{failed} reads failed");
        Ok(ran)
    }
}

/// The back-ends of the two contestants.
struct BackEnds {
    name: &'static str,
    daemons: [Daemon; 2],
    ours: Ours,
    theirs: Peer,
}

impl BackEnds {
    fn new(name: &'static str, program: Program) -> Result<BackEnds> {
        let daemon = || {
            let disk = format!("null:{DISK_SIZE}");
            Daemon::start(&DaemonConfig { program, queues: 1, ..DaemonConfig::new(disk) })
        };
        let daemons = [daemon()?, daemon()?];
        let ours = Ours::connect(daemons[0].socket())?;
        let theirs = Peer::connect(daemons[1].socket())?;
        Ok(BackEnds { name, daemons, ours, theirs })
    }

    fn turn(&mut self, which: usize, load: &Load) -> Result<Turn> {
        let pid = self.daemons[which].pid();
        let (driver, back_end) = (thread_cpu(), cpu_seconds(pid)?);
        let ran = if which == 0 { self.ours.run(load) } else { self.theirs.run(load) }?;
        let per_request = |spent: f64| cpu_ns_per_request(spent, ran.requests as f64);
        Ok(Turn {
            rate: ran.requests as f64 / ran.time.as_secs_f64(),
            kicks: ran.kicks as f64 / ran.requests as f64,
            driver: per_request(thread_cpu() - driver),
            back_end: per_request(cpu_seconds(pid)? - back_end),
        })
    }
}

/// One turn of one contestant.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Requests per second.
    rate: f64,
    /// Kicks per request.
    kicks: f64,
    /// Processor nanoseconds of the driver per request.
    driver: f64,
    /// Processor nanoseconds of the back-end per request.
    back_end: f64,
}

/// Returns the processor seconds of this thread.
fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn compare(back_ends: &mut BackEnds, plan: &Plan, depth: u16, sleep: bool) -> Result<()> {
    let load = Load { depth, sleep, time: plan.time };
    let how = if sleep { "sleeping" } else { "polling" };
    let heading = format!("{}, {depth} in flight, {how}", back_ends.name);
    if argument("--only=").is_some_and(|only| !heading.contains(&only)) {
        return Ok(());
    }
    let mut turns: [Vec<Turn>; 2] = Default::default();
    for round in 0..plan.rounds {
        // The order changes in each round.
        for which in [round % 2, 1 - round % 2] {
            turns[which].push(back_ends.turn(which, &load)?);
        }
    }
    println!("\n{heading}");
    println!(
        "  {:<16} {:>9}  {:>9} .. {:<9} {:>9} {:>14} {:>16}",
        "", "reads/s", "least", "most", "kicks/req", "driver ns/req", "back-end ns/req"
    );
    for (name, turns) in ["ours", "virtio-driver"].into_iter().zip(&turns) {
        let of = |value: fn(&Turn) -> f64| Spread::of(turns.iter().map(value));
        let (rate, median) = (of(|turn| turn.rate), |value| of(value).median);
        println!(
            "  {name:<16} {:>9.0}  {:>9.0} .. {:<9.0} {:>9.4} {:>14.0} {:>16.0}",
            rate.median,
            rate.min,
            rate.max,
            median(|turn| turn.kicks),
            median(|turn| turn.driver),
            median(|turn| turn.back_end),
        );
    }
    let ratio = |value: fn(&Turn) -> f64| {
        let Spread { median, min, max } =
            Spread::of(turns[0].iter().zip(&turns[1]).map(|(ours, theirs)| value(ours) / value(theirs)));
        format!("{median:.2} ({min:.2} .. {max:.2})")
    };
    println!(
        "  ours/virtio-driver: reads/s {} (target: at least 1), driver's CPU for each {} (at most 1), the back-end's {}{}",
        ratio(|turn| turn.rate),
        ratio(|turn| turn.driver),
        ratio(|turn| turn.back_end),
        plan.remark(),
    );
    Ok(())
}

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let cpus = Cpus::get()?;
    cpus.for_back_ends()?;
    let mut stands = [
        BackEnds::new("kickless null:1G", Program::Kickless)?,
        BackEnds::new("qemu-storage-daemon null-co", Program::StorageDaemon)?,
    ];
    cpus.for_driver()?;
    println!("reads of 4 KiB from nothing, {} turns of {:?} each{}", plan.rounds, plan.time, plan.remark());
    for back_ends in &mut stands {
        for (depth, sleep) in [(1, false), (32, false), (1, true), (32, true)] {
            compare(back_ends, &plan, depth, sleep)?;
        }
    }
    Ok(())
}
