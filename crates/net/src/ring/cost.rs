//! The cost of frames, in the unit of [`QueueTask::poll`](kickless_device::QueueTask::poll).

/// The most frames of one poll that are taken in batches, up to a batch more. With 64 bytes each, they stay
/// in a processor's cache of the first level until they are delivered. They take some 10 microseconds, for
/// which the kicks and completions of others wait.
pub(crate) const FRAMES_MAX: u32 = 256;
/// The shares of a frame that passes directly from one guest's memory to another's. The sender does its own
/// part of the work and the receiver's, and is charged for both.
pub(crate) const DIRECT_SHARES: u32 = 2;
/// Bytes that cost as much as one frame.
const BYTES_PER_COST: u64 = 4096;
/// Frames of a batch that cost as much as a frame by itself, or a request of a disk. A frame of a batch
/// takes about 40 nanoseconds, and a request some 600. A card beside others on a worker has turns of two
/// requests. If a frame cost as much, a visit of the rings of all cards would take longer than its
/// frames, and frames would pile up before a worker that is busy with visits.
const FRAMES_PER_COST: u32 = 16;
/// Bytes that the part of a frame of a batch contains: an Ethernet frame of usual length with its tags.
const BYTES_OF_PART: u64 = 1536;
/// Descriptors that cost as much as one frame. Reading a descriptor takes about 3 nanoseconds.
pub(crate) const DESCRIPTORS_PER_COST: u16 = 64;
/// Popping a chain as credit and completing it takes as long as reading this many descriptors.
const CHAIN_DESCRIPTORS: u32 = 8;

/// Segments that cost as much as one frame, if the card does not make them: the receiver's card does, or a
/// kernel. Three usual segments have about [`BYTES_PER_COST`], so a packet of them costs what its bytes cost.
/// The kernel takes 0.3 microseconds for a segment of a TAP's packet.
const SEGMENTS_PER_COST: u32 = 3;

/// Returns the cost of a frame of this length. The cast is lossless, because a chain holds at most 2^32
/// bytes.
pub(crate) fn of_frame(len: u64) -> u32 {
    1 + (len / BYTES_PER_COST) as u32
}

/// Returns the cost of a packet of this length that passes whole and becomes so many segments elsewhere.
pub(crate) fn of_packet(len: u64, segments: u32) -> u32 {
    of_frame(len).max(segments.div_ceil(SEGMENTS_PER_COST))
}

/// The cost of frames that are carried in one batch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchCost {
    /// The limit and the sum, in parts of a cost of 1.
    limit: u32,
    parts: u32,
    /// The parts of a frame without bytes.
    frame: u32,
}

impl BatchCost {
    /// Begins a batch that may cost `limit`. While frames have limits, the budget of a poll is their
    /// number, so each costs 1.
    #[inline]
    pub(crate) fn new(limit: u32, has_limits: bool) -> Self {
        let frame = if has_limits { FRAMES_PER_COST } else { 1 };
        Self { limit: limit.saturating_mul(FRAMES_PER_COST), parts: 0, frame }
    }

    #[inline]
    pub(crate) fn is_used_up(&self) -> bool {
        self.parts >= self.limit
    }

    /// Adds a frame of this length. The bytes of a long frame cost as much as those of a frame by itself.
    /// The cast is lossless, as in [`of_frame`].
    #[inline]
    pub(crate) fn add(&mut self, len: u64) {
        let bytes = len.saturating_sub(BYTES_OF_PART) * u64::from(FRAMES_PER_COST) / BYTES_PER_COST;
        self.parts = self.parts.saturating_add(self.frame + bytes as u32);
    }

    /// Adds a packet of this length that becomes so many segments elsewhere, or none.
    #[inline]
    pub(crate) fn add_packet(&mut self, len: u64, segments: u32) {
        let before = self.parts;
        self.add(len);
        if segments > 0 {
            let parts = segments.saturating_mul(FRAMES_PER_COST) / SEGMENTS_PER_COST;
            self.parts = self.parts.max(before.saturating_add(parts));
        }
    }

    /// Adds frames of this length.
    #[inline]
    pub(crate) fn add_all(&mut self, len: u64, frames: u32) {
        let bytes = len.saturating_sub(BYTES_OF_PART) * u64::from(FRAMES_PER_COST) / BYTES_PER_COST;
        self.parts = self.parts.saturating_add((self.frame + bytes as u32).saturating_mul(frames));
    }

    /// Returns the cost of all frames. A batch costs 1 at least.
    #[inline]
    pub(crate) fn cost(&self) -> u32 {
        self.parts.div_ceil(FRAMES_PER_COST)
    }
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
    fn frames_of_a_batch_cost_a_part() {
        let mut batch = BatchCost::new(2, false);
        let mut frames = 0u32;
        while !batch.is_used_up() {
            batch.add(1514);
            frames += 1;
            assert_eq!(batch.cost(), of_frame(1514) * frames.div_ceil(16));
        }
        assert_eq!(frames, 32);
        // Long frames cost what they cost by themselves.
        let mut long = BatchCost::new(u32::MAX, false);
        (0..4).for_each(|_| long.add(65_000));
        assert_eq!((long.cost(), 4 * of_frame(65_000)), (62, 64));
        let mut pages = BatchCost::new(u32::MAX, false);
        (0..32).for_each(|_| pages.add(4095));
        assert_eq!(pages.cost(), 20);
        assert_eq!(BatchCost::new(64, false).cost(), 0);
        let mut limited = BatchCost::new(3, true);
        (0..3).for_each(|_| limited.add(60));
        assert_eq!((limited.is_used_up(), limited.cost()), (true, 3));
    }

    #[test]
    fn usual_segments_cost_what_their_packet_costs() {
        let of_batch = |len, segments| {
            let mut batch = BatchCost::new(u32::MAX, false);
            (0..16).for_each(|_| batch.add_packet(len, segments));
            batch.cost()
        };
        // The payload of a long packet in segments of 1448 bytes.
        let usual = 65_000u32.div_ceil(1448);
        assert_eq!((of_packet(65_054, usual), of_packet(65_054, 0)), (16, 16));
        assert_eq!(of_batch(65_054, usual), of_batch(65_054, 0));
        // Short segments are paid one by one, also those of a short packet.
        assert_eq!((of_packet(65_054, 128), of_packet(182, 128)), (43, 43));
        assert_eq!((of_batch(65_054, 128), of_batch(182, 128)), (682, 682));
    }

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
