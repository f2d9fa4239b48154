//! The privileges of this thread that AF_XDP needs.

use super::rings::MEMORY;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Returns the names of the capabilities that this thread lacks, or `None` if it has all, or if they are not
/// known.
pub(super) fn missing() -> Option<String> {
    missing_of(capabilities(None).ok()?.effective)
}

fn missing_of(effective: CapabilitySet) -> Option<String> {
    let needed = [
        ("CAP_NET_ADMIN", CapabilitySet::NET_ADMIN),
        ("CAP_NET_RAW", CapabilitySet::NET_RAW),
        // The second one contains the first.
        ("CAP_BPF", CapabilitySet::BPF | CapabilitySet::SYS_ADMIN),
    ];
    let missing: Vec<_> =
        needed.into_iter().filter(|(_, any)| !effective.intersects(*any)).map(|(name, _)| name).collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

/// Returns whether the limit of locked memory allows this number of queues.
pub(super) fn may_lock(queues: u16) -> bool {
    getrlimit(Resource::Memlock).current.is_none_or(|limit| limit >= u64::from(queues) * MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_capabilities_are_named() {
        assert_eq!(missing_of(CapabilitySet::all()), None);
        assert_eq!(missing_of(CapabilitySet::empty()).unwrap(), "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF");
        let admin = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
        assert_eq!(missing_of(admin).unwrap(), "CAP_NET_RAW");
        assert_eq!(MEMORY, 8 << 20);
    }
}
