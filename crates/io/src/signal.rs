//! Signalling an eventfd that belongs to somebody else.
#![expect(unsafe_code, reason = "island: an operation handed to the kernel")]

use crate::kernel_aio::{BATCH, Context, Control, Event, PREAD, SIGNAL_EVENT};
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
pub fn signal(eventfd: impl AsFd) {
    // Without it when the thread ends: then nobody waits for signals of its any more.
    let _ = SIGNALLER.try_with(|signaller| match signaller {
        Ok(signaller) => signaller.signal(&eventfd),
        Err(_) => while write(&eventfd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {},
    });
}

struct Signaller {
    context: Context,
    empty: OwnedFd,
}

impl Signaller {
    fn new() -> io::Result<Self> {
        let empty = memfd_create(c"empty", MemfdFlags::CLOEXEC)?;
        Ok(Self { context: Context::open(BATCH)?, empty })
    }

    /// Takes the events that there are; how many.
    fn drain(&self) -> usize {
        self.context.events(false, &mut [Event::default(); BATCH]).unwrap_or_default()
    }

    fn signal(&self, eventfd: impl AsFd) {
        let mut control = [Control {
            opcode: PREAD,
            fd: self.empty.as_raw_fd(),
            flags: SIGNAL_EVENT,
            event_fd: eventfd.as_fd().as_raw_fd(),
            ..Control::default()
        }];
        loop {
            // SAFETY: it reads no byte.
            match unsafe { self.context.submit(&mut control) } {
                // Full of events that nobody wants.
                Err(Errno::AGAIN) if self.drain() > 0 => {}
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
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
        (0..1000).for_each(|_| signal(&fd));
        assert_eq!(count(&fd), 1000);
    }

    /// Where a write would wait for ever.
    #[test]
    fn a_full_counter_stays_full() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..3).for_each(|_| signal(&fd));
        assert!(count(&fd) >= u64::MAX - 1);
    }

    #[test]
    fn what_is_no_eventfd_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        signal(&file);
        assert_eq!(file.metadata().unwrap().len(), 0);
    }
}
