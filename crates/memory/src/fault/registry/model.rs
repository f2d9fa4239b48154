//! Model of the registry of mappings: a signal handler searches it while mappings come and go.
//!
//! loom runs it in every order that the memory model allows, up to a few preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-memory --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use super::{Range, Registry};
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use std::sync::Arc;

fn registry() -> Arc<Registry> {
    Arc::new(Registry {
        first: loom::sync::atomic::AtomicPtr::new(std::ptr::null_mut()),
        spare: loom::sync::Mutex::new(Vec::new()),
    })
}

fn range(start: usize, len: usize) -> Range {
    Range { start, len, page: 1 }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// An atomic that both threads store to before each of their steps.
///
/// loom reorders two accesses only if they are the last ones. If a thread loads a value and then stores to
/// it, loom does not try this store before earlier loads of other threads. These additional stores make it
/// try that.
#[derive(Default)]
struct Steps(AtomicUsize);

impl Steps {
    fn next(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// One thread has a fault in its mapping while other mappings come and go, in a reused entry and in new ones.
/// It finds its own mapping.
#[test]
fn a_user_of_a_mapping_finds_it() {
    check(|| {
        let (registry, steps) = (registry(), Arc::new(Steps::default()));
        let ours = registry.add(range(200, 10));
        // Before ours in the list.
        let other = registry.add(range(100, 10));
        let changing = {
            let (registry, steps) = (registry.clone(), steps.clone());
            thread::spawn(move || {
                steps.next();
                registry.remove(other);
                // In the same entry. A mix of both ranges would contain 205 too.
                registry.add(range(50, 200 - 50));
                steps.next();
                registry.add(range(300, 10));
                steps.next();
            })
        };
        steps.next();
        let (found, at) = registry.find(205).unwrap();
        assert!(std::ptr::eq(found, ours));
        assert_eq!(at, range(200, 10));
        changing.join().unwrap();
    });
}

/// A fault in foreign memory finds no mapping, whatever changes meanwhile. A half-changed entry does not seem
/// to hold it.
#[test]
fn foreign_memory_is_not_found() {
    check(|| {
        let registry = registry();
        let low = registry.add(range(100, 10));
        let changing = {
            let registry = registry.clone();
            thread::spawn(move || {
                registry.remove(low);
                // With the old start and the new length, the entry would hold 150.
                registry.add(range(200, 100));
            })
        };
        assert!(registry.find(150).is_none());
        changing.join().unwrap();
    });
}

/// A thread finds a mapping that another thread made and handed over. A fault counts for that mapping only.
#[test]
fn a_mapping_that_was_handed_over_is_found() {
    check(|| {
        let registry = registry();
        let handed = Arc::new(AtomicUsize::new(0));
        let making = {
            let (registry, handed) = (registry.clone(), handed.clone());
            thread::spawn(move || {
                let first = registry.add(range(10, 10));
                registry.remove(first);
                let second = registry.add(range(400, 10));
                handed.store(401, Ordering::Release);
                second
            })
        };
        let address = handed.load(Ordering::Acquire);
        if address != 0 {
            let (found, at) = registry.find(address).unwrap();
            assert_eq!(at, range(400, 10));
            assert_eq!(found.count_miss(), 0);
            let made = making.join().unwrap();
            assert_eq!(made.misses(), 1);
        } else {
            assert_eq!(making.join().unwrap().misses(), 0);
        }
    });
}
