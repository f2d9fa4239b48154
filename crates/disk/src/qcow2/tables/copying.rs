//! The clusters with a copy in progress.

use super::plan::GivenUp;
use crate::qcow2::format::entry::Mapping;
use crate::qcow2::format::geometry::{GuestCluster, HostCluster, SliceIndex};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The clusters with a copy in progress.
#[derive(Debug, Default)]
pub(super) struct Copies {
    pub(super) next: u32,
    pub(super) running: HashMap<u32, Copy>,
    pub(super) by_cluster: HashMap<GuestCluster, u32>,
    pub(super) given_up: Arc<Mutex<Vec<GivenUp>>>,
}

/// One copy.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) cluster: GuestCluster,
    pub(super) slice: SliceIndex,
    pub(super) index: usize,
    /// The new cluster. A subcluster is filled in the old one.
    pub(super) new: Option<HostCluster>,
    pub(super) old: Mapping,
    pub(super) mapping: Mapping,
}

impl Copies {
    pub(super) fn has(&self, cluster: GuestCluster) -> bool {
        self.by_cluster.contains_key(&cluster)
    }

    /// Returns whether a slice must stay in the cache.
    pub(super) fn use_slice(&self, slice: SliceIndex) -> bool {
        self.running.values().any(|copy| copy.slice == slice)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }
}
