//! Parses requests. This is pure: it takes a chain and its memory, and returns a request.

use kickless_disk::{Extent, RangeLimits};
use kickless_memory::{Gpa, View};
use kickless_spec::blk::{self, BlkFeatures};
use kickless_virtqueue::{Buffer, Chain};
use zerocopy::{FromBytes, IntoBytes};

/// A well-formed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub kind: Kind,
    /// The address of its status byte.
    pub status: Gpa,
    /// The length of its data in bytes.
    pub data_len: u64,
}

/// The kinds of requests.
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
    /// Apply the operation to the [`extents`] in the readable buffers, after their header.
    Extents(RangeOp),
}

/// The operations on ranges of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeOp {
    /// Discard their data.
    Discard,
    /// Make them read as zeroes.
    WriteZeroes,
}

/// A malformed request, which is answered at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The address of its status byte. `None` if the chain has no writable byte in guest memory.
    pub status: Option<Gpa>,
    /// The status to write, one of `S_*`.
    pub code: u8,
    /// The reason, for the log.
    pub why: &'static str,
}

/// The properties of the disk that the checks need.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The size in bytes, a multiple of 512.
    pub size: u64,
    /// Refuse writes.
    pub read_only: bool,
    /// The negotiated features.
    pub features: BlkFeatures,
}

const SEGMENT_LEN: usize = size_of::<blk::Segment>();
pub(crate) const HEADER_LEN: u64 = size_of::<blk::Header>() as u64;

/// Parses a chain.
///
/// Any layout is valid (virtio 1.3, section 2.7.4): the header is the first 16 readable bytes, the status is
/// the last writable byte, and the data are between them.
///
/// The legacy flag [`T_BARRIER`](blk::T_BARRIER) of the type is ignored, as QEMU does: the feature for it is
/// never offered, but SLOF, the firmware of QEMU's POWER machines, sets it in each request.
///
/// # Errors
/// - Status IOERR: no header, data that are not a multiple of 512 bytes, a range beyond the disk, or a write
///   to a read-only disk.
/// - Status UNSUPP: a request type that is unknown or was not negotiated.
/// - No status: the chain has no status byte and can only be returned.
#[inline(always)]
pub fn parse(chain: &Chain, view: &View, bounds: Bounds) -> Result<Request, Reject> {
    let status = status_of(chain.writable()).filter(|&at| view.contains(at, 1)).ok_or(Reject {
        status: None,
        code: blk::S_IOERR,
        why: "no status byte in guest memory",
    })?;
    let reject = |code, why| Reject { status: Some(status), code, why };
    let Some((header_kind, sector)) = header_of(chain.readable(), view) else {
        return Err(reject(blk::S_IOERR, "no header in guest memory"));
    };
    let readable = chain.readable_len() - HEADER_LEN;
    let writable = chain.writable_len() - 1;
    let (kind, data_len) = match header_kind & !blk::T_BARRIER {
        blk::T_IN => (Kind::Read { offset: 0 }, writable),
        blk::T_OUT if !bounds.read_only => (Kind::Write { offset: 0 }, readable),
        other => {
            let kind = other_kind(other, bounds).map_err(|(code, why)| reject(code, why))?;
            let data_len = match kind {
                Kind::Flush => 0,
                Kind::Extents(_) => readable,
                _ => writable,
            };
            return Ok(Request { kind, status, data_len });
        }
    };
    if !data_len.is_multiple_of(blk::SECTOR_SIZE) {
        return Err(reject(blk::S_IOERR, "data is not a multiple of 512 bytes"));
    }
    let offset = sector.checked_mul(blk::SECTOR_SIZE);
    let Some(offset) = offset.filter(|o| o.checked_add(data_len).is_some_and(|end| end <= bounds.size))
    else {
        return Err(reject(blk::S_IOERR, "range is beyond the disk"));
    };
    let kind = match kind {
        Kind::Read { .. } => Kind::Read { offset },
        _ => Kind::Write { offset },
    };
    Ok(Request { kind, status, data_len })
}

/// Parses a request other than a plain read or write. The error is the status and the reason.
#[inline(never)]
fn other_kind(kind: u32, bounds: Bounds) -> Result<Kind, (u8, &'static str)> {
    let (op, feature) = match kind {
        blk::T_OUT => return Err((blk::S_IOERR, "write to a read-only disk")),
        blk::T_FLUSH | blk::T_FLUSH_OUT => return Ok(Kind::Flush),
        blk::T_GET_ID => return Ok(Kind::GetId),
        blk::T_DISCARD => (RangeOp::Discard, BlkFeatures::DISCARD),
        blk::T_WRITE_ZEROES => (RangeOp::WriteZeroes, BlkFeatures::WRITE_ZEROES),
        _ => return Err((blk::S_UNSUPP, "unknown request type")),
    };
    if bounds.read_only {
        return Err((blk::S_IOERR, "write to a read-only disk"));
    }
    if !bounds.features.contains(feature) {
        return Err((blk::S_UNSUPP, "request type that was not negotiated"));
    }
    Ok(Kind::Extents(op))
}

/// Reads and checks all segments of a request on ranges (virtio 1.3, section 5.2.6.2).
///
/// # Errors
/// - Status UNSUPP: an unknown flag, or `unmap` in a request other than write-zeroes.
/// - Status IOERR: no segment, or part of one; more or longer segments than the configuration space allows; a
///   range beyond the disk.
pub fn extents(
    chain: &Chain,
    view: &View,
    request: &Request,
    op: RangeOp,
    (size, limits): (u64, &RangeLimits),
    into: &mut Vec<Extent>,
) -> Result<(), Reject> {
    let reject = |code, why| Reject { status: Some(request.status), code, why };
    let bytes = usize::try_from(request.data_len).unwrap_or(usize::MAX);
    if bytes == 0 || !bytes.is_multiple_of(SEGMENT_LEN) {
        return Err(reject(blk::S_IOERR, "data is not a whole number of segments"));
    }
    let count = bytes / SEGMENT_LEN;
    if count > limits.ranges_max as usize {
        return Err(reject(blk::S_IOERR, "too many segments"));
    }
    let mut segments = vec![blk::Segment::default(); count];
    let mut rest = segments.as_mut_bytes();
    for (addr, len) in data(chain.readable(), HEADER_LEN, request.data_len) {
        let (here, more) = rest.split_at_mut(len as usize);
        view.read(addr, here).map_err(|_| reject(blk::S_IOERR, "data buffer is not in guest memory"))?;
        rest = more;
    }
    into.reserve_exact(count);
    for segment in &segments {
        into.push(extent(segment, op, size, limits).map_err(|(code, why)| reject(code, why))?);
    }
    Ok(())
}

fn extent(
    segment: &blk::Segment,
    op: RangeOp,
    size: u64,
    limits: &RangeLimits,
) -> Result<Extent, (u8, &'static str)> {
    let (sector, sectors, flags) = (segment.sector.get(), segment.num_sectors.get(), segment.flags.get());
    let unmap = flags & blk::SEGMENT_UNMAP != 0;
    if flags & !blk::SEGMENT_UNMAP != 0 {
        return Err((blk::S_UNSUPP, "unknown flag of a segment"));
    }
    if unmap && op != RangeOp::WriteZeroes {
        return Err((blk::S_UNSUPP, "unmap flag in a request other than write-zeroes"));
    }
    if sectors > limits.sectors_max {
        return Err((blk::S_IOERR, "segment is too long"));
    }
    let len = u64::from(sectors) * blk::SECTOR_SIZE;
    match sector.checked_mul(blk::SECTOR_SIZE) {
        Some(offset) if offset.checked_add(len).is_some_and(|end| end <= size) => {
            Ok(Extent { offset, len, unmap })
        }
        _ => Err((blk::S_IOERR, "range is beyond the disk")),
    }
}

/// Returns the parts of the buffers that hold `len` bytes after the first `skip`.
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
        // `skipped` and `here` are at most the length of the buffer. An address that wraps is outside guest
        // memory, as is u64::MAX.
        Some((buffer.addr.checked_add(skipped).unwrap_or(Gpa(u64::MAX)), here as u32))
    })
}

/// Returns the buffer with the `len` bytes after the first `skip`, if these are the first buffer and the data
/// begin with the next one, as in the requests of all known drivers.
#[inline]
pub(crate) fn data_in_one(buffers: &[Buffer], skip: u64, len: u64) -> Option<(Gpa, u32)> {
    let data = match buffers {
        [data, ..] if skip == 0 => data,
        [skipped, data, ..] if u64::from(skipped.len) == skip => data,
        _ => return None,
    };
    // So `len` fits into 32 bits.
    (len <= u64::from(data.len) && len > 0).then_some((data.addr, len as u32))
}

fn status_of(writable: &[Buffer]) -> Option<Gpa> {
    let last = writable.last()?;
    last.addr.checked_add(u64::from(last.len) - 1)
}

/// Returns the type of the request and its first sector.
#[inline]
fn header_of(readable: &[Buffer], view: &View) -> Option<(u32, u64)> {
    let first = readable.first()?;
    if u64::from(first.len) >= HEADER_LEN {
        // Reads two words instead of a header. A header has no alignment, so the compiler would add copies of
        // its bytes.
        let [kind, sector] = view.read_obj::<[u64; 2]>(first.addr).ok()?.map(u64::from_le);
        return Some((kind as u32, sector));
    }
    header_in_pieces(readable, view).map(|header| (header.kind.get(), header.sector.get()))
}

#[cold]
fn header_in_pieces(readable: &[Buffer], view: &View) -> Option<blk::Header> {
    // The header is split over several buffers. The standard allows that; no known driver does it.
    let mut bytes = [0; HEADER_LEN as usize];
    let mut at = 0;
    for (addr, len) in data(readable, 0, HEADER_LEN) {
        view.read(addr, &mut bytes[at..at + len as usize]).ok()?;
        at += len as usize;
    }
    (at == bytes.len()).then(|| blk::Header::read_from_bytes(bytes.as_bytes()).ok()).flatten()
}
