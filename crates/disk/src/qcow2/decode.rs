//! Compressed clusters of requests.

use super::decoder::{Answer, Decoder, Job};
use super::layer::Image;
use super::local_buffers::LocalBuffers;
use crate::buffer_pool::{BufferPermit, BufferWait};
use crate::file::{FileState, Unchecked};
use crate::{IoError, Step};
use kickless_io::{Errno, Waker};
use kickless_sync::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The compressed cluster of a request.
#[derive(Debug, Default)]
pub(super) struct DecodeState {
    at: u64,
    bytes: u32,
    /// The bytes of the cluster that the request needs.
    range: Range<usize>,
    is_started: bool,
    wait: Option<BufferWait>,
    permit: Option<BufferPermit>,
    /// The compressed bytes.
    pub(super) local: LocalBuffers,
    pub(super) file: FileState,
    answer: Arc<Mutex<Option<Answer>>>,
}

impl DecodeState {
    /// Begins with a cluster.
    pub(super) fn begin(&mut self, at: u64, bytes: u32, range: Range<usize>) {
        (self.at, self.bytes, self.range, self.is_started) = (at, bytes, range, false);
    }

    /// Gets a buffer. Returns the request that reads the compressed bytes, unless that was started.
    pub(super) fn prepare(&mut self, image: &Image, waker: &Waker) -> Result<Option<Unchecked>, Step> {
        if self.is_started {
            return Ok(None);
        }
        let pool = &image.pools.decode;
        let (start, bytes) = (pool.bytes() / 3, self.bytes as usize);
        if start + bytes > pool.bytes() || self.range.end > start {
            return Err(Step::Done(Err(IoError::Os(Errno::IO))));
        }
        let permit = self.permit.insert(pool.take(&mut self.wait, waker)?);
        let Some(buffer) = permit.buffer.take() else { return Err(Step::Done(Err(IoError::Stuck))) };
        self.local = LocalBuffers::of_range(buffer, start..start + bytes);
        self.is_started = true;
        Ok(Some(Unchecked::Read { at: self.at }))
    }

    /// Passes the compressed bytes to the threads.
    pub(super) fn submit(&mut self, image: &Image, decoder: &Arc<Decoder>, waker: &Waker) {
        let Some(buffer) = self.local.take() else { return };
        let (answer, waker) = (self.answer.clone(), waker.clone());
        let cluster = image.geometry.cluster() as usize;
        let job = Job { buffer, cluster, bytes: self.bytes as usize, by: image.compression, answer, waker };
        decoder.submit(job);
    }

    /// Returns the bytes of the cluster that the request needs, when they are there.
    pub(super) fn take(&mut self) -> Option<Result<&[u8], IoError>> {
        let answer = lock(&self.answer).take()?;
        let permit = self.permit.as_mut()?;
        let buffer = permit.buffer.insert(answer.buffer);
        Some(if answer.is_whole { Ok(&buffer[self.range.clone()]) } else { Err(IoError::Os(Errno::IO)) })
    }

    /// Returns the buffer.
    pub(super) fn release(&mut self) {
        (self.permit, self.wait, self.is_started) = (None, None, false);
    }

    /// Ends without the contents of the cluster, which the threads may still be decompressing.
    pub(super) fn give_up(&mut self) {
        self.answer = Arc::default();
        self.release();
    }
}
