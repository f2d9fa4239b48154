//! The images of a disk in one engine.

use super::layer::Chain;
use super::table_op_slot::TableOpSlot;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The images in one engine, for one queue.
#[derive(Debug)]
pub(crate) struct AttachedImages {
    pub(super) chain: Arc<Chain>,
    pub(super) generation: u64,
    /// The requests of the queue that have begun and not ended.
    pub(super) requests: usize,
    pub(super) shard: u32,
    /// The operations that the queue carries out for the tables.
    pub(super) table_ops: Vec<Option<Box<TableOpSlot>>>,
    /// The number of these operations.
    pub(super) in_flight: usize,
    /// The number of them for which the engine had no room.
    pub(super) busy: usize,
    /// The image was open at the last look.
    pub(super) is_open: bool,
    /// The queue stops by force, so it begins no other operation until its next request.
    pub(super) is_cancelled: bool,
}

impl AttachedImages {
    pub(super) fn new(chain: Arc<Chain>, generation: u64, shard: u32) -> Self {
        let (requests, table_ops, in_flight, busy) = (0, Vec::new(), 0, 0);
        let (is_open, is_cancelled) = (true, false);
        Self { chain, generation, requests, shard, table_ops, in_flight, busy, is_open, is_cancelled }
    }

    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.busy > 0 || self.chain.due.load(Ordering::Relaxed) && !self.is_cancelled
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Cancels the operations of the queue. Other queues carry them out.
    pub(crate) fn cancel(&mut self) {
        self.is_cancelled = true;
        self.table_ops.iter_mut().flatten().for_each(|slot| slot.cancel());
    }
}
