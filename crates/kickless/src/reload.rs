//! Reads the configuration file again, after SIGHUP or a call.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kickless_daemon::{
    BeingUpgraded, DeviceConfig, DeviceRef, Registry, Reloaded, UsedDevices, reload, sentence,
};
use kickless_sync::lock;
use tracing::{info, warn};

use crate::config;
use crate::notify::ServiceState;
use crate::service::Service;

/// The time that a call waits for the file and the changes. A file system that answers later answers never.
const ANSWER_WAIT: Duration = Duration::from_secs(300);
/// The interval at which a reload looks whether an upgrade has ended.
const UPGRADE_CHECK_EVERY: Duration = Duration::from_millis(100);

/// Reads the file and applies it on a thread of its own, because a file system may never answer. Requests are
/// carried out one after the other.
#[derive(Clone)]
pub(crate) struct Reload {
    requests: Sender<ReloadRequest>,
    /// The devices of the file, as it was read last.
    devices: Arc<Mutex<Vec<DeviceConfig>>>,
}

struct ReloadRequest {
    used: UsedDevices,
    /// The receiver of the result, if a call waits for it.
    reply: Option<SyncSender<Result<Reloaded, String>>>,
}

impl Reload {
    /// Starts the thread, if the service has a configuration file. `devices` are those of the file as they
    /// were applied last.
    ///
    /// # Errors
    /// The process cannot start a thread.
    pub(crate) fn start(
        service: &Service,
        registry: &Arc<Registry>,
        devices: Vec<DeviceConfig>,
        state: &Arc<ServiceState>,
    ) -> Result<Option<Self>> {
        let Some(path) = service.file.clone() else { return Ok(None) };
        let (requests, requested) = channel();
        // The thread does not keep the devices at the end of the program.
        let (registry, devices) = (Arc::downgrade(registry), Arc::new(Mutex::new(devices)));
        let (applied, state) = (devices.clone(), state.clone());
        let run = move || serve(&requested, &path, &registry, &applied, &state);
        let thread = thread::Builder::new().name("reload".into()).spawn(run);
        thread.context("the configuration file cannot be read again at a signal")?;
        Ok(Some(Self { requests, devices }))
    }

    /// Returns the devices of the file, as it was read last.
    pub(crate) fn devices(&self) -> Vec<DeviceConfig> {
        lock(&self.devices).clone()
    }

    /// Requests that the file is read and applied. Does not wait for it.
    pub(crate) fn request(&self) {
        // The thread ends with the program.
        let _ = self.requests.send(ReloadRequest { used: UsedDevices::Keep, reply: None });
    }

    /// Reads the file and applies it. Waits for the result.
    ///
    /// # Errors
    /// The file is wrong, and nothing of it is used. The error is one sentence.
    pub(crate) fn call(&self, used: UsedDevices) -> Result<Reloaded, String> {
        let (reply, result) = sync_channel(1);
        let _ = self.requests.send(ReloadRequest { used, reply: Some(reply) });
        let result = result.recv_timeout(ANSWER_WAIT);
        result.unwrap_or_else(|_| Err("the configuration file is still being read or applied".into()))
    }
}

/// Carries out requests until the program ends.
fn serve(
    requested: &Receiver<ReloadRequest>,
    path: &Path,
    registry: &Weak<Registry>,
    devices: &Mutex<Vec<DeviceConfig>>,
    state: &ServiceState,
) {
    while let Ok(ReloadRequest { used, reply }) = requested.recv() {
        state.reloading();
        let earlier = lock(devices).clone();
        let read = read(path, &earlier).map_err(|error| sentence(&*error));
        let Some(registry) = registry.upgrade() else { return };
        let change = loop {
            match registry.begin_change() {
                Ok(change) => break change,
                // If this process goes on, the file is read then. Otherwise the next process reads it.
                Err(BeingUpgraded) => thread::sleep(UPGRADE_CHECK_EVERY),
            }
        };
        let result = match read {
            Ok(service) => {
                let reloaded = reload(&registry, &earlier, &service.pool, &service.devices, used);
                *lock(devices) = service.devices;
                Ok(reloaded)
            }
            Err(error) => {
                // The sizes of disks do not depend on the file.
                registry.devices().for_each(DeviceRef::refresh);
                Err(error)
            }
        };
        let is_empty = registry.list().is_empty();
        drop(change);
        drop(registry);
        state.ready();
        log(&result);
        if is_empty && result.is_ok() {
            warn!("no device is left: correct the configuration file, and have it read again");
        }
        if let Some(reply) = reply {
            // The call may have given up.
            let _ = reply.send(result);
        }
    }
}

/// Reads the file. `earlier` has the devices of the file before.
///
/// # Errors
/// The file is wrong, or has lost all of its devices, as a file that is being written or was cut short. The
/// error is one sentence.
fn read(path: &Path, earlier: &[DeviceConfig]) -> Result<Service> {
    let service = config::read(path)?;
    if service.devices.is_empty() && !earlier.is_empty() {
        bail!(
            "{}: there is no device in it any more, so it may be cut short: remove the last devices by calls",
            path.display()
        );
    }
    Ok(service)
}

fn log(result: &Result<Reloaded, String>) {
    let reloaded = match result {
        Ok(reloaded) => reloaded,
        Err(error) => return warn!(error, "the configuration file is wrong, and nothing of it is used"),
    };
    let Reloaded { added, removed, leaving, replaced, needs_restart, failed } = reloaded;
    let [added, removed, replaced] = [added, removed, replaced].map(|names| names.join(","));
    info!(added, removed, replaced, "the configuration file was read again");
    for name in leaving {
        warn!(
            name,
            "the device is no longer in the configuration file: it is removed when its front-end has left"
        );
    }
    for restart in needs_restart {
        let (device, keys) = (restart.device.as_deref().unwrap_or("[pool]"), restart.keys.join(", "));
        info!(name = device, keys, "these changes to the configuration file need a restart");
    }
    for failure in failed {
        warn!(name = failure.device, error = failure.error, "a change to the configuration file failed");
    }
}
