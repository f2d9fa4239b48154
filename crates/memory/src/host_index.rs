//! Translates host addresses back to guest-physical ones.

use crate::{Gpa, Slot};
use std::sync::Arc;

/// The host addresses of one slot.
#[derive(Clone, Copy, Debug)]
struct HostRange {
    base: usize,
    len: usize,
    gpa: Gpa,
}

/// All slots of a map by host address, in one block of memory. Each completion is looked up here while a log
/// is on.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostIndex(Arc<[HostRange]>);

/// Largest number of slots that are scanned. More slots are searched.
const SCANNED_MAX: usize = 8;

impl HostIndex {
    pub(crate) fn new(slots: &[Slot]) -> Self {
        let mut hosts: Vec<HostRange> = slots
            .iter()
            .map(|slot| {
                let mapping = slot.mapping();
                // The length fits into isize: it was checked when it was mapped.
                HostRange {
                    base: mapping.base().as_ptr().addr(),
                    len: mapping.len() as usize,
                    gpa: slot.gpa(),
                }
            })
            .collect();
        hosts.sort_by_key(|host| host.base);
        Self(hosts.into())
    }

    /// Returns whether both are of the same slots, or one is a clone of the other.
    #[inline]
    pub(crate) fn is_same(&self, other: &HostIndex) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Calls `each` with the guest-physical ranges of the first of `len` bytes at a host address. Returns how
    /// many bytes these ranges have; 0 if the address is in no slot.
    ///
    /// The ranges end with their mapping, because the kernel may have put another mapping next to it. Bytes
    /// that two slots share are in both of their ranges.
    #[inline]
    pub(crate) fn locate(&self, at: usize, len: usize, mut each: impl FnMut(Gpa, u64)) -> usize {
        let mut here = 0;
        for host in self.candidates(at) {
            let offset = at.wrapping_sub(host.base);
            if offset < host.len {
                here = len.min(host.len - offset);
                each(Gpa(host.gpa.0 + offset as u64), here as u64);
            }
        }
        here
    }

    /// Returns the slots that may hold the byte at a host address. All slots that do hold it are among them.
    ///
    /// Slots that share a mapping begin at the same address. Other slots have no byte in common.
    #[inline]
    fn candidates(&self, at: usize) -> &[HostRange] {
        if self.0.len() <= SCANNED_MAX {
            return &self.0;
        }
        let before = &self.0[..self.0.partition_point(|host| host.base <= at)];
        let Some(last) = before.last() else { return &[] };
        &before[before.partition_point(|host| host.base < last.base)..]
    }
}
