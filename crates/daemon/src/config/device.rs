//! One device: what it serves, and where.

use serde::Serialize;
use tracing::{Span, error_span};

use super::blk::BlkConfig;
use super::net::NetConfig;
use super::notation::{Mistake, Notation};
use super::serve::ServeConfig;

/// The name of the span that log lines about a device are in.
pub const DEVICE_SPAN: &str = "device";
/// The log says the name in each line.
const NAME_BYTES_MAX: usize = 64;

/// A device and its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceConfig {
    /// The kind of device, with its own options.
    #[serde(flatten)]
    pub kind: DeviceKind,
    /// The options that all devices have.
    #[serde(flatten)]
    pub serve: ServeConfig,
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

impl DeviceConfig {
    /// Checks what the types of the options cannot say.
    ///
    /// # Errors
    /// Options do not go together. `notation` is how the sentence names them.
    pub fn check(&self, notation: Notation) -> Result<(), Mistake> {
        match &self.kind {
            DeviceKind::Blk(disk) => disk.check(notation),
            DeviceKind::Net(_) => Ok(()),
        }
    }

    /// Returns the name of the device.
    pub fn name(&self) -> Option<&str> {
        self.serve.name.as_deref()
    }

    /// Returns the span that marks the log's lines about this device. Of the highest level, so that it is there whatever is
    /// logged.
    pub fn span(&self) -> Span {
        match self.name() {
            Some(name) => error_span!(DEVICE_SPAN, %name),
            None => Span::none(),
        }
    }

    /// Returns how a sentence names an option of this device.
    pub fn option(&self, notation: Notation, option: &str) -> String {
        match self.name() {
            Some(name) => format!("device {name}: {}", notation.option(option)),
            None => notation.option(option),
        }
    }
}

/// Parses the name of a device.
///
/// # Errors
/// Says what a name may be, as the end of a sentence.
pub fn parse_device_name(text: &str) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:@".contains(&byte);
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.bytes().all(allowed) {
        return Err(format!("it must be 1 to {NAME_BYTES_MAX} letters, digits and . _ - : @"));
    }
    Ok(text.into())
}
