//! Adds and removes devices, one step after the other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod daemon;

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use daemon::{BLOCK, LIMIT, Rig};
use kickless_daemon::{
    AddError, AddOutcome, DeviceConfig, DeviceState, Endpoint, KindConfig, RemoveError, RemoveMode, sentence,
};
use kickless_kinds::{BlkConfig, BlkKind};
use kickless_opener::Descriptors;
use kickless_testing::eventually;

/// Changes the options of a disk.
fn with_disk(mut config: DeviceConfig, change: impl Fn(&mut BlkConfig)) -> DeviceConfig {
    let mut disk = config.kind.options::<BlkKind>().unwrap().clone();
    change(&mut disk);
    config.kind = KindConfig::new::<BlkKind>(disk);
    config
}

#[test]
fn a_device_is_added_used_and_removed() {
    let rig = Rig::new(1, 4);
    let config = rig.config("a", "mem:1M");
    assert_eq!(rig.registry.add(config.clone()).unwrap(), AddOutcome::New);
    assert_eq!(rig.states(), [("a".into(), DeviceState::Free)]);
    // Adding an identical device succeeds and changes nothing.
    assert_eq!(rig.registry.add(config.clone()).unwrap(), AddOutcome::Identical);
    let other = with_disk(config.clone(), |disk| disk.read_only = true);
    assert!(matches!(rig.registry.add(other), Err(AddError::Different { name }) if name == "a"));

    let disk = rig.connect("a");
    disk.write_at(&[7; BLOCK], 0).unwrap();
    assert_eq!(rig.states(), [("a".into(), DeviceState::Connected)]);
    assert!(matches!(rig.registry.remove("a", RemoveMode::Refuse, LIMIT), Err(RemoveError::InUse { .. })));
    let mut read = [0; BLOCK];
    disk.read_at(&mut read, 0).unwrap();
    assert_eq!(read, [7; BLOCK]);

    assert!(rig.registry.remove("a", RemoveMode::Drain, LIMIT).unwrap());
    assert!(disk.read_at(&mut read, 0).is_err());
    assert!(!rig.socket("a").exists() && rig.states().is_empty());
    assert!(!rig.registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap(), "there is none");
    // The name and the socket are free again.
    assert_eq!(rig.registry.add(config).unwrap(), AddOutcome::New);
    assert!(rig.registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap());
    assert!(!rig.socket("a").exists());
}

#[test]
fn a_device_that_cannot_be_added_leaves_nothing_behind() {
    let rig = Rig::new(1, 2);
    let missing = rig.registry.add(rig.config("a", "/nonexistent.img")).unwrap_err();
    assert_eq!(missing.option(), Some("blk-file"));
    assert!(sentence(&missing).contains("/nonexistent.img"), "{missing}");

    let listener = UnixListener::bind(rig.socket("a")).unwrap();
    let taken = rig.registry.add(rig.config("a", "mem:1M")).unwrap_err();
    assert_eq!(taken.option(), Some("socket-path"));
    assert!(sentence(&taken).contains("another process is listening there"), "{taken}");
    drop(listener);

    rig.registry.add(rig.config("a", "mem:1M")).unwrap();
    let mut same = rig.config("b", "mem:1M");
    same.serve.socket_path = Some(rig.dir.path().join(".").join("a"));
    assert!(matches!(rig.registry.add(same), Err(AddError::SocketTaken { name, .. }) if name == "a"));
    rig.registry.add(rig.config("b", "mem:1M")).unwrap();
    assert!(matches!(rig.registry.add(rig.config("c", "mem:1M")), Err(AddError::Full { max: 2 })));
    let incoming = with_disk(rig.config("c", "mem:1M"), |disk| disk.incoming = true);
    assert_eq!(rig.registry.add(incoming).unwrap_err().option(), Some("incoming"));
    assert_eq!(rig.states(), ["a", "b"].map(|name| (name.into(), DeviceState::Free)));
    assert!(!rig.socket("c").exists());

    rig.registry.stop();
    assert!(matches!(rig.registry.add(rig.config("d", "mem:1M")), Err(AddError::Stopping)));
}

#[test]
fn an_inherited_socket_serves_no_second_device() {
    let rig = Rig::new(1, 2);
    let listener = UnixListener::bind(rig.socket("a")).unwrap();
    let duplicate = || OwnedFd::from(listener.try_clone().unwrap());
    let inherited = Endpoint::inherited(duplicate()).unwrap();
    let mut first = rig.config("a", "mem:1M");
    first.serve.socket_path = None;
    let opened = rig.registry.open(first, Some(inherited)).unwrap().unwrap();
    rig.registry.serve(vec![opened]).unwrap();
    let mut second = rig.config("b", "mem:1M");
    second.serve.socket_path = Some("fd:s".into());
    let given = Descriptors::from_iter([("s".to_owned(), duplicate())]);
    let refused = rig.registry.add_given(second, &given);
    assert!(matches!(refused, Err(AddError::SocketTaken { name, .. }) if name == "a"));
    assert!(rig.registry.list()[0].is_inherited);
}

#[test]
fn one_of_several_concurrent_adds_is_new() {
    let rig = Rig::new(1, 4);
    let registry = &rig.registry;
    for _ in 0..50 {
        let together = &Barrier::new(3);
        let added = thread::scope(|scope| {
            let add = || {
                together.wait();
                registry.add(rig.config("a", "mem:1M"))
            };
            let threads = [scope.spawn(add), scope.spawn(add), scope.spawn(add)];
            threads.map(|thread| thread.join().unwrap())
        });
        let new = added.iter().filter(|added| matches!(added, Ok(AddOutcome::New))).count();
        let fine = |added: &Result<AddOutcome, AddError>| {
            matches!(added, Ok(_) | Err(AddError::Busy { doing: "added", .. }))
        };
        assert!(new == 1 && added.iter().all(fine), "{added:?}");
        let removed = thread::scope(|scope| {
            let remove = || {
                together.wait();
                registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap()
            };
            let threads = [scope.spawn(remove), scope.spawn(remove), scope.spawn(remove)];
            threads.map(|thread| thread.join().unwrap())
        });
        assert!(removed.contains(&true) && registry.list().is_empty(), "{removed:?}");
    }
}

#[test]
fn a_removal_waits_for_requests_in_flight() {
    let rig = Rig::new(1, 4);
    let slow = rig.config("slow", "fault:delay=1500ms@nth=1+write:mem:1M");
    rig.registry.add(slow.clone()).unwrap();
    rig.registry.add(rig.config("other", "mem:1M")).unwrap();
    let (disk, other) = (rig.connect("slow"), rig.connect("other"));
    let begin = Instant::now();
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_at(&[1; BLOCK], 0));
        // The device has popped the request.
        thread::sleep(Duration::from_millis(300));
        let early = rig.registry.remove("slow", RemoveMode::Drain, Duration::from_millis(100)).unwrap_err();
        assert!(matches!(early, RemoveError::Deadline { .. }), "{early}");
        assert_eq!(rig.registry.list()[0].state, DeviceState::Removing);
        // The name stays in use until the request ends.
        assert!(matches!(rig.registry.add(slow.clone()), Err(AddError::Busy { doing: "removed", .. })));
        other.write_at(&[2; BLOCK], 0).unwrap();
        assert!(begin.elapsed() < Duration::from_millis(1500), "too slow a machine to tell");
        assert!(rig.registry.remove("slow", RemoveMode::Force, LIMIT).unwrap());
        assert!(begin.elapsed() >= Duration::from_millis(1500));
        written.join().unwrap().unwrap();
    });
    // No caller waits for the end of this device, so its session thread closes it.
    rig.registry.add(slow.clone()).unwrap();
    let disk = rig.connect("slow");
    thread::scope(|scope| {
        let written = scope.spawn(|| disk.write_at(&[1; BLOCK], 0));
        thread::sleep(Duration::from_millis(300));
        assert!(rig.registry.remove("slow", RemoveMode::Drain, Duration::from_millis(1)).is_err());
        written.join().unwrap().unwrap();
    });
    eventually("a device stays", || rig.registry.list().len() <= 1);
    assert_eq!(rig.registry.add(slow).unwrap(), AddOutcome::New);
    other.write_at(&[3; BLOCK], 0).unwrap();
}

#[test]
fn an_ended_device_makes_room_for_its_successor() {
    let rig = Rig::new(1, 1);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut config = rig.config("a", "mem:1M");
    config.serve.socket_path = None;
    assert!(matches!(rig.registry.add(config.clone()), Err(AddError::NoSocket)));
    let opened = rig.registry.open(config, Some(Endpoint::inherited(ours.into()).unwrap())).unwrap();
    rig.registry.serve(vec![opened.unwrap()]).unwrap();
    assert!(!rig.registry.is_idle());
    drop(theirs);
    eventually("a device does not stop", || rig.registry.is_idle());
    assert!(rig.registry.take_changed());
    assert_eq!(rig.states(), [("a".into(), DeviceState::Ended)]);
    assert_eq!(rig.registry.add(rig.config("a", "null:1M")).unwrap(), AddOutcome::New);
    assert!(rig.registry.take_ended().is_empty());
    drop(rig.registry);
    assert!(!rig.dir.path().join("a").exists());
}
