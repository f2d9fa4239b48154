//! Eventfds: kicks, calls, and what wakes a sleeper of our own.
//!
//! The back-end has the same open file and can do to it what it likes: take away that it never blocks, above all.

use std::fs;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};

use crate::error::Error;

/// An eventfd that never blocks.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        eventfd(0, flags).map(Self).map_err(Error::os("eventfd"))
    }

    /// Signals it. A counter that is full is signalled already, so no error is one.
    #[inline]
    pub(crate) fn signal(&self) {
        let _ = write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes what was signalled; how often it was. Does not wait, whatever the back-end did to the descriptor.
    pub(crate) fn take(&self) -> u64 {
        let mut count = [0; 8];
        // No offset.
        let taken = preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
        let taken = match taken {
            // Linux before 5.12.
            Err(Errno::OPNOTSUPP) => read(&self.0, &mut count),
            taken => taken,
        };
        taken.map_or(0, |_| u64::from_ne_bytes(count))
    }

    /// How often it was signalled since it was last taken. Not for the fast path.
    pub(crate) fn pending(&self) -> u64 {
        // proc_pid_fdinfo(5): the counter, in hexadecimal.
        let info =
            fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd())).unwrap_or_default();
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
    }

    /// Another descriptor of the same, to hand out.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Error> {
        self.0.try_clone().map_err(|source| Error::Os { what: "eventfd", source })
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_counted_until_they_are_taken() {
        let event = Event::new().unwrap();
        assert_eq!((event.pending(), event.take()), (0, 0));
        (0..17).for_each(|_| event.signal());
        assert_eq!((event.pending(), event.take(), event.take()), (17, 17, 0));
    }
}
