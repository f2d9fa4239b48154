//! Signalling an eventfd that belongs to somebody else.
#![expect(unsafe_code, reason = "island: an operation handed to the kernel")]

use crate::aio::context::{Context, Control, Event, PREAD, SIGNAL_EVENT};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, write};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

thread_local! {
    static SIGNALLER: io::Result<Signaller> = Signaller::new();
}

/// Takes what [`signal`] needs on this thread now, not when it is first called: a descriptor and a little memory.
pub fn prepare_to_signal() {
    SIGNALLER.with(|_| ());
}

/// Adds one to an eventfd, and never waits.
///
/// A write does not promise that: `O_NONBLOCK` belongs to the open file, which the other side has too, so it can fill the
/// counter and take the flag away at any moment, between a look at them and the write if need be. The kernel itself
/// signals eventfds without waiting, so this has it read nothing from an empty file, by AIO, and signal the eventfd
/// when that is done, which it is before the call returns. It costs about 0.6 us where a write costs 0.2 us.
///
/// Where AIO cannot be had it is a write after all. A descriptor that is no eventfd is left alone.
///
/// Returns whether it is done. The kernel can refuse it, for want of memory for example. A write in its place could wait for ever, so the caller tries again
/// later.
pub fn signal(eventfd: impl AsFd) -> bool {
    let done = SIGNALLER.try_with(|signaller| match signaller {
        Ok(signaller) => signaller.signal(&eventfd),
        Err(_) => {
            while write(&eventfd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {}
            true
        }
    });
    // Without it when the thread ends: then nobody waits for signals of its any more.
    done.unwrap_or(true)
}

/// A context's events: the kernel makes room for a page of them at least, 32 bytes each and the ring's head.
const EVENTS: usize = 128;
/// How often to try a submission that the kernel has no room for. Threads that share a context can take the room that
/// another has made.
const ATTEMPTS_MAX: usize = 64;

/// Does what [`signal`] does, for a caller that keeps the AIO context itself. Threads can share it.
///
/// It belongs to the process that made it: in a child of a fork it signals nothing. Dropping it takes tens of
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
    /// AIO cannot be had: a filter forbids it, or all contexts of the system (`fs.aio-max-nr`) are taken.
    pub fn new() -> io::Result<Self> {
        let empty = memfd_create(c"empty", MemfdFlags::CLOEXEC)?;
        // The kernel makes room for a page of events, whatever it is asked for, and counts what it is asked for.
        Ok(Self { context: Context::open(1)?, empty })
    }

    /// Takes the events that there are; how many.
    fn drain(&self) -> usize {
        self.context.events(false, &mut [Event::default(); EVENTS]).unwrap_or_default()
    }

    /// Adds one to an eventfd, and never waits. Returns whether the kernel did it: it fails for a descriptor that is no
    /// eventfd, and where the kernel has no memory.
    pub fn signal(&self, eventfd: impl AsFd) -> bool {
        let mut control = [Control {
            opcode: PREAD,
            fd: self.empty.as_raw_fd(),
            flags: SIGNAL_EVENT,
            event_fd: eventfd.as_fd().as_raw_fd(),
            ..Control::default()
        }];
        for _ in 0..ATTEMPTS_MAX {
            // SAFETY: it reads no byte.
            match unsafe { self.context.submit(&mut control) } {
                Ok(taken) => return taken == 1,
                // Full of events that nobody wants, which another thread may take at the same time.
                Err(Errno::AGAIN) => {
                    self.drain();
                }
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::read;

    fn count(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        read(fd, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn counts_each() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!((0..1000).all(|_| signal(&fd)));
        assert_eq!(count(&fd), 1000);
    }

    /// Where a write would wait for ever.
    #[test]
    fn a_full_counter_stays_full() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!((0..3).all(|_| signal(&fd)));
        assert!(count(&fd) >= u64::MAX - 1);
    }

    #[test]
    fn what_is_no_eventfd_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        assert!(!signal(&file));
        assert!(!Signaller::new().unwrap().signal(&file));
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    /// More signals than the context has room for events, which the threads take from one another.
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
