//! Chooses the blocks that requests go to.

use super::pattern::Pattern;

/// The sequence of blocks of one thread.
#[derive(Debug)]
pub(crate) struct Offsets {
    pattern: Pattern,
    random: fastrand::Rng,
    blocks: u64,
    /// The next block of a sequential pattern, and the part of the disk that the thread goes through.
    next: u64,
    first: u64,
    end: u64,
}

impl Offsets {
    /// Makes the sequence of the thread `thread` of `threads`, on a disk of at least one block.
    pub(crate) fn new(pattern: Pattern, blocks: u64, thread: u64, threads: u64, seed: u64) -> Offsets {
        let first = blocks * thread / threads;
        let end = (blocks * (thread + 1) / threads).max(first + 1);
        // The multiplication keeps nearby seeds from giving two threads the same sequence.
        let random = fastrand::Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (thread << 48));
        Offsets { pattern, random, blocks, next: first, first, end }
    }

    /// Returns the next block.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        match self.pattern {
            Pattern::Random => self.random.u64(..self.blocks),
            Pattern::Sequential => {
                let block = self.next;
                self.next = if block + 1 == self.end { self.first } else { block + 1 };
                block
            }
        }
    }

    /// Returns whether the next request is a read. `percent` of a hundred requests are reads.
    #[inline]
    pub(crate) fn reads(&mut self, percent: u8) -> bool {
        match percent {
            100 => true,
            0 => false,
            _ => self.random.u8(..100) < percent,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn on_the_disk(blocks in 1u64..1000, thread in 0u64..4, seed: u64) {
            for pattern in [Pattern::Random, Pattern::Sequential] {
                let mut offsets = Offsets::new(pattern, blocks, thread, 4, seed);
                prop_assert!((0..2000).all(|_| offsets.next() < blocks));
            }
        }

        #[test]
        fn sequential_threads_cover_the_disk(blocks in 4u64..1000) {
            let mut seen: Vec<u64> = Vec::new();
            for thread in 0..4 {
                let mut offsets = Offsets::new(Pattern::Sequential, blocks, thread, 4, 1);
                let part = (blocks * (thread + 1) / 4) - (blocks * thread / 4);
                seen.extend((0..part).map(|_| offsets.next()));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..blocks).collect::<Vec<_>>());
        }
    }
}
