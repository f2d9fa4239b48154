//! The result of a harvest.

use crate::bitmap::{WORD_BYTES, WORD_PAGES};
use crate::level::{PAGE, PAGE_BITS};
use kickless_memory::Gpa;

/// Written pages of 4 KiB, as a bitmap. Reuse it for each harvest, so that it is allocated once.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    start: u64,
    words: Vec<u64>,
}

impl Pages {
    /// Empties the bitmap. Its words begin at address `start` afterwards.
    pub(crate) fn begin(&mut self, start: u64) {
        self.words.clear();
        self.start = start;
    }

    pub(crate) fn push(&mut self, word: u64) {
        self.words.push(word);
    }

    /// Returns the number of pages.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Returns the address of the first bit of [`Pages::words`].
    pub fn start(&self) -> Gpa {
        Gpa(self.start)
    }

    /// Returns the bits, lowest first. There is one for each 4 KiB from [`Pages::start`] on.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns whether the page of `gpa` was written.
    pub fn contains(&self, gpa: Gpa) -> bool {
        let Some(page) = gpa.0.checked_sub(self.start).map(|offset| offset >> PAGE_BITS) else {
            return false;
        };
        self.words.get((page / WORD_PAGES) as usize).is_some_and(|word| word >> (page % WORD_PAGES) & 1 != 0)
    }

    /// Returns the written ranges in increasing order: address and bytes. Adjacent pages of one word are one
    /// range.
    pub fn ranges(&self) -> impl Iterator<Item = (Gpa, u64)> + '_ {
        self.words.iter().enumerate().flat_map(move |(index, word)| {
            let (base, mut rest) = (self.start + index as u64 * WORD_BYTES, *word);
            std::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let first = rest.trailing_zeros();
                let count = (rest >> first).trailing_ones();
                rest &= !(u64::MAX >> (u64::BITS - count) << first);
                Some((Gpa(base + u64::from(first) * PAGE), u64::from(count) * PAGE))
            })
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_the_bits() {
        let mut pages = Pages::default();
        assert!(pages.is_empty() && pages.ranges().next().is_none());
        pages.begin(0x20_0000);
        for word in [0b1011, 0, u64::MAX, 1 << 63] {
            pages.push(word);
        }
        assert_eq!(pages.count(), 3 + 64 + 1);
        let found: Vec<_> = pages.ranges().collect();
        let at = |page: u64| Gpa(0x20_0000 + page * PAGE);
        assert_eq!(found, [(at(0), 2 * PAGE), (at(3), PAGE), (at(128), 64 * PAGE), (at(255), PAGE)]);
        assert!(pages.contains(at(0)) && !pages.contains(at(2)) && pages.contains(Gpa(at(255).0 + 4095)));
        assert!(!pages.contains(Gpa(0)) && !pages.contains(at(256)));
    }
}
