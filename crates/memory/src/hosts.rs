//! From host addresses back to guest-physical ones.

use crate::{Gpa, Slot};
use std::sync::Arc;

/// One slot's bytes.
#[derive(Clone, Copy, Debug)]
struct Host {
    base: usize,
    len: usize,
    gpa: Gpa,
}

/// All slots of a map by host address, close together: what completes is looked up here while it is logged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hosts(Arc<[Host]>);

/// So many slots are looked through; of more the right one is searched for.
const SCANNED_MAX: usize = 8;

impl Hosts {
    pub(crate) fn new(slots: &[Slot]) -> Self {
        let mut hosts: Vec<Host> = slots
            .iter()
            .map(|slot| {
                let mapping = slot.mapping();
                // The length fits into isize: it was checked when it was mapped.
                Host { base: mapping.base().as_ptr().addr(), len: mapping.len() as usize, gpa: slot.gpa() }
            })
            .collect();
        hosts.sort_by_key(|host| host.base);
        Self(hosts.into())
    }

    /// Whether both are of the same slots, or of clones of them.
    #[inline]
    pub(crate) fn is_same(&self, other: &Hosts) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Calls `each` with the guest-physical ranges that the first of `len` bytes at a host address are; how many that is. They end
    /// with their mapping, next to which the kernel may have put another; none are in no slot. Bytes that two slots
    /// share are in both.
    #[inline]
    pub(crate) fn piece(&self, at: usize, len: usize, mut each: impl FnMut(Gpa, u64)) -> usize {
        let mut here = 0;
        for host in self.around(at) {
            let offset = at.wrapping_sub(host.base);
            if offset < host.len {
                here = len.min(host.len - offset);
                each(Gpa(host.gpa.0 + offset as u64), here as u64);
            }
        }
        here
    }

    /// Slots of which some may hold the byte at a host address; all that do are among them. Those that share a mapping begin
    /// at the same address, and others have no byte in common.
    #[inline]
    fn around(&self, at: usize) -> &[Host] {
        if self.0.len() <= SCANNED_MAX {
            return &self.0;
        }
        let before = &self.0[..self.0.partition_point(|host| host.base <= at)];
        let Some(last) = before.last() else { return &[] };
        &before[before.partition_point(|host| host.base < last.base)..]
    }
}
