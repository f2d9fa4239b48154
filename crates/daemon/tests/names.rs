//! Checks that a name is in use as long as its socket and its device, and that devices are closed without the
//! lock of the table.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use common::hooked::Hooks;
use common::toy::{MadeDevice, ToyConfig};
use common::{LIMIT, Rig};
use kickless_daemon::{
    AddError, AddOutcome, DeviceState, MakeError, Making, RemoveError, RemoveMode, sentence,
};
use kickless_testing::eventually;

/// The time after which the test assumes that the lock of the table is held. The table answers immediately
/// otherwise.
const HELD: Duration = Duration::from_secs(10);

/// If a successor cannot be opened, the failed device and its error stay listed.
#[test]
fn a_failed_device_is_listed_until_its_successor_is_served() {
    let rig = Rig::new(1, 1);
    let registry = &rig.registry;
    rig.add_failed_toy("a");
    let failed = registry.list().remove(0);
    assert_eq!(failed.state, DeviceState::Ended);
    let is_same = || {
        let now = registry.list().remove(0);
        (now.config, now.state, now.error) == (failed.config.clone(), failed.state, failed.error.clone())
    };
    // A successor cannot be made, its socket cannot be made, or it is dropped before it is
    // served.
    assert!(registry.add(rig.config("a", "broken")).is_err() && is_same());
    let listener = UnixListener::bind(rig.socket("a")).unwrap();
    assert!(registry.add(rig.config("a", "car")).is_err() && is_same());
    drop(listener);
    let opened = registry.open(rig.config("a", "car"), None).unwrap();
    assert_eq!(rig.states(), [("a".into(), DeviceState::Opening)]);
    drop(opened);
    assert!(is_same());
    assert!(matches!(registry.add(rig.config("b", "car")), Err(AddError::Full { max: 1 })));

    assert_eq!(registry.add(rig.config("a", "car")).unwrap(), AddOutcome::New);
    assert_eq!(rig.states(), [("a".into(), DeviceState::Free)]);
    assert!(registry.list()[0].error.is_none() && registry.take_ended().is_empty());
    assert!(registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap());

    // A failed retry keeps the error, and the device can still be taken or removed.
    for is_taken in [true, false] {
        rig.add_failed_toy("a");
        assert!(registry.add(rig.config("a", "broken")).is_err());
        if is_taken {
            let (config, error) = registry.take_ended().remove(0);
            assert_eq!((config.name(), Some(sentence(&error))), (Some("a"), failed.error.clone()));
        } else {
            assert!(registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap());
        }
        assert!(registry.list().is_empty());
    }
}

/// Returns a function that makes devices when the test allows it. The receiver gets a message when the
/// function is called; the sender tells it whether to succeed.
fn on_demand()
-> (impl Fn(&ToyConfig, &Making<'_>) -> MadeDevice + Send + Sync + 'static, Receiver<()>, Sender<bool>) {
    let ((begun, has_begun), (say, said)) = (channel(), channel());
    let said = Mutex::new(said);
    let make = move |_: &ToyConfig, _: &Making<'_>| -> MadeDevice {
        begun.send(()).unwrap();
        match said.lock().unwrap().recv() {
            Ok(true) => Ok(Hooks::default().into_device()),
            _ => Err(MakeError { option: "toy", source: "it was to fail".into() }),
        }
    };
    (make, has_begun, say)
}

/// The daemon does not end while its only device is being opened. It ends when the opening fails.
#[test]
fn a_device_that_is_being_opened_keeps_the_daemon() {
    let (make, begun, say) = on_demand();
    let rig = Rig::with_devices(1, 1, make);
    let registry = &rig.registry;
    assert!(registry.is_idle());
    for is_made in [false, true, false] {
        registry.take_changed();
        thread::scope(|scope| {
            let added = scope.spawn(|| registry.add(rig.config("a", "car")));
            begun.recv_timeout(LIMIT).unwrap();
            let (is_idle, has_changed) = (registry.is_idle(), registry.take_changed());
            say.send(is_made).unwrap();
            assert!(!is_idle && !has_changed);
            assert_eq!(added.join().unwrap().is_ok(), is_made);
        });
        assert!(registry.take_changed() && registry.is_idle() != is_made);
        assert_eq!(registry.remove("a", RemoveMode::Refuse, LIMIT).unwrap(), is_made);
        assert!(registry.take_changed() == is_made && registry.is_idle());
    }
}

/// The daemon stops although a device takes long to make. The device is not served when it is made later.
#[test]
fn a_stopping_daemon_cancels_devices_that_are_being_opened() {
    let (make, begun, say) = on_demand();
    let rig = Rig::with_devices(1, 1, make);
    let registry = &rig.registry;
    thread::scope(|scope| {
        let added = scope.spawn(|| registry.add(rig.config("a", "car")));
        begun.recv_timeout(LIMIT).unwrap();
        registry.take_changed();
        registry.stop();
        let (is_idle, has_changed) = (registry.is_idle(), registry.take_changed());
        say.send(true).unwrap();
        assert!(is_idle && has_changed);
        assert!(matches!(added.join().unwrap(), Err(AddError::Stopping)));
    });
    assert!(registry.is_idle() && registry.list().is_empty() && !rig.socket("a").exists());
}

/// Returns a registry whose devices look at its table when they are closed. The receiver gets what each
/// device saw, or `None` if the table was locked.
fn registry_of_observers(
    limit_remote_waits: Arc<dyn Fn() + Send + Sync>,
) -> (Arc<Rig>, Receiver<Option<Seen>>) {
    let (see, seen) = channel();
    let rig: Arc<OnceLock<std::sync::Weak<Rig>>> = Arc::default();
    let of_device = rig.clone();
    let drop = move || {
        let Some(rig) = of_device.get().and_then(std::sync::Weak::upgrade) else { return };
        let (done, list) = sync_channel(1);
        thread::spawn(move || {
            let in_use = rig.registry.add(rig.config("a", "car"));
            let is_busy = matches!(in_use, Err(AddError::Busy { .. }));
            let _ = done.send((rig.states(), is_busy, rig.socket("a").exists()));
        });
        see.send(list.recv_timeout(HELD).ok()).unwrap();
    };
    let hooks = Hooks { limit_remote_waits, drop: Arc::new(drop), ..Hooks::default() };
    let make = move |_: &ToyConfig, making: &Making<'_>| -> MadeDevice {
        match making.name {
            Some("a") => Ok(hooks.clone().into_device()),
            _ => Ok(Hooks::default().into_device()),
        }
    };
    let made = Arc::new(Rig::with_devices(1, 2, make));
    rig.set(Arc::downgrade(&made)).unwrap();
    (made, seen)
}

/// The listed devices, whether the name `a` was in use, and whether its socket existed.
type Seen = (Vec<(String, DeviceState)>, bool, bool);

/// The name of a device stays in use until the device is closed, for each way to remove it. The table is not
/// locked meanwhile.
#[test]
fn a_name_is_released_after_its_device_is_closed() {
    let (rig, seen) = registry_of_observers(Arc::new(|| {}));
    let registry = &rig.registry;
    let in_use = |state| Some((vec![("a".into(), state)], true, false));
    for how in [RemoveMode::Refuse, RemoveMode::Drain, RemoveMode::Force] {
        registry.add(rig.config("a", "car")).unwrap();
        assert!(registry.remove("a", how, LIMIT).unwrap());
        assert_eq!(seen.recv().unwrap(), in_use(DeviceState::Removing), "{how:?}");
        assert!(registry.list().is_empty());
    }
    // The device is open, and dropped before or after it has its socket.
    for is_bound in [false, true] {
        let mut opened = registry.open(rig.config("a", "car"), None).unwrap().unwrap();
        if is_bound {
            opened.bind(Instant::now() + LIMIT).unwrap();
        }
        drop(opened);
        assert_eq!(seen.recv().unwrap(), in_use(DeviceState::Opening));
    }
    // Neither device is served, because the other one has no socket.
    let mut opened = registry.open(rig.config("a", "car"), None).unwrap().unwrap();
    opened.bind(Instant::now() + LIMIT).unwrap();
    let other = registry.open(rig.config("b", "car"), None).unwrap().unwrap();
    assert!(matches!(registry.serve(vec![opened, other]), Err(AddError::NoSocket)));
    let (listed, is_busy, has_socket) = seen.recv().unwrap().unwrap();
    assert!(listed.contains(&("a".into(), DeviceState::Opening)) && is_busy && !has_socket);
    assert!(registry.list().is_empty());
    // The device has ended, and is taken out or replaced.
    rig.add_failed_toy("a");
    assert_eq!(registry.take_ended().len(), 1);
    assert_eq!(seen.recv().unwrap(), in_use(DeviceState::Removing));
    rig.add_failed_toy("a");
    registry.add(rig.config("a", "car")).unwrap();
    assert_eq!(seen.recv().unwrap(), in_use(DeviceState::Ended));
    registry.stop();
    eventually("the devices do not stop", || registry.is_idle());
}

/// A caller that forces a removal uses the device after its session has ended. Another caller removes the
/// device meanwhile. Both wait, and the session thread closes the device without the lock.
#[test]
fn a_forced_removal_uses_the_device_until_it_is_closed() {
    let ((ask, asked), (answer, may_answer)) = (channel(), channel::<()>());
    let (ask, may_answer) = (Mutex::new(ask), Mutex::new(may_answer));
    let (rig, seen) = registry_of_observers(Arc::new(move || {
        let _ = ask.lock().unwrap().send(());
        let _ = may_answer.lock().unwrap().recv();
    }));
    let registry = &rig.registry;
    registry.add(rig.config("a", "car")).unwrap();
    thread::scope(|scope| {
        let forced = scope.spawn(|| registry.remove("a", RemoveMode::Force, LIMIT));
        asked.recv_timeout(LIMIT).unwrap();
        let drained = registry.remove("a", RemoveMode::Drain, Duration::from_millis(100));
        let is_open = seen.try_recv().is_err();
        drop(answer);
        assert!(matches!(drained, Err(RemoveError::StillOpen { .. })) && is_open, "{drained:?}");
        assert_eq!(seen.recv().unwrap(), Some((vec![("a".into(), DeviceState::Removing)], true, false)));
        assert!(forced.join().unwrap().unwrap());
    });
    assert!(registry.list().is_empty());
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
    let config = rig.config("a", "car");
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
