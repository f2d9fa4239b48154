//! The state of a device that all its queues share.

use crate::budget::Budget;
use crate::failures::Failures;
use crate::metrics::Metrics;
use crate::on_error::ErrorStop;
use kickless_device::Limiter;
use kickless_disk::Disk;
use kickless_spec::blk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// The state of a device that all its queues share.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) disk: Disk,
    pub(crate) budget: Arc<Budget>,
    pub(crate) id: [u8; blk::ID_LEN],
    /// The field `writeback` of the configuration space. If it is off, a write completes when it is durable.
    ///
    /// It is on for a new virtual machine. After that the driver may change it, and it survives a change of
    /// the front-end: QEMU writes it when the driver does, but not again after a reconnection. So a process
    /// that has not seen the driver reset may serve a driver that has turned it off, and leaves it off.
    pub(crate) writeback: AtomicBool,
    /// Whether the driver's choices are known, because it was reset, restored or set up here. Also set after
    /// the warning that they are unknown, so that the warning is logged once.
    pub(crate) driver_known: AtomicBool,
    /// The next queue to start is the first one of a newly reset driver.
    pub(crate) fresh_driver: AtomicBool,
    pub(crate) failures: Failures,
    pub(crate) metrics: Metrics,
    pub(crate) halt: Halt,
    pub(crate) on_error: ErrorStop,
    /// Several devices can share a limiter.
    pub(crate) limiter: Arc<Limiter>,
}

/// The reasons for which new requests stay in the rings.
///
/// The orders are relaxed: a caller that must know that a change is in force lets each worker finish its
/// round, which orders the store before later polls.
#[derive(Debug, Default)]
pub(crate) struct Halt(AtomicU8);

impl Halt {
    const PAUSED: u8 = 1;
    const STOPPED: u8 = 2;

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed) & Self::STOPPED != 0
    }

    /// Halts the device for an operator, or ends that.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.set(Self::PAUSED, is_paused);
    }

    /// Halts the device for an error, or ends that. Returns whether this changed anything.
    pub(crate) fn set_stopped(&self, is_stopped: bool) -> bool {
        self.set(Self::STOPPED, is_stopped)
    }

    fn set(&self, reason: u8, is_on: bool) -> bool {
        let before = match is_on {
            true => self.0.fetch_or(reason, Ordering::Relaxed),
            false => self.0.fetch_and(!reason, Ordering::Relaxed),
        };
        (before & reason != 0) != is_on
    }
}

impl DeviceState {
    /// Returns the value of the field.
    ///
    /// The order is relaxed: the transport and the ring order the driver's write to the configuration space
    /// before its next request.
    pub(crate) fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }
}
