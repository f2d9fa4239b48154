//! The state of a device that all its queues share.

use crate::budget::Budget;
use crate::failures::Failures;
use crate::halt::Halt;
use crate::metrics::Metrics;
use crate::on_error::ErrorStop;
use kickless_disk::Medium;
use kickless_spec::blk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state of a device that all its queues share.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) medium: Medium,
    /// The write-back of the disk has failed, and no flush of the guest has said so. Always off for a disk
    /// that reports its losses itself. Relaxed: the session sets it while no queue runs, and the start of a
    /// queue orders that.
    pub(crate) has_lost_writes: AtomicBool,
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
    /// Requests may give space of the disk back to the host. It can change at any time.
    pub(crate) discard: AtomicBool,
}

impl DeviceState {
    /// Returns the value of the field.
    ///
    /// The order is relaxed: the transport and the ring order the driver's write to the configuration space
    /// before its next request.
    pub(crate) fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Returns whether a flush has to report that the write-back of the disk has failed. Only one does.
    #[inline]
    pub(crate) fn take_lost_writes(&self) -> bool {
        self.has_lost_writes.load(Ordering::Relaxed) && self.has_lost_writes.swap(false, Ordering::Relaxed)
    }

    /// Returns whether requests give space back.
    ///
    /// The order is relaxed: requests at the time of a change have no order with it.
    pub(crate) fn discard(&self) -> bool {
        self.discard.load(Ordering::Relaxed)
    }
}
