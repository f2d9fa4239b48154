//! Costs of a write, a page and a lookup, with one thread.

use crate::contestants::{Guest, Kind, Logged, PAGE, file};
use crate::{Plan, Spread};
use kickless_dirty_log::{Mmu, Writer};
use kickless_memory::{Gpa, Iova, Slot, UserAddr};
use std::hint::black_box;
use std::time::{Duration, Instant};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

const ALL: [Kind; 5] = [Kind::Off, Kind::Protect, Kind::Marks, Kind::Flat, Kind::Atomic];
/// Pages in which bytes are written again and again. These bytes fit into the caches, so that the speed of
/// memory is not measured.
const HOT: u64 = 64;
/// Runs of a turn. The best one counts, because other programs disturb the others.
const RUNS: usize = 8;
/// Addresses in a table.
const ADDRESSES: u64 = 4096;

fn nanoseconds(spent: Duration, count: u64) -> f64 {
    spent.as_nanos() as f64 / count as f64
}

fn best(mut run: impl FnMut() -> f64) -> f64 {
    (0..RUNS).map(|_| run()).fold(f64::MAX, f64::min)
}

fn table(title: &str, names: &[&str], turns: &[Vec<f64>]) {
    println!("{title}");
    for (name, turns) in names.iter().zip(turns) {
        println!("  {name:<34} {}", Spread::of(turns.iter().copied()));
    }
}

/// Measures writes of 8 bytes to a few pages that were written before, so that there is nothing left to log.
pub(crate) fn writes(plan: Plan) {
    let guest = Guest::new(plan.memory.min(64 << 20));
    let mut turns = vec![Vec::new(); ALL.len()];
    for _ in 0..plan.rounds {
        for (kind, turns) in ALL.iter().zip(&mut turns) {
            let logged = Logged::new(*kind, &guest);
            let mut store = logged.store();
            turns.push(best(|| {
                let start = Instant::now();
                for number in 0..plan.writes / 8 {
                    store.write(black_box(number % HOT * (PAGE + 8)), number);
                    if number % 64 == 0 {
                        store.quiesce();
                    }
                }
                nanoseconds(start.elapsed(), plan.writes / 8)
            }));
        }
    }
    table("ns for a write of 8 bytes to a page that was written before", &ALL.map(Kind::name), &turns);
}

/// Measures the first write to each page, and the harvest of all pages.
pub(crate) fn pages(plan: Plan) {
    let guest = Guest::new(plan.memory);
    let kinds = &ALL[1..];
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    for (title, step) in [("every page", 1), ("one page of 100", 100)] {
        let mut turns = vec![vec![Vec::new(); kinds.len()]; 3];
        for _ in 0..plan.rounds {
            for (at, kind) in kinds.iter().enumerate() {
                let mut logged = Logged::new(*kind, &guest);
                // Splits and allocates everything before the measurement.
                sweep(&mut logged, plan, step);
                for (turns, value) in turns.iter_mut().zip(sweep(&mut logged, plan, step)) {
                    turns[at].push(value);
                }
            }
        }
        println!("{title} of {} MiB", plan.memory >> 20);
        table("ns for the first write to a page", &names, &turns[0]);
        table("ns of the harvest for a page", &names, &turns[1]);
        table("ms for a harvest of nothing", &names, &turns[2]);
    }
}

/// Returns nanoseconds to write a page and to harvest it, and milliseconds to harvest nothing.
fn sweep(logged: &mut Logged, plan: Plan, step: usize) -> [f64; 3] {
    let pages = plan.memory / PAGE;
    let wanted = pages.div_ceil(step as u64);
    let mut store = logged.store();
    let start = Instant::now();
    (0..pages).step_by(step).for_each(|page| store.write(page * PAGE, page));
    let written = nanoseconds(start.elapsed(), wanted);
    drop(store);
    let (took, count) = logged.harvest(true);
    assert_eq!(count, wanted);
    let (idle, none) = logged.harvest(true);
    assert_eq!(none, 0);
    [written, nanoseconds(took.walk, count), (idle.walk + idle.wait).as_secs_f64() * 1e3]
}

/// Measures a translation with the log off, and a load at its result: with one slot, and with two slots of a
/// guest with a hole below 4 GiB.
pub(crate) fn lookups(plan: Plan) {
    let half = (plan.memory / 2) & !(PAGE - 1);
    let layouts = [("one slot", vec![(0, 2 * half)]), ("two slots", vec![(0, half), (4 << 30, half)])];
    for (title, layout) in layouts {
        let memory = file(2 * half);
        let mmu = Mmu::new();
        let mut ranges = Vec::new();
        let mut offset = 0;
        for (gpa, len) in &layout {
            mmu.add(Slot::map(&memory, offset, Gpa(*gpa), UserAddr(0), *len).unwrap()).unwrap();
            let backing = FileOffset::new(memory.try_clone().unwrap(), offset);
            ranges.push((GuestAddress(*gpa), *len as usize, Some(backing)));
            offset += len;
        }
        let plain = GuestMemoryMmap::<()>::from_ranges_with_files(ranges).unwrap();
        let addresses = addresses(&layout);
        let count = (plan.writes / 8).next_multiple_of(ADDRESSES);
        let mut writer = Writer::direct(&mmu);
        let mut turns = vec![Vec::new(); 2];
        for _ in 0..plan.rounds {
            turns[0].push(best(|| {
                let start = Instant::now();
                for _ in 0..count / ADDRESSES {
                    for at in &addresses {
                        black_box(writer.read_obj::<u64>(Iova(*at)).unwrap());
                    }
                    writer.quiesce();
                }
                nanoseconds(start.elapsed(), count)
            }));
            turns[1].push(best(|| {
                let start = Instant::now();
                for _ in 0..count / ADDRESSES {
                    for at in &addresses {
                        let at = GuestAddress(*at);
                        let region = plain.find_region(at).unwrap();
                        let host = region.get_host_address(region.to_region_addr(at).unwrap()).unwrap();
                        black_box(load(host));
                    }
                }
                nanoseconds(start.elapsed(), count)
            }));
        }
        println!("{title}, log off");
        let names = ["Writer::read_obj", "vm-memory find_region and offset"];
        table("ns to translate and load", &names, &turns);
        let ratio = turns[0].iter().zip(&turns[1]).map(|(ours, theirs)| ours / theirs);
        println!("  ours / theirs {}", Spread::of(ratio));
    }
}

/// Returns addresses in some pages of each slot, in an unpredictable order. The pages are so few that their
/// bytes are in the caches.
fn addresses(layout: &[(u64, u64)]) -> Vec<u64> {
    let mut random = 1_u64;
    let mut below = |end: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % end
    };
    let mut address = |_| {
        let (gpa, len) = layout[below(layout.len() as u64) as usize];
        gpa + below(HOT) * (len / HOT / PAGE) * PAGE + below(8) * 8
    };
    (0..ADDRESSES).map(&mut address).collect()
}

#[expect(unsafe_code, reason = "the other side of the comparison hands out pointers")]
#[inline]
fn load(host: *mut u8) -> u64 {
    // SAFETY: in a region, at a multiple of 8.
    unsafe { host.cast::<u64>().read_volatile() }
}
