//! Reads the configuration file again after SIGHUP.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

use anyhow::Result;
use kickless_daemon::{DeviceConfig, DeviceKind, PoolConfig, Registry, sentence};
use kickless_io::Waker;
use tracing::{info, warn};

use crate::config;
use crate::service::Service;

/// Reads the file on a thread of its own, because a file system may never answer. Takes the sizes of disks
/// from it. Other changes need a restart.
pub(crate) struct Reload {
    requests: SyncSender<()>,
    results: Receiver<Result<Service>>,
    /// Signalled for each result.
    done: Arc<Waker>,
    /// The configuration that the program started with.
    pool: PoolConfig,
    devices: Vec<DeviceConfig>,
}

impl Reload {
    /// Starts the thread, if the service has a configuration file.
    ///
    /// # Errors
    /// The process has no free descriptor, or cannot start a thread.
    pub(crate) fn start(service: &Service) -> io::Result<Option<Self>> {
        let Some(path) = service.file.clone() else { return Ok(None) };
        let done = Arc::new(Waker::new()?);
        // A request that waits is as good as many.
        let (requests, requested) = sync_channel(1);
        let (sender, results) = channel();
        let waker = done.clone();
        let read = move || {
            while let Ok(()) = requested.recv() {
                if sender.send(config::read(&path)).is_err() {
                    return;
                }
                waker.wake();
            }
        };
        thread::Builder::new().name("reload".into()).spawn(read)?;
        let (pool, devices) = (service.pool.clone(), service.devices.clone());
        Ok(Some(Self { requests, results, done, pool, devices }))
    }

    /// Requests that the file is read. Does not wait for it.
    pub(crate) fn request(&self) {
        // An error means that the thread has such a request already.
        let _ = self.requests.try_send(());
    }

    /// Applies what was read since the last call.
    pub(crate) fn take(&self, registry: &Registry) {
        self.done.clear();
        for read in self.results.try_iter() {
            match read {
                Ok(service) => self.apply(&service, registry),
                Err(error) => {
                    warn!(
                        error = sentence(&*error),
                        "the configuration file is wrong, and nothing of it is used"
                    )
                }
            }
        }
    }

    fn apply(&self, service: &Service, registry: &Registry) {
        for config in &service.devices {
            let DeviceKind::Blk(blk) = &config.kind else { continue };
            let running = registry.devices().find(|device| device.config().name() == config.name());
            if let (Some(bytes), Some(device)) = (blk.blk_size, running)
                && is_the_same(device.config(), config)
            {
                device.device().set_size_min(bytes);
                device.refresh();
            }
        }
        let is_known = |config: &DeviceConfig| self.devices.iter().any(|device| is_the_same(device, config));
        let is_changed = service.pool != self.pool
            || service.devices.len() != self.devices.len()
            || !service.devices.iter().all(is_known);
        if is_changed {
            info!(
                "of the changes to the configuration file, only those of blk-size are used before a restart"
            );
        }
    }
}

impl AsFd for Reload {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }
}

/// Returns whether two configurations differ in the size of the disk at most.
fn is_the_same(one: &DeviceConfig, other: &DeviceConfig) -> bool {
    without_size(one) == without_size(other)
}

fn without_size(config: &DeviceConfig) -> DeviceConfig {
    let mut config = config.clone();
    if let DeviceKind::Blk(blk) = &mut config.kind {
        blk.blk_size = None;
    }
    config
}
