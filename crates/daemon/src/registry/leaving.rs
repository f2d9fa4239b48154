//! Removals that wait for the front-end to leave.

use std::time::Duration;

use super::{Registry, RemoveMode};
use crate::error::RemoveError;
use crate::served_device::ServedDevice;

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
        if let Some(error) = self.keeps_disk(name) {
            return Err(error);
        }
        match self.remove_by(name, ServedDevice::stop_when_free, timeout, None) {
            Ok(true) => Ok(Removal::Removed),
            Ok(false) => Ok(Removal::Absent),
            Err(RemoveError::InUse { .. }) => Ok(Removal::Leaving),
            Err(error) => Err(error),
        }
    }

    /// Returns the error for a caller that does not mean this device in particular, if it keeps its disk
    /// because writes did not reach it.
    pub(crate) fn keeps_disk(&self, name: &str) -> Option<RemoveError> {
        let table = self.state.devices.lock();
        let entry = table.entries.iter().find(|entry| entry.name == name)?;
        entry.keeps_disk().or_else(|| {
            let error = "some writes did not reach the disk".to_owned();
            let is_kept = entry.device()?.keeps_disk();
            is_kept.then(|| RemoveError::KeepsDisk { name: name.to_owned(), error })
        })
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
