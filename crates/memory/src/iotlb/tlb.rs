//! A queue's own cache of translations.

use super::table::{PAGE_BITS, Table};
use super::{Access, IovaRange};
use crate::{Gpa, Iova, Map, Unmapped, UserAddr};
use std::fmt;
use std::sync::Arc;

/// Pages that a cache holds: 4 MiB of them, in 16 KiB.
const LINES: usize = 1024;
/// So many translations are asked for at a time.
const MISSES_MAX: usize = 256;

/// Generations that a line can tell apart. Zero is none.
const GENERATIONS: u64 = 1024;
const GENERATION_SHIFT: u32 = 2;

/// One page. Its tag is the page's address, the generation (from bit 2 on), and what may be done there.
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
    generation: u64,
    /// What was not there since [`Tlb::begin`]; there may be more than these.
    missing: Vec<Miss>,
    is_missing: bool,
    /// What the front-end does not know either.
    refused: Vec<Miss>,
    /// It was more than that: whatever is missing is refused.
    all_refused: bool,
    /// What was asked for since [`Tlb::begin`].
    ranges: Vec<IovaRange>,
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
            generation: 1,
            missing: Vec::new(),
            is_missing: false,
            refused: Vec::new(),
            all_refused: false,
            ranges: Vec::new(),
        }
    }

    /// Forgets all it has kept, for the memory behind it has changed.
    pub fn flush(&mut self) {
        self.generation += 1;
        if self.generation == GENERATIONS {
            self.generation = 1;
            self.lines.fill(Line::default());
        }
    }

    /// Forgets what it has kept of these addresses, and that any of them were refused.
    pub fn drop_range(&mut self, range: IovaRange) {
        let (first, last) = (range.first().0 >> PAGE_BITS, range.last().0 >> PAGE_BITS);
        if last - first < LINES as u64 / 4 {
            for page in first..=last {
                let line = &mut self.lines[page as usize % LINES];
                if line.tag >> PAGE_BITS == page {
                    *line = Line::default();
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
        let in_page = (1 << PAGE_BITS) - (iova.0 & ((1 << PAGE_BITS) - 1));
        // The usual case: all on a page that is known.
        if len <= in_page {
            return each(self.page(map, iova, access), len);
        }
        let (mut start, mut done) = (self.page(map, iova, access), in_page);
        let mut run = in_page;
        while done < len {
            let enough = self.lacks_enough();
            let here = if enough { len - done } else { (len - done).min(1 << PAGE_BITS) };
            let next = match iova.checked_add(done) {
                // The rest is looked at when what is missing has come.
                _ if enough => Translated::Missing,
                Some(at) => self.page(map, at, access),
                None => Translated::Nowhere,
            };
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

    /// Where one address leads.
    #[inline]
    fn page(&mut self, map: &Map, iova: Iova, access: Access) -> Translated {
        let offset = iova.0 & ((1 << PAGE_BITS) - 1);
        let page = iova.0 >> PAGE_BITS;
        let line = self.lines[page as usize % LINES];
        let wanted = self.tag(page, Access::BOTH);
        // Equal but for what may be done, and there at least what is wanted.
        if (line.tag ^ wanted) & (!Access::BOTH.bits() | access.bits()) == 0 {
            return Translated::To(Gpa(line.gpa + offset));
        }
        self.walk(map, page, offset, access)
    }

    #[inline]
    fn tag(&self, page: u64, access: Access) -> u64 {
        page << PAGE_BITS | self.generation << GENERATION_SHIFT | access.bits()
    }

    /// Looks a page up in the table.
    #[inline(never)]
    fn walk(&mut self, map: &Map, page: u64, offset: u64, access: Access) -> Translated {
        if self.lacks_enough() {
            return Translated::Missing;
        }
        match self.table.get(page) {
            Some(leaf) if Access::from_bits(leaf.access).allows(access) => {
                let Some(gpa) = map.gpa_of_range(UserAddr(leaf.user), 1 << PAGE_BITS) else {
                    return Translated::Nowhere;
                };
                let tag = self.tag(page, Access::from_bits(leaf.access));
                self.lines[page as usize % LINES] = Line { tag, gpa: gpa.0 };
                Translated::To(Gpa(gpa.0 + offset))
            }
            _ if self.is_refused(page, access) => Translated::Nowhere,
            _ => {
                self.miss(page, access);
                Translated::Missing
            }
        }
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

    #[inline]
    fn note(&mut self, iova: Iova, len: u64) {
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
