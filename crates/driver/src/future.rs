//! The face without waiting: futures, for any runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::buffer::{Buffer, Data};
use crate::disk::Disk;
use crate::error::Error;
use crate::request::{Notify, Request};
use crate::ring::Ring;
use crate::waiter::Waiter;

/// What came of a request that was awaited.
#[derive(Debug)]
pub struct Finished {
    /// Whether it was done.
    pub result: Result<(), Error>,
    /// Its memory back.
    pub data: Data,
}

/// A request on its way. It is submitted when it is polled first. Dropped before it is done, it goes on without anybody
/// waiting; its memory is kept until the device is done.
#[must_use = "a future does nothing unless it is polled"]
pub struct InFlight {
    disk: Disk,
    queue: usize,
    state: FutureState,
}

enum FutureState {
    Fresh(Request),
    /// There was no room. The seat is told when something completes.
    Full(Request, Arc<Waiter>),
    Waiting(Arc<Waiter>),
    Done,
}

impl Disk {
    /// Carries out a request; its memory comes back in any case.
    pub fn start(&self, request: Request) -> InFlight {
        InFlight { disk: self.clone(), queue: self.index_of_thread(), state: FutureState::Fresh(request) }
    }

    /// Reads `buffer.len()` bytes from `offset` on.
    ///
    /// # Errors
    /// As [`Disk::run`].
    pub async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, Error> {
        self.start(Request::read(offset, buffer)).await.into_buffer()
    }

    /// Writes `buffer.len()` bytes from `offset` on.
    ///
    /// # Errors
    /// As [`Disk::run`].
    pub async fn write(&self, offset: u64, buffer: Buffer) -> Result<Buffer, Error> {
        self.start(Request::write(offset, buffer)).await.into_buffer()
    }
}

impl Finished {
    fn into_buffer(self) -> Result<Buffer, Error> {
        self.result?;
        self.data.into_buffer().ok_or(Error::NoMemory { len: 0 })
    }
}

impl InFlight {
    fn ring(&self) -> &Ring {
        &self.disk.0.core.rings[self.queue]
    }

    /// Submits the request with a seat for it; without success, it is as it was but for the seat.
    fn submit(&self, request: &mut Request) -> Result<Arc<Waiter>, Error> {
        let waiter = self.ring().free_waiters.take();
        request.notify = Notify::Waiter(waiter.clone());
        match self.ring().submit_one(request) {
            Ok(()) => Ok(waiter),
            Err(error) => {
                self.ring().free_waiters.give_back(waiter);
                Err(self.disk.0.core.explain(error))
            }
        }
    }

    fn finished(request: Request, error: Error) -> Poll<Finished> {
        Poll::Ready(Finished { result: Err(error), data: request.data })
    }

    /// Tries to submit; the seat for room is told when it makes sense to try again.
    fn try_for_room(&mut self, mut request: Request, room: Arc<Waiter>, cx: &Context<'_>) -> Poll<Finished> {
        loop {
            let outcome = room.poll(cx.waker());
            debug_assert!(outcome.is_none());
            match self.submit(&mut request) {
                Ok(waiter) => {
                    self.leave(room);
                    self.state = FutureState::Waiting(waiter);
                    return Poll::Pending;
                }
                Err(Error::Full) if room.take_notified() => {}
                Err(Error::Full) => {
                    self.state = FutureState::Full(request, room);
                    return Poll::Pending;
                }
                Err(error) => {
                    self.leave(room);
                    return Self::finished(request, error);
                }
            }
        }
    }

    fn leave(&self, room: Arc<Waiter>) {
        self.ring().unwatch(&room);
        self.ring().free_waiters.give_back(room);
    }
}

impl Future for InFlight {
    type Output = Finished;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Finished> {
        let this = &mut *self;
        match std::mem::replace(&mut this.state, FutureState::Done) {
            FutureState::Fresh(mut request) => {
                if let Err(error) = this.disk.0.core.start_reactor() {
                    return Self::finished(request, error);
                }
                match this.submit(&mut request) {
                    Ok(waiter) => this.state = FutureState::Waiting(waiter),
                    Err(Error::Full) => {
                        let room = this.ring().free_waiters.take();
                        this.ring().watch(&room);
                        if let Poll::Ready(finished) = this.try_for_room(request, room, cx) {
                            return Poll::Ready(finished);
                        }
                    }
                    Err(error) => return Self::finished(request, error),
                }
            }
            FutureState::Full(request, room) => {
                if let Poll::Ready(finished) = this.try_for_room(request, room, cx) {
                    return Poll::Ready(finished);
                }
            }
            state => this.state = state,
        }
        let FutureState::Waiting(waiter) = &this.state else { return Poll::Pending };
        let Some((result, data)) = waiter.poll(cx.waker()) else { return Poll::Pending };
        if let FutureState::Waiting(waiter) = std::mem::replace(&mut this.state, FutureState::Done) {
            this.ring().free_waiters.give_back(waiter);
        }
        Poll::Ready(Finished { result: this.disk.check_result(result), data })
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let FutureState::Full(_, room) = std::mem::replace(&mut self.state, FutureState::Done) {
            self.leave(room);
        }
    }
}
