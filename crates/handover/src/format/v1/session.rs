//! A session: the connection to a front-end, and all that it has set.

use crate::error::Error;
use crate::format::v1::ring::Ring;
use crate::parts::{Fd, Span};
use serde::{Deserialize, Serialize};

/// A parked session, between two messages of its front-end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Session {
    /// The connection. The bytes that wait in it stay there.
    pub connection: Fd,
    /// The message of which a part has arrived.
    pub half_message: Option<HalfMessage>,
    /// The negotiated feature bits.
    pub features: u64,
    /// The front-end has set them.
    pub features_set: bool,
    /// The negotiated protocol features.
    pub protocol_features: u64,
    /// The files of guest memory, each once.
    pub files: Vec<Fd>,
    /// The regions of guest memory.
    pub regions: Vec<Region>,
    /// The log of SET_LOG_BASE.
    pub log: Option<Log>,
    /// Writes are logged (VHOST_F_LOG_ALL).
    pub logs: bool,
    /// The descriptor that is signalled when pages were marked.
    pub logged: Option<Fd>,
    /// The in-flight buffer of the front-end.
    pub inflight: Option<Inflight>,
    /// The in-flight buffer of the process itself, which names the requests that a stopped disk keeps.
    pub own_inflight: Option<Inflight>,
    /// The channel for messages to the front-end.
    pub backend_channel: Option<BackendChannel>,
    /// The rings, by ascending number.
    pub rings: Vec<Ring>,
}

/// The part of a message that has arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HalfMessage {
    /// Its bytes.
    pub bytes: Span,
    /// Its descriptors.
    pub descriptors: Vec<Fd>,
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// The guest's physical address.
    pub gpa: u64,
    /// The front-end's address.
    pub user: u64,
    /// The length in bytes.
    pub len: u64,
    /// The position in [`Session::files`].
    pub file: u16,
    /// The offset in this file.
    pub offset: u64,
}

/// The log of written pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// Its file.
    pub file: Fd,
    /// The offset in the file.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// An in-flight buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inflight {
    /// Its file.
    pub file: Fd,
    /// The offset in the file.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
    /// The number of rings.
    pub queues: u16,
    /// The number of entries of each.
    pub queue_size: u16,
}

/// The channel for messages to the front-end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendChannel {
    /// Its socket.
    pub socket: Fd,
    /// The reply of which a part has arrived.
    pub half_reply: Option<HalfMessage>,
}

/// Describes a session at its park.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionFinal {
    /// The misses that wait for replies, in this order.
    pub awaiting: Vec<Miss>,
    /// The number of replies that have come and are not handled yet. They belong to the first misses.
    pub replies: u32,
    /// The configuration space has changed, and the front-end was not told yet.
    pub config_changed: bool,
    /// A ring ran at the last check for such a change.
    pub was_running: bool,
    /// The session knows the driver.
    pub driver_known: bool,
    /// The front-end seems to have a new driver.
    pub expects_new_driver: bool,
    /// The device is open.
    pub is_open: bool,
    /// The device was closed, and not opened since.
    pub has_closed: bool,
    /// The result of the last transfer of a device's state, until the front-end asks for it.
    pub transferred: Option<bool>,
}

/// A translation that the front-end was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Miss {
    /// The address of the page.
    pub page: u64,
    /// The access that is needed.
    pub access: Access,
}

/// An access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Both.
    ReadWrite,
}

/// Checks that a range is not empty and ends within 64 bits.
pub(super) fn check_range(field: &'static str, start: u64, len: u64) -> Result<(), Error> {
    match len > 0 && start.checked_add(len).is_some() {
        true => Ok(()),
        false => Err(Error::field(field, format!("{len} bytes from {start:#x}"))),
    }
}

impl Session {
    pub(super) fn check(&self) -> Result<(), Error> {
        for region in &self.regions {
            check_range("region of memory", region.gpa, region.len)?;
            check_range("region of memory", region.user, region.len)?;
            check_range("region of memory", region.offset, region.len)?;
            if usize::from(region.file) >= self.files.len() {
                return Err(Error::field("file of a region", region.file));
            }
        }
        let is_used = |file: usize| self.regions.iter().any(|region| usize::from(region.file) == file);
        if let Some(unused) = (0..self.files.len()).find(|file| !is_used(*file)) {
            return Err(Error::field("file without a region", unused));
        }
        self.log.map_or(Ok(()), |log| check_range("log", log.offset, log.len))?;
        for buffer in [self.inflight, self.own_inflight].into_iter().flatten() {
            check_range("in-flight buffer", buffer.offset, buffer.len)?;
        }
        if let Some(pair) = self.rings.windows(2).find(|pair| pair[0].index >= pair[1].index) {
            return Err(Error::field("order of rings", pair[1].index));
        }
        self.rings.iter().try_for_each(Ring::check)
    }
}

impl SessionFinal {
    pub(super) fn check(&self) -> Result<(), Error> {
        match usize::try_from(self.replies).is_ok_and(|replies| replies <= self.awaiting.len()) {
            true => Ok(()),
            false => Err(Error::field("number of replies", self.replies)),
        }
    }
}
