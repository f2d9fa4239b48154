//! Holds the state that the hostile back-end's thread and the test share.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use kickless_vhost_user::Wait;

use crate::driver::Eventfd;
use crate::hostile_backend::faults::{DISK_LEN, Rules};

/// State that the back-end's thread and the test share.
pub(crate) struct BackendState {
    rules: Mutex<Rules>,
    disk: Mutex<Vec<u8>>,
    /// The channel for the back-end's own requests, after the driver has sent it.
    channel: Mutex<Option<OwnedFd>>,
    /// Mistakes of the driver that the back-end has noticed.
    faults: Mutex<Vec<String>>,
    /// The driver's descriptors.
    received_fds: Mutex<Vec<OwnedFd>>,
    pub(crate) acked: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) requests: AtomicU64,
    /// Signals the end of the back-end.
    pub(crate) stop: Eventfd,
    /// Signals the end of the connection.
    pub(crate) leave: Eventfd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BackendState {
    pub(crate) fn new(rules: Rules) -> Result<BackendState> {
        Ok(BackendState {
            rules: Mutex::new(rules),
            disk: Mutex::new(vec![0; DISK_LEN]),
            channel: Mutex::new(None),
            faults: Mutex::new(Vec::new()),
            received_fds: Mutex::new(Vec::new()),
            acked: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            stop: Eventfd::new()?,
            leave: Eventfd::new()?,
        })
    }

    pub(crate) fn rules(&self) -> MutexGuard<'_, Rules> {
        lock(&self.rules)
    }

    pub(crate) fn disk(&self) -> MutexGuard<'_, Vec<u8>> {
        lock(&self.disk)
    }

    pub(crate) fn channel(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        lock(&self.channel)
    }

    pub(crate) fn faults(&self) -> MutexGuard<'_, Vec<String>> {
        lock(&self.faults)
    }

    pub(crate) fn received_fds(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        lock(&self.received_fds)
    }

    /// Keeps a descriptor of the driver.
    pub(crate) fn keep_fd(&self, fd: impl AsFd) -> Result<()> {
        self.received_fds().push(fd.as_fd().try_clone_to_owned()?);
        Ok(())
    }

    /// Returns a wait that ends when the test stops the back-end.
    pub(crate) fn until_stopped(&self) -> Wait<'_> {
        Wait::until(self.stop.as_fd())
    }
}
