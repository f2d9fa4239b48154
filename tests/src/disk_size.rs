//! Connects to disks, and waits until the driver has seen them grow.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use kickless_driver::{Disk, Options};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The time within which the driver must see a new size.
const LIMIT: Duration = Duration::from_secs(30);

/// Connects to the back-end at `socket`.
///
/// # Errors
/// The connection fails.
pub fn connect(socket: &Path) -> Result<Disk> {
    Ok(Disk::connect(Options { connect_timeout: LIMIT, ..Options::new(socket) })?)
}

/// Sleeps until the driver has this size. Only a report of the back-end ends the sleep.
///
/// # Errors
/// The size stays another one, or the connection is lost.
pub fn wait_for_size(disk: &Disk, bytes: u64) -> Result<()> {
    let events = disk.queue(0).events()?;
    let limit = Timespec::try_from(LIMIT)?;
    loop {
        // `size` takes the report of a change that comes before it. A later one ends the sleep.
        let armed = events.arm();
        let size = disk.size()?;
        if size == bytes {
            return Ok(());
        }
        let woken = !armed || poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&limit))? > 0;
        ensure!(woken, "the size stays {size}");
    }
}
