//! Carries out operations for the tables of images, in the engine of a queue.

use super::attached::AttachedImages;
use super::table_op_slot::TableOpSlot;
use crate::attached::TABLE_OP_SLOTS;
use crate::fault::FaultInjector;
use crate::op_sender::OpSender;
use crate::{IoContext, Step};
use kickless_io::Completion;
use std::sync::atomic::Ordering;

/// The largest number of operations of a queue at a time. Others wait, or go to other queues.
const TABLE_OPS_MAX: usize = 16;

/// Sends the operations of several slots.
pub(super) trait TableOpSender: OpSender {
    /// Chooses the slot of the next operations.
    fn set_slot(&mut self, slot: u32);
}

impl TableOpSender for IoContext<'_> {
    fn set_slot(&mut self, slot: u32) {
        self.slot = slot;
    }
}

impl AttachedImages {
    /// Starts the operations that are due, as far as there is room.
    #[cold]
    pub(super) fn submit_table_ops<S: TableOpSender>(
        &mut self,
        sender: &mut S,
        injector: Option<&FaultInjector>,
    ) {
        self.busy = 0;
        for index in 0..self.table_ops.len() {
            if self.table_ops[index].as_ref().is_some_and(|slot| slot.is_busy) {
                self.run_table_op(index, sender, injector, None);
            }
        }
        if self.is_cancelled {
            return;
        }
        // Acquire. Partner: the store in `Image::with_tables`. An operation that becomes due later sets the
        // flag again.
        while self.busy == 0 && self.in_flight < TABLE_OPS_MAX && self.chain.due.swap(false, Ordering::AcqRel)
        {
            let chain = self.chain.clone();
            'layers: for (layer, image) in chain.layers.iter().enumerate() {
                let Some(image) = image.image() else { continue };
                loop {
                    if self.in_flight >= TABLE_OPS_MAX || self.busy > 0 {
                        self.chain.due.store(true, Ordering::Release);
                        break 'layers;
                    }
                    // The flag is for this queue's own look, so no other queue is told.
                    let Some(op) = image.next_op() else { break };
                    match TableOpSlot::new(image, layer, op) {
                        Ok(slot) => self.begin_table_op(slot, sender, injector),
                        Err((id, errno)) => {
                            image.with_tables(|tables| tables.complete(id, None, Err(errno)));
                        }
                    }
                }
            }
        }
    }

    fn begin_table_op<S: TableOpSender>(
        &mut self,
        slot: TableOpSlot,
        sender: &mut S,
        injector: Option<&FaultInjector>,
    ) {
        let free = self.table_ops.iter().position(Option::is_none).unwrap_or(self.table_ops.len());
        if free == self.table_ops.len() {
            self.table_ops.push(None);
        }
        self.table_ops[free] = Some(Box::new(slot));
        self.in_flight += 1;
        self.run_table_op(free, sender, injector, None);
    }

    /// Takes the completion of one.
    #[cold]
    pub(super) fn resume_table_op<S: TableOpSender>(
        &mut self,
        sender: &mut S,
        injector: Option<&FaultInjector>,
        completion: Completion,
    ) {
        let index = (completion.token.slot - TABLE_OP_SLOTS) as usize;
        self.run_table_op(index, sender, injector, Some(completion));
    }

    /// Runs a step of one.
    fn run_table_op<S: TableOpSender>(
        &mut self,
        index: usize,
        sender: &mut S,
        injector: Option<&FaultInjector>,
        completion: Option<Completion>,
    ) {
        let Some(mut slot) = self.table_ops.get_mut(index).and_then(Option::take) else { return };
        sender.set_slot(TABLE_OP_SLOTS + index as u32);
        let step = slot.step(sender, injector, completion);
        slot.is_busy = matches!(step, Step::Busy | Step::More);
        self.busy += usize::from(slot.is_busy);
        if let Step::Done(result) = step {
            self.in_flight -= 1;
            slot.end(result);
        } else {
            self.table_ops[index] = Some(slot);
        }
    }
}
