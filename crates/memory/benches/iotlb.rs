//! Measures the cost of a translation behind a vIOMMU.
//!
//! It compares a lookup through a queue's cache, at a hit rate of 95 %, with the lookup among the slots that
//! a device without a vIOMMU does. It also measures lookups while another thread changes the table all the
//! time. The two are measured in turns, in one thread, with prepared addresses.
//!
//!     cargo bench -p kickless-memory --bench iotlb [-- --quick]
#![allow(clippy::unwrap_used, reason = "a benchmark")]

use kickless_memory::{Access, Gpa, Iotlb, Iova, Map, Slot, Tlb, Translated, UserAddr};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// Entries of 4 KiB in the table.
const ENTRIES: u64 = 10_000;
/// Pages of most lookups. All of them are in the cache.
const HOT: u64 = 512;
/// First address of the entries. Linux gives out addresses of 32 bits from the top downwards.
const IOVA: u64 = 0xffff_f000 - ENTRIES * PAGE;
const USER: u64 = 0x7e00_0000_0000;
/// Number of slots: that of most machines.
const SLOTS: u64 = 3;
const SLOT: u64 = 1 << 30;
const LOOKUPS: usize = 1 << 16;
/// Lookups that are timed together, as many as a batch of requests needs.
const BATCH: usize = 96;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn map() -> Map {
    let slot = |nth: u64| {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, SLOT).unwrap();
        Slot::map(&file, 0, Gpa(nth * 2 * SLOT), UserAddr(USER + nth * SLOT), SLOT).unwrap()
    };
    Map::new((0..SLOTS).map(slot).collect()).unwrap()
}

/// Returns the page that an entry leads to: its front-end's address and its guest-physical one.
fn target(entry: u64) -> (u64, u64) {
    let page = entry.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SLOTS * SLOT / PAGE);
    let (slot, offset) = (page * PAGE / SLOT, page * PAGE % SLOT);
    (USER + page * PAGE, slot * 2 * SLOT + offset)
}

struct Workload {
    map: Map,
    tlb: Tlb,
    iovas: Vec<u64>,
    gpas: Vec<u64>,
}

impl Workload {
    fn new() -> (Self, Iotlb) {
        let mut iotlb = Iotlb::default();
        for entry in 0..ENTRIES {
            let user = UserAddr(target(entry).0);
            iotlb.update(Iova(IOVA + entry * PAGE), PAGE, user, Access::BOTH).unwrap();
        }
        let mut state = 88_172_645_463_325_252;
        let entries: Vec<u64> = (0..LOOKUPS)
            .map(|_| match random(&mut state) % 100 < 95 {
                true => random(&mut state) % HOT,
                false => HOT + random(&mut state) % (ENTRIES - HOT),
            })
            .collect();
        let tlb = Tlb::new(iotlb.table().clone());
        let iovas = entries.iter().map(|entry| IOVA + entry * PAGE).collect();
        let gpas = entries.iter().map(|entry| target(*entry).1).collect();
        (Self { map: map(), tlb, iovas, gpas }, iotlb)
    }

    #[inline(never)]
    fn direct(&self, range: std::ops::Range<usize>) {
        for gpa in &self.gpas[range] {
            black_box(self.map.contiguous(Gpa(*gpa), 512));
        }
    }

    #[inline(never)]
    fn translated(&mut self, range: std::ops::Range<usize>) {
        for iova in &self.iovas[range] {
            self.tlb.begin();
            self.tlb.translate(&self.map, Iova(*iova), 512, Access::WRITE, |to, _| {
                black_box(to);
            });
        }
    }

    #[inline(never)]
    fn whole_way(&mut self, range: std::ops::Range<usize>) {
        for iova in &self.iovas[range] {
            self.tlb.begin();
            let map = &self.map;
            self.tlb.translate(map, Iova(*iova), 512, Access::WRITE, |to, _| {
                if let Translated::To(gpa) = to {
                    black_box(map.contiguous(gpa, 512));
                }
            });
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn per_lookup(spent: Duration) -> f64 {
    spent.as_nanos() as f64 / LOOKUPS as f64
}

fn costs(workload: &mut Workload, rounds: usize, runs: usize) {
    let mut all: [Vec<f64>; 3] = Default::default();
    for _ in 0..rounds {
        let mut best = [f64::MAX; 3];
        for _ in 0..runs {
            for (which, best) in best.iter_mut().enumerate() {
                let start = Instant::now();
                match which {
                    0 => workload.direct(0..LOOKUPS),
                    1 => workload.translated(0..LOOKUPS),
                    _ => workload.whole_way(0..LOOKUPS),
                }
                *best = best.min(per_lookup(start.elapsed()));
            }
        }
        all.iter_mut().zip(best).for_each(|(all, best)| all.push(best));
    }
    let mut ratios =
        [1, 2].map(|which| all[which].iter().zip(&all[0]).map(|(a, b)| a / b).collect::<Vec<_>>());
    let [direct, translated, whole] = all.each_mut().map(|all| median(all));
    println!("  a slot looked up (direct)                      {direct:6.2} ns");
    println!(
        "  a translation looked up                        {translated:6.2} ns   {:5.2} times   (target: 1.3)",
        median(&mut ratios[0])
    );
    println!(
        "  a translation, and then the slot               {whole:6.2} ns   {:5.2} times",
        median(&mut ratios[1])
    );
}

/// Returns the 99.9th percentile of the time of a batch of lookups, in nanoseconds.
fn tail(workload: &mut Workload, batches: usize) -> f64 {
    let mut times: Vec<f64> = (0..batches)
        .map(|batch| {
            let at = batch * BATCH % (LOOKUPS - BATCH);
            let start = Instant::now();
            workload.translated(at..at + BATCH);
            start.elapsed().as_nanos() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() * 999 / 1000]
}

fn tails(workload: &mut Workload, mut iotlb: Iotlb, rounds: usize, batches: usize) {
    let (go, stop, updates) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let (mut quiet, mut busy) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut entry = 0;
            while !stop.load(Ordering::Relaxed) {
                if !go.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                    continue;
                }
                // Updates every entry again and again, also those in use. No update withdraws anything.
                entry = (entry + 1) % ENTRIES;
                let access = if entry % 7 == 0 { Access::READ } else { Access::BOTH };
                let unused = Iova(IOVA + (ENTRIES + entry) * PAGE);
                iotlb.update(unused, PAGE, UserAddr(target(entry).0), access).unwrap();
                let user = UserAddr(target(entry).0);
                iotlb.update(Iova(IOVA + entry * PAGE), PAGE, user, Access::BOTH).unwrap();
                updates.fetch_add(2, Ordering::Relaxed);
            }
        });
        for _ in 0..rounds {
            go.store(false, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
            quiet.push(tail(workload, batches));
            go.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
            busy.push(tail(workload, batches));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut ratios: Vec<f64> = busy.iter().zip(&quiet).map(|(busy, quiet)| busy / quiet).collect();
    let ratio = median(&mut ratios);
    println!(
        "  p99.9 of {BATCH} lookups: alone {:.0} ns, beside {} updates {:.0} ns: {ratio:.2} times (from {:.2} to {:.2}; target: 1.5)",
        median(&mut quiet),
        updates.load(Ordering::Relaxed),
        median(&mut busy),
        ratios[0],
        ratios[ratios.len() - 1]
    );
}

fn main() {
    let asked = |word: &str| std::env::args().any(|argument| argument == word);
    let short = std::env::var_os("KICKLESS_BENCH_QUICK").is_some_and(|value| value == "1");
    let quick = short || asked("--quick") || !asked("--bench");
    let (rounds, runs, batches) = if quick { (1, 1, 2000) } else { (9, 20, 100_000) };
    let (mut workload, iotlb) = Workload::new();
    println!(
        "translations: {ENTRIES} entries of 4 KiB, 95 % of the lookups in {HOT} of them, {SLOTS} slots{}",
        if quick { "  (short form: not a measurement)" } else { "" }
    );
    println!("  the table takes {} KiB", iotlb.bytes() / 1024);
    println!("  a direct map of 1 TiB takes {} bytes for each slot", size_of::<Slot>());
    costs(&mut workload, rounds, runs);
    tails(&mut workload, iotlb, rounds, batches);
}
