//! The dirty log of a vhost-user front-end: a bitmap of the pages that devices have written.
//!
//! One bit stands for a page of 4 KiB of guest-physical address: page *n* is bit *n* % 8 of byte *n* / 8. The
//! front-end provides the memory. It takes bits out at any time, by exchanging whole words for zero. So a
//! device cannot remember that it has set a bit: the bit may be gone a moment later.
//!
//! # No write is lost
//! ```text
//!   device                                  front-end
//!   W1  store data                          H1  exchange word for 0
//!   W2  full fence                          H2  full fence
//!   W3  load word                           H3  read the pages of the bits
//!   W4  OR the bit in if it is clear
//! ```
//! W2 and H2 are partners.
//!
//! A device that finds the bit set at W3 does not set it. That is right only if the front-end sees the data
//! after it takes that bit. It does: W3 read the word as it was before H1, so W2 comes before H2, and H3 sees
//! W1. Without W2, the data could still be in the store buffer of the device's core while W3 finds the bit
//! and the front-end copies the page. The copy would lack the data, and the page would not be copied again.
//!
//! A device that finds the bit clear sets it after W1, so that a later H1 finds it. OR is an atomic
//! read-modify-write operation, and so is the front-end's exchange. So none of them undoes a change of other
//! bits of the word.
//!
//! The fence is the cost of a look at the word. So marks are gathered ([`MarkBatch`]) and committed together
//! once for each batch: after the data, and before the used index that publishes the data. The used index
//! itself and event fields are marked afterwards by the same rule.
#![expect(unsafe_code, reason = "island: atomic access to the words of a mapping")]

use crate::error::Purpose;
use crate::fault::Damaged;
use crate::mapper::Mapper;
use crate::mapping::Mapping;
use crate::unmapper::Released;
use crate::{Error, Gpa, Map};
use kickless_spec::vhost_user::LOG_PAGE_SIZE;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Pages in a word.
const WORD_PAGES: u64 = u64::BITS as u64;
/// Bytes of guest-physical address in a word.
const WORD_SPAN: u64 = WORD_PAGES * LOG_PAGE_SIZE;
/// Bytes of guest-physical address in a byte.
const BYTE_SPAN: u64 = 8 * LOG_PAGE_SIZE;

/// Access to the words of a bitmap: a front-end's memory, or a model checker's atomics. In our byte order,
/// bit *n* of a word stands for the word's page *n*.
pub trait Words {
    /// Loads a word. Bits that do not exist read as ones, because they need not be set.
    fn load(&self, index: u64) -> u64;
    /// Sets bits of a word. Returns the word as it was before.
    fn or(&self, index: u64, bits: u64) -> u64;
    /// Executes a sequentially consistent fence.
    fn fence(&self);
}

/// Number of words that can be gathered before a commit.
const GATHERED_MAX: usize = 64;

/// A batch of marks that are not in the bitmap yet.
#[derive(Debug)]
pub struct MarkBatch {
    words: [(u64, u64); GATHERED_MAX],
    len: usize,
    /// The last entry of a word with this number modulo the table's length. Only a hint.
    hints: [u8; GATHERED_MAX],
}

impl Default for MarkBatch {
    fn default() -> Self {
        Self { words: [(0, 0); GATHERED_MAX], len: 0, hints: [0; GATHERED_MAX] }
    }
}

impl MarkBatch {
    /// Returns whether there are no marks to commit.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds bits of a word. Returns false if there is no room: commit, and add them again.
    #[inline]
    #[must_use]
    pub fn add(&mut self, word: u64, bits: u64) -> bool {
        let hint = &mut self.hints[word as usize % GATHERED_MAX];
        if let Some(entry) = self.words[..self.len].get_mut(usize::from(*hint))
            && entry.0 == word
        {
            entry.1 |= bits;
            return true;
        }
        let Some(entry) = self.words.get_mut(self.len) else { return false };
        *entry = (word, bits);
        *hint = self.len as u8;
        self.len += 1;
        true
    }

    /// Sets all gathered bits in `words`, and empties the table. Returns whether one of the bits was clear
    /// before.
    ///
    /// The caller must have written the data before.
    #[inline]
    pub fn commit<W: Words>(&mut self, words: &W) -> bool {
        if self.is_empty() {
            return false;
        }
        // W2. Its partner is H2, between the front-end's exchange and its copy of the page. The exchange
        // itself is a fence.
        words.fence();
        self.commit_fenced(words)
    }

    /// Does the same as [`MarkBatch::commit`] if a sequentially consistent fence has already followed the
    /// data.
    #[inline]
    pub fn commit_fenced<W: Words>(&mut self, words: &W) -> bool {
        let mut newly_set = false;
        for &(word, bits) in &self.words[..self.len] {
            if words.load(word) & bits != bits {
                newly_set |= words.or(word, bits) & bits != bits;
            }
        }
        self.len = 0;
        newly_set
    }

    /// Drops all marks.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

/// Returns the word and the bits that stand for `len` bytes at `gpa`, or `None` if there are no bytes or
/// several words.
#[inline]
pub fn word_of(gpa: Gpa, len: u64) -> Option<(u64, u64)> {
    let (first, last) = (gpa.0 / LOG_PAGE_SIZE, gpa.0.checked_add(len.checked_sub(1)?)? / LOG_PAGE_SIZE);
    let bits = (u64::MAX << (first % WORD_PAGES)) & (u64::MAX >> (WORD_PAGES - 1 - last % WORD_PAGES));
    (first / WORD_PAGES == last / WORD_PAGES).then_some((first / WORD_PAGES, bits))
}

/// Returns each word, and its bits, that stand for `len` bytes at `gpa`. Returns nothing for no bytes.
#[inline]
pub fn words_of(gpa: Gpa, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let first = gpa.0 / LOG_PAGE_SIZE;
    let last = gpa.0.saturating_add(len.saturating_sub(1)) / LOG_PAGE_SIZE;
    let start = first / WORD_PAGES;
    let end = if len == 0 { start } else { last / WORD_PAGES + 1 };
    (start..end).map(move |word| {
        let start = word * WORD_PAGES;
        let low = u64::MAX << (first.max(start) - start);
        let high = u64::MAX >> (WORD_PAGES - 1 - (last.min(start + (WORD_PAGES - 1)) - start));
        (word, low & high)
    })
}

/// The shared bitmap of a front-end. It is unmapped after the last reference is gone.
#[derive(Debug)]
pub struct Log {
    mapping: Mapping,
}

impl Log {
    /// Maps `len` bytes of `file` from `offset`.
    ///
    /// # Errors
    /// No bytes, an offset that is no multiple of 8, a range that wraps or is longer than its file, or the
    /// kernel's refusal to map it.
    pub fn map(file: impl AsFd, offset: u64, len: u64) -> Result<Self, Error> {
        Mapper::of_process().log(file, offset, len)
    }

    /// Returns the length in bytes; never zero.
    #[expect(clippy::len_without_is_empty, reason = "a log is never empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Returns the file: see [`Mapping::file`].
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.file()
    }

    /// Returns the offset of the log in its file.
    pub fn offset(&self) -> u64 {
        self.mapping.offset()
    }

    /// Returns a handle with which the caller can wait until the log is unmapped.
    pub fn released(&self) -> Released {
        self.mapping.released()
    }

    /// Returns the damage if the log has lost pages, and the marks on them: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        self.mapping.is_damaged().then(|| Damaged::Log { len: self.len(), first: self.mapping.report_once() })
    }

    /// Checks that the log has a bit for each page of guest memory.
    ///
    /// # Errors
    /// The log is too small. The error names both sizes.
    pub fn covers(&self, map: &Map) -> Result<(), Error> {
        let Some(last) = map.slots().last() else { return Ok(()) };
        let end = last.gpa().0 + (last.len() - 1);
        let needs = end / BYTE_SPAN + 1;
        match self.len() >= needs {
            true => Ok(()),
            false => Err(Error::LogTooSmall { has: self.len(), needs, end: Gpa(end) }),
        }
    }

    /// Returns the word at `index`, or `None` past the end of the bitmap.
    ///
    /// All accesses to the front-end's memory go through here. If the front-end has truncated the file, the
    /// access raises SIGBUS, as in guest memory.
    #[inline]
    fn word(&self, index: u64) -> Option<&AtomicU64> {
        if index >= self.len().div_ceil(size_of::<u64>() as u64) {
            return None;
        }
        // SAFETY: the offset is a multiple of 8 below the length of the mapping, which fits into isize.
        let at = unsafe { self.mapping.base().cast::<u64>().add(index as usize) };
        // SAFETY:
        // - it is aligned: the mapping begins at a page, and the log at a multiple of 8 in it (checked in
        //   `map`);
        // - all 8 bytes are mapped: the first of them is, a word does not cross pages, and whole pages are
        //   mapped;
        // - it is alive as long as `self`, and all accesses to it in this program are atomic. The front-end's
        //   accesses are outside of this program.
        Some(unsafe { AtomicU64::from_ptr(at.as_ptr()) })
    }

    /// Returns the bits of the word at `index` that belong to the log. The front-end may use the rest of the
    /// last word for something else.
    #[inline]
    fn valid(&self, index: u64) -> u64 {
        match self.len().saturating_sub(index.saturating_mul(size_of::<u64>() as u64)) {
            left @ 1..8 => (1 << (8 * left)) - 1,
            0 => 0,
            _ => u64::MAX,
        }
    }

    /// Returns whether the page of `gpa` is marked now.
    pub fn is_marked(&self, gpa: Gpa) -> bool {
        let index = gpa.0 / WORD_SPAN;
        let bit = (1 << (gpa.0 / LOG_PAGE_SIZE % WORD_PAGES)) & self.valid(index);
        // Acquire: a thread that finds the mark may read the page next.
        self.word(index).is_some_and(|w| u64::from_le(w.load(Ordering::Acquire)) & bit != 0)
    }

    /// Takes all marks out, as a front-end does, and calls `each` with the page numbers.
    pub fn harvest(&self, mut each: impl FnMut(u64)) {
        for index in 0..self.len().div_ceil(size_of::<u64>() as u64) {
            let Some(word) = self.word(index) else { return };
            // As Linux and QEMU do: most words are zero, and a load costs less than an exchange.
            let valid = self.valid(index);
            if u64::from_le(word.load(Ordering::Relaxed)) & valid == 0 {
                continue;
            }
            // H1 and H2. On some processors the exchange is a full fence itself; on others the fence below is
            // needed.
            let mut bits = u64::from_le(match valid {
                u64::MAX => word.swap(0, Ordering::SeqCst),
                _ => word.fetch_and((!valid).to_le(), Ordering::SeqCst),
            }) & valid;
            fence(Ordering::SeqCst);
            while bits != 0 {
                each(index * WORD_PAGES + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
    }
}

impl Mapper {
    /// Maps the log as [`Log::map`] does, within the limits of this mapper.
    ///
    /// # Errors
    /// As [`Log::map`], and [`Error::Refused`].
    pub fn log(&self, file: impl AsFd, offset: u64, len: u64) -> Result<Log, Error> {
        Ok(Log { mapping: Mapping::of_words(self, Purpose::Log, file, offset, len)? })
    }
}

impl Words for Log {
    #[inline]
    fn load(&self, index: u64) -> u64 {
        self.word(index)
            .map_or(u64::MAX, |word| u64::from_le(word.load(Ordering::Relaxed)) | !self.valid(index))
    }

    #[inline]
    fn or(&self, index: u64, bits: u64) -> u64 {
        self.word(index).map_or(u64::MAX, |word| {
            // Relaxed: because of the fence before, a front-end that finds the bit also sees the data. The
            // used index is stored later, with release.
            let valid = self.valid(index);
            u64::from_le(word.fetch_or((bits & valid).to_le(), Ordering::Relaxed)) | !valid
        })
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_ranges() {
        let of = |gpa, len| {
            let words: Vec<_> = words_of(Gpa(gpa), len).collect();
            match (word_of(Gpa(gpa), len), &*words) {
                (Some(one), words) => assert_eq!(words, [one]),
                (None, words) => assert!(words.len() != 1 || gpa.checked_add(len).is_none()),
            }
            words
        };
        assert!(of(0, 0).is_empty());
        assert_eq!(of(0, 1), [(0, 1)]);
        assert_eq!(of(4095, 1), [(0, 1)]);
        assert_eq!(of(4095, 2), [(0, 3)]);
        assert_eq!(of(63 * 4096, 4096), [(0, 1 << 63)]);
        assert_eq!(of(63 * 4096 + 4095, 2), [(0, 1 << 63), (1, 1)]);
        assert_eq!(of(64 * 4096, 128 * 4096), [(1, u64::MAX), (2, u64::MAX)]);
        assert_eq!(of(4096, 130 * 4096), [(0, !1), (1, u64::MAX), (2, 7)]);
        assert_eq!(of(u64::MAX, 9), [(u64::MAX / WORD_SPAN, 1 << 63)]);
    }

    #[test]
    fn gathers_by_word_until_it_is_full() {
        let mut batch = MarkBatch::default();
        for _ in 0..3 {
            for word in 0..GATHERED_MAX as u64 {
                assert!(batch.add(word * 7, 1 << (word % 64)));
            }
        }
        assert_eq!(batch.len, GATHERED_MAX);
        assert!(batch.add(7, 1 << 5));
        assert!(!batch.add(1 << 20, 1));
        batch.clear();
        assert!(batch.is_empty() && batch.add(1 << 20, 1));
    }
}
