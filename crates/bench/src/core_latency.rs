//! The core-to-core latency: the time that a cache line takes from one CPU to another and back.
//!
//! The cost of a ring is mostly that of its lines. The host of a virtual machine can move its CPUs, which
//! makes the latency several times longer, for seconds or minutes. A ratio of two targets whose turns had
//! different latencies compares the latencies. So a comparison measures the latency before each turn and
//! after the last one of a round, and repeats the rounds in which it changed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use kickless_values::CpuList;

use super::cpu::{allowed, pin_to};
use super::layout::time;
use super::options::CoreLatencyOptions;

/// The ratio of two latencies from which they count as different. A request gets slower by no more than the
/// latency grows, so ratios within a round are wrong by less than this. Measurements of one latency scatter
/// by a few percent, and CPUs that the host moved had one that was five times as long.
const CHANGE: f64 = 1.25;
/// The time of a measurement. Longer than the 3 ms for which the kernel lets another thread run on one of the
/// CPUs, so that a part of it is undisturbed.
const TIME: Duration = Duration::from_millis(5);
/// The longest measurement, if one of the two threads does not run.
const TIME_MAX: Duration = Duration::from_millis(100);
/// The round trips that are timed at once: some 10 us or more, of which reading the clock takes half a
/// percent.
const BATCH: u64 = 100;
/// The looks at a line between two checks of the time, some milliseconds.
const LOOKS: u32 = 1 << 16;

/// A line of its own, and its neighbour's too: CPUs fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// Two CPUs between which cache lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuPair(pub(crate) [usize; 2]);

impl CpuPair {
    /// Returns the first CPU of the driver and the first one of the back-ends. `None`: a thread may run
    /// anywhere, or there is one CPU for both.
    pub(crate) fn of(driver: Option<&CpuList>, back_ends: Option<&CpuList>) -> Option<Self> {
        let cpus = [driver?, back_ends?].map(|list| list.0.first().copied());
        match cpus {
            [Some(one), Some(other)] if one != other => Some(Self([one, other])),
            _ => None,
        }
    }

    /// Measures the latency and returns it in nanoseconds. `None`: one of the CPUs was busy all the time.
    ///
    /// # Errors
    /// This process may not use one of the CPUs.
    pub(crate) fn measure(self) -> Result<Option<f64>> {
        let Self([one, other]) = self;
        // A thread writes to the line only after it has read the other's last number, so their stores follow
        // one another in one order, and a model has nothing to try. The end comes at any time, and so has a
        // word of its own.
        let (line, over) = (Line::default(), AtomicBool::new(false));
        thread::scope(|scope| {
            let asks = scope.spawn(|| {
                let batches = pin_to(one).map(|()| ask(&line.0));
                over.store(true, Ordering::Relaxed);
                batches
            });
            let answers = scope.spawn(|| pin_to(other).map(|()| answer(&line.0, &over)));
            let panicked = |_| anyhow!("a thread that measures the core-to-core latency has failed");
            answers.join().map_err(panicked)??;
            let batches = asks.join().map_err(panicked)??;
            // Other threads of the CPUs only make batches longer.
            Ok(batches.into_iter().reduce(f64::min))
        })
    }
}

/// Measures the latency again and again, and prints a line for each time.
///
/// # Errors
/// This process may not use two CPUs, or not those of `options`.
pub(crate) fn carry_out(options: &CoreLatencyOptions, print: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let allowed = allowed()?;
    let [one, other, ..] = options.cpu.as_ref().map_or(&allowed, |list| &list.0)[..] else {
        bail!("two CPUs are needed, and this process may use one");
    };
    let mut text = String::new();
    for _ in 0..options.rounds {
        text += &format!("{}\n", in_words(CpuPair([one, other]).measure()?));
    }
    print(&text)
}

/// Formats a latency.
pub(crate) fn in_words(latency: Option<f64>) -> String {
    latency.map_or_else(|| "not measured".into(), |latency| time(latency.round()))
}

/// Answers each odd number with the next even one, until it is `over`.
fn answer(line: &AtomicU64, over: &AtomicBool) {
    let mut odd = 1;
    while !over.load(Ordering::Relaxed) {
        if line.load(Ordering::Acquire) == odd {
            line.store(odd + 1, Ordering::Release);
            odd += 2;
        }
    }
}

/// Asks for answers. Returns the time of a round trip in each batch, in nanoseconds.
fn ask(line: &AtomicU64) -> Vec<f64> {
    let begin = Instant::now();
    let (mut even, mut batches) = (0, Vec::new());
    while begin.elapsed() < TIME || (batches.is_empty() && begin.elapsed() < TIME_MAX) {
        let batch = Instant::now();
        for _ in 0..BATCH {
            line.store(even + 1, Ordering::Release);
            even += 2;
            let mut looks = 0;
            while line.load(Ordering::Acquire) != even {
                looks += 1;
                if looks % LOOKS == 0 && begin.elapsed() > TIME_MAX {
                    return batches;
                }
            }
        }
        batches.push(batch.elapsed().as_nanos() as f64 / BATCH as f64);
    }
    batches
}

/// Returns whether these latencies are the same. Those that were not measured do not count.
pub(crate) fn is_same(latencies: &[Option<f64>]) -> bool {
    let most = latencies.iter().copied().flatten().reduce(f64::max);
    shortest(latencies).zip(most).is_none_or(|(least, most)| most < least * CHANGE)
}

fn shortest(latencies: &[Option<f64>]) -> Option<f64> {
    latencies.iter().copied().flatten().reduce(f64::min)
}

/// The rounds of a load that may still be repeated: as many as it has, so a comparison takes twice its time
/// at most.
#[derive(Debug)]
pub(crate) struct Repeats(pub(crate) u32);

impl Repeats {
    /// Returns whether a round with these latencies is to be repeated.
    pub(crate) fn takes(&mut self, latencies: &[Option<f64>]) -> bool {
        let takes = !is_same(latencies) && self.0 > 0;
        self.0 -= u32::from(takes);
        takes
    }
}

/// Groups the rounds in which the latency did not change by their latency, the shortest first. `rounds` has
/// the latencies of each. Returns the numbers of the rounds of each group.
pub(crate) fn groups(rounds: &[Vec<Option<f64>>]) -> Vec<Vec<usize>> {
    let mut sorted: Vec<(f64, usize)> = rounds
        .iter()
        .enumerate()
        .filter(|(_, latencies)| is_same(latencies))
        .filter_map(|(round, latencies)| Some((shortest(latencies)?, round)))
        .collect();
    sorted.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut groups: Vec<(f64, Vec<usize>)> = Vec::new();
    for (latency, round) in sorted {
        match groups.last_mut() {
            Some((first, group)) if is_same(&[Some(*first), Some(latency)]) => group.push(round),
            _ => groups.push((latency, vec![round])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_of_a_comparison() {
        let list = |text: &str| text.parse::<CpuList>().unwrap();
        let pair = |one: &str, other: &str| CpuPair::of(Some(&list(one)), Some(&list(other)));
        assert_eq!(pair("2-3", "0,1"), Some(CpuPair([2, 0])));
        assert_eq!(pair("1", "1,2"), None);
        assert_eq!(CpuPair::of(Some(&list("1")), None), None);
    }

    #[test]
    fn a_latency_is_measured_and_a_missing_cpu_is_an_error() {
        // On a single CPU, or a busy one, nothing may be measured.
        let cpus = allowed().unwrap();
        if let [one, other, ..] = cpus[..] {
            assert!(CpuPair([one, other]).measure().unwrap().is_none_or(|latency| latency > 0.0));
        }
        for cpus in [[cpus[0], 1023], [1023, cpus[0]]] {
            assert!(format!("{:#}", CpuPair(cpus).measure().unwrap_err()).contains("CPU 1023"));
        }
    }

    #[test]
    fn a_question_that_is_given_up_ends_the_answers() {
        let (line, over) = (AtomicU64::new(1), AtomicBool::new(false));
        thread::scope(|scope| {
            let answers = scope.spawn(|| answer(&line, &over));
            // The end comes before, within or after the answer.
            over.store(true, Ordering::Relaxed);
            answers.join().unwrap();
        });
        assert!([1, 2].contains(&line.load(Ordering::Relaxed)));
    }

    #[test]
    fn small_changes_do_not_count() {
        assert!(is_same(&[]) && is_same(&[None, Some(80.0), None]));
        assert!(is_same(&[80.0, 99.0, 85.0].map(Some)));
        assert!(!is_same(&[80.0, 85.0, 100.0].map(Some)) && !is_same(&[Some(400.0), None, Some(80.0)]));
    }

    #[test]
    fn rounds_are_repeated_as_often_as_there_are_rounds() {
        let mut repeats = Repeats(2);
        let (same, changed) = ([80.0, 81.0].map(Some), [80.0, 400.0].map(Some));
        let rounds = [&same, &changed, &same, &changed, &changed, &same];
        let taken = rounds.map(|latencies| repeats.takes(latencies));
        assert_eq!(taken, [false, true, false, true, false, false]);
    }

    #[test]
    fn rounds_with_the_same_latency_are_together() {
        let rounds: [&[f64]; 7] =
            [&[410.0, 400.0], &[80.0, 85.0], &[80.0, 400.0], &[99.0], &[101.0], &[], &[390.0]];
        let mut rounds = rounds.map(|latencies| latencies.iter().copied().map(Some).collect::<Vec<_>>());
        rounds[3].push(None);
        assert_eq!(groups(&rounds), [vec![1, 3], vec![4], vec![6, 0]]);
        assert_eq!(groups(&[]), Vec::<Vec<usize>>::new());
    }
}
