//! Shares of the process's address space, and of the kernel's list of its mappings.
//!
//! To map what a front-end shares costs no memory, but address space, and an entry of the kernel's list of mappings. Both end: a
//! process on x86-64 has 128 TiB (47 bits), and 65530 mappings (`vm.max_map_count`). A front-end can share one sparse file
//! again and again, so what a device maps is bounded. Everything counts that is mapped for it: guest memory, logs, buffers of requests in
//! flight, and also memory that was replaced or removed as long as a request uses it.
//!
//! # The rule
//! Each device has a *limit*, and a *guarantee*, which is its limit or less. It may map more while both hold:
//!
//! 1. It stays within its limit.
//! 2. It stays within its guarantee, or the sum over all devices of what each has mapped or is guaranteed, whichever is more,
//!    stays within the total.
//!
//! So a device can always map up to its guarantee, whatever the others do: by the second condition nothing that is guaranteed and
//! free was ever lent. The guarantees are the limits where all limits together fit into the total; then no device can hold another up at
//! all. Where they do not fit, half of the total is guaranteed, the same to each device but no more than its limit, and the other
//! half is lent to those that need more than that. A single device cannot take all that is lent, unless its limit is that large.
//!
//! # Devices that come later
//! Guarantees are divided anew when a device comes or goes. A device that comes while more is lent than the new division leaves has its
//! guarantee once that was given back. The total holds at any time.
//!
//! The lock is taken when memory is mapped and unmapped, by sessions and by the worker that has the last reference. It is held for a
//! scan of all devices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that the devices of a process can have mapped: three quarters of the 128 TiB that there are on x86-64. The rest is for
/// everything else: RAM disks, stacks, heaps, the memory of engines. A machine that has less address space says so by itself.
pub const BYTES_MAX: u64 = 96 << 40;

/// Mappings of front-ends' files in a process: half of what the kernel has room for (65530, `vm.max_map_count`). The rest is for holes in
/// them ([`crate::fault`]) and for everything else.
pub const MAPPINGS_MAX: u64 = 1 << 15;

/// The most slots a map can have: as many as QEMU's vhost-user front-end can use (512 KVM slots less three).
pub const SLOTS_MAX: usize = 509;

/// Mappings that a device has at most: all slots twice, for a table whose predecessor is still in use, two logs for the same reason,
/// and buffers of requests in flight.
const DEVICE_MAPPINGS_MAX: u64 = 2 * SLOTS_MAX as u64 + 6;

/// Bytes that a device has mapped at most unless something else is said: a third of what is lent ([`BYTES_MAX`]), so that one device
/// cannot take all of that. Enough for a guest of 8 TiB whose memory is replaced at once, or one of 16 TiB whose memory is not.
pub const DEVICE_BYTES_DEFAULT: u64 = 16 << 40;

/// Bytes and mappings.
type Amount = [u64; 2];
const BYTES: usize = 0;
const MAPPINGS: usize = 1;

/// Why a front-end's file is not mapped: something else is mapped already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Exhausted {
    /// The device would have more than its limit.
    #[error(
        "{needs:#x} bytes beside {used:#x} that are mapped are more than the {limit:#x} that this device may map: memory-max allows more"
    )]
    Bytes {
        /// Bytes to map.
        needs: u64,
        /// Bytes that the device has mapped.
        used: u64,
        /// The device's limit.
        limit: u64,
    },
    /// It would have more mappings than a device needs.
    #[error("this device has {limit} mappings, and no device needs more")]
    Mappings {
        /// The limit of each device.
        limit: u64,
    },
    /// It would have more bytes than its guarantee, and others use what there is beside that.
    #[error(
        "this process has no more address space for {used:#x} bytes and {needs:#x} more, because other devices use it: lower their \
         memory-max, or serve this device by another process"
    )]
    ProcessBytes {
        /// Bytes to map.
        needs: u64,
        /// Bytes that the device has mapped.
        used: u64,
    },
    /// It would have more mappings than its guarantee, and others use what there is beside that.
    #[error(
        "this process has no mapping left for this device, which has {used}, because other devices use the {total} that there are: \
         give their guests fewer memory regions, or serve this device by another process"
    )]
    ProcessMappings {
        /// Mappings that the device has.
        used: u64,
        /// Mappings that all devices may have.
        total: u64,
    },
}

/// The resources that devices share.
#[derive(Debug)]
pub struct AddressSpace {
    total: Amount,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    members: BTreeMap<u64, Member>,
    /// The key of the next one.
    next: u64,
    /// No guarantee is larger.
    level: Amount,
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
    /// So many bytes, and so many mappings.
    pub fn new(bytes: u64, mappings: u64) -> Self {
        Self { total: [bytes, mappings], state: Mutex::default() }
    }

    /// The share of one more device, which maps so many bytes at most.
    pub fn join(self: &Arc<Self>, bytes_max: u64) -> Arc<Quota> {
        let mut state = self.lock();
        let key = state.next;
        state.next += 1;
        state.members.insert(key, Member { limit: [bytes_max, DEVICE_MAPPINGS_MAX], used: [0, 0] });
        state.divide(self.total);
        drop(state);
        Arc::new(Quota { space: self.clone(), key })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Divides the total into guarantees.
    fn divide(&mut self, total: Amount) {
        for (of, level) in self.level.iter_mut().enumerate() {
            let limits = self.members.values().map(|member| member.limit[of]);
            *level = divide(limits.collect(), total[of]);
        }
    }

    /// What all have mapped, and what all have mapped or are guaranteed, if `key` has `used` of it.
    fn sums(&self, of: usize, key: u64, used: u64) -> (u64, u64) {
        let each = self.members.iter().map(|(member, Member { limit, used: now })| {
            let used = if *member == key { used } else { now[of] };
            (used, used.max(limit[of].min(self.level[of])))
        });
        each.fold((0, 0), |sums, (used, kept)| (sums.0.saturating_add(used), sums.1.saturating_add(kept)))
    }
}

/// The largest guarantee: see the module's documentation.
fn divide(mut limits: Vec<u64>, total: u64) -> u64 {
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

/// The share of one device. Given back when this and all that was mapped is dropped.
#[derive(Debug)]
pub struct Quota {
    space: Arc<AddressSpace>,
    key: u64,
}

impl Quota {
    /// Takes so many bytes for one mapping.
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Exhausted> {
        let mut state = self.space.lock();
        let Some(Member { limit, used }) = state.members.get(&self.key) else {
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
            let guaranteed = new[of] <= limit[of].min(state.level[of]);
            let (all_used, all_kept) = state.sums(of, self.key, new[of]);
            let total = self.space.total[of];
            if (if guaranteed { all_used } else { all_kept }) > total {
                return Err(match of {
                    BYTES => Exhausted::ProcessBytes { needs: bytes, used: used[of] },
                    _ => Exhausted::ProcessMappings { used: used[of], total },
                });
            }
        }
        if let Some(member) = state.members.get_mut(&self.key) {
            member.used = new;
        }
        drop(state);
        Ok(Charge { quota: self.clone(), bytes })
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let mut state = self.space.lock();
        state.members.remove(&self.key);
        state.divide(self.space.total);
    }
}

/// The resources that one mapping takes. Given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(member) = self.quota.space.lock().members.get_mut(&self.quota.key) {
            member.used[BYTES] = member.used[BYTES].saturating_sub(self.bytes);
            member.used[MAPPINGS] = member.used[MAPPINGS].saturating_sub(1);
        }
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
    fn one_of_a_thousand_that_takes_what_it_can_holds_no_other_up() {
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
        // All others have a guest of 32 GiB in ten pieces, and a few of them one of 4 TiB.
        let small = (4..1000).flat_map(|number| (0..10).map(move |_| (number, (32 << 30) / 10)));
        let large = (1..4).map(|number| (number, 4 * TIB));
        let held: Vec<Charge> =
            small.chain(large).map(|(number, bytes)| devices[number].charge(bytes).unwrap()).collect();
        drop(held);
    }

    #[test]
    fn what_is_guaranteed_is_not_lent() {
        let space = Arc::new(AddressSpace::new(100, MAPPINGS_MAX));
        let devices: Vec<_> = (0..5).map(|_| space.join(40)).collect();
        // Ten for each.
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
        // Two for each, and four for either.
        let _held: Vec<Charge> = (0..6).map(|_| devices[0].charge(1).unwrap()).collect();
        let refused = devices[0].charge(1).unwrap_err();
        assert_eq!(refused, Exhausted::ProcessMappings { used: 6, total: 8 });
        let told = refused.to_string();
        assert!(told.contains("fewer memory regions") && !told.contains("memory-max"), "{told}");
    }

    #[test]
    fn guarantees_are_divided_anew() {
        let space = Arc::new(AddressSpace::new(100, MAPPINGS_MAX));
        let first = space.join(100);
        let held = first.charge(80).unwrap();
        // The total holds, even where a guarantee has to wait for that.
        let second = space.join(100);
        assert!(second.charge(25).is_err() && second.charge(20).is_ok());
        drop((held, first));
        assert!(second.charge(100).is_ok());
    }

    #[test]
    fn division() {
        assert_eq!(divide(vec![], 10), u64::MAX);
        assert_eq!(divide(vec![4, 6], 10), u64::MAX);
        assert_eq!(divide(vec![u64::MAX, u64::MAX], 10), 2);
        assert_eq!(divide(vec![100, 1, 100], 20), 4);
    }
}
