//! The record of writes, which says what reads must return.
//!
//! Each block has a generation. It is 0 until the first write. At most one request at a time uses a block.
//! The content of a block follows from its number, its generation and the seed of the run, so the ledger
//! stores only the generations.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

/// Set while a request uses the block.
const TAKEN: u32 = 1 << 31;
/// The largest number of blocks. The ledger keeps 4 bytes in memory for each.
const BLOCKS_MAX: u64 = 1 << 28;
/// The number of blocks to try before `claim` gives up.
const TRIES: u32 = 64;

/// The generation of each block.
#[derive(Debug)]
pub(crate) struct Ledger {
    generations: Vec<AtomicU32>,
    seed: u64,
}

/// The exclusive use of a block by one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// The number of the block.
    pub(crate) block: u64,
    /// The generation of its content.
    pub(crate) generation: u32,
}

impl Ledger {
    /// Makes a ledger in which no block is written yet. `seed` tells the data of this run from those of an
    /// earlier one.
    ///
    /// # Errors
    /// There are more than [`BLOCKS_MAX`] blocks.
    pub(crate) fn new(blocks: u64, seed: u64) -> Result<Ledger> {
        if blocks > BLOCKS_MAX {
            bail!(
                "--verify handles at most {BLOCKS_MAX} blocks and the disk has {blocks}: set a smaller --range"
            );
        }
        Ok(Ledger { generations: (0..blocks).map(|_| AtomicU32::new(0)).collect(), seed })
    }

    /// Calls `next` until it returns a free block, and takes that block. Returns `None` after [`TRIES`]
    /// blocks that were in use.
    pub(crate) fn claim(&self, mut next: impl FnMut() -> u64) -> Option<Claim> {
        (0..TRIES).find_map(|_| self.try_claim(next()))
    }

    /// Takes this block if it is free.
    pub(crate) fn try_claim(&self, block: u64) -> Option<Claim> {
        let entry = self.generations.get(usize::try_from(block).ok()?)?;
        let generation = entry.load(Ordering::Relaxed);
        // Pairs with `release`: the next owner of a block sees what the previous one did there.
        let free = generation & TAKEN == 0;
        let swapped = free
            && entry
                .compare_exchange(generation, generation | TAKEN, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        swapped.then_some(Claim { block, generation })
    }

    /// Ends the use of a block, whose content has this generation now.
    pub(crate) fn release(&self, block: u64, generation: u32) {
        if let Some(entry) = usize::try_from(block).ok().and_then(|at| self.generations.get(at)) {
            entry.store(generation & !TAKEN, Ordering::Release);
        }
    }

    /// Returns the generation that a write gives to a block whose generation is `generation`.
    pub(crate) fn next_generation(generation: u32) -> u32 {
        // Generation 0 means "never written".
        if generation + 1 == TAKEN { 1 } else { generation + 1 }
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.generations.len() as u64
    }

    /// Fills `into` with the content of the block.
    pub(crate) fn fill(&self, claim: Claim, into: &mut [u8]) {
        let words = self.words(claim);
        into.as_chunks_mut::<8>()
            .0
            .iter_mut()
            .zip(words)
            .for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    }

    /// Returns the position of the first byte of `found` that differs from the expected content of the block.
    ///
    /// A block that was never written may have any content.
    pub(crate) fn first_wrong(&self, claim: Claim, found: &[u8]) -> Option<usize> {
        if claim.generation == 0 {
            return None;
        }
        let words = found.as_chunks::<8>().0.iter().zip(self.words(claim));
        let at = words.into_iter().position(|(bytes, word)| *bytes != word.to_le_bytes())?;
        let (bytes, word) = found.as_chunks::<8>().0.iter().zip(self.words(claim)).nth(at)?;
        let inside = bytes.iter().zip(word.to_le_bytes()).position(|(found, right)| *found != right)?;
        Some(at * 8 + inside)
    }

    fn words(&self, Claim { block, generation }: Claim) -> impl Iterator<Item = u64> {
        let start = mix(self.seed ^ mix(block ^ (u64::from(generation) << 32)));
        (0u64..).map(move |at| mix(start.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15))))
    }
}

/// Mixes the bits of a word by SplitMix64's output function (Steele, Lea, Flood: Fast splittable
/// pseudorandom number generators, 2014).
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_uses_a_block_at_a_time() {
        let ledger = Ledger::new(2, 1).unwrap();
        let claim = ledger.try_claim(1).unwrap();
        assert_eq!(claim, Claim { block: 1, generation: 0 });
        assert_eq!(ledger.try_claim(1), None);
        assert_eq!(ledger.try_claim(2), None);
        assert_eq!(ledger.claim(|| 1), None);
        ledger.release(1, Ledger::next_generation(claim.generation));
        assert_eq!(ledger.claim(|| 1).unwrap().generation, 1);
        assert_eq!(Ledger::next_generation(TAKEN - 1), 1);
        assert!(Ledger::new(BLOCKS_MAX + 1, 1).is_err());
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let ledger = Ledger::new(2, 1).unwrap();
        let claim = Claim { block: 0, generation: 3 };
        let mut block = vec![0; 512];
        ledger.fill(claim, &mut block);
        assert_eq!(ledger.first_wrong(claim, &block), None);
        for other in [Claim { block: 1, ..claim }, Claim { generation: 2, ..claim }] {
            assert!(ledger.first_wrong(other, &block).is_some());
        }
        assert!(Ledger::new(2, 2).unwrap().first_wrong(claim, &block).is_some());
        for at in 0..512 {
            let mut broken = block.clone();
            *broken.get_mut(at).unwrap() ^= 0x10;
            assert_eq!(ledger.first_wrong(claim, &broken), Some(at));
            assert_eq!(ledger.first_wrong(Claim { generation: 0, ..claim }, &broken), None);
        }
    }
}
