//! Survives the loss of pages of guest memory.
//!
//! A front-end shares memory as a file, and can truncate that file while we have it mapped. A file of huge
//! pages can also run out of pages. The next access to a lost page raises the signal SIGBUS, which kills the
//! process and with it all other devices.
//!
//! After [`guard`], SIGBUS does not kill the process. The handler checks whether the address lies in one of
//! our [`Mapping`](crate::Mapping)s. If so, it puts anonymous memory, all zeroes, in the place of the missing
//! page, and marks the mapping as damaged. The access then continues and harms nothing.
//!
//! Users of guest memory check for new damage once for each batch: after their accesses, and before they
//! report the results. The check is a load ([`damages`]). If there is new damage, they check whether it is in
//! their own memory ([`Map::damaged`](crate::Map::damaged)). A device with damaged memory stops using it;
//! other devices go on. Without [`guard`], a SIGBUS has its usual effect.
//!
//! Accesses of the operating system on our behalf (`preadv`, io_uring) do not need this. They fail with
//! EFAULT.
//!
//! # The handler
//! There is one handler for the process. It passes other signals (another address, or a signal that a process
//! sent) to the handler that was installed before. A program that installs a handler later has to pass on
//! what is not its own.
//!
//! The handler runs on the thread's alternate stack if there is one, calls only `mmap`, and takes no lock.
//! Mappings can come and go while it runs (`registry` says why).
//!
//! The handler replaces the first few missing pages of a mapping one by one, so that the pages between them
//! stay. It replaces a further page together with everything that follows, and the whole mapping if nothing
//! else works. So the kernel's list of our mappings is bounded, however many holes a front-end makes.
//! Front-ends cannot fill the list with mappings either, because their number is limited. (If the list were
//! full, the kernel could not replace anything.)
#![expect(unsafe_code, reason = "island: a signal handler, and memory in the place of memory")]

mod registry;

use crate::{Gpa, UserAddr};
use kickless_sync::lock;
use libc::{c_int, c_void, sigaction, siginfo_t};
pub(crate) use registry::{MAPPINGS, MappingEntry, Range};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence};

/// Missing pages of one mapping that are replaced one at a time.
const SINGLE_PAGES_MAX: usize = 16;
/// Missing pages of all existing mappings that are replaced one at a time. Each can cost two entries of the
/// kernel's list, which ends at 65530 (`vm.max_map_count`).
const SINGLE_PAGES_MAX_IN_ALL: usize = 512;

/// Codes for a missing page: it does not exist, or the hardware lost it and the access cannot continue.
const CODES: [c_int; 3] = [libc::BUS_ADRERR, libc::BUS_OBJERR, libc::BUS_MCEERR_AR];

/// Missing pages of all mappings since the process started.
static DAMAGES: AtomicUsize = AtomicUsize::new(0);

/// Missing pages of the existing mappings, up to [`SINGLE_PAGES_MAX`] of each.
static SINGLE_PAGES: AtomicUsize = AtomicUsize::new(0);

/// The previous action for the signal. Null until our handler is installed.
static PREVIOUS: AtomicPtr<sigaction> = AtomicPtr::new(ptr::null_mut());
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// Shared memory that has lost pages: its file was truncated, or has no pages left. Data read from it or
/// written to it since then is meaningless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// Guest memory.
    #[error(
        "the guest's memory at {gpa} ({len:#x} bytes, {user} to the front-end) is damaged: its file was truncated, or has no pages left"
    )]
    Memory {
        /// First guest-physical address of the slot.
        gpa: Gpa,
        /// The front-end's address of the slot.
        user: UserAddr,
        /// The slot's length in bytes.
        len: u64,
        /// Whether this is the first report of it since the slot was mapped.
        first: bool,
    },
    /// The in-flight buffer.
    #[error("the in-flight buffer ({len:#x} bytes) is damaged: its file was truncated, or has no pages left")]
    Inflight {
        /// Length of the buffer in bytes.
        len: u64,
        /// Whether this is the first report of it since the buffer was mapped.
        first: bool,
    },
    /// The log of written pages.
    #[error(
        "the log of written pages ({len:#x} bytes) is damaged: its file was truncated, or has no pages left"
    )]
    Log {
        /// Length of the log in bytes.
        len: u64,
        /// Whether this is the first report of it since the log was mapped.
        first: bool,
    },
}

impl Damaged {
    /// Returns whether this is the first report of this damage.
    pub fn is_first(&self) -> bool {
        let (Self::Memory { first, .. } | Self::Log { first, .. } | Self::Inflight { first, .. }) = self;
        *first
    }
}

/// Installs the handler for SIGBUS, so that missing pages of guest memory do not kill this process.
///
/// The handler belongs to the whole process, so a program calls this once, when it starts. A second call does
/// nothing.
///
/// # Errors
/// Fails if the kernel refuses the handler.
pub fn guard() -> io::Result<()> {
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    // The previous action must be known before the first signal can come. The second call is exact, in case
    // another thread has installed a handler in between.
    store_previous(set_action(None)?);
    // SAFETY: all zeroes are a valid value of this plain structure.
    let mut ours: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = handle as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    store_previous(set_action(Some(&ours))?);
    *installed = true;
    Ok(())
}

/// Sets the action for SIGBUS, if there is one to set. Returns the previous action.
fn set_action(action: Option<&sigaction>) -> io::Result<sigaction> {
    let mut before = MaybeUninit::zeroed();
    // SAFETY: a valid action, or null, which changes nothing; and a place for the previous action.
    let set = unsafe {
        libc::sigaction(libc::SIGBUS, action.map_or(ptr::null(), ptr::from_ref), before.as_mut_ptr())
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has filled it; it was valid before too, as all zeroes.
    Ok(unsafe { before.assume_init() })
}

/// Stores the previous action for the handler. It is never freed, because a handler may be about to read it.
fn store_previous(action: sigaction) {
    PREVIOUS.store(Box::leak(Box::new(action)), Ordering::Release);
}

/// Returns the number of missing pages in the whole process so far. An unchanged number means that there is
/// no new damage.
///
/// The number is read after all earlier accesses of the calling thread to guest memory.
#[inline]
pub fn damages() -> usize {
    // These fences keep the load after the accesses: the first orders the compiler, the second the processor.
    // The handler counts before it puts zeroes in place, so a thread that has read such zeroes sees the
    // count. Neither fence is an instruction on x86.
    compiler_fence(Ordering::SeqCst);
    fence(Ordering::Acquire);
    // Acquire: a thread that sees the count sees the mapping's mark, which was set before.
    DAMAGES.load(Ordering::Acquire)
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid `info`. It has an address where the code
    // says that there was a fault.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if !(CODES.contains(&code) && replace_missing(address)) {
        pass_on(signal, info, context);
    }
}

/// Takes an unused mapping out of [`MAPPINGS`] before it is unmapped.
pub(crate) fn remove(entry: &'static MappingEntry) {
    SINGLE_PAGES.fetch_sub(entry.misses().min(SINGLE_PAGES_MAX), Ordering::Relaxed);
    MAPPINGS.remove(entry);
}

/// Replaces the missing page at `address`. Returns whether the address can be accessed now.
fn replace_missing(address: usize) -> bool {
    let Some((entry, range)) = MAPPINGS.find(address) else { return false };
    let before = entry.count_miss();
    // Release: counted after `count_miss` and before the zeroes are in place. Its partner is in `damages`.
    DAMAGES.fetch_add(1, Ordering::Release);
    let offset = (address - range.start) / range.page * range.page;
    // Relaxed: the count is a limit and orders nothing.
    let single =
        before < SINGLE_PAGES_MAX && SINGLE_PAGES.fetch_add(1, Ordering::Relaxed) < SINGLE_PAGES_MAX_IN_ALL;
    let len = if single { range.page } else { range.len - offset };
    // If the kernel's list is full, the kernel cannot split a mapping, but it can replace a whole one.
    map_zeroes(range.start + offset, len) || map_zeroes(range.start, range.len)
}

/// Puts zeroed anonymous memory in the place of a part of one of our mappings. Returns whether the kernel did
/// it.
fn map_zeroes(start: usize, len: usize) -> bool {
    // SAFETY: errno belongs to this thread. It is restored below, because the interrupted code may read it
    // next.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is within a mapping of ours, which the interrupted access keeps alive, and consists
    // of whole pages of it. There are no Rust references to its bytes, and holders of pointers may write
    // there at any time.
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

/// Handles the signal as it would be handled without us.
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
            // A fault comes again when the handler returns, and an ignored fault kills too. A signal that a
            // process sent has to be sent again; it stays pending until the handler returns. The sandbox
            // refuses the call of musl's `raise`, which does not name the process. SAFETY: all are
            // async-signal-safe, the action is a valid one, and the thread is this one.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if sent {
                    libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), signal);
                }
            }
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the kernel had this address, with this flag, as that of a handler with three arguments.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above, of a handler with one argument.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
