//! The queue of a disk, for callers that submit in batches and poll.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};

use crate::core::Core;
use crate::error::Error;
use crate::event::SleeperEvent;
use crate::handle::Handle;
use crate::reconnect::Reconnect;
use crate::request::{Completion, Request};
use crate::ring::{Counters, Ring, is_delivering};

/// A request that was not submitted, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("the request was not submitted")]
pub struct SubmitError {
    /// The request.
    pub request: Request,
    /// The reason.
    #[source]
    pub error: Error,
}

/// One of the queues of a disk.
///
/// Any number of threads can submit to it and poll it at once. Submission and completion each have a lock,
/// and the kick of the device happens outside both.
#[derive(Clone)]
pub struct Queue {
    pub(crate) handle: Arc<Handle>,
    pub(crate) index: usize,
}

impl Queue {
    #[inline]
    fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    #[inline]
    pub(crate) fn ring(&self) -> &Ring {
        &self.core().rings[self.index]
    }

    /// Returns the number of the queue.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Submits the first requests of a batch, as many as there is room for. Returns their number.
    ///
    /// Checks once whether the device wants a kick. Submitted requests are removed from the batch.
    ///
    /// # Errors
    /// - [`Error::Full`]: there is no room for the first request.
    /// - [`Error::Invalid`]: a request is invalid. Those before it were submitted, so it is now the first of
    ///   the batch.
    /// - The disk is dead.
    #[inline]
    pub fn submit(&self, batch: &mut Vec<Request>) -> Result<usize, Error> {
        self.ring().submit(batch).map_err(|error| self.core().link.explain(error))
    }

    /// Submits a whole batch. Waits when there is no room.
    ///
    /// # Errors
    /// As [`Queue::submit`], except [`Error::Full`].
    pub fn submit_or_wait(&self, batch: &mut Vec<Request>) -> Result<(), Error> {
        while !batch.is_empty() {
            match self.submit(batch) {
                Ok(_) => {}
                Err(Error::Full) => {
                    let Some(first) = batch.first_mut() else { break };
                    self.core().submit_or_wait(self.ring(), first)?;
                    batch.remove(0);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Submits one request.
    ///
    /// # Errors
    /// As [`Queue::submit`]. The error contains the request.
    #[inline]
    #[expect(clippy::result_large_err, reason = "the request comes back in the error")]
    pub fn submit_one(&self, mut request: Request) -> Result<(), SubmitError> {
        let submitted = self.ring().submit_one(&mut request);
        submitted.map_err(|error| SubmitError { request, error: self.core().link.explain(error) })
    }

    /// Delivers completions, and returns the number of calls of `each`.
    ///
    /// Calls `each` for up to `max` completions of requests with a token, but not always for all that there
    /// are. Also wakes futures and blocked threads. Never waits, not even for another thread that polls.
    ///
    /// `each` runs under the completion lock of the queue. It may submit requests; calls that wait return
    /// [`Error::InCallback`].
    ///
    /// # Errors
    /// The disk is dead, and no completion is left.
    #[inline]
    pub fn poll(&self, max: usize, each: impl FnMut(Completion)) -> Result<usize, Error> {
        let (count, ended) = self.ring().poll(max, each);
        if let Err(error) = ended {
            self.core().die(error);
        }
        if count > 0 { Ok(count) } else { self.idle() }
    }

    #[cold]
    fn idle(&self) -> Result<usize, Error> {
        if self.core().link.is_dead() && !self.ring().has_ready() && self.ring().in_flight() == 0 {
            return Err(self.core().link.dead_error());
        }
        if self.ring().is_idle() {
            self.core().check_connection();
        }
        Ok(0)
    }

    /// Delivers completions as [`Queue::poll`], but waits for the first one. Returns 0 after `timeout`.
    ///
    /// # Errors
    /// As [`Queue::poll`].
    pub fn wait(
        &self,
        max: usize,
        timeout: Option<Duration>,
        mut each: impl FnMut(Completion),
    ) -> Result<usize, Error> {
        let count = self.poll(max, &mut each)?;
        if count > 0 || max == 0 {
            return Ok(count);
        }
        if is_delivering() {
            return Err(Error::InCallback);
        }
        let ring = self.ring();
        if timeout != Some(Duration::ZERO) && self.core().short_spin(ring, None) {
            let count = self.poll(max, &mut each)?;
            if count > 0 {
                return Ok(count);
            }
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waiter = ring.free_waiters.take();
        ring.watch(&waiter);
        let counted = loop {
            match self.poll(max, &mut each) {
                Ok(0) => {}
                counted => break counted,
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break Ok(0);
            }
            self.core().wait_to_poll(ring, &waiter, deadline);
        };
        ring.unwatch(&waiter);
        ring.wait_leader.wake_next();
        ring.free_waiters.give_back(waiter);
        counted
    }

    /// Returns the number of requests that were submitted and are not done.
    pub fn in_flight(&self) -> u64 {
        self.ring().in_flight()
    }

    /// Returns the counters of the queue.
    pub fn counters(&self) -> Counters {
        self.ring().counters()
    }

    /// Returns a descriptor that becomes readable when there is something to poll, for epoll, or `AsyncFd` in
    /// tokio.
    ///
    /// Before each sleep, call [`arm`](Events::arm), and sleep only if it returns `true`. After the sleep,
    /// call [`Queue::poll`].
    ///
    /// Any number of threads can sleep on a queue at once, each with its own `Events`. Other threads can poll
    /// it, wait at it, block in calls and await futures meanwhile. A sleeper wakes when a request completes
    /// that no other thread delivers. The first thread that polls gets a completion with a token. So several
    /// sleepers can wake for one completion, and a sleeper can find nothing.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn events(&self) -> Result<Events, Error> {
        let ring = self.ring();
        let epoll = create(CreateFlags::CLOEXEC).map_err(Error::os("an epoll descriptor"))?;
        let sleeper_event = Arc::new(SleeperEvent::new()?);
        for (tag, fd) in [ring.call.as_fd(), sleeper_event.as_fd(), self.core().link.control.as_fd()]
            .into_iter()
            .enumerate()
        {
            add(&epoll, fd, EventData::new_u64(tag as u64), EventFlags::IN)
                .map_err(Error::os("an epoll descriptor"))?;
        }
        Ok(Events { queue: self.clone(), sleeper_event, epoll })
    }
}

/// A descriptor for one sleeping thread, from [`Queue::events`].
pub struct Events {
    queue: Queue,
    sleeper_event: Arc<SleeperEvent>,
    epoll: OwnedFd,
}

impl Events {
    /// Asks the device to call. Returns whether the caller may sleep on the descriptor.
    ///
    /// Returns `false` if there is something to poll already, or in a callback, which must not sleep.
    #[must_use]
    pub fn arm(&self) -> bool {
        let core = self.queue.core();
        core.check_connection();
        let armed = self.queue.ring().arm_events(&self.sleeper_event).unwrap_or_else(|error| {
            core.die(error);
            false
        });
        armed && !core.link.is_dead()
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
