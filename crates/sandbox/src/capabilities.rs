//! Drops capabilities.

use rustix::io::{Errno, Result};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

/// Drops all capabilities of the calling thread but `kept`, of which it keeps those that it has.
///
/// They leave all five sets. A process without CAP_SETPCAP cannot change its bounding set. That set only
/// limits the capabilities that a program gets when it is started, and no_new_privs gives it none.
pub(crate) fn keep(kept: CapabilitySet) -> Result<()> {
    // Before the others, because it needs CAP_SETPCAP.
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // This kernel has no more capabilities, or this process may not change the set.
            Err(Errno::INVAL | Errno::PERM) => break,
            Err(error) => return Err(error),
        }
    }
    let before = capabilities(None)?;
    // A capability that is not inheritable leaves the ambient set too.
    set_capabilities(
        None,
        CapabilitySets {
            effective: before.effective & kept,
            permitted: before.permitted & kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}
