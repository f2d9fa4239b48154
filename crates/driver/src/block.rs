//! The shared memory of each id of a queue, besides the rings: a header and a status, a range, and an
//! indirect table.
//!
//! Header and status are a block of one cache line. Both sides write one block for each request, so no two
//! requests share a line. All blocks are adjacent: they are on few pages.

use std::mem::offset_of;

use kickless_memory::Area;
use kickless_spec::blk::{Header, SECTOR_SIZE};
use kickless_virtqueue::driver::{Buffer, Completer, Table};
use zerocopy::{Immutable, IntoBytes};

use crate::buffer::Buffer as Piece;
use crate::limits::{Limits, PIECES_MAX};
use crate::request::{Kind, Request};

/// The distance between two blocks in bytes.
const STRIDE: usize = 64;
/// The largest number of descriptors in a chain: data, header and status.
const CHAIN_MAX: usize = PIECES_MAX + 2;
const HEADER_LEN: u32 = 16;
const STATUS: usize = offset_of!(Block, status);
const RANGE_LEN: usize = 16;
const TABLE_LEN: usize = 16 * CHAIN_MAX;
/// The value of a status before the device writes it.
const NO_STATUS: u8 = 0xff;
/// The flag of write-zeroes that allows the disk to free the space.
const UNMAP: u32 = 1;

/// The number of completions whose blocks are prefetched. A line of another processor takes as long as three
/// completions, or eight if the two processors share no cache: 8 instead of 2 made 1.08 times as many
/// requests there.
const PREFETCH: u16 = 8;

/// The content of a block.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct Block {
    header: Header,
    status: u8,
}

/// The blocks of a queue.
#[derive(Debug)]
pub(crate) struct Blocks {
    area: Area,
    /// The device's address of the first block.
    addr: u64,
    /// The offset of the ranges after the blocks, and of the tables after the ranges.
    ranges: usize,
    tables: usize,
}

/// The chain of a request.
pub(crate) struct Chain {
    buffers: [Buffer; CHAIN_MAX],
    len: usize,
}

impl Chain {
    pub(crate) const fn new() -> Self {
        Self { buffers: [Buffer { addr: 0, len: 0, writable: false }; CHAIN_MAX], len: 0 }
    }

    #[inline]
    fn push(&mut self, addr: u64, len: u32, writable: bool) {
        if let Some(buffer) = self.buffers.get_mut(self.len) {
            *buffer = Buffer { addr, len, writable };
            self.len += 1;
        }
    }

    #[inline]
    pub(crate) fn buffers(&self) -> &[Buffer] {
        self.buffers.get(..self.len).unwrap_or_default()
    }
}

impl Blocks {
    /// Returns the number of bytes for the blocks of a queue of this size.
    pub(crate) fn len(size: u16) -> usize {
        usize::from(size) * (STRIDE + RANGE_LEN + TABLE_LEN)
    }

    /// Makes the blocks of a queue of this size. `area` has [`Blocks::len`] bytes and begins at the device's
    /// address `addr`.
    pub(crate) fn new(area: Area, addr: u64, size: u16) -> Self {
        let ranges = usize::from(size) * STRIDE;
        let tables = ranges + usize::from(size) * RANGE_LEN;
        Self { area, addr, ranges, tables }
    }

    /// Returns the memory for the indirect table of `id`.
    #[inline]
    pub(crate) fn table(&self, id: u16) -> Table<'_> {
        let offset = self.tables + usize::from(id) * TABLE_LEN;
        Table { area: &self.area, offset, addr: self.addr + offset as u64 }
    }

    /// Does the same as [`Blocks::write_request`] for a read or write of one piece of memory, the usual
    /// request ([`Limits::plain_piece`]). Returns its chain.
    #[inline]
    pub(crate) fn write_plain(&self, id: u16, request: &Request, piece: &Piece) -> [Buffer; 3] {
        let at = self.write_header(id, request.kind, request.offset / SECTOR_SIZE);
        [
            Buffer { addr: at, len: HEADER_LEN, writable: false },
            Buffer { addr: piece.addr(), len: piece.len() as u32, writable: request.kind.device_writes() },
            Buffer { addr: at + STATUS as u64, len: 1, writable: true },
        ]
    }

    /// Writes a header, and a status value that no correct device writes. Returns the device's address of the
    /// block.
    #[inline]
    fn write_header(&self, id: u16, kind: Kind, sector: u64) -> u64 {
        let at = usize::from(id) * STRIDE;
        let header = Header { kind: kind.code().into(), reserved: 0.into(), sector: sector.into() };
        self.area.write(at, &Block { header, status: NO_STATUS });
        self.addr + at as u64
    }

    /// Writes the header and the range of a checked request, and makes its chain.
    #[inline]
    pub(crate) fn write_request(&self, id: u16, request: &Request, limits: &Limits, chain: &mut Chain) {
        let on_range = matches!(request.kind, Kind::Discard | Kind::WriteZeroes);
        let sector = if on_range { 0 } else { request.offset / SECTOR_SIZE };
        let addr = self.write_header(id, request.kind, sector);
        chain.len = 0;
        chain.push(addr, HEADER_LEN, false);
        if on_range {
            let sectors = u32::try_from(request.range.len / SECTOR_SIZE).unwrap_or(u32::MAX);
            let flags = if request.range.unmap { UNMAP } else { 0 };
            let at = self.ranges + usize::from(id) * RANGE_LEN;
            self.area.write(at, &(request.offset / SECTOR_SIZE).to_le_bytes());
            self.area.write(at + 8, &sectors.to_le_bytes());
            self.area.write(at + 12, &flags.to_le_bytes());
            chain.push(self.addr + at as u64, RANGE_LEN as u32, false);
        }
        let writable = request.kind.device_writes();
        for buffer in request.data.pieces() {
            let (mut addr, mut left) = (buffer.addr(), buffer.len() as u32);
            while left > limits.piece_len_max {
                chain.push(addr, limits.piece_len_max, writable);
                addr += u64::from(limits.piece_len_max);
                left -= limits.piece_len_max;
            }
            chain.push(addr, left, writable);
        }
        chain.push(addr + STATUS as u64, 1, true);
    }

    /// Prefetches the block of `id`, which can be any number. The next request with this id writes to it.
    #[inline]
    pub(crate) fn prefetch(&self, id: u16) {
        // Behind the blocks are ranges and tables, where a prefetch does no harm.
        self.area.prefetch_for_write(usize::from(id) * STRIDE);
    }

    /// Prefetches the block of the completion that is [`PREFETCH`] pops ahead, or at the first of a batch
    /// those up to it.
    #[inline]
    pub(crate) fn prefetch_later(&self, completer: &Completer, is_first: bool) {
        if is_first {
            self.prefetch_first(completer);
        } else if let Some(id) = completer.later_id(PREFETCH) {
            self.prefetch(id);
        }
    }

    #[inline(never)]
    fn prefetch_first(&self, completer: &Completer) {
        for id in (1..=PREFETCH).map_while(|pops| completer.later_id(pops)) {
            self.prefetch(id);
        }
    }

    /// Returns the status that the device wrote, or `None` if it wrote none.
    #[inline]
    pub(crate) fn status(&self, id: u16) -> Option<u8> {
        let status = self.area.read::<u8>(usize::from(id) * STRIDE + STATUS);
        (status != NO_STATUS).then_some(status)
    }
}
