//! Whether other threads want the core on which a worker spins.

use super::Nanos;

/// The interval between samples.
const INTERVAL: Nanos = 10_000_000;
/// A worker that spun for less than one part in this many of a sample disturbs no other thread.
const SPUN_MIN: Nanos = 8;
/// The threshold of the share of the time for which the worker waited for the core. A thread that wants all
/// of the core gets half of it, so it is found in three samples. On an otherwise idle machine, threads that
/// run now and then took up to 8 ms some 15 times a second. With 0.05, that was contention half of the time,
/// and a load that loses four fifths without spinning was not spun for.
const DELAY_THRESHOLD: f64 = 0.15;
/// The threshold of the share of the time that the hypervisor took.
const STEAL_THRESHOLD: f64 = 0.1;
/// The most that a sample counts for, in thresholds.
const SAMPLE_MAX: f64 = 3.0;
/// The weight of a sample in the average. Three bad samples in a row are enough for contention, two are not.
const SAMPLE_WEIGHT: f64 = 1.0 / 6.0;
/// The shortest and the longest time for which the worker does not spin after contention.
const BACK_OFF: Nanos = 100_000_000;
const BACK_OFF_MAX: Nanos = 2_000_000_000;

/// Running totals of a worker's thread and of its core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The time for which the thread was ready to run and did not (`/proc/thread-self/schedstat`, second
    /// column). Always 0 if the kernel does not provide it.
    pub run_delay: Nanos,
    /// The time for which the hypervisor gave the core to others (`/proc/stat`, `steal`).
    pub steal: Nanos,
    /// The processor time of the thread.
    pub cpu: Nanos,
}

/// The use of one worker's core by other threads.
///
/// While the core is contended, the worker's [`Host::contended`](super::Host::contended) is set, and its
/// queues spin no longer than a sleep would take. After 100 ms the worker spins again. If it finds
/// contention, it waits three times as long the next time, up to 2 s. A tenth of a second of undisturbed
/// spinning resets this.
#[derive(Debug, Default)]
pub struct Pressure {
    last: Option<(Nanos, Usage)>,
    /// The smoothed pressure while spinning, in thresholds.
    pressure: f64,
    /// The end of the time for which the worker does not spin, while it lasts, and the length of the last.
    contended_until: Option<Nanos>,
    back_off: Nanos,
    /// The time of spinning without contention.
    quiet: Nanos,
}

impl Pressure {
    /// Takes a sample. `spun` is the time on the clock spent in spins since the last one. Returns whether the
    /// core is contended.
    pub fn sample(&mut self, now: Nanos, usage: &Usage, spun: Nanos) -> bool {
        let Some((then, old)) = self.last.replace((now, *usage)) else { return false };
        let time = now.saturating_sub(then);
        // At the end, the worker behaved differently since the last sample than it will from now on.
        if let Some(until) = self.contended_until {
            self.contended_until = Some(until).filter(|&until| now < until);
            return self.contended_until.is_some();
        }
        if time == 0 || spun < time / SPUN_MIN {
            return false;
        }
        // Spinning without processor time was waiting for the core, even if the kernel does not report it.
        let robbed = spun.saturating_sub(usage.cpu.saturating_sub(old.cpu));
        let delay = usage.run_delay.saturating_sub(old.run_delay).max(robbed);
        let steal = usage.steal.saturating_sub(old.steal);
        let strength = (delay as f64 / DELAY_THRESHOLD).max(steal as f64 / STEAL_THRESHOLD) / time as f64;
        tracing::trace!(now, time, delay, robbed, steal, self.pressure, "polling pressure");
        self.pressure += (strength.min(SAMPLE_MAX) - self.pressure) * SAMPLE_WEIGHT;
        if self.pressure < 1.0 {
            self.quiet = self.quiet.saturating_add(time);
            return false;
        }
        let longer = if self.quiet < BACK_OFF { self.back_off * 3 } else { 0 };
        self.back_off = longer.clamp(BACK_OFF, BACK_OFF_MAX);
        self.contended_until = Some(now.saturating_add(self.back_off));
        (self.pressure, self.quiet) = (0.0, 0);
        true
    }

    /// Returns the time of the next sample, if the worker is awake then.
    pub fn next(&self) -> Nanos {
        self.last.map_or(0, |(then, _)| then.saturating_add(INTERVAL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Nanos = INTERVAL;

    /// A worker that spins all the time, in samples, and the events in each.
    struct Worker {
        pressure: Pressure,
        now: Nanos,
        usage: Usage,
    }

    impl Worker {
        fn new() -> Self {
            let mut worker = Self { pressure: Pressure::default(), now: 0, usage: Usage::default() };
            assert_eq!(worker.pressure.next(), 0);
            assert!(!worker.sample(0, 0));
            worker
        }

        fn sample(&mut self, delay: Nanos, spun: Nanos) -> bool {
            self.usage.run_delay += delay;
            self.usage.cpu += INTERVAL - delay;
            self.now += INTERVAL;
            let contended = self.pressure.sample(self.now, &self.usage, spun);
            assert_eq!(self.pressure.next(), self.now + INTERVAL);
            contended
        }
    }

    #[test]
    fn three_bad_samples_in_a_row_are_contention() {
        let mut worker = Worker::new();
        // Bursts of 20 ms, four times a second.
        for sample in 0..100 {
            assert!(!worker.sample(if sample % 25 < 2 { ALL / 2 } else { 0 }, ALL));
        }
        (0..2).for_each(|_| assert!(!worker.sample(ALL / 2, ALL)));
        assert!(worker.sample(ALL / 2, ALL));
    }

    #[test]
    fn backs_off_for_longer_each_time_and_forgets_it_when_all_is_quiet() {
        let mut worker = Worker::new();
        let mut lengths = Vec::new();
        for _ in 0..7 {
            while !worker.sample(ALL / 2, ALL) {}
            let since = worker.now;
            while worker.sample(0, 0) {}
            lengths.push((worker.now - since) / 1_000_000);
        }
        assert_eq!(lengths, [100, 300, 900, 2000, 2000, 2000, 2000]);
        (0..12).for_each(|_| assert!(!worker.sample(0, ALL)));
        while !worker.sample(ALL / 2, ALL) {}
        let since = worker.now;
        while worker.sample(0, 0) {}
        assert_eq!(worker.now - since, BACK_OFF);
    }

    #[test]
    fn usage_before_spinning_resumes_does_not_count() {
        let mut worker = Worker::new();
        while !worker.sample(ALL / 2, ALL) {}
        while worker.sample(ALL / 2, ALL) {}
        (0..2).for_each(|_| assert!(!worker.sample(ALL / 2, ALL)));
        assert!(worker.sample(ALL / 2, ALL));
    }

    #[test]
    fn a_worker_that_hardly_spins_is_not_contended() {
        let mut worker = Worker::new();
        (0..100).for_each(|_| assert!(!worker.sample(ALL / 2, ALL / 10)));
    }

    #[test]
    fn small_delays_are_no_contention() {
        let mut worker = Worker::new();
        (0..100).for_each(|_| assert!(!worker.sample(ALL / 8, ALL)));
        assert!((0..100).any(|_| worker.sample(ALL / 5, ALL)));
    }

    #[test]
    fn each_measure_is_enough_alone() {
        let signs: [(&str, Usage, bool); 4] = [
            ("run delay", Usage { run_delay: ALL / 5, cpu: ALL, ..Usage::default() }, true),
            ("stolen", Usage { steal: ALL / 5, cpu: ALL, ..Usage::default() }, true),
            ("robbed", Usage { cpu: ALL * 4 / 5, ..Usage::default() }, true),
            ("nothing", Usage { cpu: ALL, steal: ALL / 20, ..Usage::default() }, false),
        ];
        for (name, each, expected) in signs {
            let mut pressure = Pressure::default();
            let mut usage = Usage::default();
            let mut contended = false;
            for sample in 0..20 {
                contended |= pressure.sample(sample * INTERVAL, &usage, ALL);
                usage.run_delay += each.run_delay;
                usage.steal += each.steal;
                usage.cpu += each.cpu;
            }
            assert_eq!(contended, expected, "{name}");
        }
    }
}
