//! Executes calls on a daemon.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use kickless_daemon::{
    AddOutcome, DeviceConfig, DeviceState, DeviceStatus, FindError, Mistake, Notation, PollingConfig,
    Registry, Reloaded, SavedTable, UsedDevices, sentence, values,
};
use kickless_opener::{Descriptors, NoDescriptor, Peer};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::call::{Call, Capture, Drain, Remove, Resize};
use super::openrpc;
use super::rpc::RpcError;
use super::stats::{DeviceStats, Stats, WorkerStats};
use super::upgrade::{CHANNEL, Successor, Upgrade, check_channel, check_user};

/// Changes the filter of the log. The error is one sentence.
pub type SetLog = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// The functions of the program that a call needs.
pub struct Hooks {
    /// Requests the end of the daemon, as SIGTERM does. Does not wait.
    pub stop: Box<dyn Fn() + Send + Sync>,
    /// Reads the configuration file again, and applies it. The error is one sentence.
    pub reload: Box<dyn Fn(UsedDevices) -> Result<Reloaded, String> + Send + Sync>,
    /// Changes the lines that are logged.
    pub set_log: Box<SetLog>,
    /// The user of this process, as at its start.
    pub user: u32,
    /// Begins to hand the daemon over, and does not wait until that is done. Returns the answer to the call.
    pub upgrade: Box<dyn Fn(Successor) -> Result<Value, RpcError> + Send + Sync>,
}

/// The sandbox of a daemon, for `daemon.info`.
#[derive(Clone, Debug, Serialize)]
pub struct SandboxInfo {
    /// The choice of the operator.
    pub mode: String,
    /// The version of landlock, or 0.
    pub landlock: u32,
    /// The name of the list of system calls that are allowed, or `none`.
    pub profile: &'static str,
    /// The directories in which files may be.
    pub roots: Vec<String>,
}

/// A daemon as its control socket sees it.
pub struct Daemon {
    registry: Arc<Registry>,
    sandbox: SandboxInfo,
    hooks: Hooks,
    started: Instant,
}

/// The contents of a configuration file.
#[derive(Serialize)]
struct Saved {
    #[serde(skip_serializing_if = "SavedTable::is_empty")]
    pool: SavedTable,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device: Vec<SavedTable>,
}

impl Daemon {
    /// Makes the control of a daemon with this registry.
    pub fn new(registry: Arc<Registry>, sandbox: SandboxInfo, hooks: Hooks) -> Self {
        Self { registry, sandbox, hooks, started: Instant::now() }
    }

    /// Executes a call of `peer` that came with these descriptors, and returns its result.
    ///
    /// # Errors
    /// The call failed.
    pub fn execute(&self, call: Call, given: &Descriptors, peer: Peer) -> Result<Value, RpcError> {
        let change = call.changes_devices().then(|| self.registry.begin_change()).transpose();
        let _change = change.map_err(|error| RpcError::busy(error.to_string()))?;
        match call {
            Call::Discover => openrpc::document(),
            Call::DaemonInfo => Ok(self.info()),
            Call::DaemonSnapshot => self.snapshot(),
            Call::DaemonStop => {
                (self.hooks.stop)();
                Ok(json!({ "stopping": true }))
            }
            Call::DaemonReload(used) => shown(&(self.hooks.reload)(used).map_err(RpcError::failed)?),
            Call::DaemonUpgrade(wants) => self.upgrade(wants, given, peer),
            Call::DeviceList => Ok(self.registry.list().iter().map(summary).collect()),
            Call::DeviceGet(name) => details(&self.status(&name)?),
            Call::DeviceAdd(config) => self.add(*config, given),
            Call::DeviceRemove(Remove { name, mode, timeout }) => {
                let removed = self.registry.remove(&name, mode, timeout).map_err(failed)?;
                Ok(json!({ "removed": removed }))
            }
            Call::DeviceDrain(Drain { name, timeout }) => {
                self.registry.drain(&name, timeout).map_err(failed)?;
                Ok(json!({ "drained": true }))
            }
            Call::DeviceResume(name) => {
                let resumed = self.registry.resume(&name).map_err(failed)?;
                Ok(json!({ "resumed": resumed }))
            }
            Call::DeviceResize(Resize { name, size }) => {
                let size = self.registry.resize(&name, size).map_err(failed)?;
                Ok(json!({ "size": size }))
            }
            Call::DeviceCapture(Capture { name, capture, capture_length }) => {
                let is_on = capture.is_some();
                self.registry.set_capture(&name, capture, capture_length).map_err(failed)?;
                Ok(json!({ "capturing": is_on }))
            }
            Call::DeviceSet { name, keys } => self.set_keys(&name, keys),
            // The server sends what was subscribed to.
            Call::StatsSubscribe(_) | Call::EventsSubscribe => Ok(json!({ "subscribed": true })),
            Call::PoolGet => shown(&self.registry.pool_config()),
            Call::PoolSet(polling) => self.set_polling(&polling),
            Call::StatsGet(name) => self.stats(name.as_deref()),
            Call::LogSet(filter) => {
                (self.hooks.set_log)(&filter).map_err(RpcError::params)?;
                Ok(json!({ "filter": filter }))
            }
            Call::ConfigSave => self.saved(),
        }
    }

    /// Adds a device that uses all descriptors that came.
    fn add(&self, config: DeviceConfig, given: &Descriptors) -> Result<Value, RpcError> {
        let used = config.descriptors();
        if let Some((option, name)) = used.iter().find(|(_, name)| !given.names().any(|given| given == *name))
        {
            let error = NoDescriptor::Unknown { name: (*name).into() };
            return Err(RpcError::params(format!("{option}: {error}")));
        }
        if let Some(name) = given.names().find(|given| !used.iter().any(|(_, name)| name == given)) {
            return Err(RpcError::params(format!("fds: no parameter has fd:{name}")));
        }
        match self.registry.add_given(config, given) {
            Ok(outcome) => Ok(json!({ "added": outcome == AddOutcome::New })),
            Err(error) => Err(RpcError::failed(error.sentence())),
        }
    }

    /// Hands the daemon over to the process that calls.
    fn upgrade(&self, wants: Upgrade, given: &Descriptors, peer: Peer) -> Result<Value, RpcError> {
        check_user(peer.uid, self.hooks.user)?;
        let channel = given.duplicate(CHANNEL).map_err(|error| RpcError::params(format!("fds: {error}")))?;
        check_channel(&channel)?;
        (self.hooks.upgrade)(Successor { wants, channel })
    }

    fn info(&self) -> Value {
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime-seconds": self.started.elapsed().as_secs_f64(),
            "upgrades": self.registry.upgrades(),
            "devices": self.registry.list().len(),
            "devices-max": self.registry.devices_max(),
            "sandbox": self.sandbox,
        })
    }

    fn snapshot(&self) -> Result<Value, RpcError> {
        let devices: Result<Value, _> = self.registry.list().iter().map(details).collect();
        Ok(json!({
            "info": self.info(),
            "pool": shown(&self.registry.pool_config())?,
            "devices": devices?,
            "stats": self.stats(None)?,
        }))
    }

    fn status(&self, name: &str) -> Result<DeviceStatus, RpcError> {
        let found = self.registry.list().into_iter().find(|status| status.config.name() == Some(name));
        found.ok_or_else(|| self.no_device(name))
    }

    fn no_device(&self, name: &str) -> RpcError {
        let devices = self.registry.list();
        let names = devices.iter().filter_map(|status| status.config.name());
        failed(FindError::no_device(name, names))
    }

    /// Returns the devices.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Changes keys of a device. Returns its configuration.
    fn set_keys(&self, name: &str, changed: Map<String, Value>) -> Result<Value, RpcError> {
        let change = |config: &DeviceConfig| {
            let present = serde_json::to_value(config);
            let present = present.map_err(|error| Mistake::new("name", error.to_string()))?;
            let mut keys = present.as_object().cloned().unwrap_or_default();
            keys.extend(changed);
            keys.retain(|_, value| !value.is_null());
            let changed = self.registry.kinds().read(&values(&keys))?;
            changed.check(Notation::Keys)?;
            Ok(changed)
        };
        shown(&self.registry.set(name, change).map_err(failed)?)
    }

    fn set_polling(&self, polling: &PollingConfig) -> Result<Value, RpcError> {
        let changed = self.registry.set_polling(polling);
        shown(&changed.map_err(|mistake| RpcError::failed(mistake.to_string()))?)
    }

    /// Returns the counters of all devices, or of the one with this name.
    pub(crate) fn stats(&self, name: Option<&str>) -> Result<Value, RpcError> {
        let (time_ns, workers) = self.registry.worker_times();
        let is_wanted = |of: &DeviceConfig| name.is_none_or(|name| of.name() == Some(name));
        let listed = self.registry.list().into_iter().filter(|status| is_wanted(&status.config));
        let mut devices: Vec<DeviceStats> = listed.map(|status| DeviceStats::new(&status)).collect();
        if let Some(name) = name.filter(|_| devices.is_empty()) {
            return Err(self.no_device(name));
        }
        for device in self.registry.devices().filter(|device| is_wanted(device.config())) {
            let name = device.config().name().unwrap_or_default();
            // A device that was added since the list was made waits for the next call.
            if let Some(stats) = devices.iter_mut().find(|stats| stats.name == name) {
                stats.read(&device, time_ns);
            }
        }
        let workers = workers.iter().enumerate().map(|(worker, times)| WorkerStats::new(worker, times));
        shown(&Stats { time_ns, workers: workers.collect(), devices })
    }

    fn saved(&self) -> Result<Value, RpcError> {
        let devices = self.registry.list();
        let kept = || devices.iter().filter(|status| status.state != DeviceState::Removing);
        let inherited: Vec<&str> =
            kept().filter(|status| status.is_inherited).filter_map(|status| status.config.name()).collect();
        if !inherited.is_empty() {
            let names = inherited.join(", ");
            return Err(RpcError::failed(format!(
                "a file cannot describe devices that were added by descriptors: {names}"
            )));
        }
        let unwritable = |error: &dyn Display| RpcError::failed(format!("it cannot be written: {error}"));
        let device = self.registry.kinds().save(kept().map(|status| &status.config));
        let saved = self.registry.pool_config().save().and_then(|pool| Ok(Saved { pool, device: device? }));
        let toml = toml::to_string(&saved.map_err(|error| unwritable(&error))?);
        let toml = toml.map_err(|error| unwritable(&error))?;
        Ok(json!({ "toml": toml }))
    }
}

fn failed(error: impl std::error::Error + 'static) -> RpcError {
    RpcError::failed(sentence(&error))
}

/// Returns the name and the state of a device.
fn summary(status: &DeviceStatus) -> Value {
    let mut summary = json!({
        "name": status.config.name().unwrap_or_default(),
        "state": status.state.word(),
    });
    if let Some(error) = &status.error {
        summary["error"] = error.as_str().into();
    }
    if status.is_leaving {
        summary["leaving"] = true.into();
    }
    summary
}

/// Returns the name, the state and the configuration of a device.
fn details(status: &DeviceStatus) -> Result<Value, RpcError> {
    let mut details = summary(status);
    details["config"] = shown(&status.config)?;
    Ok(details)
}

fn shown(config: &impl Serialize) -> Result<Value, RpcError> {
    // Only a path that is not UTF-8 has no JSON.
    serde_json::to_value(config).map_err(|error| RpcError::failed(format!("it cannot be shown: {error}")))
}
