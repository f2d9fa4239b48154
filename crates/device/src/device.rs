//! What a device offers to a transport.

use crate::{QueueTask, Vring};
use kickless_io::Waker;
use kickless_spec::features::Features;

/// A virtio device.
///
/// An implementer may rely on this: `open` comes before the first `start_queue` and `close` after the last queue has
/// stopped; features are a subset of what it offered. It must not assume that the driver or the front-end behaves.
pub trait Device: Send + Sync {
    /// All feature bits that it supports, those of the ring included.
    fn features(&self) -> Features;

    /// The most queues it can have.
    fn queues_max(&self) -> u16;

    /// The largest size of a queue.
    fn queue_size_max(&self) -> u16;

    /// Returns the configuration space to its initial state, for a fresh driver. Not called when a front-end comes back to a
    /// device that its driver has been using.
    fn reset(&self);

    /// Called when the driver was initialised by another process and migrated here. The configuration it wrote there is
    /// unknown.
    fn restore_unknown(&self);

    /// Copies the configuration space from `offset` on; zeros past its end.
    fn read_config(&self, offset: usize, into: &mut [u8]);

    /// The driver writes the configuration space.
    ///
    /// # Errors
    /// A field that cannot be written, or a value that it cannot have.
    fn write_config(&self, offset: usize, from: &[u8]) -> Result<(), ConfigError>;

    /// Signalled when the configuration space has changed by itself, so that the driver is to be told of it; `None` where it never
    /// does. Whoever tells the driver clears it first.
    fn config_changes(&self) -> Option<&Waker> {
        None
    }

    /// Takes what running queues need and what is not to be held without (the lock on an image).
    ///
    /// # Errors
    /// It cannot be had.
    fn open(&self) -> Result<(), StartError>;

    /// Gives it back.
    fn close(&self);

    /// Ends the requests in flight that wait for a remote server within a bounded time, in failure if need be. Any thread
    /// calls it, again and again, while it waits for these requests. Rings go on. Requests that start later are not limited.
    fn limit_remote_waits(&self) {}

    /// What the driver changed in the configuration space, and whatever else is the device's own and not of a queue, for a device of
    /// another process that goes on with this driver. Not called while a queue runs.
    fn save(&self) -> Vec<u8>;

    /// Takes what another device's [`Device::save`] gave; it comes from outside and may be anything. Not called while a queue runs.
    ///
    /// # Errors
    /// That is nothing that such a device can have given. Nothing has changed then.
    fn load(&self, state: &[u8]) -> Result<(), InvalidState>;

    /// Makes a running queue of a ring. Memory is taken here, not before.
    ///
    /// # Errors
    /// The device has no such queue, or what it needs cannot be had.
    fn start_queue(&self, vring: Vring, features: Features) -> Result<Box<dyn QueueTask>, StartError>;
}

/// Why a device or one of its queues cannot start.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StartError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

/// What was to be loaded was not saved by a device of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no state of a {kind} device that this version knows")]
pub struct InvalidState {
    /// The kind of device.
    pub kind: &'static str,
}

/// Why the configuration space cannot be written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Only some fields are the driver's to write.
    #[error("configuration bytes {offset}..{end} are not writable")]
    ReadOnly {
        /// First byte of the write.
        offset: usize,
        /// Byte after the last.
        end: usize,
    },
    /// The field cannot have this value.
    #[error("{field} cannot be {value}")]
    Value {
        /// The field's name in the standard.
        field: &'static str,
        /// What was written.
        value: u8,
    },
}
