//! Does without landlock and without filters, on kernels that lack them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::fs::File;

use common::in_child;
use kickless_sandbox::{DATA, Error, Lack, Mode, Ruleset, Tcp, landlock_abi, lock, restrict};
use libc::{c_int, c_long};
use rustix::thread::CapabilitySet;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// Makes a system call fail, as a kernel without it does.
fn without(call: c_long, errno: c_int) {
    let rules = [(call, Vec::new())].into_iter().collect();
    let fail = SeccompAction::Errno(errno as u32);
    let filter =
        SeccompFilter::new(rules, SeccompAction::Allow, fail, std::env::consts::ARCH.try_into().unwrap());
    apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
}

#[test]
fn this_kernel_lacks_nothing_that_it_has() {
    let lacks = Mode::On.lacks().unwrap();
    assert_eq!(lacks.contains(&Lack::Landlock), landlock_abi() == 0);
    assert_eq!(Mode::Strict.lacks().is_ok(), lacks.is_empty());
    assert_eq!(Mode::Off.lacks().unwrap(), []);
}

#[test]
fn without_landlock_paths_stay() {
    // It is not built, or it is turned off when the kernel starts.
    for errno in [libc::ENOSYS, libc::EOPNOTSUPP] {
        in_child(|| {
            without(libc::SYS_landlock_create_ruleset, errno);
            assert_eq!(landlock_abi(), 0);
            assert_eq!(Mode::On.lacks().unwrap(), [Lack::Landlock]);
            let strict = Mode::Strict.lacks().unwrap_err().to_string();
            assert!(
                strict.starts_with("--sandbox=strict: this kernel has no landlock (Linux 5.13"),
                "{strict}"
            );
            assert_eq!(Mode::Off.lacks().unwrap(), []);
            restrict(CapabilitySet::empty(), Ruleset::new(landlock_abi(), Tcp::Nothing).unwrap()).unwrap();
            assert!(File::open("/proc/self/status").is_ok());
            assert!(lock(&DATA).is_ok());
            assert!(File::open("/proc/self/status").is_err());
        });
    }
}

#[test]
fn without_filters_nothing_is_locked() {
    in_child(|| {
        without(libc::SYS_seccomp, libc::EINVAL);
        assert!(Mode::On.lacks().unwrap().contains(&Lack::Filters));
        assert!(matches!(lock(&DATA), Err(Error::Filter(_))));
        assert!(File::open("/proc/self/status").is_ok());
    });
}
