//! The life of a device in the registry, from the reservation of its name to its removal.
//!
//! Any thread can take a [`Reference`] to a device, for a short time. The session thread of a device closes
//! it, after all references were returned, and removes its entry afterwards. So the name and the socket are
//! in use as long as any thread uses the device, and no other thread ever waits for the device's disk to
//! close. Callers that remove or replace a device wait for its session thread, up to a deadline.
//!
//! The type of the devices is a parameter, so that a model can run this file.

#[cfg(all(test, loom))]
mod model;

use std::io;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kickless_io::Waker;
use kickless_sync::{Condvar, Mutex, MutexGuard, lock};

use super::config::DeviceConfig;
use super::error::{AddError, RemoveError, ServeError};
use super::table::{Entry, Outcome, Phase, Reserved, Table, Wanted};

/// The interval at which a forced removal acts on the device again.
const FORCE_EVERY: Duration = Duration::from_secs(1);
/// The longest time that a new device waits until the ended one that it replaces is closed. A disk is closed
/// within milliseconds, unless its file system or server does not answer.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

pub(crate) struct Lifecycle<D> {
    table: Mutex<Table<D>>,
    /// Notified when the phase of a device has changed. Callers wait for it.
    changed: Condvar,
    /// Notified when a device is to be closed, and when the last reference to it is returned. Session threads
    /// wait for it.
    may_close: Condvar,
    /// Signalled when the phase of a device has changed, for the main thread of the daemon.
    signal: Waker,
}

/// A reference to a device. The device is not closed while it exists.
pub(crate) struct Reference<D> {
    // Dropped in this order, so that the session thread has the last `Arc` and closes the device.
    device: Arc<D>,
    _counted: Counted<D>,
}

/// Counts a [`Reference`].
struct Counted<D> {
    lifecycle: Arc<Lifecycle<D>>,
    id: u64,
}

impl<D> Deref for Reference<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.device
    }
}

impl<D> Drop for Counted<D> {
    fn drop(&mut self) {
        // All threads of ended devices wait there. Only that of this device may have nothing to wait for now.
        if self.lifecycle.lock().return_reference(self.id) {
            self.lifecycle.may_close.notify_all();
        }
    }
}

/// Records that a device is closed when it is dropped, also after a panic of the device.
struct ClosedReport<'a, D> {
    lifecycle: &'a Lifecycle<D>,
    id: u64,
}

impl<D> Drop for ClosedReport<'_, D> {
    fn drop(&mut self) {
        let mut table = self.lifecycle.lock();
        table.set_closed(self.id);
        // A caller that finds the entry removed has been notified.
        self.lifecycle.notify_changed();
    }
}

impl<D> Lifecycle<D> {
    /// Makes an empty table.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            table: Mutex::new(Table::default()),
            changed: Condvar::new(),
            may_close: Condvar::new(),
            signal: Waker::new()?,
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Table<D>> {
        lock(&self.table)
    }

    /// Returns the waker that is signalled when the phase of a device has changed.
    pub(crate) fn signal(&self) -> &Waker {
        &self.signal
    }

    fn notify_changed(&self) {
        self.changed.notify_all();
        self.signal.wake();
    }

    /// Waits for a change, up to `left`.
    fn wait<'t>(&self, table: MutexGuard<'t, Table<D>>, left: Duration) -> MutexGuard<'t, Table<D>> {
        self.changed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Reserves the name and the socket of a device, and returns the number of the device. Has an ended
    /// device of this name closed first, so that the new one can use its disk and its reserves. Returns
    /// `None` if an identical device is already served.
    ///
    /// # Errors
    /// The name or the socket is in use, or the ended device is not closed within [`CLOSE_WAIT`].
    pub(crate) fn reserve(&self, wanted: &Wanted<'_>) -> Result<Option<u64>, AddError> {
        let since = Instant::now();
        let mut table = self.lock();
        loop {
            let ended = match table.reserve(wanted)? {
                Reserved::New(id) => return Ok(Some(id)),
                Reserved::Identical => return Ok(None),
                Reserved::Ended(id) => id,
            };
            if let Some(entry) = table.find(ended) {
                entry.close();
            }
            self.may_close.notify_all();
            while table.find(ended).is_some_and(|entry| matches!(entry.phase, Phase::Closing(_))) {
                let left = CLOSE_WAIT.saturating_sub(since.elapsed());
                if left.is_zero() {
                    let name = wanted.config.name().unwrap_or_default().to_owned();
                    return Err(AddError::Busy { name, doing: "closed" });
                }
                table = self.wait(table, left);
            }
        }
    }

    /// Cancels the opening of a device, unless it is served. The caller has closed the device.
    pub(crate) fn cancel_opening(&self, id: u64) {
        let was_opening = self.lock().cancel_opening(id);
        if was_opening {
            self.notify_changed();
        }
    }

    /// Records that these devices are served from now on. Returns `false` if they must not be served.
    pub(crate) fn set_running(&self, devices: impl Iterator<Item = (u64, Arc<D>)>) -> bool {
        let is_accepted = self.lock().set_running(devices);
        self.notify_changed();
        is_accepted
    }

    /// Records that a device is no longer served. Waits until another thread requests that it is closed,
    /// unless `is_leaving`, and until no reference is left. Then closes it. Its session thread calls this.
    /// Returns whether the device is removed because it was leaving.
    pub(crate) fn end(&self, id: u64, device: Arc<D>, outcome: Outcome, is_leaving: bool) -> bool {
        let mut table = self.lock();
        let has_left = table.set_ended(id, outcome, is_leaving);
        self.notify_changed();
        while table.find(id).is_some_and(|entry| !entry.is_being_closed()) {
            table = self.may_close.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        drop(table);
        let report = ClosedReport { lifecycle: self, id };
        // The table has none since the request, and gives out none.
        debug_assert_eq!(Arc::strong_count(&device), 1, "a reference that is not counted");
        drop(device);
        drop(report);
        has_left
    }

    /// Returns a reference to a device, if it is open.
    pub(crate) fn reference(self: &Arc<Self>, id: u64) -> Option<Reference<D>> {
        self.reference_in(&mut self.lock(), id)
    }

    fn reference_in(self: &Arc<Self>, table: &mut Table<D>, id: u64) -> Option<Reference<D>> {
        let device = table.add_reference(id)?;
        Some(Reference { device, _counted: Counted { lifecycle: self.clone(), id } })
    }

    /// Removes a device. If it is served, `stop` stops it first, and returns whether it did. Then waits up to
    /// `timeout` until the device is closed. Meanwhile calls `force` at intervals, if the device is still
    /// served. Returns whether the device was there.
    ///
    /// # Errors
    /// `stop` returned `false`, the device is being opened, or it is not closed in time.
    pub(crate) fn remove(
        self: &Arc<Self>,
        id: u64,
        timeout: Duration,
        stop: impl FnOnce(&D) -> bool,
        force: Option<impl Fn(&D)>,
    ) -> Result<bool, RemoveError> {
        let since = Instant::now();
        let mut table = self.lock();
        let Some(entry) = table.find(id) else { return Ok(false) };
        let name = entry.name.clone();
        entry.remove(stop)?;
        table.remove_closed();
        self.may_close.notify_all();
        let mut force_at = since;
        while let Some(entry) = table.find(id) {
            if let Some(error) = entry.keeps_disk() {
                return Err(error);
            }
            let is_running = matches!(entry.phase, Phase::Running(_));
            let left = timeout.saturating_sub(since.elapsed());
            if left.is_zero() {
                let waited = since.elapsed();
                return Err(match is_running {
                    true => RemoveError::Deadline { name, waited },
                    false => RemoveError::StillOpen { name, waited },
                });
            }
            match &force {
                Some(force) if is_running && force_at <= Instant::now() => {
                    let device = self.reference_in(&mut table, id);
                    drop(table);
                    if let Some(device) = device {
                        force(&device);
                    }
                    force_at = Instant::now() + FORCE_EVERY;
                    table = self.lock();
                }
                _ => table = self.wait(table, left.min(FORCE_EVERY)),
            }
        }
        drop(table);
        self.notify_changed();
        Ok(true)
    }

    /// Closes and removes the devices that have ended. Waits until they are closed, but not for those to
    /// which there are references. Returns the configuration and the error of each that failed.
    pub(crate) fn take_ended(&self) -> Vec<(DeviceConfig, ServeError)> {
        let mut table = self.lock();
        let (ids, failed) = table.take_ended();
        self.may_close.notify_all();
        while ids.iter().any(|id| table.find(*id).is_some_and(|entry| entry.is_being_closed())) {
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        drop(table);
        self.notify_changed();
        failed
    }

    /// Refuses new devices, and calls `stop` for each open one.
    pub(crate) fn stop(&self, stop: impl Fn(&D)) {
        let mut table = self.lock();
        table.is_stopping = true;
        table.entries.iter().filter_map(Entry::device).for_each(|device| stop(device));
        drop(table);
        self.signal.wake();
    }

    /// Waits until no device is served or being closed.
    pub(crate) fn wait_until_idle(&self) {
        let mut table = self.lock();
        while !table.is_idle() {
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
