//! Restricts paths, sockets and signals, with each version of landlock that this kernel has.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::symlink;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use common::{call, in_child};
use kickless_sandbox::{Access, Error, Ruleset, Tcp, landlock_abi, place, restrict};
use rustix::io::Errno;
use rustix::process::{getppid, test_kill_process};
use rustix::thread::{CapabilitySet, gettid};
use tempfile::TempDir;

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

/// Restricts this process by a version of landlock, with rules for these places.
fn restricted(abi: u32, tcp: Tcp, rules: &[(&Path, Access)]) {
    let mut ruleset = Ruleset::new(abi, tcp).unwrap();
    for (path, access) in rules {
        ruleset.allow(place(path).unwrap(), *access).unwrap();
    }
    restrict(CapabilitySet::empty(), ruleset).unwrap();
}

/// Makes a directory with two files: `inside/file` and `outside`, and a link to the second one in `inside`.
fn files() -> TempDir {
    let dir = TempDir::new().unwrap();
    let inside = dir.path().join("inside");
    fs::create_dir(&inside).unwrap();
    fs::write(inside.join("file"), "text").unwrap();
    fs::write(dir.path().join("outside"), "text").unwrap();
    symlink("../outside", inside.join("link")).unwrap();
    dir
}

/// Returns the error of a version that handles something from `since` on.
fn from(abi: u32, since: u32, refused: i32, otherwise: i32) -> i32 {
    if abi >= since { refused } else { otherwise }
}

#[test]
fn nothing_is_allowed() {
    for abi in 1..=landlock_abi() {
        let dir = files();
        let (inside, listener) = (dir.path().join("inside"), TcpListener::bind("127.0.0.1:0").unwrap());
        let address = listener.local_addr().unwrap();
        let name = SocketAddr::from_abstract_name(inside.as_os_str().as_encoded_bytes()).unwrap();
        let _abstract = UnixListener::bind_addr(&name).unwrap();
        in_child(|| {
            let (mut before, null) =
                (File::open(inside.join("file")).unwrap(), File::open("/dev/null").unwrap());
            restricted(abi, Tcp::Nothing, &[]);
            assert_eq!(errno(File::open(inside.join("file"))), libc::EACCES);
            assert_eq!(errno(fs::read_dir(&inside)), libc::EACCES);
            assert_eq!(errno(File::create(inside.join("new"))), libc::EACCES);
            assert_eq!(errno(fs::remove_file(inside.join("file"))), libc::EACCES);
            assert_eq!(errno(UnixListener::bind(inside.join("socket"))), libc::EACCES);
            assert_eq!(errno(TcpListener::bind("127.0.0.1:0")), from(abi, 4, libc::EACCES, 0));
            assert_eq!(errno(TcpStream::connect(address)), from(abi, 4, libc::EACCES, 0));
            assert_eq!(errno(UnixStream::connect_addr(&name)), from(abi, 6, libc::EPERM, 0));
            let signal = test_kill_process(getppid().unwrap());
            assert_eq!(signal, if abi >= 6 { Err(Errno::PERM) } else { Ok(()) });
            // A file that was open stays open, with its rights.
            let mut text = String::new();
            before.read_to_string(&mut text).unwrap();
            assert_eq!(text, "text");
            let tcgets = [null.as_raw_fd() as usize, libc::TCGETS as usize, 0, 0, 0, 0];
            assert_eq!(call(libc::SYS_ioctl, tcgets), Err(libc::ENOTTY));
        });
    }
}

#[test]
fn rules_hold_below_their_place() {
    for abi in 1..=landlock_abi() {
        let dir = files();
        let inside = dir.path().join("inside");
        in_child(|| {
            let access = Access::READ_FILE | Access::WRITE_FILE;
            restricted(abi, Tcp::Nothing, &[(&inside, access), (Path::new("/dev"), Access::READ_FILE)]);
            let open = |name: &str| OpenOptions::new().read(true).write(true).open(inside.join(name));
            open("file").unwrap().write_all(b"more").unwrap();
            for outside in ["link", "../outside", "../inside/../outside"] {
                assert_eq!(errno(open(outside)), libc::EACCES, "{outside}");
            }
            assert_eq!(errno(File::create(inside.join("new"))), libc::EACCES);
            // Rights that are not in the rule, of the versions that have them.
            let truncated = OpenOptions::new().write(true).truncate(true).open(inside.join("file"));
            assert_eq!(errno(truncated), from(abi, 3, libc::EACCES, 0));
            let null = File::open("/dev/null").unwrap();
            let tcgets = [null.as_raw_fd() as usize, libc::TCGETS as usize, 0, 0, 0, 0];
            let refused = from(abi, 5, libc::EACCES, libc::ENOTTY);
            assert_eq!(call(libc::SYS_ioctl, tcgets), Err(refused));
        });
    }
}

#[test]
fn a_rule_of_a_file_is_that_of_no_other() {
    let dir = files();
    if landlock_abi() == 0 {
        return;
    }
    in_child(|| {
        let outside = dir.path().join("outside");
        restricted(landlock_abi(), Tcp::Nothing, &[(&outside, Access::READ_FILE)]);
        assert_eq!(errno(File::open(&outside)), 0);
        assert_eq!(errno(File::open(dir.path().join("inside/link"))), 0);
        assert_eq!(errno(File::open(dir.path().join("inside/file"))), libc::EACCES);
    });
}

/// Workers read these files of their threads, which are made after the restriction.
#[test]
fn files_of_later_threads() {
    in_child(|| {
        let (task, stat) = (Path::new("/proc/self/task"), Path::new("/proc/stat"));
        restricted(landlock_abi(), Tcp::Nothing, &[(task, Access::READ_FILE), (stat, Access::READ_FILE)]);
        let of_a_thread = || {
            let thread = format!("/proc/self/task/{}", gettid());
            assert_eq!(errno(File::open(format!("{thread}/schedstat"))), 0);
            assert_eq!(errno(File::open("/proc/stat")), 0);
            let refused = from(landlock_abi(), 1, libc::EACCES, 0);
            assert_eq!(errno(File::open(format!("{thread}/root/etc/passwd"))), refused);
            assert_eq!(errno(File::open("/proc/meminfo")), refused);
        };
        of_a_thread();
        thread::spawn(of_a_thread).join().unwrap();
    });
}

#[test]
fn a_client_of_servers_is_no_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    in_child(|| {
        restricted(landlock_abi(), Tcp::Connect, &[]);
        assert_eq!(errno(TcpStream::connect(address)), 0);
        assert_eq!(errno(TcpListener::bind("127.0.0.1:0")), from(landlock_abi(), 4, libc::EACCES, 0));
    });
}

#[test]
fn a_process_with_threads_is_not_restricted() {
    in_child(|| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = thread::spawn(move || stopped.recv());
        let refused = restrict(CapabilitySet::empty(), Ruleset::new(0, Tcp::Nothing).unwrap());
        assert!(matches!(refused, Err(Error::Threads(2))));
        drop(stop);
        let _ = other.join();
    });
}
