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
    /// Applies a change. The worker, which waits for the kick descriptor, registers a new one itself.
    pub fn apply(&mut self, update: Update) {
        // First, while the memory that the change may take away is still mapped.
        self.is_intact();
        // No change waits for credit, and the change may take away its buffers.
        if matches!(update, Update::Memory(_) | Update::Addresses(_) | Update::Invalidate(..)) {
            self.unpop(u16::MAX);
        }
        let looks = matches!(
            update,
            Update::Memory(_) | Update::Addresses(_) | Update::Poll | Update::TranslationRefused(_)
        );
        if let Some(translation) = &mut self.translation
            && looks
        {
            translation.is_waiting = false;
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
            Update::TranslationRefused(miss) => {
                if let Some(translation) = &mut self.translation {
                    translation.tlb.refuse(miss);
                }
            }
            Update::Addresses(_) | Update::Poll | Update::Enable(_) => {}
        }
        self.commit_marks();
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
                    translation.resolved();
                }
                if std::mem::take(&mut self.lost) {
                    info!(parent: span, queue, "the ring is in guest memory again");
                }
                self.set_areas(metadata);
                // Completions that were pushed while the ring rested.
                self.pushed = true;
            }
            (Err(TranslateError::Missing), Some(translation)) => {
                translation.ask();
                self.queue.unmap();
            }
            (Err(lack), translation) => {
                if !std::mem::replace(&mut self.lost, true) {
                    warn!(parent: span, queue, error = %lack, "the ring is no longer in guest memory; it rests");
                }
                if let Some(translation) = translation {
                    translation.wait_for_update();
                }
                self.queue.unmap();
            }
        }
    }

    /// Drops the mapping and the translations that use these addresses.
    fn invalidate(&mut self, range: IovaRange, done: Sender<Infallible>) {
        let Some(translation) = &mut self.translation else { return };
        if translation.ring_overlaps(range) {
            self.queue.unmap();
        }
        // Last, because dropping `done` reports that nothing uses the range.
        translation.invalidate(range, done);
    }
}
