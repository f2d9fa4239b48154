//! The end of a process that keeps all devices for one that does not exist yet.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kickless_handover::{FromOld, NewEnd, Record, Shelf};
use tracing::warn;

use super::{PAUSE_WAIT, PREPARE_WAIT};

/// The longest time that the old process has to end.
const END_WAIT: Duration = Duration::from_secs(10);

/// Takes all devices over from the process at the other end of `channel`, and puts them into a store: `keep`
/// gets each pair of descriptors, and `finish` returns when the store has all. Waits until the other process
/// has ended.
///
/// Reads nothing of what guests and front-ends have sent. A device that needs too much room is left out: its
/// connection closes when this process ends.
///
/// # Errors
/// The other process goes on, and knows the reason. The caller takes out of the store what it has kept.
pub fn shelve(
    channel: OwnedFd,
    mut keep: impl FnMut([BorrowedFd<'_>; 2]) -> Result<(), String>,
    finish: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let mut end = NewEnd::new(channel);
    match receive(&mut end, &mut keep).and_then(|()| finish()) {
        Ok(()) => {
            let taken = end.take(Instant::now() + PAUSE_WAIT).map_err(|error| error.to_string())?;
            taken.release();
            taken.wait_for_end(Instant::now() + END_WAIT);
            Ok(())
        }
        Err(why) => {
            end.refuse(&why);
            Err(why)
        }
    }
}

/// Keeps all that comes.
fn receive(
    end: &mut NewEnd,
    keep: &mut impl FnMut([BorrowedFd<'_>; 2]) -> Result<(), String>,
) -> Result<(), String> {
    let mut devices = BTreeMap::<u32, Record>::new();
    loop {
        // In the pause, disks are written back.
        match end.receive(Instant::now() + PREPARE_WAIT).map_err(|error| error.to_string())? {
            FromOld::Plan(plan) => {
                keep(Shelf::of_plan(plan).map_err(|error| error.to_string())?.ends())?;
            }
            FromOld::Device { number, record } => {
                devices.insert(number, record);
            }
            FromOld::Gone { number } => drop(devices.remove(&number)),
            FromOld::Final { number, record } => {
                let device = devices.remove(&number).ok_or("a device has no record")?;
                match Shelf::of_device(number, device, record) {
                    Ok(shelf) => keep(shelf.ends())?,
                    Err(error) => warn!(number, %error, "a device does not fit into the store"),
                }
            }
            FromOld::Last => return Ok(()),
        }
        end.confirm(Instant::now() + PAUSE_WAIT).map_err(|error| error.to_string())?;
    }
}
