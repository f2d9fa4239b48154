//! What a vring is made of.

use crate::{Areas, Call, Counters, Iommu, Kick};
use kickless_memory::{Records, View};
use kickless_virtqueue::device::{Held, Options};
use std::sync::Arc;

/// What a vring is made of.
#[derive(Debug)]
pub struct VringParts {
    /// Its number, from 0.
    pub index: u16,
    /// Size and negotiated ring features.
    pub options: Options,
    /// Where its areas lie: by the device's addresses if, and only if, there is an `iommu`.
    pub areas: Areas,
    /// Behind a vIOMMU.
    pub iommu: Option<Iommu>,
    /// Index of the first available ring entry to take.
    pub next_avail: u16,
    /// Only the front-end says so: neither did the ring stop there in this process, nor does a loaded state say so.
    pub is_unconfirmed: bool,
    /// Completions that this ring still owes its driver, from [`Stopped::held`](crate::Stopped::held).
    pub held: Vec<Held>,
    /// Where to write down what is in flight, with an entry for each descriptor. If a device before this one did so, that says where
    /// this ring goes on, and what it has to do again, and neither `next_avail` nor `held` do.
    pub inflight: Option<Records>,
    /// What its device sees of guest memory.
    pub view: Arc<View>,
    /// Kicks come from here; without it the driver's kicks come as messages, or never.
    pub kick: Option<Kick>,
    /// Calls go here; without it the driver polls.
    pub call: Option<Call>,
    /// A broken ring is told here.
    pub err: Option<Call>,
    /// It is told here that pages were marked in the log.
    pub logged: Option<Call>,
    /// Where to count.
    pub counters: Arc<Counters>,
}
