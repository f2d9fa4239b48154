//! Eventfds: kicks, calls, and the wake-ups of the driver's own threads.
//!
//! The back-end has the same open file and can change it. For example, it can clear the flag that keeps the
//! file from blocking.

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

/// An eventfd whose use never blocks.
#[derive(Debug)]
pub(crate) struct Event {
    fd: OwnedFd,
    latch: Latch,
}

impl Event {
    pub(crate) fn new() -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = eventfd(0, flags).map_err(Error::os("an eventfd"))?;
        Ok(Self { fd, latch: Latch::default() })
    }

    /// Signals the event. Only for events that the back-end does not have; for the others see [`Kicker`].
    ///
    /// The only error is a full counter, and then the event is signalled already.
    #[inline]
    pub(crate) fn signal(&self) {
        let _ = write(&self.fd, &1u64.to_ne_bytes());
        self.latch.set();
    }

    /// Takes the signals and returns their number. Does not wait, whatever the back-end does to the
    /// descriptor.
    pub(crate) fn take(&self) -> u64 {
        let mut count = [0; 8];
        // An offset of -1 means none.
        let taken = preadv2(&self.fd, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
        let taken = match taken {
            // Linux before 5.12 does not support NOWAIT here.
            Err(Errno::OPNOTSUPP) => read(&self.fd, &mut count),
            taken => taken,
        };
        self.latch.clear();
        taken.map_or(0, |_| u64::from_ne_bytes(count))
    }

    /// Returns the latch that a loom model waits for instead of the descriptor.
    #[cfg(all(test, loom))]
    pub(crate) fn latch(&self) -> &Latch {
        &self.latch
    }

    /// Returns the number of signals since the last [`Event::take`]. Too slow for the data path.
    #[expect(clippy::disallowed_methods, reason = "a descriptor's number belongs to this process")]
    pub(crate) fn pending(&self) -> u64 {
        // proc_pid_fdinfo(5): the counter, in hexadecimal.
        let info =
            fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd())).unwrap_or_default();
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
    }

    /// Returns another descriptor of the same file, for the back-end.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd, Error> {
        self.fd.try_clone().map_err(|source| Error::Os { what: "an eventfd", source })
    }
}

/// The eventfd that wakes the owner of an [`Events`](crate::Events). It remembers whether it is signalled, to
/// save system calls. Used under the completion lock.
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

/// Signals the eventfds that the back-end has too, without ever waiting.
///
/// A plain write could wait: the back-end can fill the counter and clear `O_NONBLOCK` at any moment, after
/// any check. Then the thread would wait as long as the back-end likes, while the disk is alive and nothing
/// ends the wait. So the kernel signals the event instead, by an AIO submission, which does not wait
/// ([`Signaller`]). A kick costs one system call, like a write. Some 120 kicks together cost two more calls,
/// which remove their unused completions.
#[derive(Debug)]
pub(crate) struct Kicker(Option<Signaller>);

impl Kicker {
    /// Makes a kicker. Without AIO, it falls back to writes.
    pub(crate) fn new() -> Self {
        let signaller = Signaller::new().inspect_err(|error| {
            let error: &dyn std::error::Error = error;
            tracing::warn!(
                error,
                "without AIO, a hostile back-end can block a thread that submits a request"
            );
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

    /// A plain write to this event would wait for ever.
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
