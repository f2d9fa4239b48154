//! Counts the instructions of a poll for each request to `null:`, with 32 and with 1 request in a poll. They
//! are the same each time, so that a change of a few shows. Needs valgrind.
//!
//!     cargo bench -p kickless-blk --bench poll
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a benchmark may")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use kickless_disk::DiskSpec;
use kickless_io::EngineKind;
use kickless_spec::blk::BlkFeatures;
use kickless_testing::counted_instructions;
use rig::{Rig, TestRequest, blk, open};

/// The polls of a run. The first ones allocate.
const POLLS: u32 = 200;

#[inline(never)]
fn counted_submit(rig: &mut Rig) {
    rig.poll();
}

/// Polls a queue with this number of requests in its ring, again and again.
fn run(requests: u32) {
    let device = blk(open(&DiskSpec::Null(1 << 30)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 1, false, BlkFeatures::empty());
    for _ in 0..POLLS {
        for request in 0..requests {
            rig.send(TestRequest::read(u64::from(request) * 8, 4096));
        }
        counted_submit(&mut rig);
        rig.take_answers();
        rig.answers.clear();
    }
}

fn main() {
    if let Some(requests) = std::env::args().nth(1).and_then(|argument| argument.parse().ok()) {
        return run(requests);
    }
    for requests in [32, 1] {
        match counted_instructions(&requests.to_string()) {
            Some(count) => println!(
                "{requests} in a poll: {:.1} instructions a request",
                count / f64::from(POLLS * requests)
            ),
            None => println!("valgrind cannot count instructions here"),
        }
    }
}
