//! Model of a walk through a list of the reverse map while entries come and go.
//!
//! loom runs it in every order that the memory model allows, up to a few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-dirty-log --release --lib model`
#![allow(unsafe_code, clippy::unwrap_used, clippy::undocumented_unsafe_blocks, reason = "tests")]

use super::{Blocks, List};
use loom::thread;
use std::sync::Arc;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Entries leave a list, and blocks are moved to another, during a walk. The walker visits all entries that
/// stay.
#[test]
fn a_walker_misses_nothing() {
    // The last two addresses are in the second block, the others in the first.
    for all in [&[4, 8, 12][..], &[4, 8, 12, 16]] {
        for (&leaving, joins) in all.iter().zip([false; 4]).chain(all.iter().zip([true; 4])) {
            check(move || {
                let lists = Arc::new([List::new(), List::new()]);
                let mut blocks = Blocks::default();
                all.iter().for_each(|what| unsafe { lists[0].add(&mut blocks, *what) });
                unsafe { lists[1].add(&mut blocks, 20) };
                let walker = thread::spawn({
                    let lists = lists.clone();
                    move || {
                        let mut seen = Vec::new();
                        unsafe { lists[0].walk(|what| seen.push(what)) };
                        seen
                    }
                });
                assert!(unsafe { lists[0].remove(&mut blocks, leaving) });
                // A block that becomes free is reused at once, by the other list or by this one.
                let list = &lists[usize::from(!joins)];
                unsafe { list.add(&mut blocks, 24) };
                unsafe { list.add(&mut blocks, 28) };
                let seen = walker.join().unwrap();
                for what in all.iter().filter(|what| **what != leaving) {
                    assert!(seen.contains(what), "missed {what}: {seen:?}");
                }
            });
        }
    }
}
