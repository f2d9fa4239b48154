//! Shares of the process's address space, and of the kernel's list of its mappings.
//!
//! A mapping of a front-end's file takes address space and an entry in the kernel's list of mappings. Both
//! are limited: a process on x86-64 has 128 TiB (47 bits) and 65530 mappings (`vm.max_map_count`). A
//! front-end can share one sparse file again and again, so the mappings of each device are limited. All
//! mappings of a device count: guest memory, logs and in-flight buffers. Memory that was replaced or removed
//! counts as long as a request uses it.
//!
//! # The rule
//! Each device has a *limit* and a *guarantee*, which is at most its limit. A device may map more if both of
//! these hold:
//!
//! 1. It stays within its limit.
//! 2. It stays within its guarantee, or the following sum over all devices stays within the total: the larger
//!    of the device's use and its guarantee.
//!
//! So a device can always map up to its guarantee, whatever the others do. The second condition reserves
//! every guarantee.
//!
//! If all limits together fit into the total, each guarantee is the device's limit, and no device can hold up
//! another. Otherwise half of the total is guaranteed: the same amount to each device, but at most its limit.
//! The other half is lent to devices that need more than their guarantee. A single device cannot take all of
//! that half, unless its limit is as large.
//!
//! # New devices
//! Guarantees are divided again when a device comes or goes. The new guarantees can be less than what is lent
//! already. Then a new device has its guarantee only after the excess is returned. The total is never
//! exceeded.
//!
//! The lock is held for a scan of all devices. Sessions take it to map memory. Threads that unmap memory take
//! it when they have done that. No worker takes it.
//!
//! # Files
//! Each device can also keep some files open ([`files_max`]). Their number is the same for each device, and
//! none are lent.

use kickless_sync::lock;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes that the devices of a process may map: three quarters of the 128 TiB of x86-64. The rest is for
/// everything else: RAM disks, stacks, heaps, the memory of engines. On a machine with less address space,
/// the kernel refuses the excess.
pub const BYTES_MAX: u64 = 96 << 40;

/// Mappings of front-ends' files in a process: half of the kernel's limit (65530, `vm.max_map_count`). The
/// rest is for holes in them ([`crate::fault`]) and for everything else.
pub const MAPPINGS_MAX: u64 = 1 << 15;

/// Largest number of slots in a map: as many as QEMU's vhost-user front-end can use (512 KVM slots less
/// three).
pub const SLOTS_MAX: usize = 509;

/// Largest number of mappings of a device. All slots count twice, because the previous memory table can still
/// be in use. The other six are two logs, for the same reason, and in-flight buffers.
const DEVICE_MAPPINGS_MAX: u64 = 2 * SLOTS_MAX as u64 + 6;

/// Default limit of the bytes that a device maps: a third of the lent half of [`BYTES_MAX`], so that one
/// device cannot take all of that half. It is enough for a guest of 8 TiB whose memory is replaced at once,
/// or for one of 16 TiB whose memory is not. Not less: the front-end's regions can be larger than the host's
/// memory, and the limit is one of address space. It does not bound the pages that count in this process's
/// memory cgroup, because a front-end can keep the pages of memory that it has replaced.
pub const DEVICE_BYTES_DEFAULT: u64 = 16 << 40;

/// The part of the process's descriptors that are for the files of memory: a quarter. Rings, disks and
/// connections need the rest.
const FILES_PART: u64 = 4;

/// Smallest number of files that a device can keep open. A guest has a file for each NUMA node and each DIMM,
/// and the device a log and an in-flight buffer.
const DEVICE_FILES_MIN: usize = 16;

/// Returns the number of files that each of `devices_max` devices can keep open: its share of their part of
/// the descriptors of this process.
pub fn files_max(devices_max: usize) -> usize {
    // No limit is the largest number.
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let part = usize::try_from(limit / FILES_PART).unwrap_or(usize::MAX);
    (part / devices_max.max(1)).max(DEVICE_FILES_MIN)
}

/// An amount of bytes and of mappings.
type Amount = [u64; 2];
const BYTES: usize = 0;
const MAPPINGS: usize = 1;

/// A limit because of which a front-end's file is not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Exhausted {
    /// The device would have more than its limit.
    #[error(
        "{needs:#x} bytes beside {used:#x} mapped bytes exceed the {limit:#x} that this device may map: memory-max allows more"
    )]
    Bytes {
        /// Bytes to map.
        needs: u64,
        /// Bytes that the device has mapped.
        used: u64,
        /// The device's limit.
        limit: u64,
    },
    /// The device would have more mappings than a device needs.
    #[error("this device has {limit} mappings, the most that a device may have")]
    Mappings {
        /// The limit of each device.
        limit: u64,
    },
    /// The device would exceed its guarantee, and others use what there is beyond the guarantees.
    #[error(
        "this process has no address space for {needs:#x} bytes beside the {used:#x} of this device, because other \
         devices use it: lower their memory-max, or serve this device by another process"
    )]
    ProcessBytes {
        /// Bytes to map.
        needs: u64,
        /// Bytes that the device has mapped.
        used: u64,
    },
    /// The device would exceed its guarantee, and others use what there is beyond the guarantees.
    #[error(
        "this process has no mapping left for this device, which has {used}, because other devices use the {total} that are possible: \
         give their guests fewer memory regions, or serve this device by another process"
    )]
    ProcessMappings {
        /// Mappings that the device has.
        used: u64,
        /// Mappings that all devices may have.
        total: u64,
    },
}

/// Address space and mappings, shared by the devices of a process.
#[derive(Debug)]
pub struct AddressSpace {
    total: Amount,
    files_max: usize,
    shares: Mutex<Shares>,
}

#[derive(Debug, Default)]
struct Shares {
    members: BTreeMap<u64, Member>,
    /// The key of the next member.
    next: u64,
    /// The largest guarantee.
    guarantee_max: Amount,
}

#[derive(Debug)]
struct Member {
    limit: Amount,
    used: Amount,
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self::new(BYTES_MAX, MAPPINGS_MAX)
    }
}

impl AddressSpace {
    /// Makes an address space of this many bytes and mappings.
    pub fn new(bytes: u64, mappings: u64) -> Self {
        Self { total: [bytes, mappings], files_max: DEVICE_FILES_MIN, shares: Mutex::default() }
    }

    /// Sets the number of files that each device can keep open: see [`files_max`].
    #[must_use]
    pub fn with_files(self, files_max: usize) -> Self {
        Self { files_max, ..self }
    }

    /// Adds a device, which may map at most `bytes_max` bytes.
    pub fn join(self: &Arc<Self>, bytes_max: u64) -> Arc<Quota> {
        let mut shares = lock(&self.shares);
        let key = shares.next;
        shares.next += 1;
        shares.members.insert(key, Member { limit: [bytes_max, DEVICE_MAPPINGS_MAX], used: [0, 0] });
        shares.divide(self.total);
        drop(shares);
        Arc::new(Quota { space: self.clone(), key })
    }
}

impl Shares {
    /// Divides the total into guarantees.
    fn divide(&mut self, total: Amount) {
        for (of, guarantee_max) in self.guarantee_max.iter_mut().enumerate() {
            let limits = self.members.values().map(|member| member.limit[of]);
            *guarantee_max = largest_guarantee(limits.collect(), total[of]);
        }
    }

    /// Returns two sums over all devices for the case that `key` uses `used`: of their use, and of the larger
    /// of use and guarantee.
    fn sums(&self, of: usize, key: u64, used: u64) -> (u64, u64) {
        let each = self.members.iter().map(|(member, Member { limit, used: now })| {
            let used = if *member == key { used } else { now[of] };
            (used, used.max(limit[of].min(self.guarantee_max[of])))
        });
        each.fold((0, 0), |sums, (used, kept)| (sums.0.saturating_add(used), sums.1.saturating_add(kept)))
    }
}

/// Returns the largest guarantee: see the module's documentation.
fn largest_guarantee(mut limits: Vec<u64>, total: u64) -> u64 {
    if limits.iter().try_fold(0u64, |sum, limit| sum.checked_add(*limit)).is_some_and(|sum| sum <= total) {
        return u64::MAX;
    }
    limits.sort_unstable();
    let mut left = total / 2;
    for (before, limit) in limits.iter().enumerate() {
        let share = left / (limits.len() - before) as u64;
        if *limit > share {
            return share;
        }
        left -= limit;
    }
    u64::MAX
}

/// The share of one device. The device's resources are free when this and all of its mappings are dropped.
#[derive(Debug)]
pub struct Quota {
    space: Arc<AddressSpace>,
    key: u64,
}

impl Quota {
    /// Returns the number of files that the device can keep open.
    pub(crate) fn files_max(&self) -> usize {
        self.space.files_max
    }

    /// Charges `bytes` for one mapping.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Exhausted> {
        let mut shares = lock(&self.space.shares);
        let Some(Member { limit, used }) = shares.members.get(&self.key) else {
            return Ok(Charge { quota: self.clone(), bytes: 0 });
        };
        let needs: Amount = [bytes, 1];
        let new = [BYTES, MAPPINGS].map(|of| used[of].saturating_add(needs[of]));
        if new[BYTES] > limit[BYTES] {
            return Err(Exhausted::Bytes { needs: bytes, used: used[BYTES], limit: limit[BYTES] });
        }
        if new[MAPPINGS] > limit[MAPPINGS] {
            return Err(Exhausted::Mappings { limit: limit[MAPPINGS] });
        }
        for of in [BYTES, MAPPINGS] {
            let guaranteed = new[of] <= limit[of].min(shares.guarantee_max[of]);
            let (all_used, all_kept) = shares.sums(of, self.key, new[of]);
            let total = self.space.total[of];
            if (if guaranteed { all_used } else { all_kept }) > total {
                return Err(match of {
                    BYTES => Exhausted::ProcessBytes { needs: bytes, used: used[of] },
                    _ => Exhausted::ProcessMappings { used: used[of], total },
                });
            }
        }
        if let Some(member) = shares.members.get_mut(&self.key) {
            member.used = new;
        }
        drop(shares);
        Ok(Charge { quota: self.clone(), bytes })
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let mut shares = lock(&self.space.shares);
        shares.members.remove(&self.key);
        shares.divide(self.space.total);
    }
}

/// The charge of one mapping. Dropping it gives the resources back.
#[derive(Debug)]
pub(crate) struct Charge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(member) = lock(&self.quota.space.shares).members.get_mut(&self.quota.key) {
            member.used[BYTES] = member.used[BYTES].saturating_sub(self.bytes);
            member.used[MAPPINGS] = member.used[MAPPINGS].saturating_sub(1);
        }
    }
}

/// Number of mappings in this process, of devices with and without a quota.
static MAPPING_COUNT: AtomicUsize = AtomicUsize::new(0);

/// One mapping in [`MAPPING_COUNT`].
#[derive(Debug)]
pub(crate) struct CountedMapping;

impl CountedMapping {
    pub(crate) fn new() -> io::Result<Self> {
        // Relaxed: the count is a limit and orders nothing. If this mapping is one too many, `Drop` subtracts
        // it again.
        let (before, counted) = (MAPPING_COUNT.fetch_add(1, Ordering::Relaxed), Self);
        if before as u64 >= MAPPINGS_MAX {
            let why = format!(
                "there are {MAPPINGS_MAX} mappings already, the most in one process: serve fewer devices by one process"
            );
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, why));
        }
        Ok(counted)
    }
}

impl Drop for CountedMapping {
    fn drop(&mut self) {
        MAPPING_COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: u64 = 1 << 40;

    #[test]
    fn a_device_stays_within_its_limit() {
        let space = Arc::new(AddressSpace::default());
        let device = space.join(4 * TIB);
        let first = device.charge(3 * TIB).unwrap();
        let refused = device.charge(TIB + 1).unwrap_err();
        assert_eq!(refused, Exhausted::Bytes { needs: TIB + 1, used: 3 * TIB, limit: 4 * TIB });
        assert!(refused.to_string().contains("memory-max"), "{refused}");
        let second = device.charge(TIB).unwrap();
        drop(first);
        drop((device.charge(3 * TIB).unwrap(), second));
        let all: Vec<Charge> = (0..DEVICE_MAPPINGS_MAX).map(|_| device.charge(1).unwrap()).collect();
        assert_eq!(device.charge(1).unwrap_err(), Exhausted::Mappings { limit: DEVICE_MAPPINGS_MAX });
        drop(all);
        assert!(device.charge(4 * TIB).is_ok());
    }

    #[test]
    fn limits_that_fit_are_guaranteed() {
        let space = Arc::new(AddressSpace::default());
        let devices: Vec<_> = (0..6).map(|_| space.join(16 * TIB)).collect();
        let held: Vec<Charge> = devices.iter().map(|device| device.charge(16 * TIB).unwrap()).collect();
        assert_eq!(held.len(), 6);
    }

    #[test]
    fn a_greedy_device_holds_up_none_of_a_thousand_others() {
        let space = Arc::new(AddressSpace::default());
        let devices: Vec<_> = (0..1000).map(|_| space.join(DEVICE_BYTES_DEFAULT)).collect();
        let mut greedy = Vec::new();
        while let Ok(charge) = devices[0].charge(DEVICE_BYTES_DEFAULT / 64) {
            greedy.push(charge);
        }
        assert_eq!(greedy.len(), 64);
        while let Ok(charge) = devices[0].charge(1) {
            greedy.push(charge);
        }
        // All others have a guest of 32 GiB in ten pieces, except for three with a guest of 4 TiB.
        let small = (4..1000).flat_map(|number| (0..10).map(move |_| (number, (32 << 30) / 10)));
        let large = (1..4).map(|number| (number, 4 * TIB));
        let held: Vec<Charge> =
            small.chain(large).map(|(number, bytes)| devices[number].charge(bytes).unwrap()).collect();
        drop(held);
    }

    #[test]
    fn guaranteed_bytes_are_not_lent() {
        let space = Arc::new(AddressSpace::new(100, MAPPINGS_MAX));
        let devices: Vec<_> = (0..5).map(|_| space.join(40)).collect();
        // Ten are guaranteed to each.
        let _lent = [devices[0].charge(40).unwrap(), devices[1].charge(30).unwrap()];
        let refused = devices[2].charge(11).unwrap_err();
        assert!(
            refused == Exhausted::ProcessBytes { needs: 11, used: 0 }
                && refused.to_string().contains("memory-max"),
            "{refused}"
        );
        let _held: Vec<Charge> = devices[2..].iter().map(|device| device.charge(10).unwrap()).collect();
        assert!(devices[4].charge(1).is_err());
    }

    #[test]
    fn mappings_run_out() {
        let space = Arc::new(AddressSpace::new(BYTES_MAX, 8));
        let devices: Vec<_> = (0..2).map(|_| space.join(BYTES_MAX)).collect();
        // Two are guaranteed to each, and four can be lent.
        let _held: Vec<Charge> = (0..6).map(|_| devices[0].charge(1).unwrap()).collect();
        let refused = devices[0].charge(1).unwrap_err();
        assert_eq!(refused, Exhausted::ProcessMappings { used: 6, total: 8 });
        let text = refused.to_string();
        assert!(text.contains("fewer memory regions") && !text.contains("memory-max"), "{text}");
    }

    #[test]
    fn guarantees_are_divided_again_for_a_new_device() {
        let space = Arc::new(AddressSpace::new(100, MAPPINGS_MAX));
        let first = space.join(100);
        let held = first.charge(80).unwrap();
        // The total is never exceeded, even if a guarantee has to wait for that.
        let second = space.join(100);
        assert!(second.charge(25).is_err() && second.charge(20).is_ok());
        drop((held, first));
        assert!(second.charge(100).is_ok());
    }

    #[test]
    fn division() {
        assert_eq!(largest_guarantee(vec![], 10), u64::MAX);
        assert_eq!(largest_guarantee(vec![4, 6], 10), u64::MAX);
        assert_eq!(largest_guarantee(vec![u64::MAX, u64::MAX], 10), 2);
        assert_eq!(largest_guarantee(vec![100, 1, 100], 20), 4);
    }
}
