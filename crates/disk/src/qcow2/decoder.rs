//! The threads that decompress clusters.

use crate::catch::catch;
use kickless_io::{AlignedBuf, Waker};
use kickless_qcow2::Compression;
use kickless_sync::lock;
use rustix::thread::sched_getaffinity;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

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
#[derive(Debug)]
pub(super) struct Decoder {
    /// `None` only while this is dropped.
    jobs: Option<Sender<Job>>,
    shared: Arc<DecoderShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct DecoderShared {
    jobs: Mutex<Receiver<Job>>,
    /// The number of jobs that are not done.
    left: AtomicUsize,
}

impl Default for Decoder {
    fn default() -> Self {
        let (sender, receiver) = channel();
        let shared = Arc::new(DecoderShared { jobs: Mutex::new(receiver), left: AtomicUsize::new(0) });
        Self { jobs: Some(sender), shared, threads: Mutex::default() }
    }
}

impl Decoder {
    /// Passes a cluster to the threads. Starts another one if all are busy.
    pub(super) fn submit(&self, job: Job) {
        let mut threads = lock(&self.threads);
        let before = self.shared.left.fetch_add(1, Ordering::Relaxed);
        // Threads have the CPUs of the worker that starts them.
        let cpus = || sched_getaffinity(None).map_or(1, |cpus| cpus.count() as usize);
        if before >= threads.len() && threads.len() < THREADS_MAX && threads.len() < cpus() {
            let shared = self.shared.clone();
            let name = format!("qcow2-{}", threads.len());
            threads.extend(Builder::new().name(name).spawn(move || shared.run()).ok());
        }
        match &self.jobs {
            Some(jobs) if !threads.is_empty() => drop(jobs.send(job)),
            // Without any thread, the caller does the work.
            _ => self.shared.perform(job),
        }
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = thread.join();
        }
    }
}

impl DecoderShared {
    /// Does jobs until there will be none. The thread that waits for the next job holds the lock.
    fn run(&self) {
        let next = || lock(&self.jobs).recv();
        while let Ok(job) = next() {
            self.perform(job);
        }
    }

    fn perform(&self, job: Job) {
        job.run();
        self.left.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Job {
    fn run(self) {
        let Self { mut buffer, cluster, bytes, by, answer, waker } = self;
        let (into, from) = buffer.split_at_mut(cluster);
        // An image can contain anything. A panic of a library about it fails only one request.
        let from = &from[..bytes.min(from.len())];
        let is_whole = catch(|| decompress(by, from, into)).unwrap_or(false);
        *lock(&answer) = Some(Answer { buffer, is_whole });
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
