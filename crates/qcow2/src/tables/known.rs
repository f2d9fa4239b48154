//! The clusters that are known to have tables. A reference to one of them as data cannot be true.

use super::cluster_run::ClusterRun;
use std::collections::BTreeSet;

/// The clusters of tables.
#[derive(Debug)]
pub(super) struct Known {
    /// The header, the L1 table, the refcount table, the snapshots.
    fixed: Vec<ClusterRun>,
    /// The tables of snapshots, apart and in order. Snapshots can name the same table.
    snapshots: Vec<ClusterRun>,
    /// L2 tables and refcount blocks when the image was opened, in order.
    first: Vec<u64>,
    /// Newer L2 tables and refcount blocks.
    newer: BTreeSet<u64>,
    /// Tables that only snapshots may refer to now.
    gone: BTreeSet<u64>,
    /// The clusters of `fixed`, `first` and `newer`.
    filter: Filter,
}

impl Known {
    /// Takes the places of the tables. `most` is the number of L2 tables and refcount blocks that the image
    /// has room for.
    pub(super) fn new(
        fixed: Vec<ClusterRun>,
        mut snapshots: Vec<ClusterRun>,
        mut first: Vec<u64>,
        most: usize,
    ) -> Self {
        first.sort_unstable();
        first.dedup();
        snapshots.retain(|run| run.len > 0);
        snapshots.sort_unstable_by_key(|run| run.start);
        snapshots.dedup_by(|next, run| {
            let is_joined = next.start <= run.end();
            if is_joined {
                run.len = run.len.max(next.end() - run.start);
            }
            is_joined
        });
        let mut filter = Filter::new(most);
        // L1 table and refcount table have a limit.
        fixed.iter().for_each(|run| (run.start..run.end()).for_each(|cluster| filter.add(cluster)));
        first.iter().for_each(|cluster| filter.add(*cluster));
        Self { fixed, snapshots, first, newer: BTreeSet::new(), gone: BTreeSet::new(), filter }
    }

    /// Returns whether a cluster has a table. It is asked for each entry of each slice that is read.
    #[inline]
    pub(super) fn contains(&self, cluster: u64) -> bool {
        (self.filter.may_have(cluster) || !self.snapshots.is_empty()) && self.is_table(cluster)
    }

    #[inline(never)]
    fn is_table(&self, cluster: u64) -> bool {
        self.is_fixed(cluster)
            || self.is_of_snapshot(cluster)
            || self.newer.contains(&cluster)
            || self.first.binary_search(&cluster).is_ok() && !self.gone.contains(&cluster)
    }

    /// Returns whether a cluster from `first` to `last` may have a table.
    pub(super) fn has_any(&self, first: u64, last: u64) -> bool {
        let begun = self.snapshots.partition_point(|run| run.start <= last);
        let next = self.first.partition_point(|cluster| *cluster < first);
        self.fixed.iter().any(|run| run.start <= last && first < run.end())
            || begun.checked_sub(1).is_some_and(|last| first < self.snapshots[last].end())
            || self.newer.range(first..=last).next().is_some()
            || self.first.get(next).is_some_and(|cluster| *cluster <= last)
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
        self.filter.add(cluster);
    }

    /// Removes an L2 table.
    pub(super) fn remove(&mut self, cluster: u64) {
        self.newer.remove(&cluster);
        self.gone.insert(cluster);
    }

    /// Notes that a table has moved.
    pub(super) fn moved(&mut self, old: ClusterRun, new: ClusterRun) {
        self.fixed.retain(|run| *run != old);
        self.fixed.push(new);
        (new.start..new.end()).for_each(|cluster| self.filter.add(cluster));
    }
}

/// Says that a cluster is not in a set, or that it may be.
#[derive(Debug)]
struct Filter {
    /// Bit `cluster % bits` is set for each cluster of the set. The number of bits is a power of two.
    words: Box<[u64]>,
}

impl Filter {
    /// Makes the filter of an empty set that gets at most `most` clusters, or a few more.
    fn new(most: usize) -> Self {
        // A byte for each: if the set is full, an eighth of the bits are set at most.
        Self { words: vec![0; (most / 8 + 1).next_power_of_two()].into() }
    }

    fn add(&mut self, cluster: u64) {
        let at = self.word_of(cluster);
        self.words[at] |= 1 << (cluster % 64);
    }

    #[inline]
    fn may_have(&self, cluster: u64) -> bool {
        self.words[self.word_of(cluster)] & 1 << (cluster % 64) != 0
    }

    #[inline]
    fn word_of(&self, cluster: u64) -> usize {
        (cluster / 64) as usize & (self.words.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_has_no_false_negatives() {
        let mut filter = Filter::new(100);
        assert_eq!(filter.words.len(), 16);
        let clusters = [0, 1, 63, 64, 1023, 1024, 5000, u64::MAX];
        clusters.iter().for_each(|cluster| filter.add(*cluster));
        assert!(clusters.iter().all(|cluster| filter.may_have(*cluster)));
        assert_eq!((0..1024).filter(|cluster| filter.may_have(*cluster)).count(), 6);
    }

    #[test]
    fn tables_come_and_go() {
        let run = |start, len| ClusterRun { start, len };
        let mut known = Known::new(vec![run(0, 1), run(10, 2)], Vec::new(), vec![7, 5, 7], 2);
        let list = |known: &Known| (0..30).filter(|cluster| known.contains(*cluster)).collect::<Vec<_>>();
        assert_eq!(list(&known), [0, 5, 7, 10, 11]);
        known.add(20);
        known.remove(7);
        known.moved(run(10, 2), run(12, 3));
        assert_eq!(list(&known), [0, 5, 12, 13, 14, 20]);
        known.remove(20);
        assert_eq!(list(&known), [0, 5, 12, 13, 14]);
        // The one that is gone counts.
        assert!(known.has_any(0, 3) && known.has_any(6, 11) && known.has_any(13, 40));
        assert!(!known.has_any(1, 4) && !known.has_any(6, 6) && !known.has_any(15, 40));
        known.add(20);
        assert!(known.has_any(15, 20) && known.has_any(20, 20) && !known.has_any(15, 19));
    }

    #[test]
    fn snapshots_with_the_same_tables_take_no_more_memory() {
        let run = |start, len| ClusterRun { start, len };
        let tables =
            [vec![run(9, 1); 5], vec![run(20, 3), run(4, 3), run(5, 1), run(21, 4), run(7, 1)]].concat();
        let known = Known::new(Vec::new(), tables, Vec::new(), 0);
        assert_eq!(known.snapshots, [run(4, 4), run(9, 1), run(20, 5)]);
        let list = (0..30).filter(|cluster| known.contains(*cluster)).collect::<Vec<_>>();
        assert_eq!(list, [4, 5, 6, 7, 9, 20, 21, 22, 23, 24]);
        assert!(known.has_any(7, 8) && known.has_any(10, 20) && known.has_any(24, 30));
        assert!(!known.has_any(0, 3) && !known.has_any(10, 19) && !known.has_any(25, 30));
    }
}
