//! What a chain asks for. Pure: a chain and its memory in, a request out.

use kickless_memory::{Gpa, View};
use kickless_spec::blk;
use kickless_virtqueue::{Buffer, Chain};
use zerocopy::{FromBytes, IntoBytes};

/// A request that can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub kind: Kind,
    /// Where its status byte goes.
    pub status: Gpa,
    /// Bytes of its data.
    pub data_len: u64,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read `data_len` bytes at this byte offset into the writable buffers.
    Read {
        /// In bytes; a multiple of 512.
        offset: u64,
    },
    /// Write `data_len` bytes from the readable buffers, after their header, to this byte offset.
    Write {
        /// In bytes; a multiple of 512.
        offset: u64,
    },
    /// Make completed writes durable.
    Flush,
    /// Write the identity string into the writable buffers.
    GetId,
}

/// A request that is answered at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Where its status byte goes; `None` where the chain has no writable byte in guest memory.
    pub status: Option<Gpa>,
    /// `S_*`.
    pub code: u8,
    /// What was wrong with it, for the log.
    pub why: &'static str,
}

/// The disk as the checks see it.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Size in bytes; a multiple of 512.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
}

const HEADER_LEN: u64 = size_of::<blk::Header>() as u64;

/// Understands a chain. Any layout will do (virtio 1.3, section 2.7.4): the header is the first 16 readable bytes, the
/// status is the last writable byte, and the data lies between them.
///
/// # Errors
/// Status IOERR: no header, data not a multiple of 512 bytes, a range that leaves the disk, a write to a read-only disk.
/// Status UNSUPP: an unknown request type. Without a status byte nothing can be answered, and the chain is only returned.
pub fn parse(chain: &Chain, view: &View, bounds: Bounds) -> Result<Request, Reject> {
    let status = status_of(chain.writable()).filter(|&at| view.contains(at, 1)).ok_or(Reject {
        status: None,
        code: blk::S_IOERR,
        why: "no status byte in guest memory",
    })?;
    let reject = |code, why| Reject { status: Some(status), code, why };
    let header =
        header_of(chain.readable(), view).ok_or_else(|| reject(blk::S_IOERR, "no header in guest memory"))?;
    let readable = chain.readable_len() - HEADER_LEN;
    let writable = chain.writable_len() - 1;
    let (kind, data_len) = match header.kind.get() {
        blk::T_IN => (Kind::Read { offset: 0 }, writable),
        blk::T_OUT if bounds.read_only => return Err(reject(blk::S_IOERR, "write to a read-only disk")),
        blk::T_OUT => (Kind::Write { offset: 0 }, readable),
        blk::T_FLUSH => return Ok(Request { kind: Kind::Flush, status, data_len: 0 }),
        blk::T_GET_ID => return Ok(Request { kind: Kind::GetId, status, data_len: writable }),
        _ => return Err(reject(blk::S_UNSUPP, "unknown request type")),
    };
    if !data_len.is_multiple_of(blk::SECTOR_SIZE) {
        return Err(reject(blk::S_IOERR, "data is no multiple of 512 bytes"));
    }
    let offset = header.sector.get().checked_mul(blk::SECTOR_SIZE);
    let Some(offset) = offset.filter(|o| o.checked_add(data_len).is_some_and(|end| end <= bounds.size))
    else {
        return Err(reject(blk::S_IOERR, "range is not on the disk"));
    };
    let kind = match kind {
        Kind::Read { .. } => Kind::Read { offset },
        _ => Kind::Write { offset },
    };
    Ok(Request { kind, status, data_len })
}

/// The buffers that hold `len` bytes after `skip`, cut to size.
pub(crate) fn data(buffers: &[Buffer], skip: u64, len: u64) -> impl Iterator<Item = (Gpa, u32)> + '_ {
    let (mut skip, mut left) = (skip, len);
    buffers.iter().map_while(move |buffer| {
        if left == 0 {
            return None;
        }
        let skipped = skip.min(buffer.len.into());
        skip -= skipped;
        let here = (u64::from(buffer.len) - skipped).min(left);
        left -= here;
        // Both are at most the buffer's length. An address that wraps is in no guest memory; u64::MAX says so too.
        Some((buffer.addr.checked_add(skipped).unwrap_or(Gpa(u64::MAX)), here as u32))
    })
}

/// Bytes before the data: the header of a write, nothing of a read.
pub(crate) fn data_start(kind: Kind) -> u64 {
    if matches!(kind, Kind::Write { .. }) { HEADER_LEN } else { 0 }
}

fn status_of(writable: &[Buffer]) -> Option<Gpa> {
    let last = writable.last()?;
    last.addr.checked_add(u64::from(last.len) - 1)
}

fn header_of(readable: &[Buffer], view: &View) -> Option<blk::Header> {
    let first = readable.first()?;
    if u64::from(first.len) >= HEADER_LEN {
        return view.read_obj(first.addr).ok();
    }
    // Spread over several buffers: legal, and no driver in use does it.
    let mut bytes = [0; HEADER_LEN as usize];
    let mut at = 0;
    for (addr, len) in data(readable, 0, HEADER_LEN) {
        view.read(addr, &mut bytes[at..at + len as usize]).ok()?;
        at += len as usize;
    }
    (at == bytes.len()).then(|| blk::Header::read_from_bytes(bytes.as_bytes()).ok()).flatten()
}
