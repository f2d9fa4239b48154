//! The configuration of one device.

use kickless_device::Limits;
use kickless_net_port::Port;
use kickless_opener::{descriptor_name, is_descriptor_name};
use serde::Serialize;
use tracing::{Span, error_span};

use super::blk::BlkConfig;
use super::name::parse_device_name;
use super::net::NetConfig;
use super::notation::{Mistake, Notation};
use super::serve::{Identity, ServeConfig, Share};
use super::values::Switch;

/// The name of the span of log lines about a device.
pub const DEVICE_SPAN: &str = "device";

/// A device and its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceConfig {
    /// The kind of device, with its own options.
    #[serde(flatten)]
    pub kind: DeviceKind,
    /// The name.
    #[serde(flatten)]
    pub identity: Identity,
    /// The socket and the memory.
    #[serde(flatten)]
    pub serve: ServeConfig,
    /// The share of the pool.
    #[serde(flatten)]
    pub share: Share,
}

/// The kind of a device, with its own options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A disk.
    Blk(BlkConfig),
    /// A network card.
    Net(NetConfig),
}

impl DeviceKind {
    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        match self {
            Self::Blk(disk) => disk.limits.limits(),
            Self::Net(card) => card.limits.limits(),
        }
    }

    /// Returns whether the device gives space back to the host. `None` if it has none to give back.
    pub fn discard(&self) -> Option<Switch> {
        match self {
            Self::Blk(disk) => Some(disk.discard),
            Self::Net(_) => None,
        }
    }

    /// Returns the group that shares the limits.
    pub fn group(&self) -> Option<&str> {
        match self {
            Self::Blk(disk) => disk.limits.group.as_deref(),
            Self::Net(card) => card.limits.group.as_deref(),
        }
    }

    /// Takes the limits of another device of the same kind, and whether it gives space back.
    pub(crate) fn take_changeable(&mut self, other: Self) {
        match (self, other) {
            (Self::Blk(disk), Self::Blk(other)) => {
                (disk.limits, disk.discard) = (other.limits, other.discard)
            }
            (Self::Net(card), Self::Net(other)) => card.limits = other.limits,
            _ => {}
        }
    }

    /// Removes the limits, but not the group.
    pub(crate) fn remove_limits(&mut self) {
        match self {
            Self::Blk(disk) => disk.limits = disk.limits.without_limits(),
            Self::Net(card) => card.limits = card.limits.without_limits(),
        }
    }
}

impl DeviceConfig {
    /// Checks that the options can be combined.
    ///
    /// # Errors
    /// Some options cannot be combined. The error names them in `notation`.
    pub fn check(&self, notation: Notation) -> Result<(), Mistake> {
        let serve = &self.serve;
        let option =
            serve.socket_mode.map(|_| "socket-mode").or(serve.socket_group.as_ref().map(|_| "socket-group"));
        if let Some(option) = option
            && serve.socket_path.as_deref().and_then(descriptor_name).is_some()
        {
            return Err(Mistake::new(option, "a socket that comes as a descriptor has its own"));
        }
        match &self.kind {
            DeviceKind::Blk(disk) => disk.check(notation),
            DeviceKind::Net(card) => card.check(notation),
        }
    }

    /// Returns the names of the descriptors that the device needs, and the options that name them.
    pub fn descriptors(&self) -> Vec<(&'static str, &str)> {
        let socket = self.serve.socket_path.as_deref().and_then(descriptor_name);
        let mut names: Vec<_> = socket.map(|name| ("socket-path", name)).into_iter().collect();
        match &self.kind {
            DeviceKind::Blk(disk) => names.extend(disk.blk_file.descriptor().map(|name| ("blk-file", name))),
            DeviceKind::Net(card) => {
                if let Port::TapFd(fds) = &card.port {
                    let fds = fds.iter().map(String::as_str).filter(|fd| is_descriptor_name(fd));
                    names.extend(fds.map(|fd| ("port", fd)));
                }
            }
        }
        names
    }

    /// Checks that the device needs no descriptor of a call.
    ///
    /// # Errors
    /// It needs one. The error names its option.
    pub fn check_has_no_descriptors(&self) -> Result<(), Mistake> {
        let Some((option, name)) = self.descriptors().first().copied() else { return Ok(()) };
        let why = format!("only a call of device.add comes with descriptors such as {name}");
        Err(Mistake::new(option, why))
    }

    /// Returns the name of the device.
    pub fn name(&self) -> Option<&str> {
        self.identity.name.as_deref()
    }

    /// Names a device without a name after its socket, without the ending.
    ///
    /// # Errors
    /// The device has no socket path, or no name can be made of it.
    pub fn name_by_socket(&mut self) -> Result<(), Mistake> {
        let mistake = |why: &str| Mistake::new("socket-path", why);
        if self.identity.name.is_some() {
            return Ok(());
        }
        let path = self.serve.socket_path.as_ref().ok_or_else(|| mistake("this device needs one"))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = parse_device_name(&stem);
        self.identity.name =
            Some(name.map_err(|_| mistake("no name can be made of it: give the device a name"))?);
        Ok(())
    }

    /// Returns the span for log lines about this device. It has the level `error`, so that every log filter
    /// keeps it.
    pub fn span(&self) -> Span {
        match self.name() {
            Some(name) => error_span!(DEVICE_SPAN, %name),
            None => Span::none(),
        }
    }

    /// Returns the name of an option of this device, for a sentence.
    pub fn option(&self, notation: Notation, option: &str) -> String {
        match self.name() {
            Some(name) => format!("device {name}: {}", notation.option(option)),
            None => notation.option(option),
        }
    }
}
