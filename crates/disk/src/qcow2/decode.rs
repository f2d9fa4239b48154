//! Compressed clusters: buffers for them, and threads that decompress.

use super::format::header::Compression;
use super::layer::Image;
use super::own_buffers::OwnBuffers;
use crate::buffer_pool::{BufferPermit, BufferWait};
use crate::catch::catch;
use crate::file::{FileState, Unchecked};
use crate::{IoError, Step};
use kickless_io::{AlignedBuf, Errno, Waker};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle, available_parallelism};

/// The largest number of threads of a disk.
const THREADS_MAX: usize = 4;
/// The largest window of a Zstandard frame. Larger clusters do not exist.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;

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
    pub(super) own: OwnBuffers,
    pub(super) file: FileState,
    answer: Arc<Mutex<Option<Answer>>>,
}

/// A buffer that comes back, and whether its cluster is whole.
#[derive(Debug)]
struct Answer {
    buffer: AlignedBuf,
    is_whole: bool,
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
        let permit = match pool.take(&mut self.wait, waker) {
            Ok(Some(permit)) => self.permit.insert(permit),
            Ok(None) => return Err(Step::Busy),
            Err(_) => return Err(Step::Done(Err(IoError::Os(Errno::NOMEM)))),
        };
        let Some(buffer) = permit.buffer.take() else { return Err(Step::Done(Err(IoError::Stuck))) };
        self.own = OwnBuffers::of_range(buffer, start..start + bytes);
        self.is_started = true;
        Ok(Some(Unchecked::Read { at: self.at }))
    }

    /// Passes the compressed bytes to the threads.
    pub(super) fn submit(&mut self, image: &Image, decoder: &Arc<Decoder>, waker: &Waker) {
        let Some(buffer) = self.own.take() else { return };
        let (answer, waker) = (self.answer.clone(), waker.clone());
        let cluster = image.geometry.cluster() as usize;
        let job = Job { buffer, cluster, bytes: self.bytes as usize, by: image.compression, answer, waker };
        decoder.submit(job);
    }

    /// Returns the bytes of the cluster that the request needs, when they are there.
    pub(super) fn take(&mut self) -> Option<Result<&[u8], IoError>> {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let permit = self.permit.as_mut()?;
        let buffer = permit.buffer.insert(answer.buffer);
        Some(if answer.is_whole { Ok(&buffer[self.range.clone()]) } else { Err(IoError::Os(Errno::IO)) })
    }

    /// Returns the buffer.
    pub(super) fn release(&mut self) {
        (self.permit, self.wait, self.is_started) = (None, None, false);
    }
}

/// A cluster to decompress.
struct Job {
    /// The cluster's place, and behind it the compressed bytes.
    buffer: AlignedBuf,
    cluster: usize,
    bytes: usize,
    by: Compression,
    answer: Arc<Mutex<Option<Answer>>>,
    waker: Waker,
}

/// The threads that decompress. They are started by the first clusters. Dropping this stops them.
#[derive(Default)]
pub(super) struct Decoder {
    shared: Arc<DecoderShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct DecoderShared {
    work: Mutex<Work>,
    more: Condvar,
}

#[derive(Default)]
struct Work {
    jobs: VecDeque<Job>,
    /// The number of threads that wait for a job.
    idle: usize,
    stop: bool,
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

impl Decoder {
    fn submit(&self, job: Job) {
        let needs_thread = {
            let mut work = self.shared.lock();
            work.jobs.push_back(job);
            work.jobs.len() > work.idle
        };
        self.shared.more.notify_one();
        if needs_thread && !self.add_thread() {
            // Without any thread, the caller does the work.
            let job = self.shared.lock().jobs.pop_front();
            job.into_iter().for_each(Job::run);
        }
    }

    /// Starts another thread, unless there are enough. Returns whether there is one.
    fn add_thread(&self) -> bool {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let max = available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX));
        if threads.len() < max {
            let shared = self.shared.clone();
            let name = format!("qcow2-{}", threads.len());
            threads.extend(Builder::new().name(name).spawn(move || shared.run()).ok());
        }
        !threads.is_empty()
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.more.notify_all();
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = thread.join();
        }
    }
}

impl DecoderShared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            job.run();
        }
    }

    /// Waits for a job. Returns `None` when the threads must stop.
    fn next(&self) -> Option<Job> {
        let mut work = self.lock();
        loop {
            if work.stop {
                return None;
            }
            if let Some(job) = work.jobs.pop_front() {
                return Some(job);
            }
            work.idle += 1;
            work = self.more.wait(work).unwrap_or_else(PoisonError::into_inner);
            work.idle -= 1;
        }
    }
}

impl Job {
    fn run(self) {
        let Self { mut buffer, cluster, bytes, by, answer, waker } = self;
        let (into, from) = buffer.split_at_mut(cluster);
        // An image can contain anything. A panic of a library about it fails only one request.
        let from = &from[..bytes.min(from.len())];
        let is_whole = catch(|| decompress(by, from, into)).unwrap_or(false);
        *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(Answer { buffer, is_whole });
        waker.wake();
    }
}

/// Decompresses `from`, which may have other bytes at its end. Returns whether that fills `into`.
fn decompress(by: Compression, from: &[u8], into: &mut [u8]) -> bool {
    match by {
        Compression::Zlib => inflate(from, into),
        Compression::Zstd => unzstd(from, into),
    }
}

fn inflate(from: &[u8], into: &mut [u8]) -> bool {
    use miniz_oxide::inflate::TINFLStatus::{Done, HasMoreOutput};
    use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, bytes) = decompress(&mut DecompressorOxide::new(), from, into, 0, flags);
    bytes == into.len() && matches!(status, Done | HasMoreOutput)
}

fn unzstd(mut from: &[u8], into: &mut [u8]) -> bool {
    use ruzstd::decoding::StreamingDecoder;
    use std::io::Read;
    let decoder = StreamingDecoder::new_with_max_window_size(&mut from, ZSTD_WINDOW_MAX);
    decoder.is_ok_and(|mut decoder| decoder.read_exact(into).is_ok())
}
