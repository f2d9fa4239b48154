//! The threads that decompress clusters.

use crate::catch::catch;
use kickless_io::{AlignedBuf, Waker};
use kickless_qcow2::Compression;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle, available_parallelism};

/// The largest number of threads of a disk.
const THREADS_MAX: usize = 4;
/// The largest window of a Zstandard frame. Larger clusters do not exist.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;

/// A buffer that comes back, and whether its cluster is whole.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) buffer: AlignedBuf,
    pub(super) is_whole: bool,
}

/// A cluster to decompress.
pub(super) struct Job {
    /// The cluster's place, and behind it the compressed bytes.
    pub(super) buffer: AlignedBuf,
    pub(super) cluster: usize,
    pub(super) bytes: usize,
    pub(super) by: Compression,
    pub(super) answer: Arc<Mutex<Option<Answer>>>,
    pub(super) waker: Waker,
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
    /// Passes a cluster to the threads.
    pub(super) fn submit(&self, job: Job) {
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
