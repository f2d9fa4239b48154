//! A single wait for all events of a worker.

use kickless_device::Interest;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// An event source that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The mailbox, or the waker was used.
    Mailbox,
    /// The engine may have completions.
    Engine,
    /// The driver kicked the task with this number.
    Kick(u32),
    /// The far side of the task with this number is ready.
    Event(u32),
}

const MAILBOX: u64 = u64::MAX;
const ENGINE: u64 = u64::MAX - 1;
/// Set beside a task's number, which has 32 bits, for the event of its far side.
const EVENT: u64 = 1 << 32;
/// The number of events taken at once. More are left for the next wait.
const EVENTS: usize = 64;

/// The worker's epoll instance.
pub(crate) struct Waiter {
    epoll: OwnedFd,
    /// Completions of the engine end a wait.
    watches_engine: bool,
    events: Vec<epoll::Event>,
}

impl Waiter {
    pub(crate) fn new(mailbox: BorrowedFd<'_>, engine: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, mailbox, EventData::new_u64(MAILBOX), EventFlags::IN)?;
        epoll::add(&epoll, engine, EventData::new_u64(ENGINE), EventFlags::IN)?;
        Ok(Self { epoll, watches_engine: true, events: Vec::with_capacity(EVENTS) })
    }

    /// Adds the kicks of `task` to the wait. An earlier kick counts.
    pub(crate) fn add(&self, kick: BorrowedFd<'_>, task: u32) -> io::Result<()> {
        // Edge-triggered, because the descriptor is never read and each kick must be an event.
        Ok(epoll::add(&self.epoll, kick, EventData::new_u64(task.into()), EventFlags::IN | EventFlags::ET)?)
    }

    /// Chooses whether kicks that were added are reported. Earlier kicks count.
    pub(crate) fn listen(&self, kick: BorrowedFd<'_>, task: u32, listens: bool) -> io::Result<()> {
        let ready = if listens { EventFlags::IN } else { EventFlags::empty() };
        Ok(epoll::modify(&self.epoll, kick, EventData::new_u64(task.into()), ready | EventFlags::ET)?)
    }

    /// Adds the far side of `task` to the wait, or changes its interest if it is `registered`. Earlier
    /// readiness counts.
    pub(crate) fn watch(
        &self,
        far_side: BorrowedFd<'_>,
        interest: Interest,
        task: u32,
        registered: bool,
    ) -> io::Result<()> {
        let ready = match interest {
            Interest::None => EventFlags::empty(),
            Interest::Readable => EventFlags::IN,
            Interest::Writable => EventFlags::OUT,
        };
        let (data, flags) = (EventData::new_u64(EVENT | u64::from(task)), ready | EventFlags::ET);
        match registered {
            true => epoll::modify(&self.epoll, far_side, data, flags)?,
            false => epoll::add(&self.epoll, far_side, data, flags)?,
        }
        Ok(())
    }

    /// Chooses whether completions of the `engine` end the next waits. Earlier completions count.
    pub(crate) fn watch_engine(&mut self, engine: BorrowedFd<'_>, watches_engine: bool) -> io::Result<()> {
        if self.watches_engine != watches_engine {
            let flags = if watches_engine { EventFlags::IN } else { EventFlags::empty() };
            epoll::modify(&self.epoll, engine, EventData::new_u64(ENGINE), flags)?;
            self.watches_engine = watches_engine;
        }
        Ok(())
    }

    pub(crate) fn remove(&self, kick: BorrowedFd<'_>) {
        // It was added. A failure would leave events for a task that is gone, which are ignored.
        let _ = epoll::delete(&self.epoll, kick);
    }

    /// Waits until something is ready, but no longer than `timeout`.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<impl Iterator<Item = Ready> + '_> {
        self.events.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = match timeout {
            None => None,
            Some(Duration::ZERO) => Some(&now),
            Some(timeout) => {
                // `epoll_wait`, which every kernel has, counts milliseconds.
                let timeout =
                    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
                let mut epoll = [PollFd::new(&self.epoll, PollFlags::IN)];
                if matches!(poll(&mut epoll, Some(&timeout)), Ok(0) | Err(Errno::INTR)) {
                    return Ok(self.ready());
                }
                Some(&now)
            }
        };
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(self.ready())
    }

    fn ready(&self) -> impl Iterator<Item = Ready> + '_ {
        self.events.iter().map(|event| match event.data.u64() {
            MAILBOX => Ready::Mailbox,
            ENGINE => Ready::Engine,
            task if task & EVENT != 0 => Ready::Event(task as u32),
            task => Ready::Kick(task as u32),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;
    use std::time::Instant;

    #[test]
    fn a_wait_is_as_long_as_it_should_be_or_ends_with_an_event() {
        let eventfd = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (mailbox, engine, kick) = (eventfd(), eventfd(), eventfd());
        let mut waiter = Waiter::new(mailbox.as_fd(), engine.as_fd()).unwrap();
        waiter.add(kick.as_fd(), 7).unwrap();
        let time = Duration::from_micros(50);
        // Some of them are not interrupted by another thread, and so end within the millisecond.
        let slept = |waiter: &mut Waiter| {
            let start = Instant::now();
            assert_eq!(waiter.wait(Some(time)).unwrap().count(), 0);
            start.elapsed()
        };
        let shortest = (0..1000).map(|_| slept(&mut waiter)).min().unwrap();
        assert!(shortest >= time && shortest < Duration::from_millis(1), "{shortest:?}");
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        let happened: Vec<_> = waiter.wait(Some(Duration::from_secs(60))).unwrap().collect();
        assert_eq!(happened, [Ready::Kick(7)]);
        assert_eq!(waiter.wait(Some(Duration::ZERO)).unwrap().count(), 0, "it is edge-triggered");
    }

    #[test]
    fn completions_that_are_not_watched_are_reported_later() {
        let eventfd = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (mailbox, engine) = (eventfd(), eventfd());
        let mut waiter = Waiter::new(mailbox.as_fd(), engine.as_fd()).unwrap();
        waiter.watch_engine(engine.as_fd(), false).unwrap();
        rustix::io::write(&engine, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(waiter.wait(Some(Duration::from_micros(50))).unwrap().count(), 0);
        waiter.watch_engine(engine.as_fd(), true).unwrap();
        assert_eq!(waiter.wait(None).unwrap().collect::<Vec<_>>(), [Ready::Engine]);
    }
}
