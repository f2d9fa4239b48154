//! The cost of a pause of the load through which the server sleeps. Two threads on two CPUs, without this
//! crate.
//!
//! One thread asks and the other answers, one question at a time, for 100 ms of every second. Through the
//! pauses, the answering thread either polls (as a poller that stops after 3 s idle) or sleeps (as a server
//! that costs nothing while idle). While questions come, it polls in both cases. The asking thread polls for
//! its answer, or sleeps until it is woken. For each combination, this prints questions per millisecond and
//! their ratio.
//!
//! `cargo run --release -p kickless-worker --example pause [TURNS]`

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::{read, write};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const ON: Duration = Duration::from_millis(100);
const OFF: Duration = Duration::from_millis(900);
const PHASES: u32 = 5;
/// The time for which a thread polls before it sleeps.
const LOOK: Duration = Duration::from_micros(300);
const LOOKS_PER_CLOCK: u32 = 64;

/// A cache line of its own, and its neighbour's too: lines are fetched in pairs.
#[repr(align(128))]
struct Line<T>(T);

/// The state that both threads share.
struct Pair {
    question: Line<AtomicU64>,
    answer: Line<AtomicU64>,
    /// The one that answers, and the one that asks, is to be woken.
    sleeps: [Line<AtomicBool>; 2],
    wakes: [OwnedFd; 2],
    over: AtomicBool,
}

const ANSWERS: usize = 0;
const ASKS: usize = 1;

impl Pair {
    fn new() -> io::Result<Self> {
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Self {
            question: Line(AtomicU64::new(0)),
            answer: Line(AtomicU64::new(0)),
            sleeps: [Line(AtomicBool::new(false)), Line(AtomicBool::new(false))],
            wakes: [event()?, event()?],
            over: AtomicBool::new(false),
        })
    }

    /// Wakes the other if it sleeps.
    fn wake(&self, whom: usize) {
        // Either the other sees what was stored before, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.sleeps[whom].0.load(Ordering::Relaxed) {
            // It fails only if there are 2^64 - 1 already.
            let _ = write(&self.wakes[whom], &1u64.to_ne_bytes());
        }
    }

    /// Sleeps, unless there is something already.
    fn sleep(&self, who: usize, is_there: impl Fn() -> bool) {
        self.sleeps[who].0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !is_there() {
            // An error can only be a signal: the caller looks again.
            let _ = poll(&mut [PollFd::new(&self.wakes[who], PollFlags::IN)], None);
        }
        self.sleeps[who].0.store(false, Ordering::Relaxed);
        let _ = read(&self.wakes[who], &mut [0; 8]);
    }

    fn answer(&self, sleeps: bool) {
        let (mut seen, mut looks, mut since) = (0, 0u32, Instant::now());
        while !self.over.load(Ordering::Relaxed) {
            let question = self.question.0.load(Ordering::Acquire);
            if question != seen {
                seen = question;
                self.answer.0.store(question, Ordering::Release);
                self.wake(ASKS);
                (looks, since) = (0, Instant::now());
                continue;
            }
            std::hint::spin_loop();
            looks += 1;
            if sleeps && looks.is_multiple_of(LOOKS_PER_CLOCK) && since.elapsed() >= LOOK {
                self.sleep(ANSWERS, || {
                    self.question.0.load(Ordering::Acquire) != seen || self.over.load(Ordering::Relaxed)
                });
                since = Instant::now();
            }
        }
    }

    /// Questions that were answered.
    fn ask(&self, sleeps: bool) -> u64 {
        let mut asked = 0;
        for _ in 0..PHASES {
            std::thread::sleep(OFF);
            let start = Instant::now();
            while start.elapsed() < ON {
                asked += 1;
                self.question.0.store(asked, Ordering::Release);
                self.wake(ANSWERS);
                let is_there = || self.answer.0.load(Ordering::Acquire) == asked;
                while !is_there() {
                    match sleeps {
                        true => self.sleep(ASKS, is_there),
                        false => std::hint::spin_loop(),
                    }
                }
            }
        }
        self.over.store(true, Ordering::Relaxed);
        self.wake(ANSWERS);
        asked
    }
}

fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Answers for each millisecond of load.
fn turn(cpus: [usize; 2], answers_sleep: bool, asks_sleep: bool) -> io::Result<f64> {
    let pair = Pair::new()?;
    let asked = std::thread::scope(|scope| {
        let answers = scope.spawn(|| pin(cpus[ANSWERS]).map(|()| pair.answer(answers_sleep)));
        let asked = pin(cpus[ASKS]).map(|()| pair.ask(asks_sleep));
        answers.join().map_err(|_| io::Error::other("the thread that answers panicked"))??;
        asked
    })?;
    Ok(asked as f64 / (f64::from(PHASES) * ON.as_secs_f64() * 1e3))
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn show(values: &[f64], digits: usize) -> String {
    let [first, .., last] = values else { return values.first().map(f64::to_string).unwrap_or_default() };
    format!("{:.digits$} ({first:.digits$} to {last:.digits$})", values[values.len() / 2])
}

fn main() -> io::Result<()> {
    let turns = std::env::args().nth(1).map_or(Ok(5), |turns| turns.parse()).map_err(io::Error::other)?;
    let usable = sched_getaffinity(None)?;
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).take(2).collect();
    let &[asks, answers] = cpus.as_slice() else {
        println!("skipped: it needs two CPUs");
        return Ok(());
    };
    let cpus = [answers, asks];
    println!("questions answered in a millisecond of load; median (least to most) of {turns} turns");
    for (name, asks_sleep) in [("looks for its answer", false), ("sleeps until it is called", true)] {
        let mut rates = Vec::new();
        for number in 0..turns {
            // The first of a pair is now the one, now the other.
            let first = number % 2 == 0;
            let (one, other) = (turn(cpus, first, asks_sleep)?, turn(cpus, !first, asks_sleep)?);
            rates.push(if first { (one, other) } else { (other, one) });
        }
        let slept = sorted(rates.iter().map(|rate| rate.0));
        let looked = sorted(rates.iter().map(|rate| rate.1));
        let means = [&slept, &looked].map(|rates| rates.iter().sum::<f64>() / rates.len() as f64);
        println!("the one that asks {name}:");
        println!("  the other slept through the pauses: {}", show(&slept, 0));
        println!("  the other looked on:                {}", show(&looked, 0));
        println!("  ratio: {}", show(&sorted(rates.iter().map(|rate| rate.0 / rate.1)), 2));
        println!("  ratio of the means: {:.2}", means[0] / means[1]);
    }
    Ok(())
}
