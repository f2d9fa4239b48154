//! The configuration of one device.

use kickless_opener::{Grant, Target, descriptor_name};
use serde::Serialize;
use tracing::{Span, error_span};

use super::kind_config::KindConfig;
use super::name::parse_device_name;
use super::notation::{Mistake, Notation};
use super::serve::{Identity, ServeConfig, Share};

/// The name of the span of log lines about a device.
pub const DEVICE_SPAN: &str = "device";

/// A device and its socket.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceConfig {
    /// The kind of device, with its own options.
    #[serde(flatten)]
    pub kind: KindConfig,
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
        self.kind.check(notation)
    }

    /// Returns the names of the descriptors that the device needs, and the options that name them.
    pub fn descriptors(&self) -> Vec<(&'static str, &str)> {
        let socket = self.serve.socket_path.as_deref().and_then(descriptor_name);
        let mut names: Vec<_> = socket.map(|name| ("socket-path", name)).into_iter().collect();
        names.extend(self.kind.descriptors());
        names
    }

    /// Returns the things of the host that the device uses by their names: its socket, and those of its kind.
    pub fn grants(&self) -> Vec<Grant> {
        let serve = &self.serve;
        let path = serve.socket_path.as_ref().filter(|path| descriptor_name(path).is_none());
        let socket = path.map(|path| Target::Socket {
            path: path.clone(),
            mode: serve.socket_mode.map(|mode| mode.0),
            group: serve.socket_group.clone(),
        });
        let mut grants = self.kind.grants();
        grants.extend(socket.map(|to| Grant { option: "socket-path", to }));
        grants
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
