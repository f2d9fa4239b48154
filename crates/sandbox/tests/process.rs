//! Makes helpers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::{fs, thread};

use common::{child, in_child, raise, replace_stderr};
use kickless_sandbox::{Ended, Error, fork};
use rustix::process::{Signal, getpid, kill_process};

#[test]
fn a_helper_has_a_name_and_a_status() {
    in_child(|| {
        let helper = fork(c"kickless-helper", &[], || {
            assert_eq!(fs::read_to_string("/proc/self/comm").unwrap(), "kickless-helper\n");
            7
        });
        assert_eq!(helper.unwrap().wait().unwrap(), Ended::Exited(7));
        assert_ne!(fs::read_to_string("/proc/self/comm").unwrap(), "kickless-helper\n");
    });
}

#[test]
fn a_helper_closes_what_is_not_its_own() {
    in_child(|| {
        let (mut ours, its) = UnixStream::pair().unwrap();
        let other = File::open("/dev/null").unwrap();
        let numbers = [ours.as_raw_fd(), its.as_raw_fd(), other.as_raw_fd()];
        let its_end = its.try_clone().unwrap();
        let close = [ours.as_fd(), its.as_fd()];
        let helper = fork(c"helper", &close, move || {
            let open = numbers.map(|number| fs::read_link(format!("/proc/self/fd/{number}")).is_ok());
            (&its_end).write_all(&open.map(u8::from)).unwrap();
            if open[0] {
                return 1;
            }
            // The end of file, when the process that made this one closes its end.
            i32::from((&its_end).read(&mut [0]).unwrap() != 0)
        });
        let helper = helper.unwrap();
        drop(its);
        let mut open = [9; 3];
        ours.read_exact(&mut open).unwrap();
        assert_eq!(open, [0, 0, 1]);
        assert_eq!(helper.try_wait().unwrap(), None);
        drop(ours);
        assert_eq!(helper.wait().unwrap(), Ended::Exited(0));
    });
}

#[test]
fn a_panic_is_one_sentence_and_the_status_1() {
    in_child(|| {
        let (mut read, write) = std::io::pipe().unwrap();
        replace_stderr(&write);
        let helper = fork(c"helper", &[], || panic!("it is broken")).unwrap();
        drop(write);
        // The copy in place of standard error keeps the pipe open, so this reads one line.
        assert_eq!(helper.wait().unwrap(), Ended::Exited(1));
        let mut bytes = [0; 1000];
        let len = read.read(&mut bytes).unwrap();
        let text = std::str::from_utf8(&bytes[..len]).unwrap();
        assert!(text.starts_with("helper panicked at ") && text.ends_with(": it is broken\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
    });
}

#[test]
fn a_helper_outlives_the_signals_of_a_terminal_and_its_programs_do_not() {
    in_child(|| {
        let helper = fork(c"helper", &[], || {
            for signal in
                [libc::SIGTERM, libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2]
            {
                raise(signal);
            }
            let status = Command::new("sh").args(["-c", "kill -TERM $$; exit 3"]).status().unwrap();
            status.code().unwrap_or(0)
        });
        assert_eq!(helper.unwrap().wait().unwrap(), Ended::Exited(0));
    });
}

#[test]
fn a_helper_that_was_killed() {
    in_child(|| {
        let helper = fork(c"helper", &[], || {
            loop {
                thread::park();
            }
        });
        let helper = helper.unwrap();
        kill_process(helper.pid(), Signal::KILL).unwrap();
        let ended = helper.wait().unwrap();
        assert_eq!((ended, ended.to_string().as_str()), (Ended::Killed(9), "killed by signal 9"));
    });
}

#[test]
fn a_helper_ends_with_the_process_that_made_it() {
    let (mut said, saying) = std::io::pipe().unwrap();
    let status = child(|| {
        let pipe = saying.as_raw_fd();
        fork(c"helper", &[], move || {
            loop {
                // It has the pipe open, whatever the other process does.
                let _ = pipe;
                thread::park();
            }
        })
        .unwrap();
        kill_process(getpid(), Signal::KILL).unwrap();
    });
    assert_eq!(status.signal(), Some(9));
    drop(saying);
    // The end of the pipe is the end of the helper.
    let mut all = Vec::new();
    said.read_to_end(&mut all).unwrap();
}

#[test]
fn a_process_with_threads_makes_no_helper() {
    in_child(|| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = thread::spawn(move || stopped.recv());
        assert!(matches!(fork(c"helper", &[], || 0), Err(Error::Threads(2))));
        drop(stop);
        let _ = other.join();
    });
}
