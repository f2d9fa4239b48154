//! Hands the devices of one registry over to another one. Both are in this process.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::mem;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{LIMIT, Rig};
use kickless_daemon::{
    BeingUpgraded, Beside, DeviceState, Given, Registry, RemoveMode, TakenOver, hand_over, take_over,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

fn channel() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Hands the devices of `old` over to `new`. Returns the results of both.
fn pass(
    old: &Registry,
    beside: &Beside,
    new: &Arc<Registry>,
) -> (Result<Given, String>, Result<TakenOver, String>) {
    let (old_end, new_end) = channel();
    thread::scope(|scope| {
        let taken = scope.spawn(|| take_over(new, new_end, &mut |_| Ok(()), || Ok(()), &Mutex::new(false)));
        (hand_over(old, beside, old_end, LIMIT, false), taken.join().unwrap())
    })
}

/// Ends the old process: nothing of it is dropped.
fn end(old: Rig) -> tempfile::TempDir {
    let Rig { registry, dir, .. } = old;
    mem::forget(registry);
    dir
}

#[test]
fn devices_pass_with_their_sockets() {
    let (old, new) = (Rig::new(1, 8), Rig::new(1, 8));
    for name in ["a", "b"] {
        old.registry.add(old.config(name, "car")).unwrap();
    }
    old.registry.add_when_available(old.config("c", "broken")).unwrap_err();
    old.add_failed_toy("d");
    let socket = old.socket("a");
    let beside = Beside {
        of_file: vec![old.config("a", "car")],
        log_filter: Some("debug".into()),
        watchdog: Some(Duration::from_secs(60)),
        ..Beside::default()
    };
    let (given, taken) = pass(&old.registry, &beside, &new.registry);
    let (given, taken) = (given.unwrap(), taken.unwrap());
    assert_eq!((given.devices, taken.devices), (2, 2));
    assert_eq!((old.registry.upgrades(), new.registry.upgrades()), (0, 1));
    assert_eq!(taken.beside.log_filter.as_deref(), Some("debug"));
    assert_eq!(taken.beside.watchdog, Some(Duration::from_secs(60)));
    assert_eq!(taken.beside.of_file, [old.config("a", "car")]);
    let dir = end(old);
    assert_eq!(
        new.states(),
        [
            ("a".into(), DeviceState::Free),
            ("b".into(), DeviceState::Free),
            ("c".into(), DeviceState::Unavailable)
        ]
    );
    drop(UnixStream::connect(&socket).unwrap());
    // The name belongs to the new process, which removes it.
    assert!(new.registry.remove("a", RemoveMode::Drain, LIMIT).unwrap());
    assert!(!socket.exists());
    drop(dir);
}

#[test]
fn a_registry_that_passes_refuses_changes_until_it_goes_on() {
    let (old, new) = (Rig::new(1, 8), Rig::new(1, 8));
    old.registry.add(old.config("a", "car")).unwrap();
    // The new process has a device of this name, so it refuses the plan.
    new.registry.add(new.config("a", "bus")).unwrap();
    let (given, taken) = pass(&old.registry, &Beside::default(), &new.registry);
    for why in [given.unwrap_err(), taken.unwrap_err()] {
        assert!(why.contains("there is a device a already"), "{why}");
    }
    // The old process serves, with its socket.
    drop(UnixStream::connect(old.socket("a")).unwrap());
    drop(old.registry.begin_change().unwrap());

    // A change that goes on is waited for, and refused while the devices pass.
    let (old_end, new_end) = channel();
    let registry = &old.registry;
    thread::scope(|scope| {
        let change = registry.begin_change().unwrap();
        let passing = scope.spawn(|| hand_over(registry, &Beside::default(), old_end, LIMIT, false));
        while registry.begin_change().is_ok() {
            thread::yield_now();
        }
        drop(change);
        assert_eq!(registry.begin_change().unwrap_err(), BeingUpgraded);
        let (another, _theirs) = channel();
        let refused = hand_over(registry, &Beside::default(), another, LIMIT, false).unwrap_err();
        assert_eq!(refused, BeingUpgraded.to_string());
        // The new process ends before it answers.
        drop(new_end);
        passing.join().unwrap().unwrap_err();
    });
    drop(registry.begin_change().unwrap());
    assert_eq!(old.states(), [("a".into(), DeviceState::Free)]);
}

/// The new process finds out when the old one has ended.
#[test]
fn a_registry_without_devices_passes() {
    let (old, new) = (Rig::new(1, 1), Rig::new(1, 1));
    let (given, taken) = pass(&old.registry, &Beside::default(), &new.registry);
    let (given, taken) = (given.unwrap(), taken.unwrap());
    assert_eq!((given.devices, taken.devices, taken.stall), (0, 0, Duration::ZERO));
    drop(given);
    assert!(taken.taken.unwrap().wait_for_end(std::time::Instant::now() + LIMIT));
}
