//! Refreshes devices whose disk or server may not answer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{LIMIT, Rig};
use kickless_daemon::{AddError, AddOutcome, DeviceRef, DeviceState, Endpoint, RemoveError, RemoveMode};
use kickless_testing::{Fake, FakeDevice, eventually};

/// A device whose refresh ends when the test says so.
struct Slow {
    begun: Sender<()>,
    may_end: Mutex<Receiver<()>>,
    refreshed: Arc<AtomicU32>,
}

impl Fake for Slow {
    fn refresh(&self) {
        let _ = self.begun.send(());
        let _ = self.may_end.lock().unwrap().recv();
        self.refreshed.fetch_add(1, Ordering::SeqCst);
    }
}

/// The begin of a refresh, the permission to end it, and the number of refreshes that have ended.
type Refresh = (Receiver<()>, Sender<()>, Arc<AtomicU32>);

/// Makes a registry of such devices. The receiver gets a device's part for the test when the device is made.
fn slow_devices(devices_max: usize) -> (Rig, Receiver<Refresh>) {
    let (made, devices) = channel();
    let rig = Rig::with_devices(1, devices_max, move |_, _| {
        let ((begun, has_begun), (end, may_end)) = (channel(), channel());
        let refreshed = Arc::new(AtomicU32::new(0));
        made.send((has_begun, end, refreshed.clone())).unwrap();
        Ok(Arc::new(FakeDevice(Slow { begun, may_end: Mutex::new(may_end), refreshed })))
    });
    (rig, devices)
}

/// While the refresh of one device hangs, it is requested again, another device is refreshed, and both
/// devices can be stopped.
#[test]
fn a_refresh_that_hangs_blocks_no_other_operation() {
    let (rig, devices) = slow_devices(2);
    let registry = &rig.registry;
    for name in ["a", "b"] {
        registry.add(rig.config(name, "car")).unwrap();
    }
    let [a, b] = [devices.recv().unwrap(), devices.recv().unwrap()];
    for _ in 0..3 {
        registry.devices().for_each(DeviceRef::refresh);
    }
    for (has_begun, ..) in [&a, &b] {
        has_begun.recv_timeout(LIMIT).unwrap();
    }
    // The requests during the refresh cause exactly one more refresh.
    b.1.send(()).unwrap();
    b.0.recv_timeout(LIMIT).unwrap();
    b.1.send(()).unwrap();
    registry.stop();
    eventually("the devices do not stop", || registry.is_idle());
    eventually("it was not looked at twice", || b.2.load(Ordering::SeqCst) >= 2);
    assert!(b.0.try_recv().is_err(), "a third refresh");
    assert_eq!(a.2.load(Ordering::SeqCst), 0);
    assert!(registry.remove("b", RemoveMode::Drain, LIMIT).unwrap());
    // Ends the refresh and the one after it, which the calls above requested.
    drop(a.1);
    assert!(registry.remove("a", RemoveMode::Drain, LIMIT).unwrap());
}

/// A device whose refresh hangs is not removed before the end of the refresh, and no removal waits longer
/// than its deadline. The device does not keep the daemon.
#[test]
fn a_device_is_in_use_while_its_refresh_hangs() {
    for how in [RemoveMode::Refuse, RemoveMode::Drain, RemoveMode::Force] {
        let (rig, devices) = slow_devices(1);
        let registry = &rig.registry;
        let config = rig.config("a", "car");
        registry.add(config.clone()).unwrap();
        registry.devices().for_each(DeviceRef::refresh);
        let (has_begun, end, refreshed) = devices.recv().unwrap();
        has_begun.recv_timeout(LIMIT).unwrap();
        let error = registry.remove("a", how, Duration::from_millis(100)).unwrap_err();
        assert!(matches!(error, RemoveError::StillOpen { .. }), "{how:?}: {error}");
        assert_eq!(registry.list()[0].state, DeviceState::Removing);
        assert!(matches!(registry.add(config.clone()), Err(AddError::Busy { doing: "removed", .. })));
        assert!(registry.is_idle() && registry.devices().next().is_none());
        drop(end);
        // The device is removed now, or was removed already.
        registry.remove("a", how, LIMIT).unwrap();
        assert_eq!(refreshed.load(Ordering::SeqCst), 1);
        assert!(registry.list().is_empty());
        assert_eq!(registry.add(config).unwrap(), AddOutcome::New);
    }
}

/// The successor of an ended device is opened when no thread uses that device any more.
#[test]
fn a_successor_waits_for_a_refresh() {
    let (rig, devices) = slow_devices(1);
    let registry = &rig.registry;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut config = rig.config("a", "car");
    config.serve.socket_path = None;
    let opened = registry.open(config, Some(Endpoint::inherited(ours.into()).unwrap())).unwrap();
    registry.serve(vec![opened.unwrap()]).unwrap();
    registry.devices().for_each(DeviceRef::refresh);
    let (has_begun, end, _) = devices.recv().unwrap();
    has_begun.recv_timeout(LIMIT).unwrap();
    drop(theirs);
    eventually("the device does not end", || registry.list()[0].state == DeviceState::Ended);
    thread::scope(|scope| {
        let added = scope.spawn(|| registry.add(rig.config("a", "car")));
        let early = devices.recv_timeout(Duration::from_millis(300));
        drop(end);
        assert!(early.is_err(), "the device is still in use");
        assert_eq!(added.join().unwrap().unwrap(), AddOutcome::New);
    });
}
