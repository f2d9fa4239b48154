//! The blocks of tables that differ from the disk (R9).
//!
//! Each change of a block has a number, and numbers never repeat. A block that is not listed is written.

use super::plan::Written;
use super::rule::{Rule, Rules};
use crate::format::geometry::SliceIndex;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};

/// A unit of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Block {
    /// A part of an L2 table.
    Slice(SliceIndex),
    /// A part of the active L1 table, by number.
    L1(u32),
    /// A part of a refcount block, by number.
    Refcounts(u64),
    /// A part of the refcount table, by number.
    Table(u32),
    /// The beginning of the header's cluster.
    Header,
}

/// The numbers of a block's changes.
#[derive(Clone, Copy, Debug, Default)]
struct Numbers {
    changed: u64,
    /// The last change in the write in flight.
    writing: Option<u64>,
    written: u64,
    /// The last change in a failed write.
    failed: Option<(u64, Errno)>,
    is_queued: bool,
}

/// The blocks that differ from the disk.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    dirty: HashMap<Block, Numbers>,
    due: VecDeque<Block>,
    last: u64,
    rules: Rules,
}

impl Blocks {
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules, ..Self::default() }
    }

    /// Notes a change, and returns its number.
    pub(super) fn change(&mut self, block: Block) -> u64 {
        // All earlier changes of a block that is not listed are written.
        let written = self.last;
        self.last += 1;
        let numbers = self.dirty.entry(block).or_insert(Numbers { written, ..Numbers::default() });
        numbers.changed = self.last;
        if !numbers.is_queued && (numbers.writing.is_none() || !self.rules.hold(Rule::R9)) {
            numbers.is_queued = true;
            self.due.push_back(block);
        }
        self.last
    }

    /// Returns the number to wait for until all changes of a block are written. A block whose last write
    /// failed is written again.
    pub(super) fn need(&mut self, block: Block) -> Option<u64> {
        let numbers = self.dirty.get(&block)?;
        if numbers.failed.is_some_and(|(failed, _)| failed >= numbers.changed) {
            return Some(self.change(block));
        }
        Some(numbers.changed)
    }

    /// Returns whether the changes up to a number are written.
    pub(super) fn state(&self, block: Block, number: u64) -> Written {
        match self.dirty.get(&block) {
            None => Written::Yes,
            Some(numbers) if numbers.written >= number => Written::Yes,
            Some(Numbers { failed: Some((failed, errno)), .. }) if *failed >= number => {
                Written::Failed(*errno)
            }
            Some(_) => Written::NotYet,
        }
    }

    pub(super) fn is_written(&self, block: Block, number: u64) -> bool {
        self.state(block, number) == Written::Yes
    }

    pub(super) fn is_dirty(&self, block: Block) -> bool {
        self.dirty.contains_key(&block)
    }

    /// Returns the error of a block whose last write failed.
    pub(super) fn failure(&self, block: Block) -> Option<Errno> {
        let numbers = self.dirty.get(&block)?;
        numbers.failed.filter(|(failed, _)| *failed >= numbers.changed).map(|(_, errno)| errno)
    }

    /// Takes a block to write, with the number of the last change in it.
    pub(super) fn take_due(&mut self) -> Option<(Block, u64)> {
        let block = self.due.pop_front()?;
        let numbers = self.dirty.entry(block).or_default();
        numbers.is_queued = false;
        numbers.writing = Some(numbers.changed);
        Some((block, numbers.changed))
    }

    /// Takes the result of the write of changes up to `number`.
    pub(super) fn done(&mut self, block: Block, number: u64, result: Result<(), Errno>) {
        let Some(numbers) = self.dirty.get_mut(&block) else { return };
        numbers.writing = None;
        match result {
            Ok(()) => numbers.written = numbers.written.max(number),
            Err(errno) => numbers.failed = Some((number, errno)),
        }
        if numbers.written >= numbers.changed {
            self.dirty.remove(&block);
        } else if numbers.changed > number && !numbers.is_queued {
            numbers.is_queued = true;
            self.due.push_back(block);
        }
    }

    /// Queues all blocks whose last write failed. Returns the error of one.
    pub(super) fn retry_all(&mut self) -> Option<Errno> {
        let failure = |block: &Block| self.failure(*block).map(|errno| (*block, errno));
        let failed: Vec<_> = self.dirty.keys().filter_map(failure).collect();
        for (block, _) in &failed {
            self.change(*block);
        }
        failed.first().map(|(_, errno)| *errno)
    }

    /// Returns whether the last write of some block failed.
    pub(super) fn has_failed(&self) -> bool {
        self.dirty.keys().any(|block| self.failure(*block).is_some())
    }

    /// Returns whether a write of the L1 table is in flight.
    pub(super) fn writes_l1(&self) -> bool {
        self.dirty.iter().any(|(block, numbers)| matches!(block, Block::L1(_)) && numbers.writing.is_some())
    }

    pub(super) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    pub(super) fn dirty(&self) -> usize {
        self.dirty.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Block = Block::L1(3);

    #[test]
    fn a_block_that_changes_while_it_is_written_is_written_again() {
        let mut blocks = Blocks::default();
        let first = blocks.change(BLOCK);
        assert_eq!(blocks.take_due(), Some((BLOCK, first)));
        let second = blocks.change(BLOCK);
        assert_eq!(blocks.take_due(), None);
        blocks.done(BLOCK, first, Ok(()));
        assert_eq!(
            (blocks.state(BLOCK, first), blocks.state(BLOCK, second)),
            (Written::Yes, Written::NotYet)
        );
        assert_eq!(blocks.take_due(), Some((BLOCK, second)));
        blocks.done(BLOCK, second, Ok(()));
        assert!(!blocks.is_dirty(BLOCK));
        let third = blocks.change(BLOCK);
        assert_eq!(
            (blocks.state(BLOCK, second), blocks.state(BLOCK, third)),
            (Written::Yes, Written::NotYet)
        );
    }

    #[test]
    fn a_failed_write_is_repeated_when_it_is_needed() {
        let mut blocks = Blocks::default();
        let number = blocks.change(BLOCK);
        blocks.take_due();
        blocks.done(BLOCK, number, Err(Errno::NOSPC));
        assert_eq!(blocks.state(BLOCK, number), Written::Failed(Errno::NOSPC));
        assert_eq!(blocks.take_due(), None);
        let again = blocks.need(BLOCK).unwrap();
        assert!(again > number);
        assert_eq!(blocks.take_due(), Some((BLOCK, again)));
    }
}
