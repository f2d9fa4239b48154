//! The interface without waiting: futures for any runtime.

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

/// The result of an awaited request.
#[derive(Debug)]
pub struct Finished {
    /// Success, or the reason of the failure.
    pub result: Result<(), Error>,
    /// The memory of the request.
    pub data: Data,
}

/// A request in flight as a future.
///
/// The first poll submits the request. If the ring is full, a later poll does. If the future is dropped after
/// that, the request goes on, and its memory is kept until the device is done. If it is dropped before, the
/// request is not sent.
#[must_use = "a future does nothing unless it is polled"]
pub struct InFlight {
    disk: Disk,
    queue: usize,
    state: FutureState,
}

enum FutureState {
    Fresh(Request),
    /// The ring had no room. The waiter is notified when a request completes.
    Full(Request, Arc<Waiter>),
    Waiting(Arc<Waiter>),
    Done,
}

impl Disk {
    /// Runs a request. The future returns its memory in any case.
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

    /// Submits the request with a waiter for its result. On failure, only the waiter of the request has
    /// changed.
    fn submit(&self, request: &mut Request) -> Result<Arc<Waiter>, Error> {
        let waiter = self.ring().free_waiters.take();
        request.notify = Notify::Waiter(waiter.clone());
        match self.ring().submit_one(request) {
            Ok(()) => Ok(waiter),
            Err(error) => {
                self.ring().free_waiters.give_back(waiter);
                Err(self.disk.0.core.link.explain(error))
            }
        }
    }

    fn finished(request: Request, error: Error) -> Poll<Finished> {
        Poll::Ready(Finished { result: Err(error), data: request.data })
    }

    /// Tries to submit the request. `room` is notified when another attempt makes sense.
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
