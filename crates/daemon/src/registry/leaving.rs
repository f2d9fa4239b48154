//! Removals that wait for the front-end to leave.

use std::time::Duration;

use super::{Registry, RemoveMode};
use crate::error::RemoveError;
use crate::served_device::ServedDevice;
use crate::table::Entry;

/// The result of [`Registry::remove_when_free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The name and the socket of the device are free.
    Removed,
    /// There was no such device.
    Absent,
    /// A front-end is connected. The device is removed when it has left.
    Leaving,
}

impl Registry {
    /// Removes a device, now if no front-end is connected, and otherwise when its front-end has left. Until
    /// then, [`Registry::keep`] cancels the removal. Waits up to `timeout` for a device that is removed now.
    ///
    /// # Errors
    /// The same as those of [`Registry::remove`], but not for a front-end that is connected.
    pub fn remove_when_free(&self, name: &str, timeout: Duration) -> Result<Removal, RemoveError> {
        // Only a caller that means this device gives up a disk that lacks writes.
        let kept =
            self.state.devices.lock().entries.iter().find(|entry| entry.name == name).map(Entry::keeps_disk);
        if let Some(Some(error)) = kept {
            return Err(error);
        }
        match self.remove_by(name, ServedDevice::stop_when_free, timeout, None) {
            Ok(true) => Ok(Removal::Removed),
            Ok(false) => Ok(Removal::Absent),
            Err(RemoveError::InUse { .. }) => Ok(Removal::Leaving),
            Err(error) => Err(error),
        }
    }

    /// Cancels a removal that waits for the front-end to leave. A removal that cannot be cancelled any more
    /// is completed, within `timeout`. Returns whether the device stays.
    ///
    /// # Errors
    /// The same as those of [`Registry::remove`].
    pub fn keep(&self, name: &str, timeout: Duration) -> Result<bool, RemoveError> {
        let table = self.state.devices.lock();
        let entry = table.entries.iter().find(|entry| entry.name == name && !entry.is_removing);
        let is_kept = entry.and_then(|entry| entry.device()).is_some_and(|device| device.keep());
        drop(table);
        if is_kept { Ok(true) } else { self.remove(name, RemoveMode::Drain, timeout).map(|_| false) }
    }
}
