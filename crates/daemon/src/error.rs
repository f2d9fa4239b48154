//! Errors of the daemon. A caller shows an error with [`sentence`](fn@crate::sentence).

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kickless_device::{CloseError, StartError, Unsupported};
use kickless_opener::{NoDescriptor, Refused, SocketError};
use kickless_values::nearest;
use kickless_vhost::Ended;

use super::config::{MakeError, Mistake};
use super::sentence::sentence;

/// The error of a device that cannot be added. The registry has not changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// A device of this name exists with another configuration.
    #[error(
        "there is a device {name} already, with another configuration: remove it first or use another name"
    )]
    Different {
        /// The name of both.
        name: String,
    },
    /// A device of this name exists, and one of the two has descriptors, which cannot be compared.
    #[error(
        "there is a device {name} already, and descriptors cannot be compared: remove it first or use another name"
    )]
    NotComparable {
        /// The name of both.
        name: String,
    },
    /// Another caller is adding or removing a device of this name, or the ended device of this name is not
    /// closed yet.
    #[error("the device {name} is being {doing}: try again when that is done")]
    Busy {
        /// The name of both.
        name: String,
        /// `added`, `removed` or `closed`.
        doing: &'static str,
    },
    /// The device of this name has ended, and writes of its guest did not reach its disk.
    #[error(
        "the device {name} could not write everything to its disk, and keeps it: mend the disk, and remove the device first"
    )]
    KeepsDisk {
        /// The name of both.
        name: String,
    },
    /// Another device uses this socket.
    #[error("the device {name} has {} already: use another one", path.display())]
    SocketTaken {
        /// The other device.
        name: String,
        /// The path of the socket.
        path: PathBuf,
    },
    /// The device has no socket, neither by a path nor by a descriptor.
    #[error(
        "the device needs a socket: give its path, or let systemd pass a socket with the name of the device"
    )]
    NoSocket,
    /// The descriptor that stands for the socket is not there.
    #[error(transparent)]
    NoDescriptor(#[from] NoDescriptor),
    /// The registry has as many devices as the pool has reserves for.
    #[error("the pool has room for {max} devices: remove one first, or start another daemon")]
    Full {
        /// The most devices.
        max: usize,
    },
    /// The registry has no pool yet: see [`Registry::set_pool`](crate::Registry::set_pool).
    #[error("the workers have not been started")]
    NoPool,
    /// The daemon is stopping.
    #[error("the daemon is stopping")]
    Stopping,
    /// Some options cannot be combined.
    #[error("{}", .0.why)]
    Mistake(Mistake),
    /// The socket cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The device cannot be made.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// The sandbox does not allow a thing that the device uses. A later try has the same result.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The session thread, or the descriptor that stops it, cannot be made.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

impl AddError {
    /// Returns the error as one sentence that begins with its option.
    pub fn sentence(&self) -> String {
        match self.option() {
            Some(option) => format!("{option}: {}", sentence(self)),
            None => sentence(self),
        }
    }

    /// Returns the option that the error is about, if it is a single one.
    pub fn option(&self) -> Option<&str> {
        match self {
            Self::Different { .. }
            | Self::NotComparable { .. }
            | Self::Busy { .. }
            | Self::KeepsDisk { .. } => Some("name"),
            Self::SocketTaken { .. } | Self::NoSocket | Self::NoDescriptor(_) => Some("socket-path"),
            Self::Mistake(mistake) => Some(&mistake.option),
            Self::Socket(error) => Some(error.option),
            Self::Make(error) => Some(error.option),
            Self::Refused(error) => Some(error.option),
            Self::Full { .. } | Self::NoPool | Self::Stopping | Self::Thread(_) => None,
        }
    }
}

/// The error of a name that is not that of a served device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindError {
    /// There is no device of this name.
    #[error("there is no device {name}{}", near.as_ref().map_or_else(String::new, |near| format!(": did you mean {near}?")))]
    NoDevice {
        /// The name.
        name: String,
        /// The name of a device that is probably meant.
        near: Option<String>,
    },
    /// The device is being opened or removed, or has ended.
    #[error("the device {name} is not served now")]
    NotServed {
        /// The device.
        name: String,
    },
}

impl FindError {
    /// Returns the error of a name that none of the devices with these names has.
    pub fn no_device<'d>(name: &str, devices: impl IntoIterator<Item = &'d str>) -> Self {
        Self::NoDevice { name: name.into(), near: nearest(name, devices).map(str::to_owned) }
    }
}

/// The error of a device that cannot be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetError {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] FindError),
    /// The group of a device cannot change while it is served.
    #[error("group: it cannot change while the device is served")]
    Group,
    /// The options cannot be combined.
    #[error(transparent)]
    Mistake(#[from] Mistake),
}

/// The error of a device that cannot be drained or resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] FindError),
    /// This kind of device cannot be drained.
    #[error("the device {name} is {one}, which {why}")]
    Unsupported {
        /// The device.
        name: String,
        /// A device of its kind, with its article.
        one: &'static str,
        /// The reason, as the end of a sentence.
        why: Unsupported,
    },
    /// The device has stopped because of an error, and only requests that wait for its end are in flight.
    #[error(
        "the device {name} has stopped ({error}), and requests that wait for device.resume ({requests}) are in flight: \
         mend the cause and resume it"
    )]
    Stopped {
        /// The device.
        name: String,
        /// The operation and the error that stopped it.
        error: String,
        /// The number of these requests.
        requests: u64,
    },
    /// Requests are still in flight at the deadline.
    #[error(
        "the device {name} takes no new requests, and {} still in flight: wait longer, or resume it",
        in_flight.map_or_else(|| "requests may be".to_owned(), |count| format!("{count} are"))
    )]
    Deadline {
        /// The device.
        name: String,
        /// The number of these requests, if it is known.
        in_flight: Option<u64>,
    },
}

/// The error of a device whose size cannot change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] FindError),
    /// The device has no medium with a size.
    #[error("the device {name} is {one}, which {why}")]
    NoSize {
        /// The device.
        name: String,
        /// A device of its kind, with its article.
        one: &'static str,
        /// The reason, as the end of a sentence.
        why: Unsupported,
    },
    /// The size is less than the present one.
    #[error("size: the disk has {present} bytes, and cannot shrink")]
    Shrink {
        /// The present size in bytes.
        present: u64,
    },
    /// The medium did not grow. The log has the reason, unless it is a qcow2 image that no guest uses.
    #[error(
        "size: the disk still has {present} bytes: an image that no guest uses grows when the next one starts, and \
         otherwise the log has the reason"
    )]
    TooSmall {
        /// The present size in bytes.
        present: u64,
    },
    /// The size does not go with the disk.
    #[error(transparent)]
    Mistake(#[from] Mistake),
}

/// The error of a device whose frames cannot be captured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] FindError),
    /// The device has no frames.
    #[error("the device {name} is {one}, which has no frames")]
    NoFrames {
        /// The device.
        name: String,
        /// A device of its kind, with its article.
        one: &'static str,
    },
    /// The sandbox does not allow the file.
    #[error("{}: {}", .0.option, super::sentence::sentence(.0))]
    Refused(Refused),
    /// The file cannot be written, or the earlier one is not complete yet.
    #[error("capture: {}", super::sentence::sentence(.0))]
    File(StartError),
}

/// The error of a device that cannot be removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// A front-end uses the device. The registry continues to serve it. Only
    /// [`RemoveMode::Refuse`](crate::RemoveMode::Refuse) fails like this.
    #[error(
        "a front-end is connected to the device {name}: disconnect it first, or give mode=drain, which takes the device from its guest"
    )]
    InUse {
        /// The device.
        name: String,
    },
    /// Requests are still in flight at the deadline. The device takes no new ones. Its name and socket stay
    /// in use until the last request ends. A caller can remove the device again to wait for that.
    #[error("requests of the device {name} are still in flight after {waited:?}; it takes no new ones")]
    Deadline {
        /// The device.
        name: String,
        /// The time that was waited.
        waited: Duration,
    },
    /// The device has stopped, and is still open at the deadline: a system call on its disk has not returned.
    /// Its name and socket stay in use until the call returns. A caller can remove the device again to wait
    /// for that.
    #[error(
        "the device {name} has stopped and is still open after {waited:?}: a call on its disk does not return"
    )]
    StillOpen {
        /// The device.
        name: String,
        /// The time that was waited.
        waited: Duration,
    },
    /// The device has stopped, and writes of its guest did not reach its disk. It keeps the disk. A caller
    /// can remove the device again to give the disk up without these writes.
    #[error(
        "the device {name} keeps its disk, because {error}: mend the disk; removing the device again gives it up"
    )]
    KeepsDisk {
        /// The device.
        name: String,
        /// The reason, as a part of a sentence.
        error: String,
    },
    /// Another caller is adding the device.
    #[error("the device {name} is being added: try again when that is done")]
    BeingAdded {
        /// The device.
        name: String,
    },
}

/// The error that ended the service of a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The listener failed, or a worker has ended.
    #[error("no more front-ends can be served")]
    Listener(#[source] io::Error),
    /// The inherited connection cannot be used.
    #[error("the connection of --fd cannot be used")]
    Connection(#[source] io::Error),
    /// The inherited connection ended with an error.
    #[error("the connection of --fd was dropped")]
    Dropped(#[source] Ended),
    /// Writes that the guest was told are done did not reach the disk.
    #[error("the disk cannot be given up")]
    NotClosed(#[source] CloseError),
    /// The session thread panicked.
    #[error("a session panicked")]
    Panicked,
}

impl ServeError {
    /// Returns whether the device keeps its disk, because writes of its guest did not reach it.
    pub(crate) fn keeps_disk(&self) -> bool {
        matches!(self, Self::NotClosed(_))
    }
}
