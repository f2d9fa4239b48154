//! Adds, replaces, fails and removes devices at random on several threads, and compares the table with a
//! model.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use common::hooked::Hooks;
use common::toy::{MadeDevice, ToyConfig};
use common::{LIMIT, Rig};
use kickless_daemon::{
    AddError, AddOutcome, DeviceState, MakeError, Making, Registry, RemoveError, RemoveMode,
};
use kickless_testing::Random;

/// Threads, each with names of its own, and a name that all of them use.
const THREADS: usize = 4;
const STEPS: usize = 300;

/// The state of a name that only one thread uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    Absent,
    Served,
    /// It has ended with an error.
    Failed,
}

fn state(registry: &Registry, name: &str) -> Model {
    let mut listed = registry.list().into_iter().filter(|listed| listed.config.name() == Some(name));
    let found = listed.next();
    assert!(listed.next().is_none(), "{name} is there twice");
    match found.map(|listed| (listed.state, listed.error.is_some())) {
        None => Model::Absent,
        Some((DeviceState::Free | DeviceState::Connected, false)) => Model::Served,
        Some((DeviceState::Ended, true)) => Model::Failed,
        other => panic!("{name}: {other:?}"),
    }
}

fn removal(random: &mut Random) -> RemoveMode {
    match random.below(3) {
        0 => RemoveMode::Refuse,
        1 => RemoveMode::Drain,
        _ => RemoveMode::Force,
    }
}

/// Takes one step with the name that only this thread uses.
fn own_step(rig: &Rig, name: &str, model: Model, random: &mut Random) -> Model {
    let registry = &rig.registry;
    let (good, bad) = (rig.config(name, "car"), rig.config(name, "broken"));
    match (random.below(5), model) {
        (0 | 1, Model::Absent | Model::Failed) => {
            assert_eq!(registry.add(good).unwrap(), AddOutcome::New);
            Model::Served
        }
        (0 | 1, Model::Served) => {
            assert_eq!(registry.add(good).unwrap(), AddOutcome::Identical);
            assert!(matches!(registry.add(bad), Err(AddError::Different { .. })));
            Model::Served
        }
        // The factory refuses it.
        (2, Model::Absent | Model::Failed) => {
            assert!(matches!(registry.add(bad), Err(AddError::Make(_))));
            model
        }
        (3, Model::Absent | Model::Failed) => {
            rig.add_failed_toy(name);
            Model::Failed
        }
        _ => {
            let was_there = registry.remove(name, removal(random), LIMIT).unwrap();
            assert_eq!(was_there, model != Model::Absent);
            assert!(!rig.socket(name).exists());
            Model::Absent
        }
    }
}

/// Takes one step with the name that all threads use.
fn shared_step(rig: &Rig, random: &mut Random) {
    let registry = &rig.registry;
    if random.one_in(2) {
        let result = registry.add(rig.config("shared", "car"));
        assert!(matches!(result, Ok(_) | Err(AddError::Busy { .. })), "{result:?}");
    } else {
        let result = registry.remove("shared", removal(random), LIMIT);
        assert!(matches!(result, Ok(_) | Err(RemoveError::BeingAdded { .. })), "{result:?}");
    }
}

#[test]
fn the_table_agrees_with_the_model() {
    let open = Arc::new(AtomicUsize::new(0));
    let counted = open.clone();
    let make = move |options: &ToyConfig, _: &Making<'_>| -> MadeDevice {
        if options.toy.as_deref() == Some("broken") {
            return Err(MakeError { option: "toy", source: "it was to fail".into() });
        }
        let closed = counted.clone();
        counted.fetch_add(1, Ordering::SeqCst);
        let drop = Arc::new(move || {
            closed.fetch_sub(1, Ordering::SeqCst);
        });
        Ok(Hooks { drop, ..Hooks::default() }.into_device())
    };
    let rig = Rig::with_devices(2, THREADS + 1, make);
    let registry = &rig.registry;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // The registry can be listed at any time, and never has too many devices.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert!(registry.list().len() <= THREADS + 1);
                assert!(open.load(Ordering::SeqCst) <= THREADS + 1);
                thread::sleep(Duration::from_micros(200));
            }
        });
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let rig = &rig;
                scope.spawn(move || {
                    let name = format!("own-{thread}");
                    let (mut model, mut random) = (Model::Absent, Random(thread as u64 + 1));
                    for step in 0..STEPS {
                        model = own_step(rig, &name, model, &mut random);
                        assert_eq!(state(&rig.registry, &name), model, "{name}, step {step}");
                        assert!(model != Model::Served || !rig.registry.is_idle(), "{name} is served");
                        shared_step(rig, &mut random);
                    }
                    // Served devices are removed, and failed ones stay.
                    if model == Model::Served {
                        assert!(rig.registry.remove(&name, RemoveMode::Force, LIMIT).unwrap());
                        model = Model::Absent;
                    }
                    (name, model)
                })
            })
            .collect();
        let left: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        // Set it also after a panic, because the scope waits for the listing thread.
        is_over.store(true, Ordering::Relaxed);
        for (name, model) in left.into_iter().map(Result::unwrap) {
            assert_eq!(state(registry, &name), model, "{name}");
        }
    });
    registry.remove("shared", RemoveMode::Force, LIMIT).unwrap();
    // No device is served or being opened, and the main thread of a daemon would have been woken.
    assert!(registry.is_idle() && registry.take_changed());
    registry.take_ended();
    assert_eq!((registry.list().len(), open.load(Ordering::SeqCst)), (0, 0));
}
