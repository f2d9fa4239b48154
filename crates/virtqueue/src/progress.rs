//! The translation of a chain behind a vIOMMU, over several pops if need be.
//!
//! A driver can describe 4 GiB in a few descriptors, and each page of them can take a look at the table of translations. So:
//!
//! * A chain is read to its end before any of its buffers is translated. One that is longer than a request can be
//!   ([`REQUEST_BYTES_MAX`]) is refused there: all of it leads nowhere but the last writable byte, where a device puts its
//!   status.
//! * One pop translates at most [`LOOKUPS_MAX`] pages or large leaves. Then it says that the chain is unfinished, and the
//!   next pop goes on. In between, the worker can serve others.
//! * An indirect table is translated once for each pop, whatever the order in which its descriptors are read: at most 257 pages,
//!   for an index reaches 1 MiB of it. Those are beside [`LOOKUPS_MAX`].
//! * Where translations are missing, the pop goes on to look for more that are missing, so that they are asked for together.
//!   When they have come, the next pop goes on at the first of them. So a page is looked for at most twice for each time
//!   that translations are asked for after it was passed, and a chain of n pages takes a number of looks proportional to n,
//!   however its misses are spread.
//!
//! # What is kept from one pop to the next
//! The descriptors as they were read, and the pieces that came of the first of them. Neither is trusted blindly:
//! * The driver can change the descriptors in the ring in between. Each pop reads them again, and the first that reads
//!   all of them begins anew unless they are the same.
//! * An invalidation, or another view of guest memory, can make a piece untrue. Both change [`Tlb::epoch`] before they are
//!   answered ([`Tlb::watch`]), and the next pop begins anew. Until a chain is popped, nothing uses its pieces, so no invalidation waits for it.
//! * A driver that has its chain begin anew again and again pays for each look: see [`Tlb::take_lookups`].

use crate::Buffer;
use crate::chain::BUFFERS_KEPT;
use kickless_memory::{Access, Gpa, Iova, Map, Tlb, Translated, View};

/// Pieces of a chain that are told apart: 256 MiB, if no two pages follow one another in guest memory. What comes after them leads
/// nowhere, so that the request fails; each buffer is one piece more then.
const PIECES_MAX: usize = 1 << 16;

/// Bytes of a request, at most: a transfer of 1 GiB, the most that EDK2's driver makes of one (others keep to the disk's `seg_max` and
/// `size_max`, which come to 126 MiB), and a page for all that is not data.
const REQUEST_BYTES_MAX: u64 = (1 << 30) + 4096;

/// Translations that one pop looks for: some 25 microseconds, and enough for 4 MiB in pages of 4 KiB.
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

/// A piece of an indirect table: what its pages that follow one another lead to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablePiece {
    pub(crate) len: u64,
    /// Its end, from the beginning of the table.
    pub(crate) end: u64,
    /// `None`: it leads nowhere, or its translation is missing.
    pub(crate) to: Option<Gpa>,
}

/// How far the translation of a chain has come.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Where the indirect table of this pop begins, and its pieces in order.
    table: (Iova, Vec<TablePiece>),
    described: Vec<Described>,
    /// The descriptors that the pieces came of, whatever pops have read since.
    translated: Vec<Described>,
    /// When the pieces were true. `None`: there are none.
    epoch: Option<u64>,
    /// What the descriptors before `place` have come to, and the first bytes of that one.
    pieces: Vec<Buffer>,
    /// How many of them are readable.
    readable: usize,
    place: Place,
    /// There is more to translate than one pop does.
    unfinished: bool,
}

/// A byte of a chain: of which descriptor, and which of its bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
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

    /// Begins an indirect table. Its pieces are to be added.
    #[inline]
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
            // No more than the rest of 16 bytes.
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

    /// Takes in the next buffer of the chain.
    #[inline]
    pub(crate) fn describe(&mut self, described: Described) {
        self.described.push(described);
    }

    /// Whether the next pop is to go on with the same chain, though nothing is missing.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Translates the chain, of `len` bytes, into `buffers`, and counts the readable pieces; or as much of it as one pop may.
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
            (self.readable, self.place) = (0, Place::default());
        }
        self.epoch = None;
        if len > REQUEST_BYTES_MAX {
            self.refuse(map, tlb);
        } else if !self.go_on(map, tlb) {
            tlb.watch();
            self.epoch = Some(tlb.epoch());
            // What is kept belongs to these. A pop that does not come this far changes none of it.
            std::mem::swap(&mut self.described, &mut self.translated);
            self.unfinished = !tlb.is_missing();
            return;
        }
        *readable = self.readable;
        std::mem::swap(buffers, &mut self.pieces);
    }

    /// Goes on with the translation. Whether it came to the end of the chain with nothing missing.
    fn go_on(&mut self, map: &Map, tlb: &mut Tlb) -> bool {
        self.described.iter().take(self.place.at).for_each(|passed| tlb.note(passed.addr, passed.len.into()));
        let nowhere = map.unmapped_address();
        let mut place = self.place;
        let mut looks = 0;
        while let Some(&described) = self.described.get(place.at) {
            let (addr, len) = (described.addr, described.len);
            tlb.note(addr, len.into());
            while place.done < len {
                let rest = len - place.done;
                let (to, bytes) = if self.pieces.len() >= PIECES_MAX {
                    (Translated::Unmapped, rest)
                } else if tlb.is_miss_list_full() || looks == LOOKUPS_MAX {
                    return false;
                } else if let Some(next) = addr.checked_add(place.done.into()) {
                    looks += 1;
                    let (to, bytes) = tlb.piece(map, next, described.access());
                    // A piece is no longer than the buffer.
                    (to, bytes.min(rest.into()) as u32)
                } else {
                    (Translated::Unmapped, rest)
                };
                // After one that is missing, only others that are missing are of interest.
                if !tlb.is_missing() {
                    let to = if let Translated::To(gpa) = to { gpa } else { nowhere };
                    self.add(described, place.done > 0, Buffer { addr: to, len: bytes }, nowhere);
                    self.place = Place { at: place.at, done: place.done + bytes };
                }
                place.done += bytes;
            }
            place = Place { at: place.at + 1, done: 0 };
        }
        !tlb.is_missing()
    }

    /// Adds a piece, to the last one if it `continues` its buffer and follows it in guest memory.
    fn add(&mut self, described: Described, continues: bool, piece: Buffer, nowhere: Gpa) {
        if let Some(last) = self.pieces.last_mut().filter(|_| continues) {
            let follows = last.addr.checked_add(last.len.into()) == Some(piece.addr);
            if if last.addr == nowhere { piece.addr == nowhere } else { follows && piece.addr != nowhere } {
                last.len += piece.len;
                return;
            }
        }
        self.pieces.push(piece);
        self.readable += usize::from(!described.writable);
    }

    /// Has the chain lead nowhere but for its last writable byte.
    fn refuse(&mut self, map: &Map, tlb: &mut Tlb) {
        let nowhere = map.unmapped_address();
        self.pieces.clear();
        self.readable = 0;
        for at in 0..self.described.len() {
            let Described { addr, len, writable } = self.described[at];
            let is_last = writable && at + 1 == self.described.len();
            let body = Buffer { addr: nowhere, len: len - u32::from(is_last) };
            if body.len > 0 {
                self.add(self.described[at], false, body, nowhere);
            }
            if let Some(last) = addr.checked_add(u64::from(len) - 1).filter(|_| is_last) {
                tlb.note(last, 1);
                let (to, _) = tlb.piece(map, last, Access::WRITE);
                let addr = if let Translated::To(gpa) = to { gpa } else { nowhere };
                self.add(self.described[at], false, Buffer { addr, len: 1 }, nowhere);
            }
        }
    }
}
