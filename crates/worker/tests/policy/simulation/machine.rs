//! A worker's core, in simulated time.

use super::chooser::{Chooser, Rule};
use super::load::{Driver, Load, MS, Request, US};
use fastrand::Rng;
use kickless_worker::policy::{Host, Nanos, Pressure, Usage, Verdict};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The costs of the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// The processor time of a sleep that a timer ends, and of one that a kick or a completion ends.
    pub(crate) timed_cpu: Nanos,
    pub(crate) kicked_cpu: Nanos,
    pub(crate) wake_delay: Nanos,
    /// The largest additional time of a wake.
    pub(crate) wake_jitter: Nanos,
    /// A poll of a ring.
    pub(crate) look: Nanos,
    /// The work for a request.
    pub(crate) service: Nanos,
    /// The driver's cost of a kick.
    pub(crate) kick: Nanos,
    /// Another thread wants the core all the time.
    pub(crate) hog: bool,
    /// The process or the machine is stopped for a time: when, and for how long.
    pub(crate) stop: (Nanos, Nanos),
    /// Until this time, each wake takes `slow_wake` more, because the host is busy.
    pub(crate) slow_until: Nanos,
    pub(crate) slow_wake: Nanos,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            timed_cpu: 8 * US,
            kicked_cpu: 4 * US,
            wake_delay: 25 * US,
            wake_jitter: 20 * US,
            look: 100,
            service: 500,
            kick: 3 * US,
            hog: false,
            stop: (Nanos::MAX, 0),
            slow_until: 0,
            slow_wake: 0,
        }
    }
}

/// Returns the delay that this share of the delays, less than 1, does not exceed. 0 if there is none.
pub(crate) fn quantile(delays: &mut [u32], share: f64) -> Nanos {
    if delays.is_empty() {
        return 0;
    }
    let at = (delays.len() as f64 * share) as usize;
    Nanos::from(*delays.select_nth_unstable(at).1)
}

/// The results of a run, after its warm-up.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) time: Nanos,
    pub(crate) cpu: Nanos,
    pub(crate) requests: u64,
    pub(crate) kicks: u64,
    pub(crate) sleeps: u64,
    /// The time from sending to popping, of each request.
    pub(crate) delays: Vec<u32>,
    /// The delays that cost something: of the first request after each wait. In a closed loop, all of the
    /// delay counts. Otherwise the part beyond the accepted delay and any wake counts.
    pub(crate) dear_delay: Nanos,
    /// When the worker last ran.
    pub(crate) last_run: Nanos,
    pub(crate) verdicts: Vec<Verdict>,
}

impl Outcome {
    pub(crate) fn cpu_share(&self) -> f64 {
        self.cpu as f64 / self.time as f64
    }

    pub(crate) fn per_sec(&self) -> f64 {
        self.requests as f64 / (self.time as f64 / 1e9)
    }

    pub(crate) fn mean_delay(&self) -> f64 {
        self.delays.iter().map(|&delay| f64::from(delay)).sum::<f64>() / self.delays.len().max(1) as f64
    }

    pub(crate) fn median_delay(&mut self) -> Nanos {
        quantile(&mut self.delays, 0.5)
    }

    /// Returns processor time plus the worth of delays, for each request.
    pub(crate) fn cost(&self) -> f64 {
        (self.cpu as f64 + super::table::DELAY_WORTH * self.dear_delay as f64) / self.requests.max(1) as f64
    }
}

/// The time by which a fair scheduler lets one thread run ahead of another before it switches.
const GRANULE: Nanos = 3 * MS;
/// The largest number of heads popped in one visit.
const BUDGET: u32 = 64;

/// A core that the worker may have to share with a hog.
#[derive(Default)]
struct Core {
    now: Nanos,
    hog: bool,
    usage: Usage,
    /// The processor time of each. The worker's also grows while it sleeps.
    worker: Nanos,
    other: Nanos,
}

impl Core {
    /// Runs the worker until it has had this much time.
    fn run(&mut self, cpu: Nanos) {
        let mut left = cpu;
        while left > 0 {
            let turn =
                if self.hog { (self.other + GRANULE).saturating_sub(self.worker).max(1) } else { left };
            let part = left.min(turn);
            self.now += part;
            self.usage.cpu += part;
            self.worker += part;
            left -= part;
            self.give_way(GRANULE);
        }
    }

    /// Spins until this time on the clock.
    fn spin_until(&mut self, until: Nanos) {
        while self.now < until {
            let step = if self.hog { 50 * US } else { Nanos::MAX };
            self.run(step.min(until - self.now));
        }
    }

    /// Sleeps until something happens at `at`, and wakes after a delay.
    fn sleep_until(&mut self, at: Nanos, delay: Nanos) {
        let asleep = at.max(self.now) - self.now;
        self.now += asleep;
        if self.hog {
            self.other += asleep;
            self.worker = self.worker.max(self.other.saturating_sub(GRANULE / 2));
        }
        self.now += delay;
        self.give_way(MS);
    }

    /// Lets the other thread run until it has caught up, if the worker is too far ahead.
    fn give_way(&mut self, ahead: Nanos) {
        if self.hog && self.worker >= self.other + ahead {
            let turn = self.worker - self.other;
            self.now += turn;
            self.other += turn;
            self.usage.run_delay += turn;
        }
    }
}

/// A worker that serves one queue.
pub(crate) struct Worker {
    machine: Machine,
    core: Core,
    driver: Driver,
    chooser: Chooser,
    host: Host,
    pressure: Pressure,
    latency: Nanos,
    rng: Rng,
    /// The requests in flight: the time at which each is done, and its number.
    disk: BinaryHeap<Reverse<(Nanos, Request)>>,
    spun: Nanos,
    waited: bool,
    outcome: Outcome,
}

impl Worker {
    pub(crate) fn new(machine: Machine, load: Load, rule: Rule, latency: Nanos, seed: u64) -> Self {
        let slow = if machine.slow_until > 0 { machine.slow_wake } else { 0 };
        let host = Host::new(machine.timed_cpu, machine.wake_delay + machine.wake_jitter / 2 + slow);
        Self {
            core: Core { hog: machine.hog, ..Core::default() },
            driver: Driver::new(load, seed),
            chooser: Chooser::new(rule, 256),
            host,
            pressure: Pressure::default(),
            latency,
            rng: Rng::with_seed(!seed),
            disk: BinaryHeap::new(),
            spun: 0,
            waited: true,
            outcome: Outcome::default(),
            machine,
        }
    }

    /// Runs a warm-up, and then the part that counts.
    pub(crate) fn run(mut self, warm_up: Nanos, time: Nanos) -> Outcome {
        while self.core.now < warm_up && self.turn(warm_up) {}
        let (began, cpu) = (self.core.now, self.core.usage.cpu);
        self.outcome = Outcome::default();
        let end = began + time;
        while self.core.now < end && self.turn(end) {}
        self.outcome.time = self.core.now.max(end) - began;
        self.outcome.cpu = self.core.usage.cpu - cpu;
        self.outcome
    }

    /// Runs from the start. Returns the share of the core that each `step` of the time took.
    pub(crate) fn shares(mut self, time: Nanos, step: Nanos) -> Vec<f64> {
        let mut shares = Vec::new();
        for end in (step..=time).step_by(step as usize) {
            let cpu = self.core.usage.cpu;
            while self.core.now < end && self.turn(end) {}
            shares.push((self.core.usage.cpu - cpu) as f64 / step as f64);
            self.outcome.delays.clear();
        }
        shares
    }

    /// Runs one visit and its consequences. Returns whether more requests will come.
    fn turn(&mut self, end: Nanos) -> bool {
        if self.core.now >= self.pressure.next() {
            let spun = std::mem::take(&mut self.spun);
            self.host.contended = self.pressure.sample(self.core.now, &self.core.usage, spun);
        }
        self.stop_if_due();
        self.outcome.last_run = self.core.now;
        self.core.run(self.machine.look);
        if self.pop() | self.complete() {
            self.waited = false;
            return true;
        }
        self.waited = true;
        let on_disk = !self.disk.is_empty();
        let verdict = self.chooser.empty(self.core.now, &self.host, on_disk);
        let done = self.disk.peek().map(|next| next.0.0);
        let event = [self.driver.next_at(), done].into_iter().flatten().min();
        match verdict {
            Verdict::Spin { until } => {
                let until = until.min(event.unwrap_or(end)).min(end);
                let since = self.core.now;
                self.core.spin_until(until);
                self.spun += self.core.now - since;
            }
            // A completion ends the sleep as well.
            Verdict::Nap { until, ignore_completions } => {
                let done = done.filter(|&done| !ignore_completions && done < until);
                self.sleep(done.unwrap_or(until), done.is_none());
            }
            // The next visit finds it.
            Verdict::Arm if self.driver.next_at().is_some_and(|at| at <= self.core.now) => {}
            Verdict::Arm => {
                self.chooser.armed();
                let Some(at) = event.filter(|&at| at < end) else {
                    self.core.now = self.core.now.max(end);
                    return false;
                };
                if self.driver.next_at() == Some(at) {
                    self.outcome.kicks += 1;
                    self.driver.kick(at, self.machine.kick);
                }
                self.sleep(at, false);
                self.chooser.woken(self.core.now, &self.host);
            }
        }
        true
    }

    /// Sleeps until an event, or until the end of a timer.
    fn sleep(&mut self, until: Nanos, timed: bool) {
        self.outcome.sleeps += 1;
        let cost = if timed { self.machine.timed_cpu } else { self.machine.kicked_cpu };
        self.core.run(cost / 2);
        let jitter = self.rng.u64(0..=self.machine.wake_jitter);
        let slow = if self.core.now < self.machine.slow_until { self.machine.slow_wake } else { 0 };
        // The second half of the cost is part of the delay.
        let cpu = cost / 2;
        self.driver.worker_sleeps(until);
        self.core.sleep_until(until, (self.machine.wake_delay + jitter + slow).saturating_sub(cpu));
        self.core.run(cpu);
        self.stop_if_due();
        match timed {
            true => {
                Host::approach(&mut self.host.wake_delay, self.core.now.saturating_sub(until));
                Host::approach(&mut self.host.timed_cpu, cost);
            }
            false => Host::approach(&mut self.host.kicked_cpu, cost),
        }
    }

    /// Lets the time pass for which the process is stopped. The driver goes on.
    fn stop_if_due(&mut self) {
        let (at, time) = self.machine.stop;
        if self.core.now >= at {
            self.core.now += time;
            self.machine.stop.0 = Nanos::MAX;
        }
    }

    fn pop(&mut self) -> bool {
        let found = self.core.now;
        let mut popped = 0;
        while popped < BUDGET
            && let Some(request) = self.driver.pop(found)
        {
            if popped == 0 {
                // The policy learns the number before the work is done, as in the loop, which knows it by
                // then.
                self.note_wait(request);
            }
            popped += 1;
            self.outcome.delays.push((self.core.now - request.at) as u32);
            self.core.run(self.machine.service);
            match self.driver.disk() {
                Some(time) => self.disk.push(Reverse((self.core.now + time, request))),
                None => self.answer(request),
            }
        }
        if popped > 0 {
            self.chooser.found(found, popped);
        }
        popped > 0
    }

    fn note_wait(&mut self, request: Request) {
        if self.waited {
            let delay = self.core.now - request.at;
            let accepted = if request.closed {
                0
            } else {
                self.latency + self.machine.wake_delay + self.machine.wake_jitter
            };
            self.outcome.dear_delay += delay.saturating_sub(accepted);
        }
    }

    fn complete(&mut self) -> bool {
        let mut any = false;
        while let Some(&Reverse((done, request))) = self.disk.peek()
            && done <= self.core.now
        {
            self.disk.pop();
            if self.waited && !any {
                let accepted = if request.closed {
                    0
                } else {
                    self.latency + self.machine.wake_delay + self.machine.wake_jitter
                };
                self.outcome.dear_delay += (self.core.now - done).saturating_sub(accepted);
            }
            any = true;
            self.core.run(self.machine.service / 2);
            self.answer(request);
        }
        if any {
            self.chooser.found(self.core.now, 0);
        }
        any
    }

    fn answer(&mut self, request: Request) {
        self.outcome.requests += 1;
        self.driver.answered(request, self.core.now);
    }
}
