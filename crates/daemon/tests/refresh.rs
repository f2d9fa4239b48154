//! Refreshes devices whose disk or server may not answer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use common::{LIMIT, Rig};
use kickless_daemon::Removal;
use kickless_testing::{Fake, FakeDevice, eventually};

/// A device whose refresh ends when the test says so.
struct Slow {
    begun: Sender<()>,
    may_end: Mutex<Receiver<()>>,
    refreshed: Arc<AtomicU32>,
}

impl Fake for Slow {
    fn refresh(&self) {
        self.begun.send(()).unwrap();
        let _ = self.may_end.lock().unwrap().recv();
        self.refreshed.fetch_add(1, Ordering::SeqCst);
    }
}

/// While the refresh of one device hangs, it is requested again, another device is refreshed, and both
/// devices can be stopped.
#[test]
fn a_refresh_that_hangs_blocks_no_other_operation() {
    let (made, devices) = channel();
    let rig = Rig::with_devices(1, 2, move |_| {
        let ((begun, has_begun), (end, may_end)) = (channel(), channel());
        let refreshed = Arc::new(AtomicU32::new(0));
        made.send((has_begun, end, refreshed.clone())).unwrap();
        Ok(Arc::new(FakeDevice(Slow { begun, may_end: Mutex::new(may_end), refreshed })))
    });
    let registry = &rig.registry;
    for name in ["a", "b"] {
        registry.add(rig.config(name, "mem:1M")).unwrap();
    }
    let [a, b] = [devices.recv().unwrap(), devices.recv().unwrap()];
    for served in registry.devices() {
        for _ in 0..3 {
            served.refresh();
        }
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
    assert!(registry.remove("a", Removal::Drain(LIMIT)).unwrap());
}
