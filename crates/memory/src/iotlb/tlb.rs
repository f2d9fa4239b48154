//! A queue's own cache of translations.

use super::table::{self, BITS, LEAF_LEVEL_MAX, Leaf, PAGE_BITS, Table};
use super::{Access, IovaRange};
use crate::{Gpa, Iova, Map, Unmapped, UserAddr};
use std::fmt;
use std::sync::Arc;

/// Pages that a cache holds: 4 MiB of them, in 16 KiB.
const LINES: usize = 1024;
/// Large leaves that a cache holds, of 2 MiB and of 1 GiB: 128 MiB and 16 GiB of them, in 1280 bytes.
const LARGE_LINES: [usize; LEAF_LEVEL_MAX as usize] = [64, 16];
/// So many translations are asked for at a time.
const MISSES_MAX: usize = 256;

/// Generations that a line can tell apart. Zero is none.
const GENERATIONS: u64 = 1024;
const GENERATION_SHIFT: u32 = 2;

/// One page, or one large leaf. Its tag is the number of the page, or of the leaf among those of its size, from bit 12 on, then the
/// generation (from bit 2 on), and what may be done there.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    tag: u64,
    gpa: u64,
}

/// A translation that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Miss {
    /// The page's address.
    pub page: Iova,
    /// What is to be done there.
    pub access: Access,
}

/// What became of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Translated {
    /// It leads there.
    To(Gpa),
    /// It leads out of guest memory, or the front-end has said that it leads nowhere.
    Nowhere,
    /// Nothing is known.
    Missing,
}

/// Translates for one queue, and keeps what it found.
///
/// It is emptied by a new generation, in one store, and where little is to go, line by line.
pub struct Tlb {
    table: Arc<Table>,
    lines: Box<[Line; LINES]>,
    /// By level, from 1 on. Leaves that one slot holds whole; of others, the pages are in `lines`.
    large: [Box<[Line]>; LEAF_LEVEL_MAX as usize],
    generation: u64,
    /// See [`Tlb::epoch`].
    epoch: u64,
    /// See [`Tlb::take_lookups`].
    lookups: u32,
    /// What was not there since [`Tlb::begin`]; there may be more than these.
    missing: Vec<Miss>,
    is_missing: bool,
    /// What the front-end does not know either.
    refused: Vec<Miss>,
    /// It was more than that: whatever is missing is refused.
    all_refused: bool,
    /// What was asked for since [`Tlb::begin`].
    ranges: Vec<IovaRange>,
    /// See [`Tlb::keep`].
    kept: Vec<IovaRange>,
}

impl fmt::Debug for Tlb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tlb").field("generation", &self.generation).field("missing", &self.missing).finish()
    }
}

impl Tlb {
    /// An empty one over this table.
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
            kept: Vec::new(),
        }
    }

    /// Forgets all it has kept, for the memory behind it has changed.
    pub fn flush(&mut self) {
        self.epoch += 1;
        self.generation += 1;
        if self.generation == GENERATIONS {
            self.generation = 1;
            self.lines.fill(Line::default());
            self.large.iter_mut().for_each(|lines| lines.fill(Line::default()));
        }
    }

    /// Forgets what it has kept of these addresses, and that any of them were refused.
    pub fn drop_range(&mut self, range: IovaRange) {
        if self.kept.iter().any(|kept| kept.overlaps(range)) {
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

    /// Begins with another request: nothing is missing, nothing in use.
    #[inline]
    pub fn begin(&mut self) {
        self.missing.clear();
        self.is_missing = false;
        self.ranges.clear();
    }

    /// Has [`Tlb::epoch`] change when a translation may cease to be true that was asked for since [`Tlb::begin`]. Whoever keeps what
    /// came of them from one request to the next says so by this.
    pub fn keep(&mut self) {
        self.kept.clear();
        self.kept.extend_from_slice(&self.ranges);
    }

    /// Returns a number that changes when a translation that was kept ([`Tlb::keep`]) may have ceased to be true.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns how many translations were looked for since this was called last. A page or leaf that is in the cache counts too.
    #[inline]
    pub fn take_lookups(&mut self) -> u32 {
        std::mem::take(&mut self.lookups)
    }

    /// Whether something was missing since then.
    #[inline]
    pub fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// Whether so much was missing that no more is asked for before that has come.
    #[inline]
    pub fn lacks_enough(&self) -> bool {
        self.missing.len() == MISSES_MAX
    }

    /// What was missing: not all of it, if it was much.
    pub fn missing(&self) -> &[Miss] {
        &self.missing
    }

    /// All that was asked for since then.
    pub fn ranges(&self) -> &[IovaRange] {
        &self.ranges
    }

    /// The front-end has no such translation. Until [`Tlb::accept_refusals`] it leads nowhere.
    pub fn refuse(&mut self, miss: Miss) {
        if self.refused.contains(&miss) {
            return;
        }
        if self.refused.len() < MISSES_MAX {
            self.refused.push(miss);
        } else {
            // The request fails in any case; to ask for the rest, a few at a time, would have no end.
            self.all_refused = true;
        }
    }

    /// Who wanted the refused translations has had its answer; the next one asks again.
    #[inline]
    pub fn accept_refusals(&mut self) {
        if !self.refused.is_empty() {
            self.refused.clear();
        }
        self.all_refused = false;
    }

    /// Translates `len` bytes at `iova`, and calls `each` with what each piece leads to, in order; pieces that follow one another in
    /// guest memory are one. What is missing is kept in mind, and is a piece like the others.
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
        // The usual case: all on a page that is known.
        if len <= done {
            return each(start, len);
        }
        let mut run = done;
        while done < len {
            let (next, bytes) = match iova.checked_add(done) {
                // The rest is looked at when what is missing has come.
                _ if self.lacks_enough() => (Translated::Missing, u64::MAX),
                Some(at) => self.piece(map, at, access),
                None => (Translated::Nowhere, u64::MAX),
            };
            let here = bytes.min(len - done);
            let follows = match (start, next) {
                (Translated::To(start), Translated::To(next)) => next.offset_from(start) == Some(run),
                (Translated::Missing, Translated::Missing) | (Translated::Nowhere, Translated::Nowhere) => {
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

    /// The front-end's addresses of `len` bytes at `iova`, in as few pieces as can be.
    ///
    /// # Errors
    /// Some are missing, or are nowhere.
    pub fn user(&mut self, iova: Iova, len: usize, access: Access) -> Result<Vec<(UserAddr, usize)>, Lack> {
        self.note(iova, len as u64);
        let unmapped = Unmapped { addr: iova.0, len: len as u64 };
        let (mut pieces, mut done, mut missing) = (Vec::<(UserAddr, usize)>::new(), 0, false);
        while done < len && !self.lacks_enough() {
            let at = iova.0.checked_add(done as u64).ok_or(Lack::Unmapped(unmapped))?;
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
                _ if self.is_refused(page, access) => return Err(Lack::Unmapped(unmapped)),
                _ => {
                    missing = true;
                    self.miss(page, access);
                }
            }
        }
        if missing || done < len { Err(Lack::Missing) } else { Ok(pieces) }
    }

    /// Translates one address, and returns for how many bytes from there on the answer holds: to the end of a page, or of a large
    /// leaf. What is missing is kept in mind. Whoever uses it says so by [`Tlb::note`].
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
        // Equal but for what may be done, and there at least what is wanted.
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
        if self.lacks_enough() {
            return (Translated::Missing, in_page);
        }
        match self.table.find(page) {
            Some((leaf, level)) if Access::from_bits(leaf.access).allows(access) => {
                self.fill(map, iova, leaf, level).unwrap_or((Translated::Nowhere, in_page))
            }
            _ if self.is_refused(page, access) => (Translated::Nowhere, in_page),
            _ => {
                self.miss(page, access);
                (Translated::Missing, in_page)
            }
        }
    }

    /// Fills a line with the leaf over an address: whole, if one slot holds it all, or the page only. `None`: it leads out of guest memory.
    fn fill(&mut self, map: &Map, iova: Iova, leaf: Leaf, level: u32) -> Option<(Translated, u64)> {
        let page = iova.0 >> PAGE_BITS;
        let whole = table::span(level) << PAGE_BITS;
        let (leaf, level, bytes, gpa) = match map.gpa_of_range(UserAddr(leaf.user), whole) {
            Some(gpa) => (leaf, level, whole, gpa),
            None => {
                let leaf = leaf.after(page & (table::span(level) - 1));
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

    /// Adds these addresses to those that the request uses: see [`Tlb::ranges`].
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

/// Why an area has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lack {
    /// Some of its translations are not known.
    #[error("translations are missing")]
    Missing,
    /// It is not in the front-end's memory.
    #[error(transparent)]
    Unmapped(Unmapped),
}
