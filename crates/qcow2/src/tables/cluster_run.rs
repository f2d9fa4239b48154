//! Contiguous clusters of the file.

/// Contiguous clusters of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClusterRun {
    pub(super) start: u64,
    pub(super) len: u64,
}

impl ClusterRun {
    pub(super) fn end(self) -> u64 {
        self.start + self.len
    }

    pub(super) fn contains(self, cluster: u64) -> bool {
        (self.start..self.end()).contains(&cluster)
    }

    /// Takes at most `len` clusters from the beginning.
    pub(super) fn split(&mut self, len: u64) -> Self {
        let front = Self { start: self.start, len: len.min(self.len) };
        *self = Self { start: front.end(), len: self.len - front.len };
        front
    }
}
