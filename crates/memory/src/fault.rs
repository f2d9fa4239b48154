//! Guest memory whose file shrinks under our hands.
//!
//! A front-end shares memory as a file, and can cut that file short while we have it mapped; a file of huge pages can
//! turn out to have none left. The next access to what is gone is not an error that a function returns, it is the
//! signal SIGBUS, and kills the process, with all other devices that it serves.
//!
//! After [`guard`] it does not. The handler looks whether the address lies in one of our [`Mapping`](crate::Mapping)s. If so,
//! it puts anonymous memory, all zeroes, in the place of the missing page, and marks the mapping as damaged; the access goes on
//! and harms nobody. Who uses guest memory asks once for each batch, after its accesses and before it tells of their
//! results, whether there was new damage ([`damages`], a load), and if so whether it was to memory of its own
//! ([`Map::damaged`](crate::Map::damaged)). It then gives up that memory; whose is sound, goes on. Without [`guard`], a
//! SIGBUS is what it always was.
//!
//! Accesses of the operating system for us (`preadv`, io_uring) need none of this: they fail with EFAULT.
//!
//! # The handler
//! It is one for the process. What is not ours (another address, a signal that was sent by somebody) goes to the handler
//! that was there before; a program that installs one later has to pass on what is not its own. It runs on the
//! thread's alternate stack where there is one, calls nothing but `mmap`, and takes no lock: mappings can come and go
//! meanwhile (`registry` says why). A few missing pages of a mapping are replaced one by one, so that what is still there
//! stays; further ones together with all that follows them, and in need all of the mapping. So however many holes a
//! front-end makes, the kernel's list of our mappings does not grow beyond bounds. (Nor do front-ends fill it with mappings, of which
//! there is a largest number: with the list full, nothing could be put anywhere.)
#![expect(unsafe_code, reason = "island: a signal handler, and memory in the place of memory")]

mod registry;

use crate::{Gpa, UserAddr};
use libc::{c_int, c_void, sigaction, siginfo_t};
pub(crate) use registry::{Entry, MAPPINGS, Range};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::{Mutex, PoisonError};

/// So many missing pages of a mapping are replaced one at a time.
const SINGLE_PAGES_MAX: usize = 16;
/// And so many of all mappings that there are: each can cost two entries of the kernel's list, which ends at
/// 65530 (`vm.max_map_count`).
const SINGLE_PAGES_MAX_IN_ALL: usize = 512;

/// A page is missing, by itself or because the hardware lost it and the access cannot go on.
const CODES: [c_int; 3] = [libc::BUS_ADRERR, libc::BUS_OBJERR, libc::BUS_MCEERR_AR];

/// Missing pages of all mappings since the process began.
static DAMAGES: AtomicUsize = AtomicUsize::new(0);

/// Missing pages of the mappings that there are, up to [`SINGLE_PAGES_MAX`] of each.
static SINGLE_PAGES: AtomicUsize = AtomicUsize::new(0);

/// What was to be done about the signal before us. Null until there is a handler of ours.
static PREVIOUS: AtomicPtr<sigaction> = AtomicPtr::new(ptr::null_mut());
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// Memory of the front-end's that has lost pages: its file was cut short, or has no pages left. What was read from it and
/// written to it since means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// Guest memory.
    #[error(
        "the guest's memory at {gpa} ({len:#x} bytes, {user} to the front-end) is damaged: its file was cut short, or has no pages left"
    )]
    Memory {
        /// First guest-physical address of the slot.
        gpa: Gpa,
        /// The front-end's address of it.
        user: UserAddr,
        /// The slot's length in bytes.
        len: u64,
        /// Nobody was told before, since it was mapped.
        first: bool,
    },
    /// The buffer of requests in flight.
    #[error(
        "the buffer of requests in flight ({len:#x} bytes) is damaged: its file was cut short, or has no pages left"
    )]
    Inflight {
        /// Its length in bytes.
        len: u64,
        /// Nobody was told before, since it was mapped.
        first: bool,
    },
    /// The log of written pages.
    #[error(
        "the log of written pages ({len:#x} bytes) is damaged: its file was cut short, or has no pages left"
    )]
    Log {
        /// Its length in bytes.
        len: u64,
        /// Nobody was told before, since it was mapped.
        first: bool,
    },
}

impl Damaged {
    /// Whether nobody was told before.
    pub fn is_first(&self) -> bool {
        let (Self::Memory { first, .. } | Self::Log { first, .. } | Self::Inflight { first, .. }) = self;
        *first
    }
}

/// From now on, a page that is missing from guest memory does not kill this process. For a program to call, once, at its
/// beginning: it installs a handler for SIGBUS, which is the whole process's. A second call does nothing.
///
/// # Errors
/// The kernel refuses.
pub fn guard() -> io::Result<()> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    // Known before the first signal can come, and known better afterwards, should somebody have installed one in between.
    remember(set_action(None)?);
    // SAFETY: all zeroes are a valid value of this plain structure.
    let mut ours: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = handle as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    remember(set_action(Some(&ours))?);
    *installed = true;
    Ok(())
}

/// Sets the action for SIGBUS, if there is one to set; the action before.
fn set_action(action: Option<&sigaction>) -> io::Result<sigaction> {
    let mut before = MaybeUninit::zeroed();
    // SAFETY: a valid action, or null, which leaves it as it is; and a place for the one before.
    let set = unsafe {
        libc::sigaction(libc::SIGBUS, action.map_or(ptr::null(), ptr::from_ref), before.as_mut_ptr())
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has filled it; all zeroes were valid as well.
    Ok(unsafe { before.assume_init() })
}

/// Never freed: a handler may be about to read it.
fn remember(action: sigaction) {
    PREVIOUS.store(Box::leak(Box::new(action)), Ordering::Release);
}

/// How many missing pages there were in the whole process, so far. Compares equal as long as there is nothing new.
///
/// It is read after all that the calling thread has read from guest memory and written to it before.
#[inline]
pub fn damages() -> usize {
    // The first keeps the compiler, the second the processor from asking before the accesses are over: the
    // handler counts before it puts zeroes in place, so who has seen such zeroes sees the count. Neither is an instruction on x86.
    compiler_fence(Ordering::SeqCst);
    fence(Ordering::Acquire);
    // Acquire: who sees the count sees the mapping's mark, which was set before it.
    DAMAGES.load(Ordering::Acquire)
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid one, which has an address where the code says that there
    // was a fault.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if !(CODES.contains(&code) && mend(address)) {
        pass_on(signal, info, context);
    }
}

/// Takes a mapping out of [`MAPPINGS`] that nobody uses any more, before it is unmapped.
pub(crate) fn remove(entry: &'static Entry) {
    SINGLE_PAGES.fetch_sub(entry.misses().min(SINGLE_PAGES_MAX), Ordering::Relaxed);
    MAPPINGS.remove(entry);
}

/// Whether `address` can be accessed from now on.
fn mend(address: usize) -> bool {
    let Some((entry, range)) = MAPPINGS.find(address) else { return false };
    let before = entry.miss();
    // Release: with `miss`, before the zeroes are there. Its partner is in `damages`.
    DAMAGES.fetch_add(1, Ordering::Release);
    let offset = (address - range.start) / range.page * range.page;
    // Relaxed: it bounds, and orders nothing.
    let single =
        before < SINGLE_PAGES_MAX && SINGLE_PAGES.fetch_add(1, Ordering::Relaxed) < SINGLE_PAGES_MAX_IN_ALL;
    let len = if single { range.page } else { range.len - offset };
    // Where the kernel's list is full it cannot cut a mapping in two, but can replace a whole one.
    replace(range.start + offset, len) || replace(range.start, range.len)
}

/// Puts zeroed anonymous memory at a part of a mapping of ours. Whether the kernel did.
fn replace(start: usize, len: usize) -> bool {
    // SAFETY: of this thread; the interrupted code may be about to look at it.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is within a mapping of ours, which the interrupted access keeps alive, and consists of whole
    // pages of it. Nobody has a Rust reference to its bytes, and whoever has pointers may write there at any time.
    let mapped = unsafe {
        libc::mmap(
            ptr::with_exposed_provenance_mut(start),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    mapped != libc::MAP_FAILED
}

/// Does what would have been done about the signal without us.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: null, or an action that is never freed.
    let (action, flags) =
        unsafe { previous.as_ref() }.map_or((libc::SIG_DFL, 0), |p| (p.sa_sigaction, p.sa_flags));
    // SAFETY: valid, as the handler was given it.
    let sent = unsafe { (*info).si_code } <= 0;
    match action {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // A fault comes again when the handler returns, and one that is ignored kills as well. What was sent has to
            // be sent again, and waits until then.
            // SAFETY: both are async-signal-safe, and the action is a valid one.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if sent {
                    libc::raise(signal);
                }
            }
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the kernel had this address, with this flag, as that of a handler of three arguments.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above, of one argument.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
