//! Measurements of the machine that a worker runs on: the cost of a sleep, and whether other threads want its
//! core.

use crate::clock::{Clock, Nanos, nanos};
use crate::policy::{Host, Pressure, Usage};
use crate::waiter::Waiter;
use rustix::thread::{gettid, sched_getcpu};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The number of sleeps that are measured at the start, and the length of each.
const SLEEPS: u32 = 16;
const SLEEP: Duration = Duration::from_micros(50);
/// The processor time of one sleep in so many is measured. Two readings take half a microsecond, a twentieth
/// of a sleep or so.
const MEASURED: u32 = 16;
/// The interval at which steal time is read. The kernel formats a line for each CPU and each interrupt for
/// it.
const STEAL_EVERY: Nanos = 100_000_000;
/// The time spent polling empty rings after which a sample of other threads' use is taken.
const SPUN_MIN: Nanos = 500_000;
/// A tick of `/proc/stat` (`USER_HZ` is 100 on all architectures that we run on).
const TICK: Nanos = 10_000_000;

/// The measurements that the policies of a worker use.
pub(crate) struct HostProbe {
    pub(crate) host: Host,
    clock: Clock,
    pressure: Pressure,
    /// `None`: the kernel does not provide it.
    schedstat: Option<File>,
    stat: Option<File>,
    steal: Steal,
    /// Time spent polling empty rings since the last sample.
    spun: Nanos,
    /// Sleeps so far.
    sleeps: u32,
}

impl HostProbe {
    /// Measures the cost of sleeping, on the thread that will sleep.
    #[expect(clippy::disallowed_methods, reason = "/proc has a file for each thread of this process")]
    pub(crate) fn new(clock: Clock, waiter: &mut Waiter) -> io::Result<Self> {
        // Naps are short, and the kernel may add 50 us to each by default. Where this fails, the longer naps
        // are measured.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let open = |path: &str| File::open(path).ok();
        let thread = gettid().as_raw_nonzero();
        let mut host_probe = Self {
            host: Host::new(0, 0),
            clock,
            pressure: Pressure::default(),
            schedstat: open(&format!("/proc/self/task/{thread}/schedstat")),
            stat: open("/proc/stat"),
            steal: Steal::default(),
            spun: 0,
            sleeps: 0,
        };
        let (mut late, mut cpu) = (Vec::new(), Vec::new());
        for _ in 0..SLEEPS {
            let before = cpu_time();
            let due = clock.now() + nanos(SLEEP);
            // No thread knows this worker yet, so only the timeout can end the wait.
            let _ = waiter.wait(Some(SLEEP))?.count();
            late.push(clock.now().saturating_sub(due));
            cpu.push(cpu_time().saturating_sub(before));
        }
        late.sort_unstable();
        cpu.sort_unstable();
        // The lower quartile: sleeps that nothing else disturbed.
        let [delay, cpu] = [&late, &cpu].map(|all| all[all.len() / 4]);
        host_probe.host = Host::new(cpu, delay);
        tracing::debug!(host = ?host_probe.host, "measured the sleeps of this worker");
        Ok(host_probe)
    }

    /// Begins a sleep. Returns the thread's processor time if this sleep is to be measured.
    pub(crate) fn falls_asleep(&mut self) -> Option<Nanos> {
        self.sleeps = self.sleeps.wrapping_add(1);
        (self.sleeps.is_multiple_of(MEASURED) && !self.host.contended).then(cpu_time)
    }

    /// Ends a sleep that began at this processor time. `due` is the time of its timer, if it had one.
    /// `served` tasks share the cost.
    pub(crate) fn woke(
        &mut self,
        began: Option<Nanos>,
        due: Option<Nanos>,
        now: Nanos,
        by_event: bool,
        served: Nanos,
    ) {
        let cost = |began| cpu_time().saturating_sub(began) / served.max(1);
        match (due, began) {
            (None, Some(began)) if by_event => Host::approach(&mut self.host.kicked_cpu, cost(began)),
            // A signal can end a sleep early.
            (Some(due), began) if !by_event && now >= due && !self.host.contended => {
                if let Some(began) = began {
                    Host::approach(&mut self.host.timed_cpu, cost(began));
                }
                Host::approach(&mut self.host.wake_delay, now - due);
            }
            _ => {}
        }
    }

    /// Returns the time in which this thread ran or waited for a core, since it was started. Without the
    /// kernel's statistics, a wait for a core is not in it.
    pub(crate) fn not_blocked(&self) -> Nanos {
        cpu_time().saturating_add(self.schedstat.as_ref().and_then(read_run_delay).unwrap_or(0))
    }

    /// Adds time that went into polls that found nothing.
    #[inline]
    pub(crate) fn spun(&mut self, time: Nanos) {
        self.spun += time;
    }

    /// Takes a sample of the core's use by others, if one is due.
    #[inline]
    pub(crate) fn sample_if_due(&mut self, now: Nanos) {
        if now >= self.pressure.next() && (self.spun >= SPUN_MIN || self.host.contended) {
            self.sample(now);
        }
    }

    #[cold]
    fn sample(&mut self, now: Nanos) {
        let run_delay = self.schedstat.as_ref().and_then(read_run_delay).unwrap_or(0);
        let cpu_now = sched_getcpu();
        if now.saturating_sub(self.steal.read_at) >= STEAL_EVERY
            && let Some(total) = self.stat.as_ref().and_then(|stat| read_steal(stat, cpu_now))
        {
            self.steal.read(now, cpu_now, total);
        }
        // Not the value of schedstat, which for a running thread is as old as the last tick, up to 4 ms. It
        // would look as if the thread had not had its core.
        let usage = Usage { run_delay, steal: self.steal.sample(now), cpu: cpu_time() };
        let contended = self.pressure.sample(now, &usage, std::mem::take(&mut self.spun));
        if contended != self.host.contended {
            tracing::debug!(contended, at = self.clock.now(), "contention of this worker's core changed");
        }
        self.host.contended = contended;
    }
}

/// The time that the hypervisor took, spread over the samples.
///
/// The kernel's total moves by whole ticks, and a tick is as long as a sample. As a whole, it would exceed
/// the threshold of one sample by far, whatever the host takes, and count for nothing in the nine after it.
#[derive(Debug, Default)]
struct Steal {
    read_at: Nanos,
    /// The CPU that was read last, and its total.
    last: Option<(usize, Nanos)>,
    /// The last reading had a tick.
    ticked: bool,
    /// The share of the time between the last two readings that was stolen, and the part of the stolen time
    /// that no sample has taken yet.
    share: f64,
    left: Nanos,
    sampled_at: Nanos,
    /// The sum of all samples.
    total: Nanos,
}

impl Steal {
    /// Takes a reading. Totals count from the start of the machine, for each CPU.
    fn read(&mut self, now: Nanos, cpu: usize, total: Nanos) {
        let last = self.last.replace((cpu, total)).filter(|last| last.0 == cpu);
        let mut stolen = last.map_or(0, |last| total.saturating_sub(last.1));
        // The host may have taken most of the first tick long before. An interruption that has just ended
        // shows as a delay of the thread in any case.
        if !std::mem::replace(&mut self.ticked, stolen > 0) {
            stolen = stolen.saturating_sub(TICK);
        }
        let time = now.saturating_sub(std::mem::replace(&mut self.read_at, now));
        (self.share, self.left) = (stolen as f64 / time.max(1) as f64, stolen);
    }

    /// Gives the time since the last sample its share. Returns the sum of all samples.
    fn sample(&mut self, now: Nanos) -> Nanos {
        let time = now.saturating_sub(std::mem::replace(&mut self.sampled_at, now));
        let part = self.left.min((time as f64 * self.share) as Nanos);
        self.left -= part;
        self.total += part;
        self.total
    }
}

fn cpu_time() -> Nanos {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Reads the thread's time in a run queue.
fn read_run_delay(file: &File) -> Option<Nanos> {
    let mut text = [0; 96];
    let len = file.read_at(&mut text, 0).ok()?;
    parse_run_delay(&text[..len])
}

/// Returns the second number of three.
fn parse_run_delay(text: &[u8]) -> Option<Nanos> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn read_steal(file: &File, cpu: usize) -> Option<Nanos> {
    // Lines of CPUs come first, and each has less than 128 bytes.
    let mut text = vec![0; (cpu + 2) * 128];
    let len = file.read_at(&mut text, 0).ok()?;
    parse_steal(&text[..len], cpu)
}

/// Returns the eighth number of the CPU's line (`proc_stat(5)`).
fn parse_steal(text: &[u8], cpu: usize) -> Option<Nanos> {
    let name = format!("cpu{cpu}");
    let text = String::from_utf8_lossy(text);
    let mut words = text
        .lines()
        .map(str::split_ascii_whitespace)
        .find_map(|mut line| (line.next() == Some(name.as_str())).then_some(line))?;
    words.nth(7)?.parse::<u64>().ok()?.checked_mul(TICK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_proc_are_parsed() {
        assert_eq!(parse_run_delay(b"119258 272226 3\n"), Some(272_226));
        assert_eq!(parse_run_delay(b""), None);
        assert_eq!(parse_run_delay(b"1 x 3"), None);
        let stat =
            b"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu1 1 2 3 4 5 6 7 11 0 0\nintr 1 2\n";
        assert_eq!(parse_steal(stat, 1), Some(110_000_000));
        assert_eq!(parse_steal(stat, 2), None);
        assert_eq!(parse_steal(b"cpu1 1 2", 1), None);
    }

    #[test]
    fn earlier_steal_time_of_a_cpu_does_not_count() {
        let stolen = |last, cpu, total| {
            let mut steal = Steal { last, ticked: true, ..Steal::default() };
            steal.read(STEAL_EVERY, cpu, total);
            steal.sample(STEAL_EVERY)
        };
        assert_eq!(stolen(None, 3, 1_000_000), 0);
        assert_eq!(stolen(Some((3, 400_000)), 3, 1_000_000), 600_000);
        assert_eq!(stolen(Some((2, 400_000)), 3, 1_000_000), 0);
        assert_eq!(stolen(Some((3, 400_000)), 3, 300_000), 0);
    }

    /// Has a worker spin for a second, in samples of 10 ms. `ticks` says how many the host has taken by each
    /// tenth of the second, and `delay` how long the thread waits in each sample. Returns whether the core
    /// looks contended, and the time that the samples count as stolen.
    fn spin(ticks: impl Fn(Nanos) -> Nanos, delay: impl Fn(Nanos) -> Nanos) -> (bool, Nanos) {
        let (mut steal, mut pressure, mut usage) = (Steal::default(), Pressure::default(), Usage::default());
        let mut contended = false;
        for sample in 0..100 {
            let now = STEAL_EVERY + sample * TICK;
            if sample.is_multiple_of(10) {
                steal.read(now, 1, ticks(sample / 10) * TICK);
            }
            usage.run_delay += delay(sample);
            usage.cpu += TICK;
            usage.steal = steal.sample(now);
            contended |= pressure.sample(now, &usage, TICK);
        }
        (contended, usage.steal)
    }

    #[test]
    fn one_interruption_by_the_host_is_not_counted_twice() {
        let once = |tenth| Nanos::from(tenth >= 5);
        // It delays the thread in the last sample before it shows as a tick.
        assert_eq!(spin(once, |sample| if sample == 49 { 3_000_000 } else { 0 }), (false, 0));
        // Beside small delays, which alone are no contention, it is none either.
        assert_eq!(spin(once, |sample| if sample % 2 == 0 { 600_000 } else { 0 }), (false, 0));
    }

    #[test]
    fn a_host_that_takes_a_fifth_contends_for_the_core() {
        assert!(spin(|tenth| 2 * tenth, |_| 0).0);
        // All but the first tick.
        assert_eq!(spin(|tenth| tenth.min(6), |_| 0), (false, 5 * TICK));
    }

    #[test]
    fn values_of_this_thread_can_be_read() {
        let stat = File::open("/proc/stat").unwrap();
        assert!(read_steal(&stat, sched_getcpu()).is_some());
        assert!(cpu_time() > 0);
    }
}
