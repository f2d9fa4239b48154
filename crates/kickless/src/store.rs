//! The descriptor store of systemd: the devices between two processes of a unit, when it is restarted.
//!
//! `kickless store` is a command of the unit (`ExecStop=`). It takes the devices over from the daemon, which
//! ends, and serves none: it puts their records and descriptors into the store. Both ends of each pair are
//! there, because systemd drops a socket whose other end is closed. The next process gets them with its
//! start, takes all records out, and serves. A record can be taken once. If the unit is not started again,
//! systemd empties the store, which closes all.

use std::os::fd::BorrowedFd;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use kickless_daemon::{Shelved, shelve};

use crate::inherited::{self, Noted, Passed};
use crate::log;
use crate::notify::Notify;
use crate::serve::raise_descriptor_limit;
use crate::upgrade::Upgrade;

/// The name of all descriptors in the store.
pub(crate) const NAME: &str = "kickless-device";
/// The longest time that requests in flight have to complete.
const DRAIN: &str = "10s";

/// Puts the devices of the daemon with this control socket into the store. The daemon ends.
///
/// # Errors
/// The daemon goes on, and the store is empty. The error is one sentence.
pub(crate) fn put(control: &Path) -> Result<()> {
    let manager =
        Notify::connect()?.context("NOTIFY_SOCKET: only a command of a unit of systemd has a store")?;
    // All descriptors of all devices are open at a time.
    raise_descriptor_limit();
    let connected = Upgrade::to(control, DRAIN).and_then(|daemon| daemon.begin(true));
    let channel = connected.with_context(|| format!("--control={}", control.display()))?;
    let message = format!("FDSTORE=1\nFDNAME={NAME}");
    let keep =
        |ends: [BorrowedFd<'_>; 2]| manager.tell(&message, &ends).map_err(|error| format!("{error:#}"));
    let finish = || manager.barrier().map_err(|error| format!("{error:#}"));
    shelve(channel, keep, finish).map_err(|why| {
        let _ = remove(&manager);
        anyhow!("the running daemon goes on: {why}")
    })
}

/// Takes the devices out of the store, if the service manager has started this process with it.
pub(crate) fn take(noted: &mut Noted, passed: &Passed) -> Option<Shelved> {
    let fds = inherited::of_manager(noted, passed, NAME);
    if fds.is_empty() {
        return None;
    }
    let mut shelved = Shelved::default();
    let mut problems = fds.into_iter().filter_map(|fd| shelved.take(fd).err());
    if let Some(error) = problems.next() {
        log::print_sentence(&format!("a device in the store cannot be read: {error}"));
    }
    drop(problems);
    // From here on, the records are in this process only.
    let removed = Notify::connect().and_then(|manager| manager.as_ref().map_or(Ok(()), remove));
    if let Err(error) = removed {
        log::print_sentence(&format!("the store may not be empty: {error:#}"));
    }
    Some(shelved)
}

/// Empties the store.
fn remove(manager: &Notify) -> Result<()> {
    manager.tell(&format!("FDSTOREREMOVE=1\nFDNAME={NAME}"), &[])?;
    manager.barrier()
}
