//! The clusters that are known to have tables. A reference to one of them as data cannot be true.

use super::ops::Run;
use std::collections::BTreeSet;

/// The clusters of tables.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// The header, the L1 table, the refcount table, the snapshots.
    fixed: Vec<Run>,
    /// L2 tables and refcount blocks when the image was opened, in order.
    first: Vec<u64>,
    /// Newer L2 tables and refcount blocks.
    newer: BTreeSet<u64>,
    /// Tables that only snapshots may refer to now.
    gone: BTreeSet<u64>,
}

impl Known {
    pub(super) fn new(fixed: Vec<Run>, mut first: Vec<u64>) -> Self {
        first.sort_unstable();
        first.dedup();
        Self { fixed, first, ..Self::default() }
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        self.is_fixed(cluster)
            || self.newer.contains(&cluster)
            || self.first.binary_search(&cluster).is_ok() && !self.gone.contains(&cluster)
    }

    /// Returns whether a cluster has a table of which there is one.
    pub(super) fn is_fixed(&self, cluster: u64) -> bool {
        self.fixed.iter().any(|run| run.contains(cluster))
    }

    /// Adds an L2 table or a refcount block.
    pub(super) fn add(&mut self, cluster: u64) {
        self.newer.insert(cluster);
    }

    /// Removes an L2 table.
    pub(super) fn remove(&mut self, cluster: u64) {
        self.newer.remove(&cluster);
        self.gone.insert(cluster);
    }

    /// Notes that a table has moved.
    pub(super) fn moved(&mut self, old: Run, new: Run) {
        self.fixed.retain(|run| *run != old);
        self.fixed.push(new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_come_and_go() {
        let run = |start, len| Run { start, len };
        let mut known = Known::new(vec![run(0, 1), run(10, 2)], vec![7, 5, 7]);
        let list = |known: &Known| (0..30).filter(|cluster| known.contains(*cluster)).collect::<Vec<_>>();
        assert_eq!(list(&known), [0, 5, 7, 10, 11]);
        known.add(20);
        known.remove(7);
        known.moved(run(10, 2), run(12, 3));
        assert_eq!(list(&known), [0, 5, 12, 13, 14, 20]);
        known.remove(20);
        assert_eq!(list(&known), [0, 5, 12, 13, 14]);
    }
}
