//! Clusters that are filled before they are mapped (R3).

use crate::format::entry::Mapping;
use crate::format::geometry::{GuestCluster, HostCluster, SliceIndex};
use crate::runtime::Runtime;
use crate::wakers::Wakers;
use kickless_sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The clusters with a copy in progress.
#[derive(Debug)]
pub(super) struct ClusterCopies<R: Runtime> {
    next: u32,
    running: HashMap<u32, ClusterCopy>,
    by_cluster: HashMap<GuestCluster, u32>,
    given_up: Arc<Mutex<Vec<GivenUp>>>,
    /// The requests that wait for copies.
    wakers: Wakers<R>,
}

/// One copy.
#[derive(Debug)]
pub(super) struct ClusterCopy {
    pub(super) cluster: GuestCluster,
    pub(super) slice: SliceIndex,
    pub(super) index: usize,
    /// The new cluster. A subcluster is filled in the old one.
    pub(super) new: Option<HostCluster>,
    /// The entry before.
    pub(super) old: Mapping,
    /// The entry that follows.
    pub(super) mapping: Mapping,
}

/// The right to fill a part of a cluster. Other writes to the guest's cluster wait meanwhile. Dropping it
/// gives up, when no transfer is in flight: the new cluster is retired.
#[derive(Debug)]
pub struct Copying<R: Runtime> {
    id: u32,
    given_up: Arc<Mutex<Vec<GivenUp>>>,
    /// The requests that wait for the copy.
    wakers: Wakers<R>,
    /// It has ended, so dropping it does nothing.
    is_over: bool,
}

/// The end of a copy that did not succeed.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    id: u32,
    /// A transfer may still land in the cluster.
    leaks: bool,
}

impl<R: Runtime> Copying<R> {
    /// Gives up while a transfer is in flight. The cluster is never used again.
    pub fn leak(mut self) {
        self.give_up(true);
        self.is_over = true;
    }

    fn give_up(&self, leaks: bool) {
        let mut list = lock(&self.given_up);
        list.push(GivenUp { id: self.id, leaks });
        drop(list);
        self.wakers.wake();
    }
}

impl<R: Runtime> Drop for Copying<R> {
    fn drop(&mut self) {
        if !self.is_over {
            self.give_up(false);
        }
    }
}

impl<R: Runtime> ClusterCopies<R> {
    pub(super) fn new(wakers: Wakers<R>) -> Self {
        Self {
            next: 0,
            running: HashMap::new(),
            by_cluster: HashMap::new(),
            given_up: Arc::default(),
            wakers,
        }
    }

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

    /// Begins a copy.
    pub(super) fn begin(&mut self, copy: ClusterCopy) -> Copying<R> {
        let id = self.next;
        self.next = id.wrapping_add(1);
        self.by_cluster.insert(copy.cluster, id);
        self.running.insert(id, copy);
        Copying { id, given_up: Arc::clone(&self.given_up), wakers: self.wakers.clone(), is_over: false }
    }

    /// Ends a copy that was made durably.
    pub(super) fn end(&mut self, mut copy: Copying<R>) -> Option<ClusterCopy> {
        copy.is_over = true;
        self.remove(copy.id)
    }

    fn remove(&mut self, id: u32) -> Option<ClusterCopy> {
        let copy = self.running.remove(&id)?;
        self.by_cluster.remove(&copy.cluster);
        Some(copy)
    }

    /// Ends the copies whose owners gave up. Returns their new clusters, except for those that a transfer may
    /// still change.
    pub(super) fn end_given_up(&mut self) -> Vec<HostCluster> {
        let list: Vec<GivenUp> = {
            let mut list = lock(&self.given_up);
            list.drain(..).collect()
        };
        let new = |GivenUp { id, leaks }| self.remove(id).and_then(|copy| copy.new).filter(|_| !leaks);
        list.into_iter().filter_map(new).collect()
    }
}
