//! State of a device that all its queues share.

use crate::budget::Budget;
use crate::failures::Failures;
use kickless_disk::Disk;
use kickless_spec::blk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state that all queues of a device share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) disk: Disk,
    pub(crate) budget: Arc<Budget>,
    pub(crate) id: [u8; blk::ID_LEN],
    /// `writeback` of the configuration space. Off: a write completes when it is durable.
    ///
    /// On for a virtual machine that begins, and then what its driver made it, from one front-end to the next: QEMU reads it
    /// once and writes it when the driver does, but not again after a reconnection. So a process that has seen no
    /// virtual machine begin may serve a driver that has turned it off, and leaves it off.
    pub(crate) writeback: AtomicBool,
    /// A driver was reset here, so its choices are known.
    pub(crate) driver_known: AtomicBool,
    /// The next queue to start is the first one of a fresh driver.
    pub(crate) fresh: AtomicBool,
    pub(crate) failures: Failures,
}

impl Shared {
    /// Relaxed: the driver's next request after its write to the configuration space comes through the transport
    /// and the ring, which order it.
    pub(crate) fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }
}
