//! Random runs of whole disks, with cuts.

use super::images::builder::{Shape, build};
use super::images::lives::{LIVES, SETTLE, STEPS, number};
use super::whole::Whole;
use fastrand::Rng;

/// Runs one image through several lives of a disk, each ended by a cut.
fn run_whole(seed: u64, cuts: &mut u64) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    // Threads decompress, so their order is not the simulator's.
    let shape = Shape { has_compressed: false, is_device: false, ..Shape::random(&mut rng) };
    let mut file = build(shape, &mut rng);
    for _ in 0..LIVES {
        let mut whole = Whole::open(shape, &file, rng.fork());
        for _ in 0..rng.u64(1..STEPS) {
            whole.turn()?;
            if rng.f64() < SETTLE {
                whole.settle()?;
            }
            if rng.f64() < 0.03 {
                whole.kill()?;
                whole.power_cut()?;
                *cuts += 2;
            }
        }
        file = match rng.u8(..3) {
            0 => whole.kill()?,
            1 => whole.power_cut()?,
            _ => whole.close()?,
        };
        // Dropping a disk waits for operations in flight.
        whole.drain()?;
    }
    Ok(())
}

#[test]
fn cuts_of_whole_disks_leave_leaks_at_most() {
    let (mut cuts, mut seed) = (0, number("KICKLESS_SEED", 0));
    while cuts < number("KICKLESS_CUTS", 3_000) {
        let fault = run_whole(seed, &mut cuts);
        assert_eq!(fault, Ok(()), "seed {seed}, after {cuts} cuts");
        seed += 1;
    }
}
