//! Translates a chain behind a vIOMMU, in several pops if necessary.
//!
//! A driver can describe 4 GiB in a few descriptors, and each page of them can need a lookup in the table of
//! translations. So:
//!
//! * A chain is read to its end before any of its buffers is translated. A chain that is longer than
//!   [`REQUEST_BYTES_MAX`] is refused then. All of it becomes unmapped, except for the last writable byte,
//!   which the device needs for its status.
//! * One pop translates at most [`LOOKUPS_MAX`] pages or large leaves. Then it reports the chain as
//!   unfinished, and the next pop continues. In between, the worker can serve other queues.
//! * An indirect table is translated once for each pop, whatever the order in which its descriptors are read.
//!   It has at most 257 pages, because an index reaches 1 MiB of it. They do not count for [`LOOKUPS_MAX`].
//! * If translations are missing, the pop looks for further missing ones, so that they are requested
//!   together. After they have come, the next pop continues at the first of them. So each request for
//!   translations causes at most two lookups of a page. The number of lookups for a chain of n pages is
//!   proportional to n, however its misses are spread.
//!
//! # State between two pops
//! The descriptors as they were read, and the translated pieces of the first of them. Both are checked again:
//! * The driver can change the descriptors in the ring. Each pop reads them again. When a pop has read all of
//!   them and they differ from the earlier ones, the translation starts again.
//! * An invalidation or a new view of guest memory can make a piece invalid. Both change [`Tlb::epoch`]
//!   before they are answered ([`Tlb::watch`]), and the next pop starts again. Nothing uses the pieces of a
//!   chain that is not popped, so invalidations do not wait for it.
//! * A driver may make its chain start again and again. It pays for each lookup: see [`Tlb::take_lookups`].

use crate::Buffer;
use crate::chain::BUFFERS_KEPT;
use kickless_memory::{Access, Gpa, Iova, Map, Tlb, Translated, View};

/// Largest number of pieces of a chain: 256 MiB, if no two pages are contiguous in guest memory. The rest of
/// a longer chain becomes unmapped, one piece for each buffer, so that the request fails.
const PIECES_MAX: usize = 1 << 16;

/// Largest number of bytes of a request. 1 GiB is the longest transfer of EDK2's driver (others obey the
/// disk's `seg_max` and `size_max`, which allow 126 MiB). The additional page is for everything that is not
/// data.
const REQUEST_BYTES_MAX: u64 = (1 << 30) + 4096;

/// Largest number of lookups of one pop. They take about 25 microseconds, and are enough for 4 MiB in pages
/// of 4 KiB.
const LOOKUPS_MAX: u32 = 1024;

/// A buffer as a descriptor describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) addr: Iova,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

impl Described {
    fn access(self) -> Access {
        if self.writable { Access::WRITE } else { Access::READ }
    }
}

/// A piece of an indirect table: pages that are contiguous in guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablePiece {
    pub(crate) len: u64,
    /// Offset of its end from the beginning of the table.
    pub(crate) end: u64,
    /// The guest-physical address, or `None` if it is unmapped or its translation is missing.
    pub(crate) to: Option<Gpa>,
}

/// The progress of the translation of one chain.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// The address of this pop's indirect table, and its pieces in order.
    table: (Iova, Vec<TablePiece>),
    described: Vec<Described>,
    /// The descriptors to which `pieces` belong. Later pops may have read others.
    translated: Vec<Described>,
    /// The epoch in which the pieces are valid. `None` if there are no pieces.
    epoch: Option<u64>,
    /// The pieces of all bytes before `position`.
    pieces: Vec<Buffer>,
    /// Number of readable pieces.
    readable: usize,
    position: ChainByte,
    /// Whether this pop has stopped at its limit, with more to translate.
    unfinished: bool,
}

/// A byte of a chain: a descriptor, and an offset in its buffer.
#[derive(Clone, Copy, Debug, Default)]
struct ChainByte {
    at: usize,
    done: u32,
}

impl Progress {
    /// Begins a pop.
    pub(crate) fn begin(&mut self) {
        self.described.clear();
        self.described.shrink_to(BUFFERS_KEPT);
        self.unfinished = false;
    }

    /// Begins an indirect table. Returns the list for its pieces.
    pub(crate) fn table_pieces(&mut self, addr: Iova) -> &mut Vec<TablePiece> {
        self.table.0 = addr;
        self.table.1.clear();
        &mut self.table.1
    }

    /// Copies bytes of the indirect table. Returns whether they are guest memory.
    pub(crate) fn read_table(&self, view: &View, addr: Iova, into: &mut [u8]) -> bool {
        let (start, pieces) = &self.table;
        let Some(mut at) = addr.0.checked_sub(start.0) else { return false };
        let mut done = 0;
        while done < into.len() {
            let piece = pieces.get(pieces.partition_point(|piece| piece.end <= at));
            let Some(&TablePiece { len, end, to: Some(to) }) = piece else { return false };
            // At most the rest of 16 bytes.
            let here = (end - at).min((into.len() - done) as u64) as usize;
            let from = to.checked_add(at - (end - len));
            if from.is_none_or(|from| view.read(from, &mut into[done..done + here]).is_err()) {
                return false;
            }
            at += here as u64;
            done += here;
        }
        true
    }

    /// Adds the next buffer of the chain.
    pub(crate) fn describe(&mut self, described: Described) {
        self.described.push(described);
    }

    /// Returns whether the next pop has to continue with the same chain, although nothing is missing.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Translates the chain, of `len` bytes, into `buffers`, and counts the readable pieces. Stops early at
    /// the limit of one pop.
    pub(crate) fn translate(
        &mut self,
        map: &Map,
        tlb: &mut Tlb,
        len: u64,
        (buffers, readable): (&mut Vec<Buffer>, &mut usize),
    ) {
        if self.epoch != Some(tlb.epoch()) || self.described != self.translated {
            self.pieces.clear();
            self.pieces.shrink_to(BUFFERS_KEPT);
            (self.readable, self.position) = (0, ChainByte::default());
        }
        self.epoch = None;
        if len > REQUEST_BYTES_MAX {
            self.refuse(map, tlb);
        } else if !self.resume(map, tlb) {
            tlb.watch();
            self.epoch = Some(tlb.epoch());
            // The pieces belong to these descriptors. A pop that ends before this line changes neither.
            std::mem::swap(&mut self.described, &mut self.translated);
            self.unfinished = !tlb.is_missing();
            return;
        }
        *readable = self.readable;
        std::mem::swap(buffers, &mut self.pieces);
    }

    /// Continues the translation. Returns whether it reached the end of the chain and nothing is missing.
    fn resume(&mut self, map: &Map, tlb: &mut Tlb) -> bool {
        self.described
            .iter()
            .take(self.position.at)
            .for_each(|passed| tlb.note(passed.addr, passed.len.into()));
        let unmapped = map.unmapped_address();
        let mut position = self.position;
        let mut lookups = 0;
        while let Some(&described) = self.described.get(position.at) {
            let (addr, len) = (described.addr, described.len);
            tlb.note(addr, len.into());
            while position.done < len {
                let rest = len - position.done;
                let (to, bytes) = if self.pieces.len() >= PIECES_MAX {
                    (Translated::Unmapped, rest)
                } else if tlb.is_miss_list_full() || lookups == LOOKUPS_MAX {
                    return false;
                } else if let Some(next) = addr.checked_add(position.done.into()) {
                    lookups += 1;
                    let (to, bytes) = tlb.piece(map, next, described.access());
                    // A piece is at most as long as the buffer.
                    (to, bytes.min(rest.into()) as u32)
                } else {
                    (Translated::Unmapped, rest)
                };
                // After a missing piece, only further missing ones are of interest.
                if !tlb.is_missing() {
                    let to = if let Translated::To(gpa) = to { gpa } else { unmapped };
                    self.add(described, position.done > 0, Buffer { addr: to, len: bytes }, unmapped);
                    self.position = ChainByte { at: position.at, done: position.done + bytes };
                }
                position.done += bytes;
            }
            position = ChainByte { at: position.at + 1, done: 0 };
        }
        !tlb.is_missing()
    }

    /// Adds a piece. Joins it to the last one if it `continues` that one's buffer and follows it in guest
    /// memory.
    fn add(&mut self, described: Described, continues: bool, piece: Buffer, unmapped: Gpa) {
        if let Some(last) = self.pieces.last_mut().filter(|_| continues) {
            let follows = last.addr.checked_add(last.len.into()) == Some(piece.addr);
            if if last.addr == unmapped { piece.addr == unmapped } else { follows && piece.addr != unmapped }
            {
                last.len += piece.len;
                return;
            }
        }
        self.pieces.push(piece);
        self.readable += usize::from(!described.writable);
    }

    /// Makes the chain unmapped, except for its last writable byte.
    fn refuse(&mut self, map: &Map, tlb: &mut Tlb) {
        let unmapped = map.unmapped_address();
        self.pieces.clear();
        self.readable = 0;
        for at in 0..self.described.len() {
            let Described { addr, len, writable } = self.described[at];
            let is_last = writable && at + 1 == self.described.len();
            let body = Buffer { addr: unmapped, len: len - u32::from(is_last) };
            if body.len > 0 {
                self.add(self.described[at], false, body, unmapped);
            }
            if let Some(last) = addr.checked_add(u64::from(len) - 1).filter(|_| is_last) {
                tlb.note(last, 1);
                let (to, _) = tlb.piece(map, last, Access::WRITE);
                let addr = if let Translated::To(gpa) = to { gpa } else { unmapped };
                self.add(self.described[at], false, Buffer { addr, len: 1 }, unmapped);
            }
        }
    }
}
