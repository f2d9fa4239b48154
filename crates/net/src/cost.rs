//! The cost of frames, in the unit of [`QueueTask::poll`](kickless_device::QueueTask::poll).

/// Bytes that cost as much as one frame.
const BYTES_PER_COST: u64 = 4096;
/// Descriptors that cost as much as one frame. Reading a descriptor takes about 3 nanoseconds.
pub(crate) const DESCRIPTORS_PER_COST: u16 = 64;
/// Popping a chain as credit and completing it takes as long as reading this many descriptors.
const CHAIN_DESCRIPTORS: u32 = 8;

/// Returns the cost of a frame of this length. The cast is lossless, because a chain holds at most 2^32
/// bytes.
pub(crate) fn of_frame(len: u64) -> u32 {
    1 + (len / BYTES_PER_COST) as u32
}

/// The budget of a poll, and the cost of the poll so far.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    limit: u32,
    cost: u32,
    /// Descriptors that the cost does not contain yet, because they are fewer than [`DESCRIPTORS_PER_COST`].
    /// Later polls charge them.
    descriptors: u32,
}

impl Budget {
    /// Starts a poll with this budget.
    pub(crate) fn begin(&mut self, limit: u32) {
        (self.limit, self.cost) = (limit, 0);
    }

    /// Returns the cost of the poll so far.
    pub(crate) fn cost(&self) -> u32 {
        self.cost
    }

    /// Returns what is left of the budget.
    pub(crate) fn left(&self) -> u32 {
        self.limit.saturating_sub(self.cost)
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.cost >= self.limit
    }

    pub(crate) fn charge(&mut self, cost: u32) {
        self.cost = self.cost.saturating_add(cost);
    }

    /// Charges a chain that was popped as credit.
    pub(crate) fn charge_chain(&mut self, descriptors: u16) {
        self.charge_descriptors(CHAIN_DESCRIPTORS + u32::from(descriptors));
    }

    /// Charges this number of descriptors, or of buffers that were written.
    pub(crate) fn charge_descriptors(&mut self, descriptors: u32) {
        self.descriptors += descriptors;
        self.charge(self.descriptors / u32::from(DESCRIPTORS_PER_COST));
        self.descriptors %= u32::from(DESCRIPTORS_PER_COST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_charged_across_polls() {
        let mut budget = Budget::default();
        let mut cost = 0;
        for _ in 0..64 {
            budget.begin(1);
            budget.charge_chain(1);
            cost += budget.cost();
        }
        assert_eq!(cost, 9);
        budget.begin(3);
        budget.charge_chain(u16::MAX);
        assert!(budget.is_used_up());
    }
}
