//! The privileges of this thread that AF_XDP needs.

use kickless_opener::file;
use rustix::thread::{CapabilitySet, capabilities};
use std::io;
use std::path::Path;

/// Returns whether the capabilities of this process are valid in a user namespace only. The kernel wants
/// CAP_BPF of the first namespace, the host's.
pub(super) fn are_of_namespace() -> bool {
    // Each namespace but the first one has less than all users.
    file(Path::new("/proc/self/uid_map")).and_then(io::read_to_string).is_ok_and(|map| !is_first(&map))
}

fn is_first(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_capabilities_are_named() {
        assert_eq!(missing_of(CapabilitySet::all()), None);
        assert_eq!(missing_of(CapabilitySet::empty()).unwrap(), "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF");
        let admin = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
        assert_eq!(missing_of(admin).unwrap(), "CAP_NET_RAW");
    }

    #[test]
    fn the_first_namespace_has_all_users() {
        assert!(is_first("         0          0 4294967295\n"));
        for map in ["0 1000 1\n", "0 100000 65536\n", "0 0 4294967295\n1 1 1\n", ""] {
            assert!(!is_first(map), "{map}");
        }
    }
}
