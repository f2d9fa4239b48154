//! Drops capabilities and privileges.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use common::in_child;
use kickless_sandbox::{Ruleset, Tcp, restrict};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set, set_capabilities,
};

/// Returns the five sets of this thread, and `NoNewPrivs`.
fn status() -> BTreeMap<String, u64> {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(":\t"));
    let fields = fields.filter(|(name, _)| name.starts_with("Cap") || *name == "NoNewPrivs");
    fields.map(|(name, value)| (name.to_owned(), u64::from_str_radix(value, 16).unwrap())).collect()
}

fn restrict_to(kept: CapabilitySet) {
    restrict(kept, Ruleset::new(0, Tcp::Nothing).unwrap()).unwrap();
}

#[test]
fn kept_capabilities_stay_in_two_sets_and_all_others_leave_five() {
    for kept in [CapabilitySet::empty(), CapabilitySet::DAC_OVERRIDE | CapabilitySet::NET_ADMIN] {
        in_child(|| {
            let before = capabilities(None).unwrap();
            let bounding = status()["CapBnd"];
            if before.permitted.contains(CapabilitySet::KILL) {
                // An ambient capability has to be inheritable.
                let inheritable = CapabilitySet::KILL;
                set_capabilities(None, CapabilitySets { inheritable, ..before }).unwrap();
                configure_capability_in_ambient_set(CapabilitySet::KILL, true).unwrap();
                assert_eq!(status()["CapAmb"], CapabilitySet::KILL.bits());
            }
            restrict_to(kept);
            let (after, had) = (status(), (before.permitted & kept).bits());
            assert_eq!((after["CapPrm"], after["CapEff"]), (had, had));
            assert_eq!((after["CapInh"], after["CapAmb"]), (0, 0));
            let may_drop = before.effective.contains(CapabilitySet::SETPCAP);
            assert_eq!(after["CapBnd"], if may_drop { bounding & kept.bits() } else { bounding });
            assert_eq!(after["NoNewPrivs"], 1);
            assert_eq!(getrlimit(Resource::Core).current, Some(0));
        });
    }
}

#[test]
fn a_process_without_capabilities_is_restricted() {
    in_child(|| {
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
            .unwrap();
        let bounding = status()["CapBnd"];
        restrict_to(CapabilitySet::DAC_OVERRIDE);
        let after = status();
        assert_eq!((after["CapPrm"], after["CapEff"], after["CapBnd"]), (0, 0, bounding));
        assert_eq!(after["NoNewPrivs"], 1);
    });
}

#[test]
fn a_program_gets_none_back() {
    in_child(|| {
        restrict_to(CapabilitySet::empty());
        // As root, a program would have all capabilities of the bounding set.
        let output = Command::new("grep").args(["Cap[PE]", "/proc/self/status"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text, "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n");
    });
}
