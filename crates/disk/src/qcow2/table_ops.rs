//! Carries out operations for the tables of images, in the engine of a queue.

use super::attached::AttachedImages;
use super::own_op::OwnSlot;
use crate::attached::OWN_SLOTS;
use crate::fault::FaultInjector;
use crate::op_sender::OpSender;
use crate::{IoContext, Step};
use kickless_io::Completion;
use std::sync::atomic::Ordering;

/// The largest number of operations of a queue at a time. Others wait, or go to other queues.
const OWN_MAX: usize = 16;

/// Sends the operations of several slots.
pub(super) trait OwnSender: OpSender {
    /// Chooses the slot of the next operations.
    fn set_slot(&mut self, slot: u32);
}

impl OwnSender for IoContext<'_> {
    fn set_slot(&mut self, slot: u32) {
        self.slot = slot;
    }
}

impl AttachedImages {
    /// Starts the operations that are due, as far as there is room.
    #[cold]
    pub(super) fn submit_own<S: OwnSender>(&mut self, sender: &mut S, injector: Option<&FaultInjector>) {
        self.busy = 0;
        for index in 0..self.own.len() {
            if self.own[index].as_ref().is_some_and(|slot| slot.is_busy) {
                self.run_own(index, sender, injector, None);
            }
        }
        if self.is_cancelled {
            return;
        }
        // Acquire. Partner: the store in `Image::with_tables`. An operation that becomes due later sets the
        // flag again.
        while self.busy == 0 && self.in_flight < OWN_MAX && self.chain.due.swap(false, Ordering::AcqRel) {
            let chain = self.chain.clone();
            'layers: for (layer, image) in chain.layers.iter().enumerate() {
                let Some(image) = image.image() else { continue };
                loop {
                    if self.in_flight >= OWN_MAX || self.busy > 0 {
                        self.chain.due.store(true, Ordering::Release);
                        break 'layers;
                    }
                    // The flag is for this queue's own look, so no other queue is told.
                    let Some(op) = image.next_op() else { break };
                    match OwnSlot::new(image, layer, op) {
                        Ok(slot) => self.begin_own(slot, sender, injector),
                        Err((id, errno)) => {
                            image.with_tables(|tables| tables.complete(id, None, Err(errno)));
                        }
                    }
                }
            }
        }
    }

    fn begin_own<S: OwnSender>(&mut self, slot: OwnSlot, sender: &mut S, injector: Option<&FaultInjector>) {
        let free = self.own.iter().position(Option::is_none).unwrap_or(self.own.len());
        if free == self.own.len() {
            self.own.push(None);
        }
        self.own[free] = Some(Box::new(slot));
        self.in_flight += 1;
        self.run_own(free, sender, injector, None);
    }

    /// Takes the completion of one.
    #[cold]
    pub(super) fn resume_own<S: OwnSender>(
        &mut self,
        sender: &mut S,
        injector: Option<&FaultInjector>,
        completion: Completion,
    ) {
        let index = (completion.token.slot - OWN_SLOTS) as usize;
        self.run_own(index, sender, injector, Some(completion));
    }

    /// Runs a step of one.
    fn run_own<S: OwnSender>(
        &mut self,
        index: usize,
        sender: &mut S,
        injector: Option<&FaultInjector>,
        completion: Option<Completion>,
    ) {
        let Some(mut slot) = self.own.get_mut(index).and_then(Option::take) else { return };
        sender.set_slot(OWN_SLOTS + index as u32);
        let step = slot.step(sender, injector, completion);
        slot.is_busy = matches!(step, Step::Busy | Step::More);
        self.busy += usize::from(slot.is_busy);
        if let Step::Done(result) = step {
            self.in_flight -= 1;
            slot.end(result);
        } else {
            self.own[index] = Some(slot);
        }
    }
}
