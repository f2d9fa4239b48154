//! Eventfds: kicks, calls, and what wakes a sleeper of our own.
//!
//! The back-end has the same open file and can do to it what it likes: take away that it never blocks, above all.

use std::fs;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use kickless_io::Signaller;
use kickless_sync::Latch;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};

use crate::error::Error;
use crate::sleepers::WakeEvent;

/// An eventfd that never blocks.
#[derive(Debug)]
pub(crate) struct Event {
    fd: OwnedFd,
    latch: Latch,
}

impl Event {
    pub(crate) fn new() -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).map_err(Error::os("eventfd"))?;
        Ok(Self { fd, latch: Latch::default() })
    }

    /// Signals it, for one that the back-end does not have ([`Kicker`]). A counter that is full is signalled already, so no
    /// error is one.
    #[inline]
    pub(crate) fn signal(&self) {
        let _ = write(&self.fd, &1u64.to_ne_bytes());
        self.latch.set();
    }

    /// Takes what was signalled; how often it was. Does not wait, whatever the back-end did to the descriptor.
    pub(crate) fn take(&self) -> u64 {
        let mut count = [0; 8];
        // No offset.
        let taken = preadv2(&self.fd, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
        let taken = match taken {
            // Linux before 5.12.
            Err(Errno::OPNOTSUPP) => read(&self.fd, &mut count),
            taken => taken,
        };
        self.latch.clear();
        taken.map_or(0, |_| u64::from_ne_bytes(count))
    }

    /// What a model waits for instead of the descriptor.
    #[cfg(all(test, loom))]
    pub(crate) fn latch(&self) -> &Latch {
        &self.latch
    }

    /// How often it was signalled since it was last taken. Not for the fast path.
    pub(crate) fn pending(&self) -> u64 {
        // proc_pid_fdinfo(5): the counter, in hexadecimal.
        let info =
            fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd())).unwrap_or_default();
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
    }

    /// Another descriptor of the same, to hand out.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Error> {
        self.fd.try_clone().map_err(|source| Error::Os { what: "eventfd", source })
    }
}

/// An eventfd of ours that knows whether it is signalled, to save system calls. Used under one lock.
#[derive(Debug)]
pub(crate) struct SleeperEvent {
    event: Event,
    signalled: AtomicBool,
}

impl SleeperEvent {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self { event: Event::new()?, signalled: AtomicBool::new(false) })
    }
}

impl WakeEvent for SleeperEvent {
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::Relaxed) {
            self.event.signal();
        }
    }

    fn clear(&self) {
        if self.signalled.swap(false, Ordering::Relaxed) {
            self.event.take();
        }
    }
}

impl AsFd for SleeperEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Signals the eventfds that the back-end has too, and never waits.
///
/// A write can wait, whatever was looked at before: the back-end fills the counter and takes `O_NONBLOCK` away at any moment.
/// The thread would then wait for as long as the back-end likes, with the disk alive and nobody to end it. A submission does
/// not wait, so the kernel signals instead ([`Signaller`]): one system call for a kick, as a write is, and two more for some
/// 120 of them, which take the events that nobody wants.
#[derive(Debug)]
pub(crate) struct Kicker(Option<Signaller>);

impl Kicker {
    /// Without AIO, kicks are writes after all.
    pub(crate) fn new() -> Self {
        let signaller = Signaller::new().inspect_err(|error| {
            let error: &dyn std::error::Error = error;
            tracing::warn!(error, "without AIO, a hostile back-end can make a thread that submits wait");
        });
        Self(signaller.ok())
    }

    /// Signals `event`.
    #[inline]
    pub(crate) fn kick(&self, event: &Event) {
        if !self.0.as_ref().is_some_and(|signaller| signaller.signal(event)) {
            event.signal();
        }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_setfl};

    /// A write to this event would wait for ever.
    #[test]
    fn a_kick_does_not_wait() {
        let kicker = Kicker::new();
        let event = Event::new().unwrap();
        write(&event.fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        fcntl_setfl(&event.fd, OFlags::empty()).unwrap();
        (0..1000).for_each(|_| kicker.kick(&event));
        assert_eq!(event.take(), u64::MAX);
        kicker.kick(&event);
        assert_eq!(event.take(), 1);
    }

    #[test]
    fn signals_are_counted_until_they_are_taken() {
        let event = Event::new().unwrap();
        assert_eq!((event.pending(), event.take()), (0, 0));
        (0..17).for_each(|_| event.signal());
        assert_eq!((event.pending(), event.take(), event.take()), (17, 17, 0));
    }
}
