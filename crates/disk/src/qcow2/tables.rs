//! The tables of an image that is written: the only code that changes them.
//!
//! It does no I/O. It emits operations ([`Tables::next_op`]) and takes their completions. Any queue can carry
//! out any operation. The rules R1 to R9 are argued in
//! `docs/adr/0010-a-table-holds-only-what-may-be-on-disk.md`.

pub(crate) mod op;
pub(crate) mod plan;

use super::format::bad_image::BadImage;
use super::format::geometry::{GuestOffset, SliceIndex};
use super::format::header::{Header, HeaderChange, TableAt};
use super::pins::Pins;
use super::slices::Slices;
use kickless_io::{AlignedBuf, Errno, Waker};
use op::{OpId, TableOp};
use plan::{Clear, ClearPlan, Copying, SyncMark, Ticket, Under, WritePlan, Written};
use std::sync::Arc;

/// The choices of an image's owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TablesOptions {
    /// The unit of table I/O, and the size of a slice: at most a cluster.
    pub(crate) unit: u64,
    /// Free clusters are punched.
    pub(crate) discard: bool,
    /// The size of a block device, beyond which nothing can be allocated.
    pub(crate) device_bytes: Option<u64>,
    /// The largest number of bytes that the reserve prepares at a time.
    pub(crate) reserve_max: u64,
}

/// Figures for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableStats {
    /// Clusters in the reserve.
    pub(crate) reserve: u64,
    /// Extents that wait to be freed.
    pub(crate) retired: u64,
    /// Blocks that differ from the disk.
    pub(crate) dirty: u64,
}

/// The parts of an image that `Tables::new` needs.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// The header.
    pub(crate) header: &'a Header,
    /// The first cluster.
    pub(crate) first: Vec<u8>,
    /// The bytes of the L1 table.
    pub(crate) l1: Vec<u8>,
    /// The bytes of the refcount table.
    pub(crate) refcount_table: Vec<u8>,
    /// The L1 tables of the snapshots.
    pub(crate) snapshots: &'a [TableAt],
    /// The length of the file.
    pub(crate) file_bytes: u64,
}

/// The tables of one image.
#[derive(Debug)]
pub(crate) struct Tables {
    slices: Arc<Slices>,
    pins: Arc<Pins>,
    options: TablesOptions,
}

impl Tables {
    /// Makes the tables. It reads nothing. `slices` is empty.
    pub(crate) fn new(
        _parts: Parts<'_>,
        slices: Arc<Slices>,
        pins: Arc<Pins>,
        options: TablesOptions,
    ) -> Result<Self, BadImage> {
        Ok(Self { slices, pins, options })
    }

    /// Returns the next operation that is due.
    pub(crate) fn next_op(&mut self) -> Option<TableOp> {
        None
    }

    /// Takes the completion of an operation.
    pub(crate) fn complete(&mut self, _id: OpId, _buffer: Option<AlignedBuf>, _result: Result<u32, Errno>) {}

    /// Returns whether `next_op` has something.
    pub(crate) fn has_due(&self) -> bool {
        false
    }

    /// Loads a slice. The waker is signalled when it is there, or at once if it is there already.
    pub(crate) fn want(&mut self, _slice: SliceIndex, _waker: &Waker) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Plans a write of `len` bytes at `at`. The caller holds a pin, and drops it before it waits.
    pub(crate) fn plan_write(
        &mut self,
        _at: GuestOffset,
        _len: u64,
        _under: Under,
        _waker: &Waker,
    ) -> WritePlan {
        WritePlan::Fail(Errno::OPNOTSUPP)
    }

    /// Maps a cluster that was filled durably.
    pub(crate) fn copied(&mut self, _copy: Copying) -> Ticket {
        Ticket::default()
    }

    /// Unmaps or zeroes whole clusters of a range, at most one slice.
    pub(crate) fn clear(&mut self, _at: GuestOffset, _len: u64, _how: Clear, _waker: &Waker) -> ClearPlan {
        ClearPlan::Fail(Errno::OPNOTSUPP)
    }

    /// Returns whether the changes of a ticket are written.
    pub(crate) fn written(&mut self, _ticket: Ticket, _waker: &Waker) -> Written {
        Written::NotYet
    }

    /// Notes the beginning of a sync, before it is queued.
    pub(crate) fn sync_begins(&self) -> SyncMark {
        SyncMark(0)
    }

    /// Takes the result of a sync.
    pub(crate) fn synced(&mut self, _mark: SyncMark, _result: Result<(), Errno>) {}

    /// Returns whether no table write has completed since the last sync began (R8).
    pub(crate) fn is_synced(&self) -> bool {
        true
    }

    /// Begins to grow the virtual disk to `size` bytes. It is done when [`grown`](Self::grown) says so.
    pub(crate) fn grow(&mut self, _size: u64) -> Result<(), BadImage> {
        Ok(())
    }

    /// Returns the result of growing.
    pub(crate) fn grown(&self) -> Option<Result<u64, Errno>> {
        Some(Err(Errno::OPNOTSUPP))
    }

    /// Changes the header. The change is written when all blocks are.
    pub(crate) fn change_header(&mut self, _change: HeaderChange) {}

    /// Returns the reserve and ends the retirements. It is done when [`closed`](Self::closed) says so.
    pub(crate) fn close(&mut self) {}

    /// Returns the result of closing.
    pub(crate) fn closed(&self) -> Option<Result<(), Errno>> {
        Some(Ok(()))
    }

    /// Marks the image as corrupt, and fails all later changes.
    pub(crate) fn found_bad(&mut self) {}

    /// Returns figures.
    pub(crate) fn stats(&self) -> TableStats {
        TableStats::default()
    }
}
