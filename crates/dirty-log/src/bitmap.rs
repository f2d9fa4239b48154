//! The dirty bits of one slot: a bit for each page, in pieces that are made when the first page in them is written.
#![expect(unsafe_code, reason = "island: pieces are made on demand, behind pointers")]

use crate::bounds::WORDS;
use crate::level::{PAGE, PAGE_BITS, shift};
use kickless_memory::Gpa;
use kickless_sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Pages for each word.
pub(crate) const WORD_PAGES: u64 = u64::BITS as u64;
/// Bytes of guest memory for each word.
pub(crate) const WORD_BYTES: u64 = WORD_PAGES << PAGE_BITS;

/// 16 MiB of guest memory.
type Piece = [AtomicU64; WORDS];

/// The bits.
pub(crate) struct Bits {
    /// The address of bit 0: where the piece of 2 MiB begins that the slot begins in, so that no word is for two such pieces.
    origin: u64,
    pieces: Box<[AtomicPtr<Piece>]>,
}

impl Bits {
    /// For `len` bytes at `gpa`; at least one.
    pub(crate) fn new(gpa: Gpa, len: u64) -> Self {
        let origin = gpa.0 & !((1 << shift(2)) - 1);
        let count = (gpa.0 + (len - 1) - origin) / (WORD_BYTES * WORDS as u64) + 1;
        Self { origin, pieces: (0..count).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect() }
    }

    /// The address of bit 0 of word `index`.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.origin + index as u64 * WORD_BYTES
    }

    /// The number of the bit for `gpa`, which is in the slot.
    #[inline]
    fn bit(&self, gpa: u64) -> usize {
        ((gpa - self.origin) >> PAGE_BITS) as usize
    }

    /// The words for `start..end`, which is in the slot and not empty.
    pub(crate) fn words(&self, start: u64, end: u64) -> std::ops::Range<usize> {
        self.bit(start) / 64..self.bit(end - 1) / 64 + 1
    }

    #[inline]
    fn piece(&self, word: usize) -> Option<&Piece> {
        // SAFETY: null, or from `Box::into_raw` and freed with `self` only; shared from then on. Acquire: made whole before.
        unsafe { self.pieces[word / WORDS].load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    fn make(&self, word: usize) -> &Piece {
        let at = &self.pieces[word / WORDS];
        let made = Box::into_raw(Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
        match at.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as in `piece`.
            Ok(_) => unsafe { &*made },
            Err(theirs) => {
                // SAFETY: from `Box::into_raw`, and never shown to anybody.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: as in `piece`.
                unsafe { &*theirs }
            }
        }
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        &self.piece(index).unwrap_or_else(|| self.make(index))[index % WORDS]
    }

    /// Sets the bit for `gpa`, also if it is set: the order of this and a harvest's taking it is the order of changes of the word,
    /// and who comes second sees what the other did before.
    pub(crate) fn mark(&self, gpa: u64) {
        let bit = self.bit(gpa);
        self.word(bit / 64).fetch_or(1 << (bit % 64), Ordering::AcqRel);
    }

    /// Sets the bits for `len` bytes at `gpa`, at least one, where they are clear. A harvest that takes them waits for who came here,
    /// or this would need a fence before the look.
    #[inline]
    pub(crate) fn mark_where_clear(&self, gpa: u64, len: u64) {
        for bit in self.bit(gpa)..=self.bit(gpa + (len - 1)) {
            let (word, mask) = (self.word(bit / 64), 1 << (bit % 64));
            if word.load(Ordering::Relaxed) & mask == 0 {
                // Release: the bytes were written before.
                word.fetch_or(mask, Ordering::Release);
            }
        }
    }

    /// Whether none of the words of the piece with word `index` was ever set.
    pub(crate) fn is_blank(&self, index: usize) -> bool {
        self.piece(index).is_none()
    }

    /// Takes those bits of `mask` that are set.
    #[inline]
    pub(crate) fn take(&self, index: usize, mask: u64) -> u64 {
        let Some(piece) = self.piece(index) else { return 0 };
        let word = &piece[index % WORDS];
        // Looks first: a bit that is not seen here stays for the next harvest.
        if word.load(Ordering::Relaxed) & mask == 0 {
            0
        } else if mask == u64::MAX {
            word.swap(0, Ordering::AcqRel)
        } else {
            word.fetch_and(!mask, Ordering::AcqRel) & mask
        }
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self) -> usize {
        let made = self.pieces.iter().filter(|piece| !piece.load(Ordering::Relaxed).is_null()).count();
        size_of_val(&*self.pieces) + made * size_of::<Piece>()
    }
}

impl Drop for Bits {
    fn drop(&mut self) {
        for piece in &self.pieces {
            let piece = piece.load(Ordering::Relaxed);
            if !piece.is_null() {
                // SAFETY: from `Box::into_raw`, and nobody has a reference to `self` any more.
                drop(unsafe { Box::from_raw(piece) });
            }
        }
    }
}

/// The bits of `index` that are for `start..end`, of which the word at address `at` holds at least one.
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
        let bits = Bits::new(Gpa(start), len);
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
        let bits = Bits::new(Gpa(0), 1 << 20);
        bits.mark_where_clear(0, 1 << 18);
        assert_eq!(bits.take(0, mask(0, 2 * PAGE, 4 * PAGE)), 0b1100);
        assert_eq!(bits.take(0, u64::MAX), !0b1100);
        assert_eq!(mask(0, 0, 1 << 18), u64::MAX);
        assert_eq!(mask(1 << 18, 0, (1 << 18) + 1), 1);
        assert_eq!(mask(0, 63 * PAGE, 1 << 40), 1 << 63);
    }
}
