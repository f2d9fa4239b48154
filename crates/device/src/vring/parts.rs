//! The parts of a vring.

use crate::{Areas, Call, Counters, Iommu, Kick};
use kickless_memory::{Records, View};
use kickless_virtqueue::device::{Options, UnpublishedUsed};
use std::sync::Arc;

/// The parts of a vring.
#[derive(Debug)]
pub struct VringParts {
    /// The number of the ring, from 0.
    pub index: u16,
    /// Size and negotiated ring features.
    pub options: Options,
    /// The addresses of its areas. They are the device's addresses if, and only if, there is an `iommu`.
    pub areas: Areas,
    /// The translations and misses; `Some` only behind a vIOMMU.
    pub iommu: Option<Iommu>,
    /// Index of the first available ring entry to take.
    pub next_avail: u16,
    /// Only the front-end gave this index, or nobody. The ring did not stop there in this process, and no
    /// loaded state has it.
    pub is_unconfirmed: bool,
    /// Completions that an earlier task of this ring could not show, from
    /// [`Stopped::unpublished`](crate::Stopped::unpublished).
    pub unpublished: Vec<UnpublishedUsed>,
    /// The buffer that records the requests in flight, with an entry for each descriptor. If an earlier
    /// device has recorded some, the buffer decides where this ring continues and which requests it repeats.
    /// `next_avail` and `unpublished` are ignored then.
    pub inflight: Option<Records>,
    /// The device's view of guest memory.
    pub view: Arc<View>,
    /// The descriptor of kicks. Without it, the driver's kicks come as messages, or never.
    pub kick: Option<Kick>,
    /// The descriptor of calls. Without it, the driver polls.
    pub call: Option<Call>,
    /// The descriptor that is signalled when the ring is found broken.
    pub err: Option<Call>,
    /// The descriptor that is signalled when pages were marked in the log.
    pub logged: Option<Call>,
    /// The counters of the ring.
    pub counters: Arc<Counters>,
}
