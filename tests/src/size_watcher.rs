//! A connection that sees a disk grow.

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use kickless_driver::{Disk, Options};

/// The time within which the driver must see a new size.
const LIMIT: Duration = Duration::from_secs(30);

/// Receives the changes of a disk's configuration space.
pub struct SizeWatcher {
    changes: Receiver<()>,
}

/// Connects to the back-end at `socket`. Returns the disk, and a watcher of its size.
///
/// # Errors
/// The connection fails.
pub fn connect(socket: &Path) -> Result<(Disk, SizeWatcher)> {
    let disk = Disk::connect(Options { connect_timeout: LIMIT, ..Options::new(socket) })?;
    let (news, changes) = channel();
    disk.on_config_change(move || {
        let _ = news.send(());
    })?;
    Ok((disk, SizeWatcher { changes }))
}

impl SizeWatcher {
    /// Waits until the driver has this size.
    ///
    /// # Errors
    /// The size stays another one, or the connection is lost.
    pub fn wait_for(&self, disk: &Disk, bytes: u64) -> Result<()> {
        while disk.size()? != bytes {
            self.changes.recv_timeout(LIMIT).with_context(|| format!("the size stays {:?}", disk.size()))?;
        }
        Ok(())
    }
}
