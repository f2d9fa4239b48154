//! The contract of a device, as a transport sees it.

use crate::{DeviceMetrics, Limiter, QueueTask, Vring};
use kickless_io::Waker;
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use std::path::Path;

/// A virtio device.
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
    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::empty()
    }

    /// Returns the protocol features of the transport that front-ends do not use correctly with this kind of
    /// device. The transport does not offer them.
    fn withheld_protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::empty()
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

    /// Returns names and values of the device's own counters, beside those of each ring. The values never
    /// decrease.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns the metrics of the device. `now_ns` is the time on the clock of the pool that runs its queues.
    /// The default is for a device that counts no operations.
    fn metrics(&self, _now_ns: u64) -> DeviceMetrics {
        DeviceMetrics::default()
    }

    /// Returns the configuration space to its initial state, for a fresh driver. Not called when a front-end
    /// reconnects to a device that its driver still uses.
    fn reset(&self);

    /// Starts anew with a fresh driver behind the same front-end, which resets the device (RESET_DEVICE). No
    /// ring runs.
    ///
    /// Fields of the configuration space that the driver writes keep their values. QEMU keeps a copy of the
    /// space and shows it to the next driver. It reports only changes to the device. With another value here,
    /// the driver would read a setting that the device does not follow. The default is for a device without
    /// such fields.
    fn reset_driver(&self) {
        self.reset();
    }

    /// Called when a front-end connects, before its first message. Forgets the settings from messages of an
    /// earlier front-end ([`Device::message`]).
    fn connected(&self) {}

    /// Called when the driver was initialised by another process and migrated here. The configuration it
    /// wrote there is unknown.
    fn restore_unknown(&self);

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

    /// Reads the host's values again, such as the size of a disk, and notifies the driver of a change.
    fn refresh(&self) {}

    /// Sets the size in bytes that the medium has at least after the next [`Device::refresh`] of an open
    /// device. The default is for a device without a medium that can grow by itself.
    fn set_size_min(&self, _bytes: u64) {}

    /// Sets whether the device gives space of its medium back to the host. Does not wait. Any thread can call
    /// this. The default is for a device without space to give back.
    fn set_discard(&self, _is_on: bool) {}

    /// Returns the size of the medium in bytes. `None` for a device without one.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Stops to take new requests, or continues. Requests wait in the rings meanwhile, and those in flight
    /// complete. Returns whether this kind of device can do it. Any thread can call this.
    fn set_paused(&self, _is_paused: bool) -> bool {
        false
    }

    /// Writes the frames of the device to a file from now on, or ends that for `None`. Waits for the file.
    /// Any thread can call this. The default is for a device without frames.
    ///
    /// # Errors
    /// The file cannot be written, or an earlier one is not complete yet. The error is one sentence.
    fn set_capture(&self, to: Option<&CaptureTo<'_>>) -> Result<(), StartError> {
        match to {
            Some(_) => Err(StartError("only a network card has frames".into())),
            None => Ok(()),
        }
    }

    /// Returns the error for which the device has stopped. `None` if it has not.
    ///
    /// A device can stop instead of answering a request with an error. It then keeps the failed requests and
    /// takes no new ones until [`Device::resume`]. The default is for a device that always answers.
    fn stopped(&self) -> Option<StoppedOnError> {
        None
    }

    /// Starts the requests again for which the device has stopped, and takes new ones. Returns whether it had
    /// stopped. Any thread can call this.
    fn resume(&self) -> bool {
        false
    }

    /// Returns the limiter of the device's requests. `None` if this kind of device has none.
    fn limiter(&self) -> Option<&Limiter> {
        None
    }

    /// Returns the waker that is signalled when [`Device::refresh`] would find a change. `None` if changes
    /// are not reported. The caller of `refresh` clears it first.
    fn refresh_due(&self) -> Option<Waker> {
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

/// The file to which a device writes its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureTo<'a> {
    /// The path of the file.
    pub path: &'a Path,
    /// The name of the device in the file.
    pub device: &'a str,
    /// The most bytes of a frame that the file has.
    pub len_max: u32,
}

/// The error for which a device has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoppedOnError {
    /// The first error, as a part of a sentence.
    pub error: String,
    /// The number of failed requests that the device keeps.
    pub requests: u64,
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
