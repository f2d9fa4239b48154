//! The contract of a device, as a transport sees it. [`Operate`](crate::Operate) is that of the operator.

use crate::{QueueTask, Vring};
use kickless_io::Waker;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;

/// The features of rings that each device offers.
pub const RING_FEATURES: Features = Features::VERSION_1
    .union(Features::EVENT_IDX)
    .union(Features::INDIRECT_DESC)
    .union(Features::RING_PACKED)
    .union(Features::IN_ORDER);

/// A virtio device: everything that a transport needs of it.
///
/// An implementer may rely on this: `open` comes before the first `start_queue`, and `close` after the last
/// queue has stopped. Either can come more than once. Negotiated features are a subset of those offered. The
/// driver and the front-end may be hostile.
pub trait Device: Send + Sync {
    /// Returns the words for this kind of device in lines of the log.
    fn words(&self) -> Words;

    /// Returns all feature bits that the device supports, those of the ring included.
    fn features(&self) -> Features;

    /// Returns the protocol features of vhost-user that only this kind of device has, such as MTU and RARP.
    /// The transport offers them beside its own, and passes their messages to [`Device::message`]. A device
    /// whose tasks can leave requests ([`Leave::Unfinished`](crate::Leave::Unfinished)) returns
    /// GET_VRING_BASE_INFLIGHT and GET_VRING_BASE_SKIP_DRAIN, whose messages the transport carries out.
    fn protocol_features(&self) -> OwnProtocolFeatures {
        OwnProtocolFeatures::default()
    }

    /// Carries out a message of one of [`Device::protocol_features`], which was negotiated. Rings may be
    /// running.
    ///
    /// # Errors
    /// The device refuses it.
    fn message(&self, message: DeviceMessage) -> Result<(), MessageError> {
        Err(MessageError::Unknown(message))
    }

    /// Returns the largest number of rings, a control ring included.
    fn queues_max(&self) -> u16;

    /// Returns the largest size of a ring.
    fn queue_size_max(&self) -> u16;

    /// Returns the treatment of the ring with this number while it is started but disabled.
    fn disabled(&self, _index: u16) -> Disabled {
        Disabled::LeftAlone
    }

    /// Prepares for a driver that starts, or that this process does not know. Not called when a front-end
    /// reconnects to a device that its driver still uses.
    fn reset(&self, driver: Driver);

    /// Called when a front-end connects, before its first message. Forgets the settings from messages of an
    /// earlier front-end ([`Device::message`]).
    fn connected(&self) {}

    /// Copies the configuration space from `offset` on into `into`. Fills the rest with zeros past the
    /// space's end.
    fn read_config(&self, offset: usize, into: &mut [u8]);

    /// Writes to the configuration space for the driver.
    ///
    /// # Errors
    /// The field is read-only, or cannot have this value.
    fn write_config(&self, offset: usize, from: &[u8]) -> Result<(), ConfigError>;

    /// Returns the waker that the device signals when it changes the configuration space by itself. `None` if
    /// it never does. The transport clears the waker, and then notifies the driver.
    fn config_changes(&self) -> Option<&Waker> {
        None
    }

    /// Takes the resources that only running queues need, such as the lock on an image.
    ///
    /// # Errors
    /// The host or another process refuses it.
    fn open(&self) -> Result<(), StartError>;

    /// Releases the resources that [`Device::open`] took. Does nothing if it took none. Another process may
    /// use them afterwards, so it first makes all writes of the driver visible there.
    ///
    /// # Errors
    /// Some writes could not be made visible. The device keeps its resources, and a later flush of its driver
    /// fails. The transport must not tell its front-end that the rings have stopped. It can open the device
    /// again, or try again to close it.
    fn close(&self) -> Result<(), CloseError>;

    /// Ends the requests in flight that wait for a remote server within a bounded time, if necessary with an
    /// error. Any thread may call this, repeatedly, while it waits for these requests. Rings go on. Later
    /// requests are not limited.
    fn limit_remote_waits(&self) {}

    /// Saves the state of the device without its queues, such as the driver's changes of the configuration
    /// space. A device in another process loads it and continues with this driver. Not called while a queue
    /// runs.
    fn save(&self) -> Vec<u8>;

    /// Loads a state that another device's [`Device::save`] returned. The bytes are not trusted. Not called
    /// while a queue runs.
    ///
    /// # Errors
    /// The bytes are no valid state of this kind of device. The device is unchanged then.
    fn load(&self, state: &[u8]) -> Result<(), InvalidState>;

    /// Makes a task of a ring. Allocates the task's memory, because no earlier call does.
    ///
    /// # Errors
    /// The device has no such queue, or a resource is missing.
    fn start_queue(&self, vring: Vring, features: Features) -> Result<Box<dyn QueueTask>, StartError>;
}

/// The protocol features that depend on the kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnProtocolFeatures {
    /// Features that only this kind of device has.
    pub offered: ProtocolFeatures,
    /// Features of the transport that front-ends do not use correctly with this kind of device. The transport
    /// does not offer them.
    pub withheld: ProtocolFeatures,
    /// The most bytes of the configuration space that a front-end of this kind of device reads. The transport
    /// refuses to read more, because the front-end is that of another kind. `None` for any number.
    pub config_bytes_max: Option<usize>,
}

/// Returns the features of a kind of device that has and withholds none.
impl Default for OwnProtocolFeatures {
    fn default() -> Self {
        Self {
            offered: ProtocolFeatures::empty(),
            withheld: ProtocolFeatures::empty(),
            config_bytes_max: None,
        }
    }
}

/// The driver that uses a device from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A fresh driver. The configuration space returns to its initial state.
    Fresh,
    /// A fresh driver behind the same front-end, which resets the device (RESET_DEVICE). No ring runs.
    ///
    /// Fields of the configuration space that the driver writes keep their values. QEMU keeps a copy of the
    /// space and shows it to the next driver. It reports only changes to the device. With another value here,
    /// the driver would read a setting that the device does not follow.
    SameFrontEnd,
    /// A driver that was initialised by another process and migrated here. The configuration it wrote there
    /// is unknown.
    Unknown,
}

/// The words of one kind of device, for sentences that a transport logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// Its name, such as "disk".
    pub name: &'static str,
    /// The option of a front-end that sets the number of rings, such as "QEMU: num-queues=".
    pub rings_option: &'static str,
}

/// The treatment of a ring that is started but disabled (vhost-user specification, "Ring states").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disabled {
    /// No task runs. Once enabled, the ring goes on where it was.
    LeftAlone,
    /// A task runs, takes the driver's requests and discards them ([`QueueTask::set_enabled`]). It uses the
    /// ring's memory until the front-end stops the ring or sets it up anew. The specification allows this.
    Drained,
}

/// A message of the front-end for one kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceMessage {
    /// NET_SET_MTU: the MTU of the host, in bytes.
    SetMtu(u64),
    /// SEND_RARP: announce this MAC address, because the virtual machine has migrated here.
    SendRarp([u8; 6]),
}

/// The reason for which a device refuses a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The device has no such protocol feature.
    #[error("this kind of device does not know {0:?}")]
    Unknown(DeviceMessage),
    /// The device cannot have this MTU.
    #[error("an MTU of {mtu} bytes is not from {min} to {max}")]
    Mtu {
        /// The MTU that was asked for, in bytes.
        mtu: u64,
        /// The smallest MTU.
        min: u64,
        /// The largest MTU.
        max: u64,
    },
}

/// The reason for which a device or one of its queues cannot start.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StartError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

/// The reason for which a device keeps its resources: acknowledged writes did not reach its medium.
#[derive(Debug, thiserror::Error)]
#[error("some writes did not reach the disk, which stays locked: {0}")]
pub struct CloseError(pub Box<dyn std::error::Error + Send + Sync>);

/// The error of loading a state that no device of this kind has saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is no state of a {kind} device that this version knows")]
pub struct InvalidState {
    /// The kind of device.
    pub kind: &'static str,
}

/// The reason for which a write to the configuration space is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The driver may not write these bytes.
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
        /// The value that the driver wrote.
        value: u8,
    },
}
