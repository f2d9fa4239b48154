//! Removes devices when their front-end leaves.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use common::hooked::Hooks;
use common::{LIMIT, Rig, connect};
use kickless_daemon::{AddOutcome, DeviceState, Removal, RemoveMode};
use kickless_testing::eventually;

/// A removal is cancelled while the front-end leaves. The device then stays, or is gone.
#[test]
fn a_removal_is_cancelled_or_done() {
    let rig = Rig::new(1, 1);
    let registry = &rig.registry;
    let config = rig.config("a", "mem:1M");
    registry.add(config.clone()).unwrap();
    let (mut kept, mut gone) = (0, 0);
    for round in 0..40 {
        let disk = rig.connect("a");
        assert_eq!(registry.remove_when_free("a", LIMIT).unwrap(), Removal::Leaving);
        assert!(registry.list()[0].is_leaving);
        // Its session thread sees that before or while this one cancels.
        let is_kept = thread::scope(|scope| {
            let leave = move || drop(disk);
            if round % 2 == 0 {
                leave();
            } else {
                scope.spawn(leave);
            }
            registry.keep("a", LIMIT).unwrap()
        });
        if is_kept {
            kept += 1;
            eventually("its front-end has left", || rig.states()[0].1 == DeviceState::Free);
            assert!(!registry.list()[0].is_leaving);
        } else {
            gone += 1;
            assert!(registry.list().is_empty() && !rig.socket("a").exists());
            assert_eq!(registry.add(config.clone()).unwrap(), AddOutcome::New);
        }
        drop(connect(&rig.socket("a")));
        // A later front-end does not end it.
        eventually("it is free again", || rig.states()[0].1 == DeviceState::Free);
    }
    println!("{kept} were kept, {gone} were gone");
    assert_eq!(registry.remove_when_free("a", LIMIT).unwrap(), Removal::Removed);
    assert_eq!(registry.remove_when_free("a", LIMIT).unwrap(), Removal::Absent);
}

/// The last front-end leaves by its end or by a mistake. Others that connect meanwhile are not served.
#[test]
fn the_device_is_gone_when_its_front_end_has_left() {
    let rig = Rig::new(1, 1);
    let registry = &rig.registry;
    registry.add(rig.config("a", "mem:1M")).unwrap();
    let disk = rig.connect("a");
    for _ in 0..2 {
        assert_eq!(registry.remove_when_free("a", LIMIT).unwrap(), Removal::Leaving);
    }
    disk.write_at(&[1; 512], 0).unwrap();
    drop(disk);
    eventually("it is removed", || registry.list().is_empty());
    assert!(!rig.socket("a").exists());
    // Its place is free.
    registry.add(rig.config("b", "mem:1M")).unwrap();
    drop(rig.connect("b"));
}

/// A device that cannot write everything back keeps its disk when it is removed, and no other device takes
/// its name. Removing it again gives the disk up.
#[test]
fn a_device_that_keeps_its_disk_is_removed_by_a_second_call() {
    let (dropped, closes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (drop_hook, close_hook) = (dropped.clone(), closes.clone());
    let hooks = Hooks {
        close: Arc::new(move || {
            close_hook.fetch_add(1, Ordering::Relaxed);
            false
        }),
        drop: Arc::new(move || drop_hook.store(true, Ordering::Relaxed)),
        ..Hooks::default()
    };
    let rig = Rig::with_devices(1, 1, move |_, _| Ok(hooks.clone().into_device()));
    let registry = &rig.registry;
    let config = rig.config("a", "mem:1M");
    registry.add(config.clone()).unwrap();
    let refused = registry.remove("a", RemoveMode::Drain, LIMIT).unwrap_err().to_string();
    assert!(refused.contains("did not reach the disk") && refused.contains("the disk is full"), "{refused}");
    let listed = registry.list().remove(0);
    assert_eq!(listed.state, DeviceState::Ended);
    assert!(listed.error.unwrap().contains("cannot be given up") && !dropped.load(Ordering::Relaxed));
    let refused = registry.add(config.clone()).unwrap_err().to_string();
    assert!(refused.contains("keeps it"), "{refused}");
    // Neither does a reload.
    let refused = registry.remove_when_free("a", LIMIT).unwrap_err().to_string();
    assert!(refused.contains("did not reach the disk"), "{refused}");
    let tried = closes.load(Ordering::Relaxed);
    assert!(registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap());
    assert_eq!(closes.load(Ordering::Relaxed), tried + 1, "it was not tried again");
    assert!(registry.list().is_empty() && dropped.load(Ordering::Relaxed));
    registry.add(config).unwrap();
    // The end of the daemon says it too.
    registry.stop();
    eventually("it does not end", || registry.is_idle());
    let failed = registry.take_ended();
    assert!(failed.len() == 1 && failed[0].1.to_string().contains("cannot be given up"), "{failed:?}");
}
