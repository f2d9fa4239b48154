//! The constants of the protocol, and the messages of a client.
//!
//! Source: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>, section "Values".

use crate::offload::OffloadKind;
use std::io;

/// `NBDMAGIC`, the first bytes of a server.
pub(super) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: sent by a newstyle server, and before each option of a client.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Sent by an oldstyle server instead.
pub(super) const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Sent before each answer to an option.
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The handshake flag of servers and clients with options.
pub(super) const FIXED_NEWSTYLE: u16 = 1;

pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;

pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_INFO: u32 = 3;
/// An answer with this bit is a refusal.
pub(super) const REP_ERROR: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = REP_ERROR | 1;
pub(super) const REP_ERR_TLS_REQD: u32 = REP_ERROR | 5;
pub(super) const REP_ERR_UNKNOWN: u32 = REP_ERROR | 6;

pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// The transmission flags: the capabilities of an export.
pub(super) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(super) const FLAG_FLUSH: u16 = 1 << 2;
pub(super) const FLAG_FUA: u16 = 1 << 3;
pub(super) const FLAG_TRIM: u16 = 1 << 5;
pub(super) const FLAG_WRITE_ZEROES: u16 = 1 << 6;

pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_TRIM: u16 = 4;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;
const CMD_FLAG_FUA: u16 = 1 << 0;
const CMD_FLAG_NO_HOLE: u16 = 1 << 1;

/// The chunk is the last one of its reply.
pub(super) const CHUNK_DONE: u16 = 1 << 0;
pub(super) const CHUNK_NONE: u16 = 0;
pub(super) const CHUNK_DATA: u16 = 1;
pub(super) const CHUNK_HOLE: u16 = 2;
/// A chunk with this bit is an error.
pub(super) const CHUNK_ERROR: u16 = 1 << 15;

pub(super) const REQUEST_BYTES: usize = 28;

/// The reason why a server cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    #[error("it is not an NBD server: correct the address")]
    NotNbd,
    #[error("it speaks the oldstyle protocol, which has no exports")]
    Oldstyle,
    #[error("it does not know NBD_OPT_GO: use a newer server")]
    Old,
    #[error("it requires TLS, which is not supported")]
    Tls,
    #[error("it has no such export{0}: correct the name (qemu-nbd --list shows them)")]
    NoExport(ServerText),
    #[error("it refuses (error {0}){1}")]
    Refused(u32, ServerText),
    #[error("its block sizes are invalid: {minimum} minimum, {preferred} preferred, {maximum} maximum")]
    BlockSizes { minimum: u32, preferred: u32, maximum: u32 },
    #[error("its export has changed: {0}")]
    Changed(&'static str),
    #[error("it breaks the protocol: {0}")]
    Protocol(&'static str),
    #[error("it takes too long")]
    Slow,
    #[error("it has not done all requests")]
    NotFlushed,
    #[error("it has closed the connection")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl Problem {
    /// Returns whether the server was not reached. All other problems are what it said itself.
    pub(super) fn is_away(&self) -> bool {
        matches!(self, Self::Slow | Self::Closed | Self::Io(_))
    }
}

/// A text of the server about the problem. It can be anything; only the beginning is shown.
#[derive(Debug)]
pub(crate) struct ServerText(String);

impl ServerText {
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self(String::from_utf8_lossy(bytes).chars().take(200).collect())
    }
}

impl std::fmt::Display for ServerText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The quotes escape characters that control a terminal.
        if self.0.is_empty() { Ok(()) } else { write!(f, ", and says {:?}", self.0) }
    }
}

/// Returns the header of a request. The data of a write follow it.
pub(super) fn request(kind: u16, flags: u16, cookie: u64, at: u64, len: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&at.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Returns the command and the flags of an operation.
pub(super) fn command(kind: OffloadKind) -> (u16, u16) {
    let fua = |durable| if durable { CMD_FLAG_FUA } else { 0 };
    match kind {
        OffloadKind::Read => (CMD_READ, 0),
        OffloadKind::Write { durable } => (CMD_WRITE, fua(durable)),
        OffloadKind::Flush => (CMD_FLUSH, 0),
        OffloadKind::Discard { durable } => (CMD_TRIM, fua(durable)),
        OffloadKind::Zeroes { unmap, durable } => {
            (CMD_WRITE_ZEROES, fua(durable) | if unmap { 0 } else { CMD_FLAG_NO_HOLE })
        }
    }
}
