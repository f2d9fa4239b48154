//! Counts system calls that a filter refuses.
//!
//! The filter raises SIGSYS in the thread that makes the call, instead of the call. The handler counts it,
//! notes the first path, and lets the call fail with EPERM. Another thread takes the notes
//! ([`Refusals::take_new`]) and logs them.
//!
//! # The handler
//! It takes no lock, allocates nothing, and makes three kinds of calls, which each profile with a trap
//! allows: `pwrite` and `pread` of a memfd, and `write` to an eventfd. The path of a call is an address that
//! may be wrong. So the kernel reads it, by a `pwrite` of that memory, which fails where a load would fault.
//!
//! A thread that has blocked SIGSYS dies with the process instead.
#![expect(unsafe_code, reason = "island: a signal handler that answers system calls")]

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::calls::{UNKNOWN_FROM, name, path_argument};

/// The bytes of a path that are noted.
const PATH_BYTES: usize = 64;
/// Handlers that can read paths at the same time. If there are more, one could note another's path.
const READERS: usize = 64;
/// The code of a SIGSYS that a filter raised (asm-generic/siginfo.h).
const SYS_SECCOMP: c_int = 1;

/// Calls that are refused, known, and without harm, by their path.
const HARMLESS: &[&[u8]] = &[
    // glibc's malloc asks once, when it gives memory back, and assumes the default if it cannot know.
    b"/proc/sys/vm/overcommit_memory",
    // It also asks for the number of processors, and assumes two if it cannot know.
    b"/sys/devices/system/cpu/online",
    b"/proc/stat",
];

/// The notes of the process. A handler can run as long as the process lives.
static REFUSALS: OnceLock<Refusals> = OnceLock::new();

/// The refused calls of this process. Its descriptor is readable while there are new ones.
#[derive(Debug)]
pub struct Refusals {
    notes: [Note; UNKNOWN_FROM],
    /// The first path of each call, and then a place for each handler that reads one.
    paths: OwnedFd,
    readers: AtomicUsize,
    event: OwnedFd,
}

/// A system call that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The number of the call.
    pub number: usize,
    /// The name of the call, or a text with its number.
    pub call: String,
    /// The beginning of the path in the first refused call, if it has one.
    pub path: Option<PathBuf>,
    /// The number of times since the process started.
    pub count: u32,
}

#[derive(Debug)]
struct Note {
    count: AtomicU32,
    state: AtomicU8,
}

/// The states of a note, in their order.
const UNUSED: u8 = 0;
/// A handler writes the path.
const BEING_WRITTEN: u8 = 1;
const WRITTEN: u8 = 2;
const TAKEN: u8 = 3;

/// The structure that a handler gets, for SIGSYS (asm-generic/siginfo.h). `libc` has no fields for it.
#[repr(C)]
struct SigsysInfo {
    signal: c_int,
    errno: c_int,
    code: c_int,
    address: *mut c_void,
    call: c_int,
    architecture: u32,
}

/// Installs the handler, once for the process.
pub(crate) fn catch() -> io::Result<&'static Refusals> {
    if REFUSALS.get().is_none() {
        let _ = REFUSALS.set(Refusals::new()?);
    }
    // SAFETY: zeroes are valid for this plain structure: no flags, and no signals blocked.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handle as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: a valid action, and no place for the previous one.
    // SAFETY: the handler can interrupt anything: it takes no lock, and restores errno.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, ptr::null_mut()) } {
        0 => REFUSALS.get().ok_or_else(|| io::ErrorKind::Other.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn handle(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a structure with these fields for SIGSYS.
    // SAFETY: nothing else uses the structure while the handler runs.
    let info = unsafe { &*info.cast::<SigsysInfo>() };
    // Another process can send the signal too.
    if info.code != SYS_SECCOMP {
        return;
    }
    // SAFETY: errno belongs to this thread. It is restored, because the interrupted code may read it next.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the third argument is the context of the interrupted thread, and the handler's alone.
    let context = unsafe { &mut *context.cast::<ucontext_t>() };
    if let (Ok(number), Some(refusals)) = (usize::try_from(info.call), REFUSALS.get()) {
        let path = path_argument(number).map(|nth| argument(context, nth));
        refusals.note(number, path);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    set_result(context, -i64::from(libc::EPERM));
}

/// Returns the first or second argument of the interrupted call.
#[cfg(target_arch = "x86_64")]
fn argument(context: &ucontext_t, nth: usize) -> usize {
    let register = if nth == 0 { libc::REG_RDI } else { libc::REG_RSI };
    context.uc_mcontext.gregs[register as usize] as usize
}

#[cfg(target_arch = "x86_64")]
fn set_result(context: &mut ucontext_t, result: i64) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
}

/// Returns the first or second argument of the interrupted call.
#[cfg(target_arch = "aarch64")]
fn argument(context: &ucontext_t, nth: usize) -> usize {
    context.uc_mcontext.regs[nth] as usize
}

#[cfg(target_arch = "aarch64")]
fn set_result(context: &mut ucontext_t, result: i64) {
    context.uc_mcontext.regs[0] = result as u64;
}

impl Refusals {
    fn new() -> io::Result<Self> {
        let paths = memfd_create("refused paths", MemfdFlags::CLOEXEC)?;
        ftruncate(&paths, ((UNKNOWN_FROM + READERS) * PATH_BYTES) as u64)?;
        Ok(Self {
            notes: [const { Note { count: AtomicU32::new(0), state: AtomicU8::new(UNUSED) } }; UNKNOWN_FROM],
            paths,
            readers: AtomicUsize::new(0),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Returns the calls that were refused for the first time since the last time that this was called.
    pub fn take_new(&self) -> Vec<Refusal> {
        // Before the notes are read, so that later ones make it readable again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        // Acquire: the path is there. The partner is in `note`.
        let take = |note: &Note| {
            note.state.compare_exchange(WRITTEN, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let new = self.notes.iter().enumerate().filter(|(_, note)| take(note));
        new.map(|(number, _)| self.refusal(number)).collect()
    }

    /// Returns all calls that were refused, with their counts.
    pub fn all(&self) -> Vec<Refusal> {
        let refused = |note: &Note| note.count.load(Ordering::Relaxed) > 0;
        let all = self.notes.iter().enumerate().filter(|(_, note)| refused(note));
        all.map(|(number, _)| self.refusal(number)).collect()
    }

    fn refusal(&self, number: usize) -> Refusal {
        let note = &self.notes[number];
        let mut path = [0; PATH_BYTES];
        let is_written = note.state.load(Ordering::Acquire) >= WRITTEN;
        let read = if is_written {
            rustix::io::pread(&self.paths, &mut path, offset(number)).unwrap_or(0)
        } else {
            0
        };
        let path = until_nul(&path[..read]);
        Refusal {
            number,
            call: name(number).map_or_else(|| format!("call {number}"), str::to_owned),
            path: (!path.is_empty()).then(|| OsStr::from_bytes(path).into()),
            count: note.count.load(Ordering::Relaxed),
        }
    }

    /// Counts a refused call. The handler calls this.
    fn note(&self, number: usize, path: Option<usize>) {
        let Some(note) = self.notes.get(number) else { return };
        let mut bytes = [0; PATH_BYTES];
        let path = path.map_or(&[][..], |address| self.read_path(address, &mut bytes));
        if HARMLESS.contains(&path) {
            return;
        }
        // Relaxed: the count orders nothing.
        note.count.fetch_add(1, Ordering::Relaxed);
        // Relaxed: only the handler that wins writes the path.
        let first = note.state.compare_exchange(UNUSED, BEING_WRITTEN, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_ok() {
            let _ = rustix::io::pwrite(&self.paths, path, offset(number));
            // Release: after the path. The partner is in `take_new`.
            note.state.store(WRITTEN, Ordering::Release);
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Reads the beginning of a path of the interrupted call. A wrong address has none.
    fn read_path<'a>(&self, address: usize, bytes: &'a mut [u8; PATH_BYTES]) -> &'a [u8] {
        let place = UNKNOWN_FROM + self.readers.fetch_add(1, Ordering::Relaxed) % READERS;
        let (paths, at) = (self.paths.as_raw_fd(), offset(place));
        // SAFETY: the kernel reads the memory and checks the address itself. It stops at memory that it
        // cannot read.
        let written = unsafe {
            libc::pwrite(paths, ptr::with_exposed_provenance(address), PATH_BYTES, at as libc::off_t)
        };
        let len = usize::try_from(written).unwrap_or(0);
        let read = rustix::io::pread(&self.paths, &mut bytes[..len], at).unwrap_or(0);
        until_nul(&bytes[..read])
    }
}

impl AsFd for Refusals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Returns where in the memfd a path is.
fn offset(place: usize) -> u64 {
    (place * PATH_BYTES) as u64
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len())]
}
