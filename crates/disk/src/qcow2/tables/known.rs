//! The clusters that are known to have tables. A reference to one of them as data cannot be true.

use super::ops::Run;
use std::collections::BTreeSet;

/// The clusters of tables.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// The header, the L1 table, the refcount table, the snapshots.
    fixed: Vec<Run>,
    /// The tables of snapshots, apart and in order. Snapshots can name the same table.
    snapshots: Vec<Run>,
    /// L2 tables and refcount blocks when the image was opened, in order.
    first: Vec<u64>,
    /// Newer L2 tables and refcount blocks.
    newer: BTreeSet<u64>,
    /// Tables that only snapshots may refer to now.
    gone: BTreeSet<u64>,
}

impl Known {
    pub(super) fn new(fixed: Vec<Run>, mut snapshots: Vec<Run>, mut first: Vec<u64>) -> Self {
        first.sort_unstable();
        first.dedup();
        snapshots.sort_unstable_by_key(|run| run.start);
        snapshots.dedup_by(|next, run| {
            let is_joined = next.start <= run.end();
            if is_joined {
                run.len = run.len.max(next.end() - run.start);
            }
            is_joined
        });
        Self { fixed, snapshots, first, ..Self::default() }
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        self.is_fixed(cluster)
            || self.is_of_snapshot(cluster)
            || self.newer.contains(&cluster)
            || self.first.binary_search(&cluster).is_ok() && !self.gone.contains(&cluster)
    }

    /// Returns whether a cluster has a table of which there is one.
    pub(super) fn is_fixed(&self, cluster: u64) -> bool {
        self.fixed.iter().any(|run| run.contains(cluster))
    }

    fn is_of_snapshot(&self, cluster: u64) -> bool {
        let before = self.snapshots.partition_point(|run| run.start <= cluster);
        before.checked_sub(1).is_some_and(|last| self.snapshots[last].contains(cluster))
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
        let mut known = Known::new(vec![run(0, 1), run(10, 2)], Vec::new(), vec![7, 5, 7]);
        let list = |known: &Known| (0..30).filter(|cluster| known.contains(*cluster)).collect::<Vec<_>>();
        assert_eq!(list(&known), [0, 5, 7, 10, 11]);
        known.add(20);
        known.remove(7);
        known.moved(run(10, 2), run(12, 3));
        assert_eq!(list(&known), [0, 5, 12, 13, 14, 20]);
        known.remove(20);
        assert_eq!(list(&known), [0, 5, 12, 13, 14]);
    }

    #[test]
    fn snapshots_with_the_same_tables_take_no_more_memory() {
        let run = |start, len| Run { start, len };
        let tables =
            [vec![run(9, 1); 5], vec![run(20, 3), run(4, 3), run(5, 1), run(21, 4), run(7, 1)]].concat();
        let known = Known::new(Vec::new(), tables, Vec::new());
        assert_eq!(known.snapshots, [run(4, 4), run(9, 1), run(20, 5)]);
        let list = (0..30).filter(|cluster| known.contains(*cluster)).collect::<Vec<_>>();
        assert_eq!(list, [4, 5, 6, 7, 9, 20, 21, 22, 23, 24]);
    }
}
