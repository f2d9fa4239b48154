//! What was written where, to know what reads must return.
//!
//! Each block has a generation, 0 until it is written for the first time, and one request at a time. Its content follows from
//! its number, its generation and the run's seed, so that nothing but the generations has to be remembered.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

/// A request is at this block.
const TAKEN: u32 = 1 << 31;
/// The most blocks, for their generations are kept in memory.
const BLOCKS_MAX: u64 = 1 << 28;
/// How often another block is tried for one that is taken.
const TRIES: u32 = 64;

/// All blocks' generations.
#[derive(Debug)]
pub(crate) struct Ledger {
    generations: Vec<AtomicU32>,
    seed: u64,
}

/// A block that a request has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Its number.
    pub(crate) block: u64,
    /// What is there.
    pub(crate) generation: u32,
}

impl Ledger {
    /// Nothing was written yet. `seed` tells this run's data from an earlier one's.
    ///
    /// # Errors
    /// There are too many blocks.
    pub(crate) fn new(blocks: u64, seed: u64) -> Result<Ledger> {
        if blocks > BLOCKS_MAX {
            bail!(
                "--verify keeps count of {BLOCKS_MAX} blocks at most, these are {blocks}: use less of the disk by --range"
            );
        }
        Ok(Ledger { generations: (0..blocks).map(|_| AtomicU32::new(0)).collect(), seed })
    }

    /// Takes a block that nobody has, of those that `next` gives; none if all that were tried are taken.
    pub(crate) fn claim(&self, mut next: impl FnMut() -> u64) -> Option<Claim> {
        (0..TRIES).find_map(|_| self.try_claim(next()))
    }

    /// Takes this block, if nobody has it.
    pub(crate) fn try_claim(&self, block: u64) -> Option<Claim> {
        let entry = self.generations.get(usize::try_from(block).ok()?)?;
        let generation = entry.load(Ordering::Relaxed);
        // Pairs with `release`: who takes a block next comes after what the last one did there.
        let free = generation & TAKEN == 0;
        let swapped = free
            && entry
                .compare_exchange(generation, generation | TAKEN, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        swapped.then_some(Claim { block, generation })
    }

    /// The request is done, and this generation is there now.
    pub(crate) fn release(&self, block: u64, generation: u32) {
        if let Some(entry) = usize::try_from(block).ok().and_then(|at| self.generations.get(at)) {
            entry.store(generation & !TAKEN, Ordering::Release);
        }
    }

    /// The generation after this one.
    pub(crate) fn next_generation(generation: u32) -> u32 {
        // 0 is for what was never written.
        if generation + 1 == TAKEN { 1 } else { generation + 1 }
    }

    /// How many blocks there are.
    pub(crate) fn blocks(&self) -> u64 {
        self.generations.len() as u64
    }

    /// What belongs into the block.
    pub(crate) fn fill(&self, claim: Claim, into: &mut [u8]) {
        let words = self.words(claim);
        into.as_chunks_mut::<8>()
            .0
            .iter_mut()
            .zip(words)
            .for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    }

    /// The first byte of `found` that does not belong into the block, if there is one. Anything may be in a block that was
    /// never written.
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

/// SplitMix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_at_a_block() {
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
    fn whatever_is_wrong_is_found() {
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
