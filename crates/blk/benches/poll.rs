//! Counts the instructions of a poll for each read of 4 KiB, of disks that answer at once, with 32 and with 1
//! request in a poll. They are the same each time, so that a change of a few shows. Needs valgrind.
//!
//!     cargo bench -p kickless-blk --bench poll
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a benchmark may")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use kickless_disk::DiskSpec;
use kickless_io::EngineKind;
use kickless_spec::blk::BlkFeatures;
use kickless_testing::{CountedLoad, print_instructions};
use rig::{FORMATS, Rig, TestRequest, blk, open};

/// The polls of a run. The first ones allocate.
const POLLS: u32 = 200;

#[inline(never)]
fn counted_submit(rig: &mut Rig) {
    rig.poll();
}

/// Polls a queue with this number of requests in its ring, again and again.
fn run(disk: &DiskSpec, packed: bool, requests: u32) {
    let device = blk(open(disk));
    let mut rig = Rig::start(&device, EngineKind::Threads, 1, packed, BlkFeatures::empty());
    for _ in 0..POLLS {
        for request in 0..requests {
            rig.send(TestRequest::read(u64::from(request) * 8, 4096));
        }
        counted_submit(&mut rig);
        assert_eq!(rig.take_answers(), requests as usize);
        rig.answers.clear();
    }
}

fn main() {
    let mut loads = Vec::new();
    for (name, disk) in [("null", DiskSpec::Null(1 << 30)), ("mem", DiskSpec::Memory(1 << 20))] {
        for packed in FORMATS {
            for requests in [32, 1] {
                let ring = if packed { "packed" } else { "split" };
                let disk = disk.clone();
                let run = move || run(&disk, packed, requests);
                loads.push(CountedLoad::new(format!("read/{name}/{ring}/{requests}"), POLLS * requests, run));
            }
        }
    }
    print_instructions(&loads);
}
