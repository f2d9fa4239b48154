//! Devices that cannot be opened yet, and are tried again.
//!
//! After a reboot, the disk of a device may come later than the daemon. Such a device is in a list of its own
//! beside the table, because it has no socket, no reserves and no session. A thread for each of them tries to
//! open it at intervals, so that a disk that does not answer delays no other one. The thread ends when the
//! device is served, or when it is removed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kickless_sync::lock;

use super::config::DeviceConfig;

/// The interval at which a device is tried. An operator who attaches a disk does not wait longer.
pub(crate) const RETRY_EVERY: Duration = Duration::from_secs(2);

/// The devices that cannot be opened yet.
#[derive(Default)]
pub(crate) struct Unavailable {
    list: Mutex<Vec<Pending>>,
    /// The number of the next device. A thread never finds another device under its number.
    next_id: AtomicU64,
    /// Notified when a device leaves the list, or is no longer being tried.
    changed: Condvar,
}

struct Pending {
    id: u64,
    config: DeviceConfig,
    /// The reason, as a sentence.
    error: String,
    is_being_tried: bool,
}

impl Unavailable {
    /// Adds a device. Returns its number in the list, or `None` if there is one of this name.
    pub(crate) fn insert(&self, config: DeviceConfig, error: String) -> Option<u64> {
        let mut list = lock(&self.list);
        if list.iter().any(|pending| pending.config.name() == config.name()) {
            return None;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        list.push(Pending { id, config, error, is_being_tried: false });
        Some(id)
    }

    /// Returns the configuration and the error of each device.
    pub(crate) fn all(&self) -> Vec<(DeviceConfig, String)> {
        lock(&self.list).iter().map(|pending| (pending.config.clone(), pending.error.clone())).collect()
    }

    /// Returns the configuration of the device with this name.
    pub(crate) fn find(&self, name: &str) -> Option<DeviceConfig> {
        lock(&self.list)
            .iter()
            .find(|pending| pending.config.name() == Some(name))
            .map(|pending| pending.config.clone())
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.list).is_empty()
    }

    /// Removes a device. Waits up to `timeout` until it is not being tried. Returns whether it was there, or
    /// `None` if it is still being tried.
    pub(crate) fn remove(&self, name: &str, timeout: Duration) -> Option<bool> {
        let since = Instant::now();
        let mut list = lock(&self.list);
        loop {
            let at = list.iter().position(|pending| pending.config.name() == Some(name));
            let Some(at) = at else { return Some(false) };
            if !list[at].is_being_tried {
                list.remove(at);
                self.changed.notify_all();
                return Some(true);
            }
            let left = timeout.saturating_sub(since.elapsed());
            if left.is_zero() {
                return None;
            }
            list = self.changed.wait_timeout(list, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Removes all devices. Those that are being tried cannot be served any more.
    pub(crate) fn clear(&self) {
        lock(&self.list).clear();
        self.changed.notify_all();
    }

    /// Waits until the device with this number is due. Returns its configuration, or `None` if it has left
    /// the list. The caller tries it, and reports the result to [`Unavailable::tried`].
    pub(crate) fn wait_until_due(&self, id: u64) -> Option<DeviceConfig> {
        let since = Instant::now();
        let mut list = lock(&self.list);
        loop {
            let left = RETRY_EVERY.saturating_sub(since.elapsed());
            let pending = list.iter_mut().find(|pending| pending.id == id)?;
            if left.is_zero() {
                pending.is_being_tried = true;
                return Some(pending.config.clone());
            }
            list = self.changed.wait_timeout(list, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that the device was not tried now.
    pub(crate) fn not_tried(&self, id: u64) {
        if let Some(pending) = lock(&self.list).iter_mut().find(|pending| pending.id == id) {
            pending.is_being_tried = false;
        }
        self.changed.notify_all();
    }

    /// Records the result of a try. A device without an error leaves the list.
    pub(crate) fn tried(&self, id: u64, error: Option<String>) {
        let mut list = lock(&self.list);
        if let Some(at) = list.iter().position(|pending| pending.id == id) {
            match error {
                Some(error) => (list[at].error, list[at].is_being_tried) = (error, false),
                None => drop(list.remove(at)),
            }
        }
        self.changed.notify_all();
    }
}
