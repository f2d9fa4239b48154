//! The rules, for tests that leave one out.

/// A rule of `docs/adr/0011-a-table-holds-only-what-may-be-on-disk.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// The reserve is durable.
    R1,
    /// Only zeroes are linked at once.
    R2,
    /// Data is durable before it is linked.
    R3,
    /// Answers wait for the blocks.
    R4,
    /// Freeing waits for the write of the L2 entry.
    R5L2,
    /// Freeing waits for the write of the L1 entry.
    R5L1,
    /// Freeing waits for a sync.
    R5Sync,
    /// Freeing waits for requests.
    R5Pins,
    /// Clusters are not taken while their space is returned to the host.
    R6Punch,
    /// Reused clusters are zeroed.
    R6,
    /// Tables are durable before they are referred to.
    R7,
    /// A durable write syncs the tables too.
    R8,
    /// One write of a block at a time.
    R9,
}

/// The rules to follow.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules {
    #[cfg(test)]
    without: Option<Rule>,
}

impl Rules {
    /// Leaves one rule out.
    #[cfg(test)]
    pub(crate) fn without(rule: Option<Rule>) -> Self {
        Self { without: rule }
    }

    /// Returns whether a rule holds, as it always does outside of tests.
    pub(super) fn hold(self, _rule: Rule) -> bool {
        #[cfg(test)]
        return self.without != Some(_rule);
        #[cfg(not(test))]
        true
    }
}
