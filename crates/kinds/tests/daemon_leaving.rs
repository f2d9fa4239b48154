//! Removes devices when their front-end leaves.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod daemon;

use std::thread;

use daemon::{LIMIT, Rig, connect};
use kickless_daemon::{AddOutcome, DeviceState, Removal};
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
