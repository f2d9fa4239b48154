//! The calls: their names, their parameters, and what each of them asks for.
//!
//! Parsing is pure. [`Daemon`](crate::Daemon) executes a parsed call. `docs/openrpc.json` describes the calls
//! for clients, and a test compares it with [`METHODS`].

use std::path::PathBuf;
use std::time::Duration;

use kickless_daemon::{
    DeviceConfig, Key, Kinds, Mistake, Notation, PollingConfig, PoolConfig, REMOVE_TIMEOUT, RemoveMode,
    UsedDevices, Values, check, keys, parse_device_name, read as read_keys, unknown_key, values,
};
use kickless_values::{nearest, parse_duration, parse_size};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::rpc::RpcError;
use super::upgrade::Upgrade;

/// The parameters of a request by name.
type Params = Map<String, Value>;

/// The longest time that a call waits. An operator who waits longer calls again.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// The length up to which a sentence shows the name of a call that does not exist.
const NAME_CHARS_SHOWN: usize = 64;

/// The call that comes with the channel to the next process.
const UPGRADE: &str = "daemon.upgrade";

/// The shortest interval of `stats.subscribe`. Reading the counters of 500 devices takes some milliseconds.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// A parsed call.
#[derive(Debug)]
pub enum Call {
    /// `rpc.discover`: the OpenRPC document.
    Discover,
    /// `daemon.info`: version, process and uptime.
    DaemonInfo,
    /// `daemon.snapshot`: everything that the other calls show, at one time.
    DaemonSnapshot,
    /// `daemon.stop`: ends the daemon as SIGTERM does.
    DaemonStop,
    /// `daemon.reload`: reads the configuration file again, and applies it. Devices that are no longer in the
    /// file and in use are treated like this.
    DaemonReload(UsedDevices),
    /// `daemon.upgrade`: hands the daemon over to the process that calls.
    DaemonUpgrade(Upgrade),
    /// `device.list`: the devices and their states.
    DeviceList,
    /// `device.get`: one device.
    DeviceGet(String),
    /// `device.add`: opens and serves a device.
    DeviceAdd(Box<DeviceConfig>),
    /// `device.remove`: stops and closes a device.
    DeviceRemove(Remove),
    /// `device.drain`: keeps new requests in the rings, and waits for those in flight.
    DeviceDrain(Drain),
    /// `device.resume`: takes requests again.
    DeviceResume(String),
    /// `device.resize`: reads the size of a disk again, after growing it if a size is given.
    DeviceResize(Resize),
    /// `device.set`: changes the weight and the limits of a device, and whether it gives space back.
    DeviceSet {
        /// The device.
        name: String,
        /// The keys that change. `null` removes one.
        keys: Params,
    },
    /// `device.capture`: writes the frames of a card to a file, or ends that.
    DeviceCapture(Capture),
    /// `pool.get`: the configuration of the workers.
    PoolGet,
    /// `pool.set`: replaces the polling rule of the workers.
    PoolSet(PollingConfig),
    /// `stats.get`: the counters of all devices, or of one.
    StatsGet(Option<String>),
    /// `stats.subscribe`: sends the counters at this interval.
    StatsSubscribe(Duration),
    /// `events.subscribe`: sends events of devices.
    EventsSubscribe,
    /// `log.set`: changes the lines that are logged, by a filter as in `--log-level`.
    LogSet(String),
    /// `config.save`: a configuration file that starts the same daemon.
    ConfigSave,
}

impl Call {
    /// Returns whether the client gets notifications afterwards.
    pub(crate) fn subscribes(&self) -> bool {
        matches!(self, Self::StatsSubscribe(_) | Self::EventsSubscribe)
    }

    /// Returns whether the call changes what passes to another process at an upgrade.
    pub(crate) fn changes_devices(&self) -> bool {
        match self {
            Self::DeviceAdd(_)
            | Self::DeviceRemove(_)
            | Self::DeviceDrain(_)
            | Self::DeviceResume(_)
            | Self::DeviceResize(_)
            | Self::DeviceSet { .. }
            | Self::DeviceCapture(_)
            | Self::PoolSet(_)
            | Self::LogSet(_) => true,
            // The thread that reads the file says so itself.
            Self::DaemonReload(_) | Self::DaemonUpgrade(_) | Self::DaemonStop => false,
            Self::Discover
            | Self::DaemonInfo
            | Self::DaemonSnapshot
            | Self::DeviceList
            | Self::DeviceGet(_)
            | Self::PoolGet
            | Self::StatsGet(_)
            | Self::StatsSubscribe(_)
            | Self::EventsSubscribe
            | Self::ConfigSave => false,
        }
    }

    /// Returns the name of the device that the call is about, or an empty text.
    pub(crate) fn subject(&self) -> &str {
        match self {
            Self::DeviceGet(name)
            | Self::DeviceRemove(Remove { name, .. })
            | Self::DeviceDrain(Drain { name, .. })
            | Self::DeviceResume(name)
            | Self::DeviceResize(Resize { name, .. })
            | Self::DeviceSet { name, .. }
            | Self::DeviceCapture(Capture { name, .. }) => name,
            Self::DeviceAdd(config) => config.name().unwrap_or_default(),
            Self::StatsGet(name) => name.as_deref().unwrap_or_default(),
            _ => "",
        }
    }
}

/// The effect of a call on the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It only shows.
    Reads,
    /// It changes something. The read-only socket refuses it, and it is logged.
    Changes,
}

/// A call as the table of calls has it.
pub struct Method {
    /// Its name.
    pub name: &'static str,
    /// Its effect.
    pub effect: Effect,
    /// It waits for disks or requests, so it needs a thread of its own.
    pub(crate) waits: bool,
    parse: fn(Params, &Kinds) -> Result<Call, RpcError>,
}

const fn reads(name: &'static str, parse: fn(Params, &Kinds) -> Result<Call, RpcError>) -> Method {
    Method { name, effect: Effect::Reads, waits: false, parse }
}

const fn changes(name: &'static str, parse: fn(Params, &Kinds) -> Result<Call, RpcError>) -> Method {
    Method { name, effect: Effect::Changes, waits: false, parse }
}

const fn waits(method: Method) -> Method {
    Method { waits: true, ..method }
}

/// All calls.
pub const METHODS: &[Method] = &[
    reads("rpc.discover", |params, _| read::<Nothing>(params).map(|_| Call::Discover)),
    reads("daemon.info", |params, _| read::<Nothing>(params).map(|_| Call::DaemonInfo)),
    reads("daemon.snapshot", |params, _| read::<Nothing>(params).map(|_| Call::DaemonSnapshot)),
    changes("daemon.stop", |params, _| read::<Nothing>(params).map(|_| Call::DaemonStop)),
    waits(changes("daemon.reload", |params, _| {
        let used = |remove| if remove { UsedDevices::Remove } else { UsedDevices::Keep };
        read(params).map(|Reload { remove_used }| Call::DaemonReload(used(remove_used)))
    })),
    waits(changes(UPGRADE, |params, _| read(params).map(Call::DaemonUpgrade))),
    reads("device.list", |params, _| read::<Nothing>(params).map(|_| Call::DeviceList)),
    reads("device.get", |params, _| read(params).map(|OfDevice { name }| Call::DeviceGet(name))),
    waits(changes("device.add", |params, kinds| {
        device(&params, kinds).map(|config| Call::DeviceAdd(Box::new(config)))
    })),
    waits(changes("device.remove", |params, _| read(params).map(Call::DeviceRemove))),
    waits(changes("device.drain", |params, _| read(params).map(Call::DeviceDrain))),
    changes("device.resume", |params, _| read(params).map(|OfDevice { name }| Call::DeviceResume(name))),
    waits(changes("device.resize", |params, _| read(params).map(Call::DeviceResize))),
    changes("device.set", set),
    waits(changes("device.capture", capture)),
    reads("pool.get", |params, _| read::<Nothing>(params).map(|_| Call::PoolGet)),
    changes("pool.set", |params, _| polling(params).map(Call::PoolSet)),
    reads("stats.get", |params, _| read(params).map(|OfDevices { name }| Call::StatsGet(name))),
    reads("stats.subscribe", |params, _| {
        read(params).map(|Every { interval }| Call::StatsSubscribe(interval))
    }),
    reads("events.subscribe", |params, _| read::<Nothing>(params).map(|_| Call::EventsSubscribe)),
    changes("log.set", |params, _| read(params).map(|Filter { filter }| Call::LogSet(filter))),
    reads("config.save", |params, _| read::<Nothing>(params).map(|_| Call::ConfigSave)),
];

impl Method {
    /// Returns the call with this name.
    ///
    /// # Errors
    /// There is no such call.
    pub fn find(name: &str) -> Result<&'static Self, RpcError> {
        METHODS.iter().find(|method| method.name == name).ok_or_else(|| {
            let shown: String = name.chars().take(NAME_CHARS_SHOWN).collect();
            let cure = match nearest(&shown, METHODS.iter().map(|method| method.name)) {
                Some(nearest) => format!("did you mean {nearest}?"),
                None => "kickless ctl help and rpc.discover list the calls".into(),
            };
            RpcError::no_method(format!("there is no call {shown:?}: {cure}"))
        })
    }

    /// Returns whether descriptors can come with the call.
    pub fn takes_descriptors(&self) -> bool {
        matches!(self.name, "device.add" | UPGRADE)
    }

    /// Names the descriptors that came with the call. `come` has as many as `fds`, or the number of those
    /// that came.
    ///
    /// # Errors
    /// The call takes none, or fewer came.
    pub(crate) fn named<T>(
        &self,
        fds: Vec<String>,
        come: Result<Vec<T>, usize>,
    ) -> Result<Vec<(String, T)>, RpcError> {
        if !fds.is_empty() && !self.takes_descriptors() {
            return Err(RpcError::params(format!("fds: {} takes no descriptors", self.name)));
        }
        match come {
            Ok(descriptors) => Ok(fds.into_iter().zip(descriptors).collect()),
            Err(come) => Err(RpcError::params(format!("fds: {} are named, and {come} came", fds.len()))),
        }
    }

    /// Parses the parameters of this call to a daemon with these kinds of devices.
    ///
    /// # Errors
    /// They do not fit the call.
    pub fn parse(&self, params: Params, kinds: &Kinds) -> Result<Call, RpcError> {
        (self.parse)(params, kinds)
    }
}

/// The parameters of a call that are no keys of a configuration file.
trait Parameters: DeserializeOwned {
    /// Their names.
    const KEYS: &[&str];
}

/// The parameters of a call without any.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

impl Parameters for Nothing {
    const KEYS: &[&str] = &[];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Reload {
    #[serde(default, deserialize_with = "remove_used")]
    remove_used: bool,
}

impl Parameters for Reload {
    const KEYS: &[&str] = &["remove-used"];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfDevice {
    #[serde(deserialize_with = "name")]
    name: String,
}

impl Parameters for OfDevice {
    const KEYS: &[&str] = &["name"];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfDevices {
    #[serde(default, deserialize_with = "optional_name")]
    name: Option<String>,
}

impl Parameters for OfDevices {
    const KEYS: &[&str] = &["name"];
}

impl Parameters for Upgrade {
    const KEYS: &[&str] = &["formats", "version", "drain", "store"];
}

/// The parameters of `device.remove`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remove {
    /// The device.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// The treatment of a device that is in use.
    #[serde(default, deserialize_with = "mode")]
    pub mode: RemoveMode,
    /// The longest time to wait until the device is closed.
    #[serde(default = "remove_timeout", deserialize_with = "timeout")]
    pub timeout: Duration,
}

impl Parameters for Remove {
    const KEYS: &[&str] = &["name", "mode", "timeout"];
}

/// The parameters of `device.drain`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// The device.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// The longest time to wait until nothing is in flight.
    #[serde(default = "remove_timeout", deserialize_with = "timeout")]
    pub timeout: Duration,
}

impl Parameters for Drain {
    const KEYS: &[&str] = &["name", "timeout"];
}

/// The parameters of `device.resize`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// The device.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// The size in bytes that the disk has at least afterwards.
    #[serde(default, deserialize_with = "size")]
    pub size: Option<u64>,
}

impl Parameters for Resize {
    const KEYS: &[&str] = &["name", "size"];
}

/// The parameters of `device.capture`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Capture {
    /// The card.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// The file. `None` ends the capture.
    #[serde(default)]
    pub capture: Option<PathBuf>,
    /// The most bytes of a frame.
    #[serde(default)]
    pub capture_length: Option<u32>,
}

impl Parameters for Capture {
    const KEYS: &[&str] = &["name", "capture", "capture-length"];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Every {
    #[serde(default = "default_interval", deserialize_with = "interval")]
    interval: Duration,
}

impl Parameters for Every {
    const KEYS: &[&str] = &["interval"];
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Filter {
    #[serde(deserialize_with = "filter")]
    filter: String,
}

impl Parameters for Filter {
    const KEYS: &[&str] = &["filter"];
}

/// Reads a parameter that is text. Its error is a sentence with the key and an example.
fn text<'de, D: Deserializer<'de>, T>(
    from: D,
    (key, example): (&str, &str),
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    let parsed = match Value::deserialize(from)? {
        Value::String(text) => parse(&text),
        _ => Err(format!("it must be text, in quotes, such as {example:?}")),
    };
    parsed.map_err(|why| D::Error::custom(format!("{key}: {why}")))
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(from, ("name", "web"), parse_device_name)
}

fn optional_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    name(from).map(Some)
}

fn filter<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(from, ("filter", "info"), |text| Ok(text.to_owned()))
}

fn remove_used<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    let wrong = || D::Error::custom("remove-used: it must be true or false, without quotes");
    Value::deserialize(from)?.as_bool().ok_or_else(wrong)
}

fn mode<'de, D: Deserializer<'de>>(from: D) -> Result<RemoveMode, D::Error> {
    let wrong = |_| D::Error::custom("mode: it must be refuse, drain or force");
    RemoveMode::deserialize(Value::deserialize(from)?).map_err(wrong)
}

fn remove_timeout() -> Duration {
    REMOVE_TIMEOUT
}

fn timeout<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    text(from, ("timeout", "10s"), |text| match parse_duration(text)? {
        timeout if timeout <= TIMEOUT_MAX => Ok(timeout),
        _ => Err("it must be 1h at most".into()),
    })
}

fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    text(from, ("size", "64G"), parse_size).map(Some)
}

fn default_interval() -> Duration {
    Duration::from_secs(1)
}

fn interval<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    text(from, ("interval", "1s"), |text| match parse_duration(text)? {
        interval if (INTERVAL_MIN..=TIMEOUT_MAX).contains(&interval) => Ok(interval),
        _ => Err("it must be from 100ms to 1h".into()),
    })
}

fn read<T: Parameters>(params: Params) -> Result<T, RpcError> {
    if let Some(key) = params.keys().find(|key| !T::KEYS.contains(&key.as_str())) {
        return Err(RpcError::params(match T::KEYS {
            [] => format!("{key:?} is no key of this call, which has none: leave it out"),
            known => unknown_key(key, "this call", known.iter().copied()),
        }));
    }
    T::deserialize(Value::Object(params)).map_err(|error| {
        let error = error.to_string();
        let missing = error.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`'));
        RpcError::params(match missing {
            Some(key) => format!("{key}: this call needs it"),
            None => error,
        })
    })
}

/// Returns the values of keys, each of which is valid by itself.
fn checked(keys: &[Key], params: &Params) -> Result<Values, RpcError> {
    let values = values(params);
    check(keys, &values).map_err(|error| RpcError::params(error.to_string()))?;
    Ok(values)
}

/// Reads the description of a device, whose keys are those of a configuration file.
fn device(params: &Params, kinds: &Kinds) -> Result<DeviceConfig, RpcError> {
    let mistake = |mistake: Mistake| RpcError::params(mistake.to_string());
    let mut config = kinds.read(&checked(&kinds.keys(), params)?).map_err(mistake)?;
    config.name_by_socket().map_err(mistake)?;
    config.check(Notation::Keys).map_err(mistake)?;
    Ok(config)
}

/// Reads the changed keys of a device.
fn set(mut params: Params, kinds: &Kinds) -> Result<Call, RpcError> {
    let name = params.remove("name");
    let known = kinds.set_keys();
    if let Some(key) = params.keys().find(|key| !known.iter().any(|known| known.name() == *key)) {
        let is_fixed = kinds.keys().iter().any(|known| known.name() == key);
        return Err(RpcError::params(match is_fixed {
            true => format!(
                "{key}: it cannot change while the device is served: remove the device, and add it again"
            ),
            false => unknown_key(key, "this call", known.iter().map(Key::name)),
        }));
    }
    let name = name.ok_or_else(|| RpcError::params("name: this call needs it"))?;
    let OfDevice { name } = read(Params::from_iter([("name".to_owned(), name)]))?;
    checked(&known, &present(&params))?;
    Ok(Call::DeviceSet { name, keys: params })
}

/// Reads the file of a capture, whose keys are those of a configuration file.
fn capture(params: Params, kinds: &Kinds) -> Result<Call, RpcError> {
    if let Some(key) = params.keys().find(|key| !Capture::KEYS.contains(&key.as_str())) {
        return Err(RpcError::params(unknown_key(key, "this call", Capture::KEYS.iter().copied())));
    }
    checked(&kinds.keys(), &present(&params))?;
    read(params).map(Call::DeviceCapture)
}

/// Returns the parameters that are not `null`, which removes a key.
fn present(params: &Params) -> Params {
    let mut present = params.clone();
    present.retain(|_, value| !value.is_null());
    present
}

/// Reads the polling rule of the pool.
fn polling(params: Params) -> Result<PollingConfig, RpcError> {
    let mistake = |mistake: Mistake| RpcError::params(mistake.to_string());
    let (all, changeable) = (keys::<PoolConfig>(), keys::<PollingConfig>());
    let names: Vec<&str> = changeable.iter().map(Key::name).collect();
    let is_fixed = |key: &str| !names.contains(&key) && all.iter().any(|known| known.name() == key);
    if let Some(key) = params.keys().find(|key| is_fixed(key)) {
        let why = "it cannot change while the workers run: change it in the file, and restart the daemon";
        return Err(RpcError::params(format!("{key}: {why}")));
    }
    let values = checked(&changeable, &params)?;
    if params.is_empty() {
        return Err(RpcError::params(format!("this call needs one of {}", names.join(", "))));
    }
    let config: PollingConfig = read_keys(&values).map_err(mistake)?;
    config.rule(Notation::Keys).map_err(mistake)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for (at, method) in METHODS.iter().enumerate() {
            assert!(METHODS[..at].iter().all(|other| other.name != method.name), "{}", method.name);
            assert!(!method.waits || method.effect == Effect::Changes, "{}", method.name);
        }
        assert!(Method::find("device.explode").is_err());
    }
}
