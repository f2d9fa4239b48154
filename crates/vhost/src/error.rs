//! Errors that refuse a request of the front-end, and reasons for the end of a session.

use crate::setup::Shape;
use kickless_device::{CloseError, ConfigError, MessageError, StartError};
use kickless_memory::{Unmapped, UserAddr};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_virtqueue::device::InvalidSize;
use std::error::Error;
use std::io;

/// The advice to an operator about guest memory that is not shared with this process.
pub(crate) const HOW_TO_SHARE: &str = "start the virtual machine with shared memory (QEMU: -object \
     memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem; libvirt: <access mode='shared'/> in \
     <memoryBacking>; Cloud Hypervisor: --memory size=SIZE,shared=on)";

/// The error of a request that is refused. All but `NoTransfer` and `Ended` are the front-end's mistakes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("not offered by this back-end")]
    NotOffered,
    #[error("protocol feature {0:?} was not negotiated")]
    NotNegotiated(ProtocolFeatures),
    #[error("feature bits {:#x} were not offered", .0.bits())]
    Features(Features),
    #[error("protocol feature bits {:#x} were not offered", .0.bits())]
    ProtocolFeatures(ProtocolFeatures),
    #[error(
        "ring index {index}, but there are {count} rings: the front-end wants more than this back-end has ({option})"
    )]
    Index { index: u32, count: usize, option: &'static str },
    #[error(transparent)]
    InvalidSize(#[from] InvalidSize),
    #[error("ring size {size}, but at most {max} is possible")]
    SizeTooLarge { size: u32, max: u16 },
    #[error("ring base {0:#x} is not an index, or it includes requests in flight")]
    Base(u32),
    #[error("ring {0} is running")]
    Running(u16),
    #[error("no file descriptor for the log")]
    NoLog,
    #[error("{field} {value} of the in-flight buffer is not from 1 to {max}")]
    InflightShape { field: &'static str, value: u16, max: u16 },
    #[error("the in-flight buffer has {has:#x} bytes, but its rings need {needs:#x}")]
    InflightSize { has: u64, needs: u64 },
    #[error(
        "the in-flight buffer has no room for ring {index}, {}",
        Shape { size: *size, packed: *packed }
    )]
    InflightRing { index: u16, size: u16, packed: bool },
    #[error("no file descriptor, and polling a ring without kicks was not offered")]
    NoKick,
    #[error("its file descriptor cannot be used: {0}")]
    Descriptor(#[source] io::Error),
    #[error("{}", with_cause(.0))]
    Memory(#[from] kickless_memory::Error),
    #[error("ring {index}: its areas cannot be used: {source} in one piece, or misaligned")]
    Areas { index: u16, source: Unmapped },
    #[error(
        "ring {index} is at {addr} of the front-end, which is not in guest memory that it shares: {HOW_TO_SHARE}"
    )]
    NotShared { index: u16, addr: UserAddr },
    #[error(
        "the translation leads to {addr}, which is not in guest memory in one region, nor shared: {HOW_TO_SHARE}"
    )]
    TranslationNotShared { addr: UserAddr },
    #[error("a front-end can only send and invalidate translations")]
    IotlbKind,
    #[error("the translation cannot be used: {0} in one region")]
    Translation(Unmapped),
    #[error(transparent)]
    Update(#[from] kickless_memory::UpdateError),
    #[error("its file descriptor is no unix stream socket")]
    NoUnixStream,
    #[error("the channel for requests is connected to a server, and not one end of a pair of sockets")]
    OwnConnection,
    #[error("no vIOMMU was negotiated")]
    NoIommu,
    #[error("ring {index}: its areas are misaligned")]
    Misaligned { index: u16 },
    #[error(
        "it reads {bytes} bytes of the configuration space, more than a {own} has: it is the front-end of another kind \
         of device, so connect it to the socket of one"
    )]
    OtherKind { bytes: usize, own: &'static str },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Device(#[from] MessageError),
    #[error("ring {index} cannot start: {source}")]
    Start { index: u16, source: StartError },
    #[error("ring {index} is {shape}, but the state that was loaded is of one that is {loaded}")]
    Shape { index: u16, shape: Shape, loaded: Shape },
    #[error("no state has been transferred")]
    NoTransfer,
    #[error("ring {0} runs, but is not set up")]
    NotSetUp(u16),
    #[error("rings run, but the device is not open")]
    NotOpen,
    #[error("a region of memory has no file")]
    NoFile,
    #[error("{0} misses wait for replies")]
    TooManyMisses(usize),
    #[error("it has an in-flight buffer of its process, which this version does not know")]
    OwnInflight,
    #[error(transparent)]
    Given(#[from] kickless_handover::Error),
    #[error(transparent)]
    HalfMessage(#[from] kickless_vhost_user::Error),
    #[error(transparent)]
    Ended(#[from] Ended),
}

/// Shows an error and its cause, which the error does not name itself.
fn with_cause(error: &dyn Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// The reason for the end of a session, if not its front-end's regular end.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The process is to stop.
    #[error("asked to stop")]
    Stopped,
    /// The front-end left before it could be answered.
    #[error("the front-end left in the middle of a message")]
    Left,
    /// The connection cannot be used any more.
    #[error(transparent)]
    Connection(#[from] kickless_vhost_user::Error),
    /// A message could not be carried out, and has no negative reply.
    #[error("{message}: {why}")]
    Refused {
        /// The message.
        message: &'static str,
        /// The reason.
        why: String,
    },
    /// A system call failed.
    #[error("cannot wait: {0}")]
    Host(#[source] io::Error),
    /// Writes of the driver did not reach the medium of the device, which keeps it.
    #[error(transparent)]
    NotClosed(CloseError),
    /// A worker has ended, so nothing can be served any more.
    #[error("a worker has ended")]
    Worker,
}

/// The reason for which a server cannot be handed over now. Each is the end of a sentence about its device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    /// The thread of the server has ended.
    #[error("it is not served any more")]
    Ended,
    /// A message of the front-end is still being carried out.
    #[error("its front-end is in the middle of something that takes long: a message, or its end")]
    Busy,
    /// This process does not keep each file of guest memory.
    #[error(
        "its front-end has shared more files than this process keeps open for a device: a larger limit of open files \
         (LimitNOFILE=) lets it keep more"
    )]
    FileNotKept,
    /// A ring has requests that nothing but this process knows of.
    #[error(
        "{requests} of its requests in ring {index} have failed and wait for an operator, and its front-end has given no \
         in-flight buffer that would tell the next process of them"
    )]
    Kept {
        /// The ring.
        index: u16,
        /// The number of requests.
        requests: u16,
    },
    /// A ring is not parked.
    #[error("ring {0} still has requests in flight")]
    RingRuns(u16),
    /// A worker has ended.
    #[error("a worker has ended")]
    Worker,
    /// The state cannot be written.
    #[error("its state cannot be written: {0}")]
    State(#[from] kickless_handover::Error),
    /// A descriptor cannot be duplicated.
    #[error("its descriptors cannot be duplicated: {0}")]
    Descriptor(#[from] io::Error),
}

/// The reason for which this process cannot go on with a server. Each is the end of a sentence about its
/// device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The state is not valid by itself.
    #[error(transparent)]
    State(#[from] kickless_handover::Error),
    /// This process does not accept it. It would refuse the same in a message of a front-end.
    #[error("its session cannot go on here: {0}")]
    Refused(String),
}

impl From<RequestError> for RestoreError {
    fn from(error: RequestError) -> Self {
        Self::Refused(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kickless_memory::{Error, Gpa, Purpose};

    #[test]
    fn a_refused_mapping_says_why() {
        for (purpose, said) in [
            (Purpose::Region(Gpa(16)), "region at 0x10 cannot be mapped: for a reason"),
            (Purpose::Log, "the log cannot be mapped: for a reason"),
            (Purpose::Inflight, "the in-flight buffer cannot be mapped: for a reason"),
        ] {
            let refusal = Error::Mmap { purpose, source: io::Error::other("for a reason") };
            assert_eq!(RequestError::from(refusal).to_string(), said);
        }
    }
}
