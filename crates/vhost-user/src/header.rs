//! The head of a message.

use kickless_spec::vhost_user::{self as wire, FLAG_NEED_REPLY, FLAG_REPLY, VERSION};
use zerocopy::IntoBytes;

/// Bytes of a header.
pub const HEADER_SIZE: usize = size_of::<wire::Header>();

/// Longest payload in bytes that is received or sent. The longest message of the protocol, the reply to
/// GET_SHMEM_CONFIG, has 2056 bytes.
pub const PAYLOAD_MAX: usize = 4096;

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The request's number. It may be unknown to this crate.
    pub request: u32,
    /// The flags as received.
    pub flags: u32,
    /// Bytes of payload, at most [`PAYLOAD_MAX`].
    pub size: u32,
}

impl Header {
    /// Makes the head of a request.
    pub fn request(request: u32, need_reply: bool, size: usize) -> Self {
        let flags = VERSION | if need_reply { FLAG_NEED_REPLY } else { 0 };
        Self { request, flags, size: u32::try_from(size).unwrap_or(u32::MAX) }
    }

    /// Makes the head of a reply.
    pub fn reply(request: u32, size: usize) -> Self {
        Self { request, flags: VERSION | FLAG_REPLY, size: u32::try_from(size).unwrap_or(u32::MAX) }
    }

    /// Returns whether the sender set NEED_REPLY. With REPLY_ACK negotiated, it waits for an acknowledgement.
    pub fn needs_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// Returns whether the message is a reply.
    pub fn is_reply(&self) -> bool {
        self.flags & FLAG_REPLY != 0
    }

    /// Returns the bytes on the wire.
    pub fn to_bytes(&self) -> [u8; HEADER_SIZE] {
        let wire =
            wire::Header { request: self.request.into(), flags: self.flags.into(), size: self.size.into() };
        let mut bytes = [0; HEADER_SIZE];
        bytes.copy_from_slice(wire.as_bytes());
        bytes
    }
}
