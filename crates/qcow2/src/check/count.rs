//! Counters of references to the clusters of a window.

use std::ops::Range;

/// Counters for a window of host clusters.
#[derive(Debug)]
pub(super) struct Counters {
    window: Range<u64>,
    /// The largest number of clusters in a window.
    window_max: u64,
    /// The references to each cluster. At most `most`.
    counts: Vec<u32>,
    most: u32,
    /// One bit for each cluster with a table.
    tables: Vec<u64>,
    /// References to a table that another table, or data, refers to as well.
    pub(super) overlaps: u64,
    /// The number of them that are references of tables.
    pub(super) table_overlaps: u64,
    /// References that do not fit into a counter.
    pub(super) excess: u64,
}

impl Counters {
    /// Makes counters for windows of at most `window` clusters of the image's `clusters`.
    pub(super) fn new(clusters: u64, window: u64, refcount_bits: u32) -> Self {
        let window_max = window.min(clusters).max(1);
        let most = if refcount_bits > u16::BITS { u32::MAX } else { u16::MAX.into() };
        let (counts, tables) = (vec![0; window_max as usize], vec![0; window_max.div_ceil(64) as usize]);
        Self { window: 0..0, window_max, counts, most, tables, overlaps: 0, table_overlaps: 0, excess: 0 }
    }

    /// Returns the number of windows.
    pub(super) fn windows(&self, clusters: u64) -> u64 {
        clusters.div_ceil(self.window_max)
    }

    /// Moves to the next window and sets its counters to 0. Returns false if there is none.
    pub(super) fn next(&mut self, clusters: u64) -> bool {
        let start = self.window.end;
        self.window = start..clusters.min(start + self.window_max);
        self.tables.fill(0);
        self.counts.fill(0);
        !self.window.is_empty()
    }

    /// Returns the clusters of the window.
    pub(super) fn window(&self) -> Range<u64> {
        self.window.clone()
    }

    /// Returns the part of a range of clusters that is in the window.
    pub(super) fn part(&self, range: Range<u64>) -> Range<u64> {
        range.start.max(self.window.start)..range.end.min(self.window.end)
    }

    /// Adds references to tables.
    pub(super) fn add_table(&mut self, clusters: Range<u64>, count: u32) {
        for cluster in self.part(clusters) {
            let index = (cluster - self.window.start) as usize;
            let bit = 1 << (index % 64);
            let is_overlap = u64::from(self.tables[index / 64] & bit != 0);
            self.overlaps += is_overlap;
            self.table_overlaps += is_overlap;
            self.tables[index / 64] |= bit;
            self.add(index, count);
        }
    }

    /// Adds references to a cluster with data. All tables come before it.
    pub(super) fn add_data(&mut self, cluster: u64, count: u32) {
        if self.window.contains(&cluster) {
            let index = (cluster - self.window.start) as usize;
            self.overlaps += u64::from(self.tables[index / 64] & (1 << (index % 64)) != 0);
            self.add(index, count);
        }
    }

    fn add(&mut self, index: usize, count: u32) {
        let sum = self.counts[index].checked_add(count).filter(|sum| *sum <= self.most);
        self.counts[index] = sum.unwrap_or(self.most);
        self.excess += u64::from(sum.is_none());
    }

    /// Returns the counter of a cluster, `None` outside of the window.
    pub(super) fn get(&self, cluster: u64) -> Option<u64> {
        let index = self.window.contains(&cluster).then(|| (cluster - self.window.start) as usize)?;
        Some(self.counts[index].into())
    }

    /// Replaces the counter of a cluster in the window by the image's refcount, or by the largest number.
    pub(super) fn put(&mut self, cluster: u64, refcount: u64) {
        self.counts[(cluster - self.window.start) as usize] = u32::try_from(refcount).unwrap_or(u32::MAX);
    }
}
