//! What frames cost in the measure of [`QueueTask::poll`](kickless_device::QueueTask::poll).

/// So many bytes cost as much as a frame does.
const COST_BYTES: u64 = 4096;
/// So many descriptors cost as much as a frame does. One takes some 3 nanoseconds.
pub(crate) const COST_DESCRIPTORS: u16 = 64;
/// To pop a chain as credit and to complete it takes as long as to read so many descriptors.
const CHAIN_DESCRIPTORS: u32 = 8;

/// Returns the cost of a frame of this length. A chain holds at most 2^32 bytes.
pub(crate) fn of_frame(len: u64) -> u32 {
    1 + (len / COST_BYTES) as u32
}

/// The budget of a poll, and the part that is taken.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    limit: u32,
    cost: u32,
    /// Descriptors that are not in the cost yet. They count in later polls.
    descriptors: u32,
}

impl Budget {
    /// Begins a poll with this budget.
    pub(crate) fn begin(&mut self, limit: u32) {
        (self.limit, self.cost) = (limit, 0);
    }

    /// Returns what the poll has cost so far.
    pub(crate) fn cost(&self) -> u32 {
        self.cost
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.cost >= self.limit
    }

    pub(crate) fn charge(&mut self, cost: u32) {
        self.cost = self.cost.saturating_add(cost);
    }

    /// Charges a chain that was popped as credit.
    pub(crate) fn charge_chain(&mut self, descriptors: u16) {
        self.descriptors += CHAIN_DESCRIPTORS + u32::from(descriptors);
        self.charge(self.descriptors / u32::from(COST_DESCRIPTORS));
        self.descriptors %= u32::from(COST_DESCRIPTORS);
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
