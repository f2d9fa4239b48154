//! Models of a device that several threads add, use, remove, replace and stop. Loom runs them in every order
//! that the memory model allows, up to a number of preemptions.
//!
//! The device checks that its session thread closes it, without the lock of the table, and when no other
//! thread uses it. A caller that waits for ever is a deadlock, which loom finds. A model has no clock: a
//! caller waits as long as necessary, or not at all.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-daemon --release --lib model`
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use super::Lifecycle;
use crate::config::DeviceConfig;
use crate::error::{AddError, RemoveError, ServeError};
use crate::table::{Outcome, Wanted};
use crate::testing::fake_config;
use kickless_sync::Latch;
use kickless_sync::atomic::{AtomicUsize, Ordering};
use loom::thread::{self, JoinHandle, ThreadId};
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The timeout of a caller that waits as long as necessary.
const PATIENT: Duration = Duration::MAX;

/// A device, and the things that its session thread uses.
struct Device {
    registry: Weak<Lifecycle<Device>>,
    /// The number of open devices.
    open: Arc<AtomicUsize>,
    /// The number of threads that use the device.
    users: AtomicUsize,
    session: OnceLock<ThreadId>,
    /// Tells the session thread to end.
    stop: Latch,
}

impl Device {
    /// Opens a device. No other device of this name is open.
    fn open(registry: &Arc<Lifecycle<Self>>, open: &Arc<AtomicUsize>) -> Arc<Self> {
        assert_eq!(open.fetch_add(1, Ordering::SeqCst), 0, "two devices of one name");
        Arc::new(Self {
            registry: Arc::downgrade(registry),
            open: open.clone(),
            users: AtomicUsize::new(0),
            session: OnceLock::new(),
            stop: Latch::default(),
        })
    }

    /// Uses the device for a moment.
    fn access(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    /// Tells the session thread to end. Returns whether it did, as [`Lifecycle::remove`] asks for.
    fn stop(&self) -> bool {
        self.stop.set();
        true
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        assert_eq!(self.users.load(Ordering::SeqCst), 0, "a thread uses it");
        let session = self.session.get().is_none_or(|session| *session == thread::current().id());
        assert!(session, "another thread closes it");
        // A thread that has the lock of the table would wait for itself.
        let registry = self.registry.upgrade().unwrap();
        assert!(!registry.lock().entries.is_empty(), "the name is free");
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A registry of devices that all have the same name and configuration.
struct Model {
    registry: Arc<Lifecycle<Device>>,
    config: DeviceConfig,
    open: Arc<AtomicUsize>,
}

impl Model {
    fn new() -> Arc<Self> {
        let config = fake_config("a");
        let registry = Arc::new(Lifecycle::new().unwrap());
        Arc::new(Self { registry, config, open: Arc::new(AtomicUsize::new(0)) })
    }

    fn reserve(&self) -> Result<Option<u64>, AddError> {
        let socket = Some(Path::new("socket"));
        self.registry.reserve(&Wanted { config: &self.config, socket, is_inherited: false, devices_max: 1 })
    }

    /// Opens and serves the device whose name is reserved. Returns its session thread, which runs until it is
    /// told to end, unless it has failed by itself. Returns `None` if the daemon is stopping.
    fn serve(&self, id: u64, has_failed: bool) -> Option<JoinHandle<()>> {
        let device = Device::open(&self.registry, &self.open);
        if !self.registry.set_running([(id, device.clone())].into_iter()) {
            drop(device);
            self.registry.cancel_opening(id);
            return None;
        }
        let registry = self.registry.clone();
        Some(thread::spawn(move || {
            device.session.set(thread::current().id()).unwrap();
            let outcome: Outcome = if has_failed {
                Err(ServeError::Panicked)
            } else {
                device.stop.wait();
                Ok(())
            };
            registry.end(id, device, outcome, false);
        }))
    }

    /// Adds a device. Returns its number and its session thread.
    fn add(&self, has_failed: bool) -> (u64, JoinHandle<()>) {
        let id = self.reserve().unwrap().unwrap();
        (id, self.serve(id, has_failed).unwrap())
    }

    fn remove(&self, id: u64, timeout: Duration) -> Result<bool, RemoveError> {
        self.registry.remove(id, timeout, Device::stop, None::<fn(&Device)>)
    }

    /// Starts a thread that uses the device once, if it is open.
    fn use_by_thread(&self, id: u64) -> JoinHandle<()> {
        let registry = self.registry.clone();
        thread::spawn(move || {
            if let Some(device) = registry.reference(id) {
                device.access();
            }
        })
    }

    /// Returns whether the name is free and no device is open.
    fn is_gone(&self) -> bool {
        let is_empty = self.registry.lock().entries.is_empty();
        is_empty && self.open.load(Ordering::SeqCst) == 0
    }
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A thread uses the device while it is removed, first by a caller that does not wait. The removal succeeds
/// after the last use.
#[test]
fn a_device_that_is_removed_is_closed_after_its_last_use() {
    for has_failed in [false, true] {
        check(3, move || {
            let model = Model::new();
            let (id, session) = model.add(has_failed);
            let user = model.use_by_thread(id);
            match model.remove(id, Duration::ZERO) {
                Err(RemoveError::Deadline { .. } | RemoveError::StillOpen { .. }) => {}
                other => panic!("{other:?}"),
            }
            assert!(matches!(model.reserve(), Err(AddError::Busy { .. }) | Ok(Some(_))));
            // The session thread may have closed the device, so that the name was reserved again.
            if model.registry.lock().find(id).is_some() || model.open.load(Ordering::SeqCst) > 0 {
                model.remove(id, PATIENT).unwrap();
            }
            assert_eq!(model.open.load(Ordering::SeqCst), 0);
            session.join().unwrap();
            user.join().unwrap();
        });
    }
}

/// One caller forces the removal, and another one drains. Both wait until the device is closed.
#[test]
fn two_removals_wait_for_each_other() {
    check(3, || {
        let model = Model::new();
        let (id, session) = model.add(false);
        let forced = thread::spawn({
            let model = model.clone();
            move || {
                model.registry.remove(id, PATIENT, Device::stop, Some(Device::access)).unwrap();
                assert!(model.is_gone());
            }
        });
        model.remove(id, PATIENT).unwrap();
        assert!(model.is_gone());
        session.join().unwrap();
        forced.join().unwrap();
    });
}

/// Two callers replace a device that fails, while a thread uses it. At most one device is open at a time.
#[test]
fn a_successor_is_opened_after_the_last_use() {
    check(2, || {
        let model = Model::new();
        let (id, session) = model.add(true);
        let user = model.use_by_thread(id);
        let replace = |model: &Model| match model.reserve() {
            // The successor cannot be opened or is not served, and the failed device stays listed.
            Ok(Some(id)) => {
                drop(Device::open(&model.registry, &model.open));
                model.registry.cancel_opening(id);
            }
            // The device has not failed yet, or the other caller is at work.
            Ok(None) | Err(AddError::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
        };
        let other = thread::spawn({
            let model = model.clone();
            move || replace(&model)
        });
        replace(&model);
        other.join().unwrap();
        // The session thread ends only if the device is closed.
        assert!(model.remove(id, PATIENT).unwrap() && model.is_gone());
        session.join().unwrap();
        user.join().unwrap();
    });
}

/// The daemon stops while a device is used, and another thread removes it. The daemon does not wait for the
/// thread that uses it.
#[test]
fn a_stopping_daemon_closes_its_devices() {
    check(2, || {
        let model = Model::new();
        let (id, session) = model.add(false);
        let remover = thread::spawn({
            let model = model.clone();
            move || {
                model.remove(id, PATIENT).unwrap();
                assert_eq!(model.open.load(Ordering::SeqCst), 0);
            }
        });
        let device = model.registry.reference(id);
        model.registry.stop(|device| device.stop.set());
        model.registry.wait_until_idle();
        model.registry.take_ended();
        assert!(device.is_none() || !model.is_gone());
        drop(device);
        session.join().unwrap();
        remover.join().unwrap();
        assert!(model.is_gone());
    });
}

/// The daemon stops while a device is being opened. The device is closed, or is served and stopped.
#[test]
fn no_device_is_served_after_the_stop() {
    check(3, || {
        let model = Model::new();
        let id = model.reserve().unwrap().unwrap();
        let opener = thread::spawn({
            let model = model.clone();
            move || {
                if let Some(session) = model.serve(id, false) {
                    session.join().unwrap();
                }
            }
        });
        model.registry.stop(|device| device.stop.set());
        model.registry.wait_until_idle();
        model.registry.take_ended();
        opener.join().unwrap();
        assert!(model.is_gone() && matches!(model.reserve(), Err(AddError::Stopping)));
    });
}
