//! A queue's cache of translations.

use super::table::{self, BITS, LEAF_LEVEL_MAX, Leaf, PAGE_BITS, Table};
use super::{Access, IovaRange};
use crate::{Gpa, Iova, Map, Unmapped, UserAddr};
use std::fmt;
use std::sync::Arc;

/// Pages in the cache: 4 MiB of addresses, in 16 KiB.
const LINES: usize = 1024;
/// Large leaves in the cache, of 2 MiB and of 1 GiB: 128 MiB and 16 GiB of addresses, in 1280 bytes.
const LARGE_LINES: [usize; LEAF_LEVEL_MAX as usize] = [64, 16];
/// Largest number of translations that are requested at a time.
const MISSES_MAX: usize = 256;

/// Generations that a line can tell apart. Generation zero is not used.
const GENERATIONS: u64 = 1024;
const GENERATION_SHIFT: u32 = 2;

/// A cached page or large leaf.
///
/// From bit 12 on, the tag has the number of the page, or of the leaf among leaves of its size. From bit 2 on
/// it has the generation. The lowest bits are the allowed access.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    tag: u64,
    gpa: u64,
}

/// A missing translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Miss {
    /// The page's address.
    pub page: Iova,
    /// The access that is needed.
    pub access: Access,
}

/// The result of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translated {
    /// The guest-physical address.
    To(Gpa),
    /// The address leads out of guest memory, or the front-end has refused to translate it.
    Unmapped,
    /// The translation is not known yet.
    Missing,
}

/// Translates for one queue, and caches the results.
///
/// The cache is emptied by a new generation, which is one store. A small range is dropped line by line.
pub struct Tlb {
    table: Arc<Table>,
    lines: Box<[Line; LINES]>,
    /// Large leaves that one slot holds completely, by level from 1 on. Pages of other leaves are in `lines`.
    large: [Box<[Line]>; LEAF_LEVEL_MAX as usize],
    generation: u64,
    /// See [`Tlb::epoch`].
    epoch: u64,
    /// See [`Tlb::take_lookups`].
    lookups: u32,
    /// Translations that were missing since [`Tlb::begin`]. The list is limited, so more may be missing.
    missing: Vec<Miss>,
    is_missing: bool,
    /// Misses that the front-end has refused.
    refused: Vec<Miss>,
    /// Whether there were more refusals than fit into `refused`. Every miss is refused then.
    all_refused: bool,
    /// The ranges of all lookups since [`Tlb::begin`].
    ranges: Vec<IovaRange>,
    /// See [`Tlb::watch`].
    watched: Vec<IovaRange>,
}

impl fmt::Debug for Tlb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tlb").field("generation", &self.generation).field("missing", &self.missing).finish()
    }
}

impl Tlb {
    /// Makes an empty cache over this table.
    pub fn new(table: Arc<Table>) -> Self {
        Self {
            table,
            lines: Box::new([Line::default(); LINES]),
            large: LARGE_LINES.map(|lines| vec![Line::default(); lines].into()),
            generation: 1,
            epoch: 0,
            lookups: 0,
            missing: Vec::new(),
            is_missing: false,
            refused: Vec::new(),
            all_refused: false,
            ranges: Vec::new(),
            watched: Vec::new(),
        }
    }

    /// Drops all translations, because guest memory has changed.
    pub fn flush(&mut self) {
        self.epoch += 1;
        self.generation += 1;
        if self.generation == GENERATIONS {
            self.generation = 1;
            self.lines.fill(Line::default());
            self.large.iter_mut().for_each(|lines| lines.fill(Line::default()));
        }
    }

    /// Drops the translations of these addresses, and the refusals in this range.
    pub fn drop_range(&mut self, range: IovaRange) {
        if self.watched.iter().any(|watched| watched.overlaps(range)) {
            self.epoch += 1;
        }
        let (first, last) = (range.first().0 >> PAGE_BITS, range.last().0 >> PAGE_BITS);
        if last - first < LINES as u64 / 4 {
            for page in first..=last {
                let line = &mut self.lines[page as usize % LINES];
                if line.tag >> PAGE_BITS == page {
                    *line = Line::default();
                }
            }
            for (level, lines) in (1..).zip(&mut self.large) {
                let number = |page: u64| page >> (BITS * level);
                for line in lines.iter_mut() {
                    if (number(first)..=number(last)).contains(&(line.tag >> PAGE_BITS)) {
                        *line = Line::default();
                    }
                }
            }
        } else {
            self.flush();
        }
        self.refused.retain(|miss| !range.overlaps(IovaRange::new(miss.page, 1 << PAGE_BITS)));
    }

    /// Begins a new request: forgets the misses and ranges of the previous one.
    #[inline]
    pub fn begin(&mut self) {
        self.missing.clear();
        self.is_missing = false;
        self.ranges.clear();
    }

    /// Watches the ranges of all lookups since [`Tlb::begin`]: [`Tlb::epoch`] changes when one of their
    /// translations may become invalid.
    ///
    /// A caller that uses the results of one request for the next needs this.
    pub fn watch(&mut self) {
        self.watched.clear();
        self.watched.extend_from_slice(&self.ranges);
    }

    /// Returns a number that changes when a watched translation ([`Tlb::watch`]) may have become invalid.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of lookups since the last call. Hits in the cache count too.
    #[inline]
    pub fn take_lookups(&mut self) -> u32 {
        std::mem::take(&mut self.lookups)
    }

    /// Returns whether a translation was missing since [`Tlb::begin`].
    #[inline]
    pub fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// Returns whether the list of misses is full, so that no more are added before the front-end has
    /// answered.
    #[inline]
    pub fn is_miss_list_full(&self) -> bool {
        self.missing.len() == MISSES_MAX
    }

    /// Returns the missing translations. The list is limited, so more may be missing.
    pub fn missing(&self) -> &[Miss] {
        &self.missing
    }

    /// Returns the ranges of all lookups since [`Tlb::begin`].
    pub fn ranges(&self) -> &[IovaRange] {
        &self.ranges
    }

    /// Stores that the front-end refuses this translation. The address reads as unmapped until
    /// [`Tlb::clear_refusals`].
    pub fn refuse(&mut self, miss: Miss) {
        if self.refused.contains(&miss) {
            return;
        }
        if self.refused.len() < MISSES_MAX {
            self.refused.push(miss);
        } else {
            // The request fails in any case. It would ask for the rest a few at a time, for a very long time.
            self.all_refused = true;
        }
    }

    /// Forgets all refusals, after the request that needed the translations has failed. A later request asks
    /// again.
    #[inline]
    pub fn clear_refusals(&mut self) {
        if !self.refused.is_empty() {
            self.refused.clear();
        }
        self.all_refused = false;
    }

    /// Translates `len` bytes at `iova`, and calls `each` with the result of each piece, in order. Pieces
    /// that are contiguous in guest memory are joined. A missing piece is added to [`Tlb::missing`] and
    /// reported like the others.
    #[inline]
    pub fn translate(
        &mut self,
        map: &Map,
        iova: Iova,
        len: u64,
        access: Access,
        mut each: impl FnMut(Translated, u64),
    ) {
        self.note(iova, len);
        let (mut start, mut done) = self.piece(map, iova, access);
        // The usual case: all bytes are on one known page.
        if len <= done {
            return each(start, len);
        }
        let mut run = done;
        while done < len {
            let (next, bytes) = match iova.checked_add(done) {
                // The list of misses is full. The rest is looked up after the front-end's answer.
                _ if self.is_miss_list_full() => (Translated::Missing, u64::MAX),
                Some(at) => self.piece(map, at, access),
                None => (Translated::Unmapped, u64::MAX),
            };
            let here = bytes.min(len - done);
            let follows = match (start, next) {
                (Translated::To(start), Translated::To(next)) => next.offset_from(start) == Some(run),
                (Translated::Missing, Translated::Missing) | (Translated::Unmapped, Translated::Unmapped) => {
                    true
                }
                _ => false,
            };
            if follows {
                run += here;
            } else {
                each(start, run);
                (start, run) = (next, here);
            }
            done += here;
        }
        each(start, run);
    }

    /// Returns the front-end's addresses of `len` bytes at `iova`, in as few pieces as possible.
    ///
    /// # Errors
    /// Some translations are missing, or refused.
    pub fn user(
        &mut self,
        iova: Iova,
        len: usize,
        access: Access,
    ) -> Result<Vec<(UserAddr, usize)>, TranslateError> {
        self.note(iova, len as u64);
        let unmapped = Unmapped { addr: iova.0, len: len as u64 };
        let (mut pieces, mut done, mut missing) = (Vec::<(UserAddr, usize)>::new(), 0, false);
        while done < len && !self.is_miss_list_full() {
            let at = iova.0.checked_add(done as u64).ok_or(TranslateError::Unmapped(unmapped))?;
            let (page, offset) = (at >> PAGE_BITS, at & ((1 << PAGE_BITS) - 1));
            let here = (len - done).min((1 << PAGE_BITS) - offset as usize);
            done += here;
            match self.table.get(page) {
                Some(leaf) if Access::from_bits(leaf.access).allows(access) => {
                    let user = UserAddr(leaf.user + offset);
                    match pieces.last_mut() {
                        Some((start, len)) if start.checked_add(*len as u64) == Some(user) => *len += here,
                        _ => pieces.push((user, here)),
                    }
                }
                _ if self.is_refused(page, access) => return Err(TranslateError::Unmapped(unmapped)),
                _ => {
                    missing = true;
                    self.miss(page, access);
                }
            }
        }
        if missing || done < len { Err(TranslateError::Missing) } else { Ok(pieces) }
    }

    /// Translates one address. Returns also how many bytes from there on have the same result: to the end of
    /// a page or of a large leaf.
    ///
    /// A missing translation is added to [`Tlb::missing`]. A caller that uses the result must call
    /// [`Tlb::note`].
    #[inline]
    pub fn piece(&mut self, map: &Map, iova: Iova, access: Access) -> (Translated, u64) {
        self.lookups = self.lookups.wrapping_add(1);
        let offset = iova.0 & ((1 << PAGE_BITS) - 1);
        let page = iova.0 >> PAGE_BITS;
        let line = self.lines[page as usize % LINES];
        if self.is_hit(line, page, access) {
            return (Translated::To(Gpa(line.gpa + offset)), (1 << PAGE_BITS) - offset);
        }
        self.walk(map, iova, access)
    }

    #[inline]
    fn is_hit(&self, line: Line, number: u64, access: Access) -> bool {
        let wanted = self.tag(number, Access::BOTH);
        // All bits of the tag must be equal, except for the access, which must include the wanted one.
        (line.tag ^ wanted) & (!Access::BOTH.bits() | access.bits()) == 0
    }

    #[inline]
    fn tag(&self, number: u64, access: Access) -> u64 {
        number << PAGE_BITS | self.generation << GENERATION_SHIFT | access.bits()
    }

    /// Looks an address up among the large leaves, then in the table.
    #[inline(never)]
    fn walk(&mut self, map: &Map, iova: Iova, access: Access) -> (Translated, u64) {
        let page = iova.0 >> PAGE_BITS;
        let in_page = (1 << PAGE_BITS) - (iova.0 & ((1 << PAGE_BITS) - 1));
        for (level, lines) in (1..).zip(&self.large) {
            let (number, bytes) = (page >> (BITS * level), table::span(level) << PAGE_BITS);
            let line = lines[number as usize % lines.len()];
            if self.is_hit(line, number, access) {
                let offset = iova.0 & (bytes - 1);
                return (Translated::To(Gpa(line.gpa + offset)), bytes - offset);
            }
        }
        if self.is_miss_list_full() {
            return (Translated::Missing, in_page);
        }
        match self.table.find(page) {
            Some((leaf, level)) if Access::from_bits(leaf.access).allows(access) => {
                self.fill(map, iova, leaf, level).unwrap_or((Translated::Unmapped, in_page))
            }
            _ if self.is_refused(page, access) => (Translated::Unmapped, in_page),
            _ => {
                self.miss(page, access);
                (Translated::Missing, in_page)
            }
        }
    }

    /// Fills a line with the leaf over an address: with the whole leaf if one slot holds it, otherwise with
    /// the page. Returns `None` if the leaf leads out of guest memory.
    fn fill(&mut self, map: &Map, iova: Iova, leaf: Leaf, level: u32) -> Option<(Translated, u64)> {
        let page = iova.0 >> PAGE_BITS;
        let whole = table::span(level) << PAGE_BITS;
        let (leaf, level, bytes, gpa) = match map.gpa_of_range(UserAddr(leaf.user), whole) {
            Some(gpa) => (leaf, level, whole, gpa),
            None => {
                let leaf = leaf.offset_by(page & (table::span(level) - 1));
                (leaf, 0, 1 << PAGE_BITS, map.gpa_of_range(UserAddr(leaf.user), 1 << PAGE_BITS)?)
            }
        };
        let number = page >> (BITS * level);
        let line = Line { tag: self.tag(number, Access::from_bits(leaf.access)), gpa: gpa.0 };
        match level.checked_sub(1).and_then(|at| self.large.get_mut(at as usize)) {
            Some(lines) => lines[number as usize % lines.len()] = line,
            None => self.lines[page as usize % LINES] = line,
        }
        let offset = iova.0 & (bytes - 1);
        Some((Translated::To(Gpa(gpa.0 + offset)), bytes - offset))
    }

    fn is_refused(&self, page: u64, access: Access) -> bool {
        self.all_refused || self.refused.contains(&Miss { page: Iova(page << PAGE_BITS), access })
    }

    fn miss(&mut self, page: u64, access: Access) {
        self.is_missing = true;
        let miss = Miss { page: Iova(page << PAGE_BITS), access };
        if !self.missing.contains(&miss) {
            self.missing.push(miss);
        }
    }

    /// Adds these addresses to the ranges of the request: see [`Tlb::ranges`].
    #[inline]
    pub fn note(&mut self, iova: Iova, len: u64) {
        if len == 0 {
            return;
        }
        let range = IovaRange::new(iova, len);
        if let Some(last) = self.ranges.last_mut()
            && let Some(joined) = last.joined(range)
        {
            *last = joined;
            return;
        }
        self.ranges.push(range);
    }
}

/// An error of [`Tlb::user`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TranslateError {
    /// Some of the translations are not known yet.
    #[error("translations are missing")]
    Missing,
    /// The range is not in guest memory.
    #[error(transparent)]
    Unmapped(Unmapped),
}
