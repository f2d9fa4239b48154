//! Changes to a running vring.

use super::Vring;
use super::iommu::Located;
use crate::{Areas, IovaAddresses, Update};
use kickless_memory::{IovaRange, TranslateError, Unmapped};
use kickless_virtqueue::device::Metadata;
use std::convert::Infallible;
use std::sync::mpsc::Sender;
use tracing::{info, warn};

impl Vring {
    /// Applies a change. The kick descriptor, which its worker waits for, is exchanged by the worker.
    pub fn apply(&mut self, update: Update) {
        // While what it may take away is there to tell.
        self.is_sound();
        // Nothing waits for credit, and its buffers may be gone.
        if matches!(update, Update::Memory(_) | Update::Addresses(_) | Update::Invalidate(..)) {
            self.unpop(u16::MAX);
        }
        let looks =
            matches!(update, Update::Memory(_) | Update::Addresses(_) | Update::Look | Update::Refused(_));
        if let Some(translation) = &mut self.translation
            && looks
        {
            translation.standing = false;
        }
        match update {
            Update::Memory(view) => {
                self.queue.marks().set_view(&view);
                self.view = view;
                if let Some(translation) = &mut self.translation {
                    translation.tlb.flush();
                }
                self.remap();
            }
            Update::Addresses(areas) if areas != self.areas => {
                self.areas = areas;
                self.remap();
            }
            Update::Call(call) => {
                self.call = call;
                self.send_call();
            }
            Update::Err(err) => {
                if self.broken
                    && let Some(err) = &err
                {
                    err.signal();
                }
                self.err = err;
            }
            Update::Logged(logged) => self.logged = logged,
            Update::Kick(kick) => self.kick = kick,
            Update::Invalidate(range, done) => self.invalidate(range, done),
            Update::Forget(range) => {
                if let Some(translation) = &mut self.translation {
                    translation.tlb.drop_range(range);
                }
            }
            Update::Refused(miss) => {
                if let Some(translation) = &mut self.translation {
                    translation.tlb.refuse(miss);
                }
            }
            Update::Addresses(_) | Update::Look | Update::Enable(_) => {}
        }
        self.settle_marks();
    }

    pub(super) fn remap(&mut self) {
        let (view, options) = (&self.view, &self.options);
        let mapped = match (&self.areas, &mut self.translation) {
            (Areas::User(addresses), _) => {
                Metadata::map(view, addresses, options).map_err(TranslateError::Unmapped)
            }
            (Areas::Iova(addresses), Some(translation)) => {
                translation.locate(addresses, options, view.map()).and_then(|Located { areas, log }| {
                    Metadata::map_pieces(view, &areas, log, options).map_err(TranslateError::Unmapped)
                })
            }
            (Areas::Iova(IovaAddresses { desc, .. }), None) => {
                Err(TranslateError::Unmapped(Unmapped { addr: desc.0, len: 0 }))
            }
        };
        let (span, queue) = (&self.span, self.index);
        match (mapped, &mut self.translation) {
            (Ok(metadata), translation) => {
                if let Some(translation) = translation {
                    translation.found();
                }
                if std::mem::take(&mut self.lost) {
                    info!(parent: span, queue, "the ring is in guest memory again");
                }
                self.take_areas(metadata);
                // What was pushed while it rested.
                self.pushed = true;
            }
            (Err(TranslateError::Missing), Some(translation)) => {
                translation.ask();
                self.queue.unmap();
            }
            (Err(lack), translation) => {
                if !std::mem::replace(&mut self.lost, true) {
                    warn!(parent: span, queue, error = %lack, "the ring is not in guest memory any more; it rests");
                }
                if let Some(translation) = translation {
                    translation.give_up();
                }
                self.queue.unmap();
            }
        }
    }

    /// Lets go of all that goes by translations of these addresses.
    fn invalidate(&mut self, range: IovaRange, done: Sender<Infallible>) {
        let Some(translation) = &mut self.translation else { return };
        if translation.is_ring_in(range) {
            self.queue.unmap();
        }
        // Last, for with `done` goes the promise.
        translation.invalidate(range, done);
    }
}
