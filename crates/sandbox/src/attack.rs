//! Tries system calls that the sandbox refuses, for tests. Release builds do not have this module.
//!
//! Each try has a name, and makes one call. Its arguments are such that the call does no harm where it is
//! allowed: it succeeds without an effect, or fails with an error number of its own.
#![expect(unsafe_code, reason = "island: plain system calls with arguments that no other code passes")]

mod table;

use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr;
use std::sync::OnceLock;

use libc::c_long;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{getgid, getppid, getuid};
use rustix::thread::gettid;

use table::Arg;

#[cfg(not(debug_assertions))]
compile_error!("only tests make these calls");

/// The numbers of descriptors that are looked at.
const DESCRIPTORS: i32 = 256;
/// The bytes of a page, on all processors that this program is built for.
const PAGE: usize = 4096;

/// Returns the names of all tries.
pub fn names() -> impl Iterator<Item = &'static str> {
    table::calls().map(|(name, ..)| *name)
}

/// Makes the call with this name, and returns its result or its error number. Returns `None` if there is no
/// such try.
pub fn attempt(name: &str) -> Option<Result<i64, i32>> {
    let (_, number, args) = table::calls().find(|(known, ..)| *known == name)?;
    let mut values = [0; 6];
    for (value, arg) in values.iter_mut().zip(*args) {
        match arg.value() {
            Ok(made) => *value = made,
            Err(error) => return Some(Err(error.raw_os_error())),
        }
    }
    Some(call(*number, values))
}

/// Asks this process to end, as an operator does with SIGTERM.
pub fn ask_to_end() {
    let thread = gettid().as_raw_nonzero().get();
    // SAFETY: the signal has a handler, or ends the process.
    unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, libc::SIGTERM) };
}

fn call(number: c_long, args: [usize; 6]) -> Result<i64, i32> {
    // SAFETY: no call of the table writes to memory other than a page of its own, and none frees memory.
    // SAFETY: none makes code of this program unreadable, or changes it.
    // SAFETY: a process that `clone` or `fork` makes has this memory as a copy, and ends below.
    let result = unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if result == -1 {
        return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
    }
    if table::makes_a_process(number) {
        reap(result);
    }
    Ok(result)
}

/// Ends a new process, in which `pid` is 0, or waits until it has ended.
fn reap(pid: c_long) {
    if pid == 0 {
        // SAFETY: it takes any number, and does not return.
        unsafe { libc::_exit(0) }
    }
    // SAFETY: the status is not asked for. A process that is another's child is none to wait for.
    unsafe { libc::waitpid(pid as libc::pid_t, ptr::null_mut(), 0) };
}

impl Arg {
    fn value(self) -> rustix::io::Result<usize> {
        Ok(match self {
            Self::Number(number) => number as usize,
            Self::Text(text) => text.as_ptr().expose_provenance(),
            Self::Bytes(bytes) => bytes.as_ptr().expose_provenance(),
            Self::Netlink => socket_of(libc::AF_NETLINK) as usize,
            Self::Zeroes => zeroes()?.expose_provenance(),
            Self::Code => (attempt as fn(&str) -> Option<Result<i64, i32>>) as usize & !(PAGE - 1),
            Self::Memfd => {
                let memory = memfd_create("attack", MemfdFlags::CLOEXEC)?;
                ftruncate(&memory, PAGE as u64)?;
                // It is one of a test, and stays open.
                memory.into_raw_fd() as usize
            }
            Self::OwnProcess => std::process::id() as usize,
            Self::OwnThread => gettid().as_raw_nonzero().get() as usize,
            Self::Parent => KNOWN.get().map_or(0, |known| known.parent) as usize,
            Self::OwnUser => KNOWN.get().map_or(0, |known| known.user) as usize,
            Self::OwnGroup => KNOWN.get().map_or(0, |known| known.group) as usize,
        })
    }
}

/// Returns a socket of this family that this process has, or -1.
fn socket_of(family: i32) -> i32 {
    let is_one = |fd: &i32| {
        // SAFETY: it is asked only for its kind, and is not closed. Nothing relies on its meaning.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        rustix::net::sockopt::socket_domain(fd).is_ok_and(|of| i32::from(of.as_raw()) == family)
    };
    (3..DESCRIPTORS).find(is_one).unwrap_or(-1)
}

/// Makes a page of zeroes, which stays as long as the process.
fn zeroes() -> rustix::io::Result<*mut c_void> {
    // SAFETY: the kernel chooses a place where nothing is.
    unsafe { mmap_anonymous(ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
}

/// Properties of this process that it cannot ask for in the sandbox.
#[derive(Debug)]
struct Known {
    parent: i32,
    user: u32,
    group: u32,
}

static KNOWN: OnceLock<Known> = OnceLock::new();

/// Looks at properties of this process that tries need. A process calls this before it loses its rights.
pub fn prepare() {
    let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
    KNOWN.get_or_init(|| Known { parent, user: getuid().as_raw(), group: getgid().as_raw() });
}
