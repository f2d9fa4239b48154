//! The contract of a kind of device: everything that the daemon, the calls and the command line need to know
//! about it.

use std::fmt::Debug;
use std::sync::Arc;

use clap::Args;
use kickless_device::Operate;
use kickless_opener::Grant;
use serde::Serialize;

use super::capture::CaptureConfig;
use super::limits::{Limited, LimitsConfig};
use super::making::{MakeError, Making};
use super::notation::{Mistake, Notation};

/// The key that names the kind of a device. A device need not have it.
pub(crate) const KIND: &str = "kind";

/// A kind of device, such as a disk. The program hands a table of its kinds to the
/// [`Registry`](crate::Registry) ([`Kinds`](crate::Kinds)).
///
/// The value of this type has what the devices of the kind share. Nothing has a default, so that the compiler
/// asks the author of a new kind for each of these.
pub trait Kind: Send + Sync + 'static {
    /// The options of a device. Their derived `Args` is the only description: the command line, the
    /// configuration file, the calls and `config.save` follow it.
    type Options: Args + Clone + Debug + PartialEq + Serialize + Send + Sync + 'static;
    /// The kind, as the words of its limits name it.
    type Limited: Limited;

    /// The words for this kind.
    const WORDS: Words;

    /// The keys of [`Kind::Options`] that are a device's own, so that no default for several can be right.
    const OWN_KEYS: &'static [&'static str];

    /// The options beside the limits that `device.set` changes.
    const SETTABLE: &'static [Settable<Self::Options>];

    /// Returns the answer of `--print-capabilities`, in the format of QEMU (`VHostUserBackendCapabilities` in
    /// its `docs/interop/vhost-user.json`).
    fn capabilities() -> serde_json::Value;

    /// Checks that the options can be combined.
    ///
    /// # Errors
    /// Some cannot. The error names them in `notation`.
    fn check(options: &Self::Options, notation: Notation) -> Result<(), Mistake>;

    /// Returns the names of the descriptors of a call that the device needs, and the options that name them.
    fn descriptors(options: &Self::Options) -> Vec<(&'static str, &str)>;

    /// Returns the numbers of descriptors that the program inherits for the device, and the options that name
    /// them.
    fn inherited(options: &Self::Options) -> Vec<(&'static str, i32)>;

    /// Returns the things of the host that the device uses by their names, and the options that name them. A
    /// sandbox refuses all others. Leaves out descriptors.
    fn grants(options: &Self::Options) -> Vec<Grant>;

    /// Logs that the device is served: what the operator chose, and `of`.
    fn log_served(options: &Self::Options, of: &Served);

    /// Returns the limits.
    fn limits(options: &mut Self::Options) -> &mut LimitsConfig<Self::Limited>;

    /// Returns the option with the size in bytes that the medium has at least. `None` for a kind without a
    /// medium that can grow.
    fn size_min(options: &mut Self::Options) -> Option<&mut Option<u64>>;

    /// Returns the options with the file for the frames. `None` for a kind without frames.
    fn capture(options: &mut Self::Options) -> Option<&mut CaptureConfig>;

    /// Makes a device. The caller applies the options of [`Kind::SETTABLE`].
    ///
    /// # Errors
    /// The host or a server refuses it. The error names the option.
    fn make(&self, options: &Self::Options, making: &Making<'_>) -> Result<Arc<dyn Operate>, MakeError>;
}

/// The properties of a device that is served, for the log.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// The version of the program.
    pub version: &'static str,
    /// The path of its socket, if it has one.
    pub socket: Option<String>,
    /// The permissions of the socket, in octal digits.
    pub socket_mode: Option<String>,
    /// The numbers of the user and the group of the socket.
    pub socket_owner: Option<String>,
    /// The size of the medium in bytes.
    pub size: Option<u64>,
    /// The largest size of a queue.
    pub queue_size: u16,
}

/// An option that changes while the device is served.
pub struct Settable<O: 'static> {
    /// Its key.
    pub key: &'static str,
    /// Takes its value from other options.
    pub take: fn(&mut O, &O),
    /// Makes a device use its value. Does not wait.
    pub apply: fn(&O, &dyn Operate),
}

/// The words for a kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// The name, which is the value of the key `kind` and a command of the program.
    pub name: &'static str,
    /// The key that each device of this kind has, and no device of another kind.
    pub key: &'static str,
    /// One device with its article, for sentences.
    pub one: &'static str,
    /// Several devices, for sentences.
    pub several: &'static str,
    /// Whether the device measures the latencies of its requests
    /// ([`DeviceMetrics`](kickless_device::DeviceMetrics)). They are exported only then.
    pub has_latencies: bool,
    /// Command lines with a sentence before each, for the manual page of the command.
    pub examples: &'static [(&'static str, &'static str)],
}
