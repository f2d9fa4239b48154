//! Random runs of the tables, with cuts.

use super::life::Life;
use crate::Errno;
use crate::format::geometry::{Geometry, Version};
use crate::format::refcount;
use crate::images::builder::{Shape, build};
use crate::images::cut_file::SECTOR;
use crate::images::judge::Judge;
use crate::images::lives::{LIVES, SETTLE, STEPS, number};
use crate::tables::rule::Rule;
use fastrand::Rng;

/// The number of cuts, and the first fault with its seed.
type Found = (u64, Option<(u64, String)>);

/// Runs one image through several lives, each ended by a cut. Returns the number of cuts.
fn run(seed: u64, rule: Option<Rule>, cuts: &mut u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let shape = Shape::random(&mut rng);
    let mut file = build(shape, &mut rng);
    let share = if shape.geometry.extended || shape.gap > 0 { 0.01 } else { 0.03 };
    for _ in 0..LIVES {
        let mut life = Life::open(shape, file, rule, rng.fork());
        for _ in 0..rng.u64(1..STEPS) {
            life.turn();
            if rng.f64() < SETTLE {
                life.settle()?;
            }
            if rng.f64() < share {
                life.kill()?;
                life.power_cut()?;
                *cuts += 2;
            }
        }
        file = match rng.u8(..3) {
            0 => life.kill()?,
            1 => life.power_cut()?,
            _ => life.close()?,
        };
        life.fault()?;
    }
    Ok(())
}

/// Runs images until a fault or so many cuts.
fn cut(first: u64, cuts_max: u64, rule: Option<Rule>) -> Found {
    let mut cuts = 0;
    let mut seed = first;
    while cuts < cuts_max {
        if let Err(fault) = run(seed, rule, &mut cuts) {
            return (cuts, Some((seed, fault)));
        }
        seed += 1;
    }
    (cuts, None)
}

#[test]
fn cuts_leave_leaks_at_most() {
    let seed = number("KICKLESS_SEED", 0);
    let (cuts, fault) = cut(seed, number("KICKLESS_CUTS", 10_000), None);
    assert_eq!(fault, None, "after {cuts} cuts");
}

/// A device whose refcount table is full although the device is not, and lives with a fault once.
#[test]
fn seeds_that_found_faults() {
    for seed in [302_549, 40_011_308] {
        assert_eq!(run(seed, None, &mut 0), Ok(()), "seed {seed}");
    }
}

/// The file system is full, so that no new cluster can be zeroed. A close gives back those that were counted
/// for the reserve.
#[test]
fn a_close_leaks_no_reserve_that_could_not_be_zeroed() {
    let mut failed = 0;
    for seed in 0..100 {
        let mut rng = Rng::with_seed(seed);
        let shape = Shape { is_device: false, ..Shape::random(&mut rng) };
        let file = build(shape, &mut rng);
        let leaks = |file: &[u8]| Judge { file, shape }.check().unwrap().leaks;
        let before = leaks(&file);
        let mut life = Life::open_quiet(shape, file, rng.fork());
        life.failures.break_zeroes();
        for _ in 0..STEPS / 4 {
            life.turn();
        }
        life.settle().unwrap();
        failed += u32::from(life.failures.has_failed);
        life.tables.close();
        life.settle().unwrap();
        assert_eq!(life.tables.closed(), Some(Ok(())), "seed {seed}");
        assert_eq!(leaks(life.image.now()), before, "seed {seed}");
    }
    assert!(failed > 50, "{failed}");
}

/// An image whose refcount block is far outside: writes into new clusters fail, and nothing is written there.
#[test]
fn a_refcount_block_outside_of_the_file_is_not_written() {
    for seed in 0..50 {
        let mut rng = Rng::with_seed(seed);
        let shape = Shape { gap: 0, tail: 0, is_device: false, ..Shape::random(&mut rng) };
        let mut file = build(shape, &mut rng);
        let table = u64::from_be_bytes(file[48..56].try_into().unwrap()) as usize;
        file[table..table + 8].copy_from_slice(&(1u64 << 50).to_be_bytes());
        let len = file.len();
        let mut life = Life::open_unchecked(shape, file, rng.fork());
        for _ in 0..STEPS {
            life.turn();
        }
        life.drain().unwrap();
        assert!(life.image.now().len() <= len + len, "seed {seed}: {} bytes", life.image.now().len());
        assert_eq!(life.tables.stats().reserve, 0, "seed {seed}");
    }
}

/// A slice with an entry that cannot be true is not written back, because that would make the entry valid.
#[test]
fn a_bad_entry_stays_as_it_is() {
    let (mut rng, mut changed) = (Rng::with_seed(1), 0);
    for _ in 0..20 {
        let shape = Shape { gap: 0, has_snapshot: false, ..Shape::random(&mut rng) };
        let mut file = build(shape, &mut rng);
        let word = |file: &[u8], at: usize| u64::from_be_bytes(file[at..at + 8].try_into().unwrap());
        let l1 = word(&file, 40) as usize;
        let table = (word(&file, l1) & !(1 << 63)) as usize;
        if table == 0 {
            continue;
        }
        // The entry behind those that requests use. Bits 1 to 3 are reserved.
        let at = table + shape.used as usize * shape.geometry.entry_bytes() as usize;
        let bad = 1u64 << 63 | word(&file, 40) | 1 << 1;
        file[at..at + 8].copy_from_slice(&bad.to_be_bytes());
        let mut life = Life::open_unchecked(shape, file, rng.fork());
        for _ in 0..STEPS {
            life.turn();
        }
        life.drain().unwrap();
        assert_eq!(word(life.image.now(), at), bad);
        changed += 1;
    }
    assert!(changed > 5);
}

/// A device or a file: what one life or request frees is used again, so nothing is full, or longer.
#[test]
fn free_clusters_are_used_again() {
    for seed in 0..60 {
        let mut rng = Rng::with_seed(seed);
        let shape = Shape { gap: 0, tail: 0, is_device: false, ..Shape::random(&mut rng) };
        let cluster = shape.geometry.cluster();
        // Each cluster and table that the guest uses, two chunks, two blocks, what a few requests have
        // retired, and what is not worth it.
        let needed = shape.tables * (shape.used + 1) + 2 * 24 + 2 + 40 + 16;
        let is_device = rng.bool();
        let tail = if is_device { needed * cluster / SECTOR as u64 } else { 0 };
        let shape = Shape { tail, is_device, ..shape };
        let mut file = build(shape, &mut rng);
        let most = file.len() as u64 + needed * cluster;
        for _ in 0..8 {
            let mut life = Life::open_quiet(shape, file, rng.fork());
            for _ in 0..STEPS {
                life.turn();
            }
            life.close().unwrap();
            life.fault().unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
            file = life.image.now().to_vec();
            assert!(file.len() as u64 <= most, "seed {seed}: {} clusters", file.len() as u64 / cluster);
        }
    }
}

/// A device with free clusters that are apart: its L1 table cannot grow, and requests that wait meanwhile go
/// on.
#[test]
fn growth_without_room_fails_alone() {
    for seed in 0..50 {
        let mut rng = Rng::with_seed(seed);
        let geometry = Geometry::new(Version::V3, 9, 4, false).unwrap();
        let kinds = Shape {
            has_backing: false,
            has_snapshot: false,
            has_compressed: false,
            ..Shape::random(&mut rng)
        };
        let places = Shape { gap: 200, tail: 0, is_device: true, has_holes: false, ..kinds };
        let shape = Shape { geometry, tables: 2, used: 8, ..places };
        let mut file = build(shape, &mut rng);
        let word = |file: &[u8], at: usize| u64::from_be_bytes(file[at..at + 8].try_into().unwrap()) as usize;
        let block = word(&file, word(&file, 48));
        for cluster in (20..200).step_by(2) {
            refcount::set(geometry, &mut file[block..block + 512], cluster, 0).unwrap();
        }
        let mut life = Life::open_quiet(shape, file, rng.fork());
        life.tables.grow(shape.size() + 100 * geometry.table_span()).unwrap();
        for _ in 0..100 {
            life.turn();
        }
        life.settle().unwrap();
        life.fault().unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        assert_eq!(life.tables.grown(), Some(Err(Errno::NOSPC)), "seed {seed}");
    }
}

/// Each rule is needed: without it, cuts find a fault.
#[test]
fn each_rule_is_needed() {
    use Rule::{R1, R2, R3, R4, R5L1, R5L2, R5Pins, R5Sync, R6, R6Punch, R7, R8, R9};
    let mut missed = Vec::new();
    for rule in [R1, R2, R3, R4, R5L2, R5L1, R5Sync, R5Pins, R6, R6Punch, R7, R8, R9] {
        let (cuts, fault) = cut(0, 40_000, Some(rule));
        println!("without {rule:?}: {cuts} cuts, {fault:?}");
        if fault.is_none() {
            missed.push(rule);
        }
    }
    assert_eq!(missed, []);
}
