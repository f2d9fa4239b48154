//! Eventfds that are shared with another process.
#![expect(unsafe_code, reason = "island: an operation handed to the kernel")]

use crate::aio::context::{Context, Control, Event, PREAD, SIGNAL_EVENT};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, write};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::LazyLock;

thread_local! {
    static SIGNALLER: io::Result<Signaller> = Signaller::new();
}

/// Allocates the resources of [`signal`] for this thread, and of [`is_eventfd`] for the process, now instead
/// of at the first call: a descriptor each, and a little memory.
pub fn prepare_to_signal() {
    SIGNALLER.with(|_| ());
    LazyLock::force(&PROBE);
}

/// Adds one to an eventfd, and never waits.
///
/// A write could wait, because the other side shares the open file. It can fill the counter and clear
/// `O_NONBLOCK` at any time, even between a check and the write. The kernel itself signals eventfds without
/// waiting. So this function submits an AIO read of an empty file, and the kernel signals the eventfd when
/// the read completes, which is before the call returns. This takes about 0.6 us; a write takes 0.2 us.
///
/// Writes to the eventfd if AIO is not available. Leaves a descriptor alone that is no eventfd.
///
/// Returns whether the eventfd was signalled. The kernel can refuse, for lack of memory for example. The
/// caller then tries again later, because a write could wait for ever.
pub fn signal(eventfd: impl AsFd) -> bool {
    let done = SIGNALLER.try_with(|signaller| match signaller {
        Ok(signaller) => signaller.signal(&eventfd),
        Err(_) => {
            while write(&eventfd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {}
            true
        }
    });
    // The thread ends, and its signaller is gone. No signal of it is waited for any more.
    done.unwrap_or(true)
}

/// Returns whether a descriptor is an eventfd, and leaves its counter alone. Returns `None` if AIO is not
/// available.
///
/// The kernel looks for the eventfd of an AIO operation before it looks at the flags of the read. So an
/// operation with an unknown flag always fails, and its error tells.
pub fn is_eventfd(fd: impl AsFd) -> Option<bool> {
    PROBE.as_ref()?.probe(fd)
}

/// Tells eventfds from other files. `None` if the kernel does not give the expected errors: an old one gives
/// others, and a new one may know the flag.
static PROBE: LazyLock<Option<Signaller>> = LazyLock::new(|| {
    let signaller = Signaller::new().ok()?;
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
    let tells = (signaller.probe(&eventfd), signaller.probe(&signaller.empty));
    (tells == (Some(true), Some(false))).then_some(signaller)
});

/// A flag of `rw_flags` that no kernel knows.
const UNKNOWN_FLAG: u32 = 1 << 30;
/// The number of events of a context. The kernel allocates at least a page for them: 32 bytes each and the
/// ring's head.
const EVENTS: usize = 128;
/// The number of attempts at a submission for which the kernel has no room. Threads that share a context can
/// take the room that another has made.
const ATTEMPTS_MAX: usize = 64;

/// Does the same as [`signal`], for a caller that keeps the AIO context itself. Threads can share it.
///
/// It belongs to the process that made it, and signals nothing in a forked child. Dropping it takes tens of
/// milliseconds, in which the kernel waits for its own readers.
#[derive(Debug)]
pub struct Signaller {
    context: Context,
    empty: OwnedFd,
}

impl Signaller {
    /// Makes a context.
    ///
    /// # Errors
    /// AIO is not available: a filter forbids it, or all contexts of the system (`fs.aio-max-nr`) are in use.
    pub fn new() -> io::Result<Self> {
        let empty = memfd_create(c"empty", MemfdFlags::CLOEXEC)?;
        // The kernel makes room for at least a page of events, and counts only the requested number.
        Ok(Self { context: Context::open(1)?, empty })
    }

    /// Takes all events. Returns their number.
    fn drain(&self) -> usize {
        self.context.events(false, &mut [Event::default(); EVENTS]).unwrap_or_default()
    }

    /// Adds one to an eventfd, and never waits. Returns whether the kernel did it. It fails for a descriptor
    /// that is no eventfd, and without memory.
    pub fn signal(&self, eventfd: impl AsFd) -> bool {
        let mut control = [self.read_of_nothing(&eventfd)];
        for _ in 0..ATTEMPTS_MAX {
            // SAFETY: it reads no byte.
            match unsafe { self.context.submit(&mut control) } {
                Ok(taken) => return taken == 1,
                // The context is full of unused events. Another thread may take them at the same time.
                Err(Errno::AGAIN) => {
                    self.drain();
                }
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        false
    }

    /// Returns whether a descriptor is an eventfd, or `None` if the kernel gives neither expected error.
    fn probe(&self, fd: impl AsFd) -> Option<bool> {
        let mut control = [Control { rw_flags: UNKNOWN_FLAG, ..self.read_of_nothing(&fd) }];
        // SAFETY: it reads no byte.
        match unsafe { self.context.submit(&mut control) } {
            Err(Errno::OPNOTSUPP) => Some(true),
            Err(Errno::INVAL) => Some(false),
            _ => None,
        }
    }

    /// Returns a read of the empty file, whose completion signals `eventfd`.
    fn read_of_nothing(&self, eventfd: impl AsFd) -> Control {
        Control {
            opcode: PREAD,
            fd: self.empty.as_raw_fd(),
            flags: SIGNAL_EVENT,
            event_fd: eventfd.as_fd().as_raw_fd(),
            ..Control::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use rustix::io::read;
    use rustix::pipe::pipe;
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

    fn count(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        read(fd, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_counts() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!((0..1000).all(|_| signal(&fd)));
        assert_eq!(count(&fd), 1000);
    }

    /// A write would wait for ever here.
    #[test]
    fn a_full_counter_stays_full() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!((0..3).all(|_| signal(&fd)));
        assert!(count(&fd) >= u64::MAX - 1);
    }

    #[test]
    fn other_files_than_eventfds_are_left_alone() {
        let file = tempfile::tempfile().unwrap();
        assert!(!signal(&file));
        assert!(!Signaller::new().unwrap().signal(&file));
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn eventfds_are_told_from_other_files() {
        let counter = eventfd(7, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(is_eventfd(&counter), Some(true));
        assert_eq!(count(&counter), 7);
        let semaphore = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap();
        assert_eq!(is_eventfd(&semaphore), Some(true));
        // All three are anonymous inodes, as eventfds are.
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::open("/dev/zero").unwrap();
        for other in
            [epoll, timer, pipe().unwrap().1, memfd_create(c"", MemfdFlags::CLOEXEC).unwrap(), file.into()]
        {
            assert_eq!(is_eventfd(&other), Some(false), "{other:?}");
        }
    }

    /// More signals than the context has room for events. The threads take each other's events.
    #[test]
    fn threads_share_a_signaller() {
        const EACH: u64 = 20_000;
        let signaller = Signaller::new().unwrap();
        let fds = [(); 4].map(|()| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        std::thread::scope(|scope| {
            let signaller = &signaller;
            for fd in &fds {
                scope.spawn(move || (0..EACH).for_each(|_| assert!(signaller.signal(fd))));
            }
        });
        assert!(fds.iter().all(|fd| count(fd) == EACH));
    }
}
