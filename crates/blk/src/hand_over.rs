//! The device between two processes of one host, while its guest goes on.

use crate::device::Blk;
use crate::handed_disk::HandedError;
use kickless_device::{GiveError, HandOver, StartError};
use kickless_disk::Suspended;
use kickless_disk::medium::SuspendedMedium;
use kickless_handover::{Given, Giving, Part, v1};
use kickless_spec::blk::CONFIG_WRITEBACK;
use std::iter;
use std::sync::atomic::Ordering;

impl Blk {
    /// Checks that the guest of the other process sees the disk as it was. The driver's cache mode passes
    /// later.
    ///
    /// # Errors
    /// It does not.
    pub fn check_handed(&self) -> Result<(), HandedError> {
        let Some(before) = &self.handed_space else { return Ok(()) };
        let now = self.config_space();
        let len = before.len().max(now.len());
        // A version that knows more fields has 0 in them.
        let padded =
            |space: &[u8]| space.iter().copied().chain(iter::repeat(0)).take(len).collect::<Vec<_>>();
        let (before, now) = (padded(before), padded(&now));
        let differs = |at: &usize| *at != CONFIG_WRITEBACK && before[*at] != now[*at];
        match (0..len).find(differs) {
            Some(at) => Err(HandedError::Differs { at }),
            None => Ok(()),
        }
    }
}

/// Makes the error of a device that cannot be given.
fn give_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> GiveError {
    GiveError(error.into())
}

/// Makes the error of a device that cannot go on.
fn start_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StartError {
    StartError(error.into())
}

impl HandOver for Blk {
    fn refuses(&self) -> Option<String> {
        self.shared.medium.refuses().map(str::to_owned)
    }

    fn changes(&self) -> u64 {
        self.shared.medium.changes()
    }

    fn give(&self, to: &mut Giving) -> Result<Part, GiveError> {
        // In this order: a size that changes in between is a change.
        let medium = self.shared.medium.give(to).map_err(give_error)?;
        let config_space = to.bytes(&self.config_space()).map_err(give_error)?;
        Part::new(&v1::Disk { config_space, medium }).map_err(give_error)
    }

    fn gives_slowly(&self) -> bool {
        self.disk().gives_slowly()
    }

    fn settle(&self) -> Result<(), GiveError> {
        self.shared.medium.settle().map_err(give_error)
    }

    fn hold(&self) {}

    fn give_final(&self, _: &mut Giving) -> Result<Part, GiveError> {
        let shared = &self.shared;
        let SuspendedMedium { is_taken, is_new_guest, disk } = shared.medium.suspend().map_err(give_error)?;
        let Suspended { images, nbd } = disk;
        let state = v1::DiskFinal {
            is_taken,
            is_new_guest,
            writeback: shared.writeback(),
            driver_known: shared.driver_known.load(Ordering::Relaxed),
            fresh_driver: shared.fresh_driver.load(Ordering::Relaxed),
            has_lost_writes: shared.has_lost_writes.load(Ordering::Relaxed),
            is_paused: shared.halt.is_paused(),
            stops: shared.on_error.stops(),
            images,
            nbd,
            operations: shared.metrics.operations(),
        };
        Part::new(&state).map_err(give_error)
    }

    fn take_back(&self) -> Result<(), StartError> {
        self.shared.medium.take_back().map_err(start_error)
    }

    fn receive_final(&self, state: Part, _: &Given) -> Result<(), StartError> {
        let state: v1::DiskFinal = state.read().map_err(start_error)?;
        let shared = &self.shared;
        let disk = Suspended { images: state.images, nbd: state.nbd };
        let medium = SuspendedMedium { is_taken: state.is_taken, is_new_guest: state.is_new_guest, disk };
        shared.medium.receive(&medium).map_err(start_error)?;
        self.check_handed().map_err(start_error)?;
        // The start of the queues orders these.
        shared.writeback.store(state.writeback, Ordering::Relaxed);
        shared.driver_known.store(state.driver_known, Ordering::Relaxed);
        shared.fresh_driver.store(state.fresh_driver, Ordering::Relaxed);
        shared.has_lost_writes.store(state.has_lost_writes, Ordering::Relaxed);
        shared.halt.set_paused(state.is_paused);
        shared.on_error.set_stops(state.stops);
        shared.metrics.go_on_from(state.operations);
        Ok(())
    }

    fn begin(&self) {
        self.shared.medium.begin();
    }
}
