//! The answers to requests.

use super::cluster_copies::Copying;
use crate::format::geometry::{HostOffset, SliceIndex};
use crate::runtime::Runtime;
use rustix::io::Errno;
use std::ops::Range;

/// The promise that a request's changes are written: the blocks with them, and their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    pub(super) slice: Option<(SliceIndex, u64)>,
    pub(super) l1: Option<(u32, u64)>,
}

/// The state of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// All its changes are written.
    Yes,
    /// The waker is signalled when it is worth to ask again.
    NotYet,
    /// A write of a block failed. The block is written again with the next request that needs it.
    Failed(Errno),
}

/// The next thing to do for a write. `len` is the number of bytes from the beginning of the request that the
/// answer is for.
#[derive(Debug)]
pub enum WritePlan<R: Runtime> {
    /// Write there.
    InPlace {
        /// The place of the request's first byte.
        host: HostOffset,
        /// The number of bytes.
        len: u64,
    },
    /// Write there at once (R2). The answer waits for the ticket as well.
    Fresh {
        /// The place of the request's first byte.
        host: HostOffset,
        /// The number of bytes.
        len: u64,
        /// The changes that the write needs.
        ticket: Ticket,
    },
    /// Fill a part of a cluster durably (R3), then call `Tables::copied`.
    Copy(CopyPlan<R>),
    /// Something is missing. The waker is signalled when another attempt makes sense.
    Wait,
    /// The request fails.
    Fail(Errno),
}

/// A part of a cluster to fill before it is mapped.
#[derive(Debug)]
pub struct CopyPlan<R: Runtime> {
    /// The right to do so.
    pub copy: Copying<R>,
    /// The beginning of the cluster: a new one, or the same one if subclusters are filled.
    pub host: HostOffset,
    /// The bytes to fill, relative to the cluster.
    pub fill: Range<u64>,
    /// The old bytes of `fill`.
    pub from: CopyFrom,
    /// The number of bytes from the beginning of the request that lie in `fill`.
    pub len: u64,
}

/// The old bytes of a part of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyFrom {
    /// Zeroes.
    Zero,
    /// The cluster at this place.
    Host(HostOffset),
    /// The backing image at the same guest offset.
    Below,
    /// Compressed data.
    Compressed {
        /// The place.
        at: HostOffset,
        /// The number of bytes.
        bytes: u32,
    },
    /// Each subcluster from the cluster, zeroes, or below.
    Parts {
        /// The cluster. Unused if `allocated` is 0.
        host: HostOffset,
        /// The subclusters in the cluster.
        allocated: u32,
        /// The subclusters that are zeroes.
        zero: u32,
    },
}

/// The reason why a request cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Wait,
    Fail(Errno),
}

/// The contents of the backing image in all clusters that a request touches, whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Under {
    /// All reads as zeroes, or there is no backing image.
    Zero,
    /// There may be data.
    Data,
}

/// The kinds of clearing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// The contents are of no use.
    Discard,
    /// It reads as zeroes afterwards, and space is freed.
    Unmap,
    /// It reads as zeroes afterwards, and clusters are kept.
    Zero,
}

/// The next thing to do for clearing.
#[derive(Debug, PartialEq, Eq)]
pub enum ClearPlan {
    /// The first `len` bytes are done when the ticket is written.
    Done {
        /// The number of bytes.
        len: u64,
        /// The changes that the answer waits for.
        ticket: Ticket,
    },
    /// Write zeroes as data to the first `len` bytes. A discard skips them.
    Data {
        /// The number of bytes.
        len: u64,
    },
    /// Something is missing. The waker is signalled when another attempt makes sense.
    Wait,
    /// The request fails.
    Fail(Errno),
}

/// The point in the order of completed changes at which a sync began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SyncMark(pub(super) u64);
