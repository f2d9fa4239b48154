//! Applies a new configuration to the devices and the pool of a daemon.

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::config::{DeviceConfig, PoolConfig};
use super::device_status::{DeviceState, DeviceStatus};
use super::error::{AddError, RemoveError};
use super::registry::{Registry, Removal, RemoveMode};
use super::sentence::sentence;

/// The changes of a reload, by the names of the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Reloaded {
    /// Devices that are served now.
    pub added: Vec<String>,
    /// Devices that are no longer served.
    pub removed: Vec<String>,
    /// Devices that are no longer in the file, and are removed when their front-end has left.
    pub leaving: Vec<String>,
    /// Devices without a front-end that are served with their new configuration.
    pub replaced: Vec<String>,
    /// Changes that are not used before a restart of the daemon or of the device.
    pub needs_restart: Vec<RestartNeeded>,
    /// Changes that failed, with the reason.
    pub failed: Vec<Failed>,
}

impl Reloaded {
    /// Notes a device that is served with its new configuration.
    fn served(&mut self, name: String, is_replaced: bool) {
        let served = if is_replaced { &mut self.replaced } else { &mut self.added };
        served.push(name);
    }

    fn fail(&mut self, name: &str, error: &(dyn Error + 'static)) {
        self.failed.push(Failed { device: name.into(), error: sentence(error) });
    }
}

/// Changed keys that are not used before a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RestartNeeded {
    /// The device, which is in use. `None` for the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The keys.
    pub keys: Vec<String>,
}

/// A device that could not be added, removed or replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failed {
    /// The device.
    pub device: String,
    /// The reason, as one sentence.
    pub error: String,
}

/// The treatment of devices that are no longer in the file while a front-end is connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsedDevices {
    /// They are removed when their front-end has left.
    #[default]
    Keep,
    /// They are drained and removed.
    Remove,
}

/// Applies a configuration file that was read again, and is valid as a whole. `earlier` has the devices of
/// the file before. Devices that were added otherwise stay.
///
/// A device that is no longer in the file is removed. If a front-end is connected, `used` decides. A changed
/// device is replaced if no front-end is connected. Otherwise it stays as it is, and is listed. Each device
/// is changed for itself: an error of one does not keep the others from their changes. Devices can exchange
/// their sockets.
pub fn reload(
    registry: &Arc<Registry>,
    earlier: &[DeviceConfig],
    pool: &PoolConfig,
    devices: &[DeviceConfig],
    used: UsedDevices,
) -> Reloaded {
    let mut reloaded = Reloaded::default();
    reload_pool(registry, pool, &mut reloaded);
    // Devices that an earlier reload has found gone may still be in use.
    let leaving = registry.list().into_iter().filter(|status| status.is_leaving).map(|status| status.config);
    let mut gone: Vec<DeviceConfig> = earlier.iter().cloned().chain(leaving).collect();
    gone.retain(|config| !devices.iter().any(|device| device.name() == config.name()));
    let mut seen = BTreeSet::new();
    gone.retain(|config| seen.insert(config.name().map(str::to_owned)));
    // Sockets and reserves become free before other devices need them.
    for config in &gone {
        remove(registry, config.name().unwrap_or_default(), used, &mut reloaded);
    }
    let postponed: Vec<_> =
        devices.iter().filter_map(|config| reload_device(registry, config, &mut reloaded)).collect();
    for device in postponed {
        device.add(registry, &mut reloaded);
    }
    registry.devices().for_each(super::DeviceRef::refresh);
    reloaded
}

/// Removes a device that is no longer in the file.
fn remove(registry: &Registry, name: &str, used: UsedDevices, reloaded: &mut Reloaded) {
    let removal = match used {
        UsedDevices::Keep => registry.remove_when_free(name, super::REMOVE_TIMEOUT),
        UsedDevices::Remove => {
            let removed = registry.remove(name, RemoveMode::Drain, super::REMOVE_TIMEOUT);
            removed.map(|removed| if removed { Removal::Removed } else { Removal::Absent })
        }
    };
    match removal {
        Ok(Removal::Removed) => reloaded.removed.push(name.into()),
        Ok(Removal::Leaving) => reloaded.leaving.push(name.into()),
        Ok(Removal::Absent) => {}
        Err(error) => reloaded.fail(name, &error),
    }
}

fn reload_pool(registry: &Registry, pool: &PoolConfig, reloaded: &mut Reloaded) {
    let present = registry.pool_config();
    if present.with_polling(&pool.polling) != present
        && let Err(mistake) = registry.set_polling(&pool.polling)
    {
        reloaded.failed.push(Failed { device: String::new(), error: mistake.to_string() });
    }
    let keys = changed_keys(&present.with_polling(&pool.polling), pool);
    if !keys.is_empty() {
        reloaded.needs_restart.push(RestartNeeded { device: None, keys });
    }
}

/// A device whose socket another one had when it was to be added. The other one may change too.
struct Postponed {
    config: DeviceConfig,
    /// The configuration with which it was served before.
    earlier: Option<DeviceConfig>,
}

impl Postponed {
    /// Adds the device. If its socket is still in use, the device goes on as before.
    fn add(self, registry: &Arc<Registry>, reloaded: &mut Reloaded) {
        let Self { config, earlier } = self;
        let name = config.name().unwrap_or_default().to_owned();
        let error = match registry.add_when_available(config.clone()) {
            Ok(_) => return reloaded.served(name, earlier.is_some()),
            Err(error) => error,
        };
        if let Some(earlier) = earlier
            && !matches!(error, AddError::Make(_))
            && registry.add(earlier).is_err()
        {
            // Another device has its earlier socket. It is served as soon as it can be.
            registry.add_unavailable(config, &error);
        }
        reloaded.fail(&name, &error);
    }
}

/// Changes one device. Returns it if its socket is in use.
fn reload_device(
    registry: &Arc<Registry>,
    config: &DeviceConfig,
    reloaded: &mut Reloaded,
) -> Option<Postponed> {
    let name = config.name().unwrap_or_default().to_owned();
    let present = match present(registry, &name) {
        Ok(present) => present,
        Err(error) => {
            reloaded.fail(&name, &error);
            return None;
        }
    };
    let earlier = match present {
        None => None,
        Some(present) if present.state == DeviceState::Ended => None,
        Some(present) if with_changeable(&present.config, config) == *config => {
            set_size(registry, config);
            set_capture(registry, &present.config, config, reloaded);
            if let Err(error) = registry.set(&name, |_| Ok(config.clone()))
                && with_settable(&present.config, config) != present.config
            {
                reloaded.fail(&name, &error);
            }
            return None;
        }
        Some(_) if let Some(error) = registry.keeps_disk(&name) => {
            reloaded.fail(&name, &error);
            return None;
        }
        Some(present) => match registry.remove(&name, RemoveMode::Refuse, super::REMOVE_TIMEOUT) {
            Ok(_) => Some(present.config),
            Err(_) => {
                // Limits, discards and the weight need no restart, unless the group changes too.
                let limited = registry.set(&name, |_| Ok(config.clone()));
                let keys = changed_keys(&limited.unwrap_or(present.config), config);
                reloaded.needs_restart.push(RestartNeeded { device: Some(name), keys });
                return None;
            }
        },
    };
    match registry.add_when_available(config.clone()) {
        Ok(_) => reloaded.served(name, earlier.is_some()),
        Err(error @ AddError::Make(_)) => reloaded.fail(&name, &error),
        Err(_) => return Some(Postponed { config: config.clone(), earlier }),
    }
    None
}

/// Returns the device with this name, which stays from now on. Waits for the end of a removal that has begun.
fn present(registry: &Registry, name: &str) -> Result<Option<DeviceStatus>, RemoveError> {
    let present = registry.list().into_iter().find(|status| status.config.name() == Some(name));
    let is_going = |status: &DeviceStatus| status.is_leaving || status.state == DeviceState::Removing;
    if present.as_ref().is_some_and(is_going) && !registry.keep(name, super::REMOVE_TIMEOUT)? {
        return Ok(None);
    }
    Ok(present)
}

/// Sets the size to which the medium grows.
fn set_size(registry: &Registry, config: &DeviceConfig) {
    let size = config.kind.clone().size_min().and_then(|size| *size);
    let device = registry.devices().find(|device| device.config().name() == config.name());
    if let (Some(bytes), Some(device)) = (size, device) {
        device.device().set_size_min(bytes);
    }
}

/// Makes the capture of a device that of `config`, if it is another one at `present`.
fn set_capture(registry: &Registry, present: &DeviceConfig, config: &DeviceConfig, reloaded: &mut Reloaded) {
    let (mut present, mut wanted) = (present.kind.clone(), config.kind.clone());
    let (present, wanted) = (present.capture(), wanted.capture());
    if let (true, Some(wanted)) = (present != wanted, wanted) {
        let name = config.name().unwrap_or_default();
        if let Err(error) = registry.set_capture(name, wanted.capture.take(), wanted.capture_length) {
            reloaded.fail(name, &error);
        }
    }
}

/// Returns the configuration with the values of `wanted` that [`Registry::set`] changes.
fn with_settable(config: &DeviceConfig, wanted: &DeviceConfig) -> DeviceConfig {
    let mut config = DeviceConfig { share: wanted.share.clone(), ..config.clone() };
    config.kind.take_settable(&*wanted.kind);
    config
}

/// Returns the configuration with all values of `wanted` that change while the device is in use. The group of
/// limits stays for as long as the device is open.
fn with_changeable(config: &DeviceConfig, wanted: &DeviceConfig) -> DeviceConfig {
    let kind = config.kind.with_changeable(&wanted.kind);
    DeviceConfig { kind, share: wanted.share.clone(), ..config.clone() }
}

/// Returns the keys whose values differ.
fn changed_keys(one: &impl Serialize, other: &impl Serialize) -> Vec<String> {
    // Only a path that is not UTF-8 has no JSON, and a file has none.
    let values = |config: Result<Value, _>| match config {
        Ok(Value::Object(values)) => values,
        _ => Default::default(),
    };
    let (one, other) = (values(serde_json::to_value(one)), values(serde_json::to_value(other)));
    let mut keys: Vec<String> = one.keys().chain(other.keys()).cloned().collect();
    keys.retain(|key| one.get(key) != other.get(key));
    keys.sort();
    keys.dedup();
    keys
}
