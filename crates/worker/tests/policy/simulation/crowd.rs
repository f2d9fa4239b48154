//! A worker that serves many guests, each of which sends at random times of its own.

use super::chooser::{Chooser, Rule};
use super::load::{SEC, US, random_gap};
use super::machine::{Machine, quantile};
use fastrand::Rng;
use kickless_worker::policy::{Host, Nanos, Verdict};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The costs of a worker beside those of a [`Machine`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    pub(crate) machine: Machine,
    /// An interrupt of the guest.
    pub(crate) call: Nanos,
    /// A kick that the worker finds when it looks at its descriptors.
    pub(crate) event: Nanos,
    /// Such a look.
    pub(crate) wait: Nanos,
}

impl Costs {
    /// Returns those of the machine of docs/scale.md with this many guests. The work for a request grows with
    /// them, because the state of each leaves the processor's caches.
    pub(crate) fn measured(guests: usize) -> Self {
        let service = match guests {
            ..=64 => 200.0,
            more => 200.0 + 195.0 * (more as f64 / 64.0).log2() / 3.0,
        };
        let service = service as Nanos;
        // With few requests, each wakes the worker, and takes 10 us of its core.
        let machine = Machine { look: 60, kicked_cpu: 10 * US, service, ..Machine::default() };
        Self { machine, call: 700, event: 1_500, wait: 500 }
    }
}

/// The time between two looks at descriptors of a worker that polls (`TIME_BETWEEN_WAITS` of its loop).
const BETWEEN_WAITS: Nanos = 50 * US;
/// The requests of one visit, beside many other devices.
const VISIT: usize = 2;
/// The warm-up, in which leases find their length.
const WARM_UP: Nanos = 2 * SEC;

/// The results of a run.
#[derive(Debug, Default)]
pub(crate) struct Served {
    pub(crate) requests: u64,
    pub(crate) kicks: u64,
    /// The share of the core that the worker took.
    pub(crate) busy: f64,
    /// The time of each request in the ring.
    pub(crate) delays: Vec<u32>,
}

impl Served {
    /// Returns the delay that this share of the requests does not exceed, in ns.
    pub(crate) fn delay(&mut self, share: f64) -> Nanos {
        quantile(&mut self.delays, share)
    }
}

/// A guest and its queue.
struct Guest {
    chooser: Chooser,
    /// The time until which the queue is polled without asking the chooser again.
    spin_until: Option<Nanos>,
    rng: Rng,
    next: Nanos,
    ring: VecDeque<Nanos>,
}

impl Guest {
    /// Has the guest send what is due.
    fn send(&mut self, now: Nanos, mean: f64) {
        while self.next <= now {
            self.ring.push_back(self.next);
            self.next += random_gap(&mut self.rng, mean).max(1);
        }
    }
}

/// A worker with its guests.
pub(crate) struct Crowd {
    costs: Costs,
    host: Host,
    /// The nanoseconds between two requests of a guest, on average.
    mean: f64,
    guests: Vec<Guest>,
    polled: VecDeque<usize>,
    naps: BinaryHeap<Reverse<(Nanos, usize)>>,
    /// The next kick of each armed queue.
    kicks: BinaryHeap<Reverse<(Nanos, usize)>>,
    now: Nanos,
    busy: Nanos,
    looked: Nanos,
    rng: Rng,
    served: Served,
}

impl Crowd {
    /// Makes guests that send `rate` requests a second each.
    pub(crate) fn new(costs: Costs, rule: Rule, guests: usize, rate: f64, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mean = SEC as f64 / rate;
        let guest = |_| Guest {
            chooser: Chooser::new(rule, 256),
            spin_until: None,
            next: rng.u64(0..=mean as Nanos),
            rng: Rng::with_seed(rng.u64(..)),
            ring: VecDeque::new(),
        };
        let guests: Vec<_> = (0..guests).map(guest).collect();
        let Machine { timed_cpu, wake_delay, wake_jitter, .. } = costs.machine;
        Self {
            host: Host::new(timed_cpu, wake_delay + wake_jitter / 2),
            polled: (0..guests.len()).collect(),
            costs,
            mean,
            guests,
            naps: BinaryHeap::new(),
            kicks: BinaryHeap::new(),
            now: 0,
            busy: 0,
            looked: 0,
            rng,
            served: Served::default(),
        }
    }

    /// Runs a warm-up, and then the part that counts.
    pub(crate) fn run(mut self, time: Nanos) -> Served {
        while self.now < WARM_UP {
            self.turn();
        }
        let (began, busy) = (self.now, self.busy);
        self.served = Served::default();
        while self.now < began + time {
            self.turn();
        }
        self.served.busy = (self.busy - busy) as f64 / (self.now - began) as f64;
        self.served
    }

    fn work(&mut self, time: Nanos) {
        self.now += time;
        self.busy += time;
    }

    fn turn(&mut self) {
        while let Some(Reverse((until, number))) = self.naps.peek().copied()
            && until <= self.now
        {
            self.naps.pop();
            self.poll(number);
        }
        for _ in 0..self.polled.len() {
            let Some(number) = self.polled.pop_front() else { break };
            self.visit(number);
        }
        if self.polled.is_empty() {
            self.sleep();
        } else if self.now - self.looked >= BETWEEN_WAITS {
            self.work(self.costs.wait);
            self.handle_kicks();
        }
    }

    fn poll(&mut self, number: usize) {
        self.guests[number].spin_until = None;
        self.polled.push_back(number);
    }

    fn visit(&mut self, number: usize) {
        self.work(self.costs.machine.look);
        let guest = &mut self.guests[number];
        guest.send(self.now, self.mean);
        let count = guest.ring.len().min(VISIT);
        if count > 0 {
            guest.chooser.found(self.now, count as u32);
            guest.spin_until = None;
            for sent in guest.ring.drain(..count) {
                self.served.delays.push((self.now - sent) as u32);
            }
            self.served.requests += count as u64;
            self.work(count as Nanos * self.costs.machine.service + self.costs.call);
            return self.polled.push_back(number);
        }
        if guest.spin_until.is_some_and(|until| self.now < until) {
            return self.polled.push_back(number);
        }
        match guest.chooser.empty(self.now, &self.host, false) {
            Verdict::Spin { until } => {
                guest.spin_until = Some(until);
                self.polled.push_back(number);
            }
            Verdict::Nap { until, .. } => {
                // One wake serves all naps that end soon after one another.
                let first = self.naps.peek().map_or(Nanos::MAX, |nap| nap.0.0);
                let shared = first < until && first - self.now.min(first) >= (until - self.now) / 2;
                self.naps.push(Reverse((if shared { first } else { until }, number)));
            }
            Verdict::Arm => {
                guest.chooser.armed();
                self.kicks.push(Reverse((guest.next, number)));
            }
        }
    }

    /// Sleeps until a kick or the end of a nap.
    fn sleep(&mut self) {
        let [kick, nap] = [&self.kicks, &self.naps].map(|times| times.peek().map_or(Nanos::MAX, |at| at.0.0));
        let Machine { timed_cpu, kicked_cpu, wake_delay, wake_jitter, .. } = self.costs.machine;
        let cpu = if kick < nap { kicked_cpu } else { timed_cpu };
        // The second half is a part of the delay.
        self.work(cpu / 2);
        let delay = (wake_delay + self.rng.u64(0..=wake_jitter)).saturating_sub(cpu / 2);
        self.now = self.now.max(kick.min(nap)) + delay;
        self.work(cpu / 2);
        self.handle_kicks();
    }

    fn handle_kicks(&mut self) {
        while let Some(Reverse((at, number))) = self.kicks.peek().copied()
            && at <= self.now
        {
            self.kicks.pop();
            self.work(self.costs.event);
            self.served.kicks += 1;
            self.guests[number].chooser.woken(self.now, &self.host);
            self.poll(number);
        }
        self.looked = self.now;
    }
}
