//! A worker in miniature, and images to give it.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

#[cfg(feature = "rbd")]
pub mod ceph;
#[cfg(feature = "qcow2")]
pub mod qcow2;
#[cfg(feature = "nbd")]
pub mod server;

use kickless_disk::{
    Cache, Disk, DiskSpec, Extent, Io, IoContext, IoError, LostWritesSeen, Options, Request, Step,
};
use kickless_io::{Completion, Engine, EngineKind, Errno, FileId, Waker};
use kickless_memory::{Gpa, Marks, View};
use kickless_testing::{LoopDevice, guest_memory, with_subscriber};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tempfile::NamedTempFile;

/// Nothing takes so long, on any machine: what sleeps longer sleeps for ever.
const STUCK: Timespec = Timespec { tv_sec: 300, tv_nsec: 0 };

pub fn options(cache: Cache, read_only: bool) -> Options {
    Options { read_only, cache, ..Options::default() }
}

pub fn image(contents: &[u8]) -> NamedTempFile {
    let mut image = NamedTempFile::new().unwrap();
    image.write_all(contents).unwrap();
    image
}

/// Makes guest memory from address 0 on.
pub fn guest(len: u64) -> Arc<View> {
    guest_memory(len, 0)
}

/// Runs `f`; returns its result and all that this thread logs meanwhile.
pub fn logged<T>(f: impl FnOnce() -> T) -> (T, String) {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let result = with_subscriber(log, f);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    (result, text)
}

/// A loop device with blocks of 4096 bytes, until it is dropped.
///
/// # Errors
/// Why there is none: no right to make one, no such device, no such program.
pub fn device(image: NamedTempFile, read_only: bool) -> Result<LoopDevice, String> {
    let arguments = ["--sector-size=4096", "--read-only"];
    LoopDevice::new(image, if read_only { &arguments } else { &arguments[..1] })
}

/// What a request has come to that nobody would wait for any longer.
pub const GONE: Result<(), IoError> = Err(IoError::Os(Errno::TIMEDOUT));

/// Reads the description of a disk, such as a URI.
pub fn spec(text: &str) -> DiskSpec {
    text.parse().unwrap()
}

/// A disk that is written to, without a cache.
pub fn open(spec: &DiskSpec) -> Disk {
    Disk::open(spec, &options(Cache::None, false)).unwrap()
}

/// A worker for a disk that needs no engine.
pub fn worker(disk: &Disk) -> Worker<'_> {
    Worker::new(disk, EngineKind::Threads, 4)
}

/// Runs a request on one extent, which goes well.
pub fn on_extent(worker: &mut Worker<'_>, request: Request, offset: u64, len: u64, unmap: bool) {
    worker.io(0).extents_mut().push(Extent { offset, len, unmap });
    assert_eq!(worker.run(request), Ok(()));
}

/// One request's place.
#[derive(Default)]
struct Place {
    io: Io,
    busy: bool,
    /// It has got [`Step::More`].
    goes_on: bool,
}

/// An engine, some places for requests, and the turn of a worker.
pub struct Worker<'a> {
    disk: &'a Disk,
    engine: Engine,
    file: Option<FileId>,
    waker: Waker,
    places: Vec<Place>,
    lost_writes: LostWritesSeen,
    marks: Marks,
    done: Vec<Completion>,
    /// What the next completion is turned into.
    failure: Option<Errno>,
}

impl<'a> Worker<'a> {
    pub fn new(disk: &'a Disk, kind: EngineKind, depth: u32) -> Self {
        let mut engine = Engine::open(kind, depth).unwrap();
        let file = disk.attach(&mut engine).unwrap();
        static QUEUES: AtomicU16 = AtomicU16::new(0);
        let waker = Waker::new().unwrap();
        let (lost_writes, marks) = (disk.lost_writes_seen(QUEUES.fetch_add(1, Relaxed)), Marks::off());
        let (places, done, failure) = (Vec::new(), Vec::new(), None);
        Self { disk, engine, file, waker, places, lost_writes, marks, done, failure }.with_slots(1)
    }

    /// Has the next operation that completes fail.
    pub fn fail_next(&mut self, errno: Errno) {
        self.failure = Some(errno);
    }

    pub fn with_slots(mut self, slots: usize) -> Self {
        self.places.resize_with(slots, Place::default);
        self
    }

    pub fn io(&mut self, slot: usize) -> &mut Io {
        &mut self.places[slot].io
    }

    fn step(&mut self, slot: usize, step: impl FnOnce(&Disk, &mut IoContext<'_>, &mut Io) -> Step) -> Step {
        let place = &mut self.places[slot];
        let mut context = IoContext {
            engine: &mut self.engine,
            task: 3,
            slot: slot as u32,
            file: self.file,
            waker: &self.waker,
            lost_writes: &mut self.lost_writes,
            marks: &mut self.marks,
        };
        let step = step(self.disk, &mut context, &mut place.io);
        (place.busy, place.goes_on) = (step == Step::Busy, step == Step::More);
        assert_eq!(place.io.is_active(), !matches!(step, Step::Done(_)));
        step
    }

    pub fn start(&mut self, slot: usize, request: Request) -> Step {
        self.step(slot, |disk, context, io| disk.start(context, io, request))
    }

    /// Goes on with what can go on, or sleeps until something can; what is over.
    pub fn turn(&mut self) -> Vec<(usize, Result<(), IoError>)> {
        let woken = self.waker.clear();
        self.engine.submit().unwrap();
        let mut done = std::mem::take(&mut self.done);
        self.engine.reap(&mut done);
        let retry = woken || !done.is_empty() || self.engine.take_resumed();
        let goes_on = self.places.iter().any(|place| place.goes_on);
        if !retry && !goes_on && !self.engine.needs_turn() {
            self.sleep();
        }
        let mut over = Vec::new();
        for mut completion in done.drain(..) {
            assert_eq!(completion.token.source, 3);
            completion.result = self.failure.take().map_or(completion.result, Err);
            let slot = completion.token.slot as usize;
            if let Step::Done(result) =
                self.step(slot, |disk, context, io| disk.resume(context, io, completion))
            {
                over.push((slot, result));
            }
        }
        self.done = done;
        for slot in 0..self.places.len() {
            let place = &self.places[slot];
            if (place.goes_on || retry && place.busy)
                && let Step::Done(result) = self.step(slot, Disk::retry)
            {
                over.push((slot, result));
            }
        }
        over
    }

    fn sleep(&self) {
        let mut fds =
            [self.engine.event(), self.waker.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let ready = retry_on_intr(|| poll(&mut fds, Some(&STUCK))).unwrap();
        assert!(ready > 0, "nothing goes on: {:?}", self.places.iter().map(|p| &p.io).collect::<Vec<_>>());
    }

    /// One request on the first place, from start to end.
    pub fn run(&mut self, request: Request) -> Result<(), IoError> {
        if let Step::Done(result) = self.start(0, request) {
            return result;
        }
        loop {
            if let Some((_, result)) = self.turn().pop() {
                return result;
            }
        }
    }

    pub fn flush(&mut self) -> Result<(), IoError> {
        self.run(Request::Flush)
    }

    /// Writes from guest memory that begins at `misaligned`.
    pub fn write(&mut self, offset: u64, bytes: &[u8], misaligned: u64) -> Result<(), IoError> {
        let view = guest((bytes.len() as u64 + misaligned + 1).next_multiple_of(4096));
        view.map().write(Gpa(misaligned), bytes).unwrap();
        self.io(0).buffers_mut().push(&view, Gpa(misaligned), bytes.len() as u32).unwrap();
        let result = self.run(Request::Write { offset, durable: false });
        self.io(0).buffers_mut().clear(&mut Marks::off());
        result
    }

    /// Reads into guest memory that begins at `misaligned`.
    pub fn read_into(&mut self, offset: u64, len: usize, misaligned: u64) -> (Result<(), IoError>, Vec<u8>) {
        let view = guest((len as u64 + misaligned + 1).next_multiple_of(4096));
        self.io(0).buffers_mut().push(&view, Gpa(misaligned), len as u32).unwrap();
        let result = self.run(Request::Read { offset });
        self.io(0).buffers_mut().clear(&mut Marks::off());
        let mut bytes = vec![0; len];
        view.read(Gpa(misaligned), &mut bytes).unwrap();
        (result, bytes)
    }

    pub fn read(&mut self, offset: u64, len: usize) -> (Result<(), IoError>, Vec<u8>) {
        self.read_into(offset, len, 0)
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.disk.detach(&mut self.engine, self.file);
    }
}

/// Requests in flight on so many places.
pub struct InFlight<'a> {
    worker: Worker<'a>,
    pub view: Arc<View>,
    left: usize,
}

impl<'a> InFlight<'a> {
    /// Starts `reads` reads of a page each, and `writes` writes that are durable.
    pub fn start(disk: &'a Disk, reads: usize, writes: usize) -> Self {
        let all = reads + writes;
        let mut worker = worker(disk).with_slots(all);
        let view = guest(4096 * all as u64);
        for slot in 0..all {
            let offset = 4096 * slot as u64;
            worker.io(slot).buffers_mut().push(&view, Gpa(offset), 4096).unwrap();
            let request = if slot < reads {
                Request::Read { offset }
            } else {
                Request::Write { offset, durable: true }
            };
            assert_eq!(worker.start(slot, request), Step::Busy);
        }
        Self { worker, view, left: all }
    }

    /// Waits until all are over; how they ended.
    pub fn finish(&mut self) -> Vec<Result<(), IoError>> {
        let mut results = Vec::new();
        while results.len() < self.left {
            results.extend(self.worker.turn().into_iter().map(|(_, result)| result));
        }
        self.left = 0;
        results
    }
}
