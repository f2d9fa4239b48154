//! Counts refused system calls.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::{fs, thread};

use common::{block_signals, call, child, in_child, raise};
use kickless_sandbox::{DATA, OPENER, Refusal, Refusals, lock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_no_new_privs;

fn locked() -> &'static Refusals {
    set_no_new_privs(true).unwrap();
    lock(&DATA).unwrap().unwrap()
}

fn is_readable(refusals: &Refusals) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(refusals, PollFlags::IN)], Some(&now)).unwrap() == 1
}

fn of_openat(path: Option<&str>, count: u32) -> Refusal {
    let number = libc::SYS_openat as usize;
    Refusal { number, call: "openat".into(), path: path.map(Into::into), count }
}

#[test]
fn a_refused_call_is_counted_with_its_first_path() {
    in_child(|| {
        let refusals = locked();
        assert!(!is_readable(refusals));
        assert_eq!(File::open("/etc/passwd").unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert!(is_readable(refusals));
        assert_eq!(refusals.take_new(), [of_openat(Some("/etc/passwd"), 1)]);
        assert!(!is_readable(refusals));

        assert!(File::open("/etc/shadow").is_err());
        assert!(!is_readable(refusals));
        assert_eq!(refusals.take_new(), []);
        assert_eq!(refusals.all(), [of_openat(Some("/etc/passwd"), 2)]);

        assert!(fs::remove_file("later").is_err());
        let new = refusals.take_new();
        assert_eq!((new.len(), new[0].path.as_deref()), (1, Some(Path::new("later"))));
        assert!(new[0].call.starts_with("unlink"));
    });
}

#[test]
fn long_paths_are_cut_and_wrong_ones_are_none() {
    in_child(|| {
        let refusals = locked();
        assert!(File::open(format!("/{}", "a".repeat(1000))).is_err());
        let cut = format!("/{}", "a".repeat(63));
        assert_eq!(refusals.take_new(), [of_openat(Some(&cut), 1)]);
        let wrong = [0, usize::MAX - 8, 0, 0, 0, 0];
        assert_eq!(call(libc::SYS_newfstatat, wrong), Err(libc::EPERM));
        assert_eq!(call(libc::SYS_readlinkat, [0; 6]), Err(libc::EPERM));
        assert!(refusals.take_new().iter().all(|new| new.path.is_none()));
        // No path is an argument.
        assert_eq!(call(libc::SYS_getppid, [0; 6]), Err(libc::EPERM));
        assert_eq!(refusals.take_new().len(), 1);
    });
}

#[test]
fn a_harmless_call_is_refused_and_not_counted() {
    in_child(|| {
        let refusals = locked();
        for path in ["/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu/online", "/proc/stat"] {
            assert!(File::open(path).is_err());
            assert_eq!((refusals.all(), is_readable(refusals)), (vec![], false), "{path}");
        }
        // It does not hide another one.
        assert!(File::open("/proc/sys/vm/overcommit_memory2").is_err());
        assert_eq!(refusals.take_new(), [of_openat(Some("/proc/sys/vm/overcommit_memory2"), 1)]);
    });
}

#[test]
fn many_threads_are_counted() {
    in_child(|| {
        let refusals = locked();
        let threads: Vec<_> =
            (0..8).map(|_| thread::spawn(|| (0..1000).for_each(|_| drop(File::open("/x"))))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(refusals.take_new(), [of_openat(Some("/x"), 8000)]);
    });
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_interrupted_code_keeps_errno() {
    in_child(|| {
        locked();
        assert!(common::refusal_keeps_errno());
    });
}

#[test]
fn a_signal_that_a_process_sends_does_nothing() {
    in_child(|| {
        let refusals = locked();
        raise(libc::SIGSYS);
        assert_eq!(refusals.all(), []);
    });
}

#[test]
fn a_refusal_with_blocked_signals_ends_the_process() {
    let status = child(|| {
        locked();
        block_signals();
        let _ = File::open("/x");
    });
    assert_eq!(status.signal(), Some(libc::SIGSYS));
}

#[test]
fn the_opener_has_no_handler() {
    in_child(|| {
        set_no_new_privs(true).unwrap();
        assert!(lock(&OPENER).unwrap().is_none());
    });
}
