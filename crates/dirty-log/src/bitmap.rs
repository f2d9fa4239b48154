//! The dirty bits of one slot: one bit for each page, in pieces that are allocated at the first write to one
//! of their pages.
#![expect(unsafe_code, reason = "island: pieces are made on demand, behind pointers")]

use crate::bounds::WORDS;
use crate::level::{PAGE, PAGE_BITS, shift};
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Pages of a word.
pub(crate) const WORD_PAGES: u64 = u64::BITS as u64;
/// Bytes of guest memory of a word.
pub(crate) const WORD_BYTES: u64 = WORD_PAGES << PAGE_BITS;

/// The bits of 16 MiB of guest memory.
type Piece = [AtomicU64; WORDS];

/// The dirty bits of one slot.
pub(crate) struct DirtyBits {
    /// The address of bit 0: the start of the 2 MiB in which the slot begins. So no word has bits of two
    /// large pages.
    origin: u64,
    pieces: Box<[AtomicPtr<Piece>]>,
}

impl DirtyBits {
    /// Makes clear bits for `len` bytes at `gpa`; at least one byte.
    pub(crate) fn new(gpa: Gpa, len: u64) -> Self {
        let origin = gpa.0 & !((1 << shift(2)) - 1);
        let count = (gpa.0 + (len - 1) - origin) / (WORD_BYTES * WORDS as u64) + 1;
        Self { origin, pieces: (0..count).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect() }
    }

    /// Returns the address of bit 0 of word `index`.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.origin + index as u64 * WORD_BYTES
    }

    /// Returns the number of the bit for `gpa`, which is in the slot.
    #[inline]
    fn bit(&self, gpa: u64) -> usize {
        ((gpa - self.origin) >> PAGE_BITS) as usize
    }

    /// Returns the words for `start..end`, which is in the slot and not empty.
    pub(crate) fn words(&self, start: u64, end: u64) -> std::ops::Range<usize> {
        self.bit(start) / 64..self.bit(end - 1) / 64 + 1
    }

    #[inline]
    fn piece(&self, word: usize) -> Option<&Piece> {
        // SAFETY: null, or from `Box::into_raw` and freed with `self` only. It is shared from then on.
        // Acquire: the piece is complete.
        unsafe { self.pieces[word / WORDS].load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    fn make_piece(&self, word: usize) -> &Piece {
        let at = &self.pieces[word / WORDS];
        let made = Box::into_raw(Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
        match at.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as in `piece`.
            Ok(_) => unsafe { &*made },
            Err(theirs) => {
                // SAFETY: from `Box::into_raw`, and not shared with another thread.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: as in `piece`.
                unsafe { &*theirs }
            }
        }
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        &self.piece(index).unwrap_or_else(|| self.make_piece(index))[index % WORDS]
    }

    /// Sets the bit for `gpa`, even if it is set already.
    ///
    /// A harvest that takes the bit changes the same word. So the two have an order, and the later of them
    /// sees what the other did before.
    pub(crate) fn mark(&self, gpa: u64) {
        let bit = self.bit(gpa);
        self.word(bit / 64).fetch_or(1 << (bit % 64), Ordering::AcqRel);
    }

    /// Sets the bits for `len` bytes at `gpa`, at least one byte, if they are clear.
    ///
    /// No fence is needed before the check, because a harvest that takes the bits waits for the caller's
    /// section.
    #[inline]
    pub(crate) fn mark_where_clear(&self, gpa: u64, len: u64) {
        for bit in self.bit(gpa)..=self.bit(gpa + (len - 1)) {
            let (word, mask) = (self.word(bit / 64), 1 << (bit % 64));
            if word.load(Ordering::Relaxed) & mask == 0 {
                // Release: the bytes are written before.
                word.fetch_or(mask, Ordering::Release);
            }
        }
    }

    /// Returns whether no bit of the piece with word `index` was ever set.
    pub(crate) fn is_blank(&self, index: usize) -> bool {
        self.piece(index).is_none()
    }

    /// Takes the bits of `mask` that are set.
    #[inline]
    pub(crate) fn take(&self, index: usize, mask: u64) -> u64 {
        let Some(piece) = self.piece(index) else { return 0 };
        let word = &piece[index % WORDS];
        // Checked first, because it is cheaper. A bit that is not seen here stays for the next harvest.
        if word.load(Ordering::Relaxed) & mask == 0 {
            0
        } else if mask == u64::MAX {
            word.swap(0, Ordering::AcqRel)
        } else {
            word.fetch_and(!mask, Ordering::AcqRel) & mask
        }
    }

    /// Returns the number of bytes of memory that the bits take.
    pub(crate) fn bytes(&self) -> usize {
        let made = self.pieces.iter().filter(|piece| !piece.load(Ordering::Relaxed).is_null()).count();
        size_of_val(&*self.pieces) + made * size_of::<Piece>()
    }
}

impl Drop for DirtyBits {
    fn drop(&mut self) {
        for piece in &self.pieces {
            let piece = piece.load(Ordering::Relaxed);
            if !piece.is_null() {
                // SAFETY: from `Box::into_raw`, and there is no reference to `self` any more.
                drop(unsafe { Box::from_raw(piece) });
            }
        }
    }
}

/// Returns the bits for `start..end` of the word at address `at`. At least one of its bits must be in that
/// range.
pub(crate) fn mask(at: u64, start: u64, end: u64) -> u64 {
    let first = start.saturating_sub(at) >> PAGE_BITS;
    let after = ((end - at).div_ceil(PAGE)).min(WORD_PAGES);
    (u64::MAX >> (WORD_PAGES - after)) & (u64::MAX << first)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn bits_are_set_and_taken() {
        // Begins in the middle of a piece of 2 MiB.
        let (start, len) = (0x4010_0000, 64 << 20);
        let bits = DirtyBits::new(Gpa(start), len);
        assert_eq!(bits.origin, 0x4000_0000);
        let empty = bits.bytes();
        bits.mark(start);
        bits.mark_where_clear(start + len - 1, 1);
        bits.mark_where_clear(start + 0xfff, 2);
        assert_eq!(bits.bytes() - empty, 2 * size_of::<Piece>());
        let words = bits.words(start, start + len);
        assert_eq!(words, 4..256 + 4);
        let taken: Vec<u64> = words.clone().map(|word| bits.take(word, u64::MAX)).collect();
        assert_eq!((taken[0], taken[255]), (3, 1 << 63));
        assert!(taken[1..255].iter().all(|word| *word == 0));
        assert!(words.clone().all(|word| bits.take(word, u64::MAX) == 0));
        assert!(bits.is_blank(64) && !bits.is_blank(0));
    }

    #[test]
    fn a_part_of_a_word_is_taken() {
        let bits = DirtyBits::new(Gpa(0), 1 << 20);
        bits.mark_where_clear(0, 1 << 18);
        assert_eq!(bits.take(0, mask(0, 2 * PAGE, 4 * PAGE)), 0b1100);
        assert_eq!(bits.take(0, u64::MAX), !0b1100);
        assert_eq!(mask(0, 0, 1 << 18), u64::MAX);
        assert_eq!(mask(1 << 18, 0, (1 << 18) + 1), 1);
        assert_eq!(mask(0, 63 * PAGE, 1 << 40), 1 << 63);
    }
}
