//! Drives a disk as a worker would, and makes images, guest memory and loop devices.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unreachable_pub, reason = "a test program has no outside")]

#[cfg(feature = "rbd")]
pub mod ceph;
pub mod qcow2;
pub mod server;

use kickless_disk::{
    Attached, Cache, Disk, DiskSpec, Extent, Io, IoContext, IoError, LostWritesSeen, Options, Request, Step,
    TABLE_OP_SLOTS,
};
use kickless_io::{Completion, Engine, EngineKind, Errno, Waker};
use kickless_memory::{Gpa, Marks, View};
use kickless_testing::{LoopDevice, guest_memory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use tempfile::NamedTempFile;

/// The longest sleep. It ends only when a request never completes, however slow the machine is.
const SLEEP_MAX: Timespec = Timespec { tv_sec: 300, tv_nsec: 0 };

pub fn options(cache: Cache, read_only: bool) -> Options {
    Options { read_only, cache, ..Options::default() }
}

pub fn image(contents: &[u8]) -> NamedTempFile {
    let mut image = NamedTempFile::new().unwrap();
    image.write_all(contents).unwrap();
    image
}

/// Makes guest memory of `len` bytes at address 0.
pub fn guest(len: u64) -> Arc<View> {
    guest_memory(len, 0)
}

/// Makes a loop device with blocks of 4096 bytes. It exists until it is dropped.
///
/// # Errors
/// The reason in words: the right to make one, the device or the program `losetup` is missing.
pub fn loop_device(image: NamedTempFile, read_only: bool) -> Result<LoopDevice, String> {
    let arguments = ["--sector-size=4096", "--read-only"];
    LoopDevice::new(image, if read_only { &arguments } else { &arguments[..1] })
}

/// The result of a request that waited too long for a remote server.
pub const TIMED_OUT: Result<(), IoError> = Err(IoError::Os(Errno::TIMEDOUT));

/// Parses the description of a disk, such as a URI.
pub fn spec(text: &str) -> DiskSpec {
    text.parse().unwrap()
}

/// Opens a disk for writing, without a cache.
pub fn open(spec: &DiskSpec) -> Disk {
    Disk::open(spec, &options(Cache::None, false)).unwrap()
}

/// Makes a worker for a disk that needs no engine.
pub fn worker(disk: &Disk) -> Worker<'_> {
    Worker::new(disk, EngineKind::Threads, 4)
}

/// Runs a request on one extent, and expects success.
pub fn run_on_extent(worker: &mut Worker<'_>, request: Request, offset: u64, len: u64, unmap: bool) {
    worker.io(0).extents_mut().push(Extent { offset, len, unmap });
    assert_eq!(worker.run(request), Ok(()));
}

/// The state of one request.
#[derive(Default)]
struct RequestSlot {
    io: Io,
    busy: bool,
    /// The last step was [`Step::More`].
    has_more: bool,
}

/// Submits, completes and retries requests as a worker does for a queue.
pub struct Worker<'a> {
    disk: &'a Disk,
    engine: Engine,
    attached: Attached,
    waker: Waker,
    slots: Vec<RequestSlot>,
    lost_writes: LostWritesSeen,
    marks: Marks,
    done: Vec<Completion>,
    /// Replaces the result of the next completion.
    failure: Option<Errno>,
}

impl<'a> Worker<'a> {
    pub fn new(disk: &'a Disk, kind: EngineKind, depth: u32) -> Self {
        let mut engine = Engine::open(kind, depth).unwrap();
        let attached = disk.attach(&mut engine).unwrap_or_else(|_| {
            // A qcow2 image is open from a reload on, which follows the lock.
            disk.reload(false).unwrap();
            disk.attach(&mut engine).unwrap()
        });
        static QUEUES: AtomicU16 = AtomicU16::new(0);
        let waker = Waker::new().unwrap();
        let (lost_writes, marks) = (disk.lost_writes_seen(QUEUES.fetch_add(1, Relaxed)), Marks::off());
        let (slots, done, failure) = (Vec::new(), Vec::new(), None);
        Self { disk, engine, attached, waker, slots, lost_writes, marks, done, failure }.with_slots(1)
    }

    /// Makes the next operation that completes fail.
    pub fn fail_next(&mut self, errno: Errno) {
        self.failure = Some(errno);
    }

    pub fn with_slots(mut self, slots: usize) -> Self {
        self.slots.resize_with(slots, RequestSlot::default);
        self
    }

    pub fn io(&mut self, slot: usize) -> &mut Io {
        &mut self.slots[slot].io
    }

    fn step(&mut self, slot: usize, step: impl FnOnce(&Disk, &mut IoContext<'_>, &mut Io) -> Step) -> Step {
        let mut io = std::mem::take(&mut self.slots[slot].io);
        let step = self.with_context(slot as u32, |disk, context| step(disk, context, &mut io));
        let request_slot = &mut self.slots[slot];
        request_slot.io = io;
        (request_slot.busy, request_slot.has_more) = (step == Step::Busy, step == Step::More);
        assert_eq!(request_slot.io.is_active(), !matches!(step, Step::Done(_)));
        step
    }

    /// Calls a method of the disk.
    fn with_context<T>(&mut self, slot: u32, call: impl FnOnce(&Disk, &mut IoContext<'_>) -> T) -> T {
        let mut context = IoContext {
            engine: &mut self.engine,
            task: 3,
            slot,
            attached: &mut self.attached,
            waker: &self.waker,
            lost_writes: &mut self.lost_writes,
            marks: &mut self.marks,
        };
        call(self.disk, &mut context)
    }

    /// Starts the operations that are due for the tables.
    pub fn submit_table_ops(&mut self) {
        if self.attached.is_due() {
            self.with_context(TABLE_OP_SLOTS, Disk::submit_table_ops);
        }
    }

    pub fn start(&mut self, slot: usize, request: Request) -> Step {
        self.step(slot, |disk, context, io| disk.start(context, io, request))
    }

    /// Resumes each request that can continue, or sleeps until one can. Returns the slots of the requests
    /// that ended, with their results.
    pub fn turn(&mut self) -> Vec<(usize, Result<(), IoError>)> {
        self.submit_table_ops();
        let woken = self.waker.clear();
        self.engine.submit().unwrap();
        let mut done = std::mem::take(&mut self.done);
        self.engine.reap(&mut done);
        let mut with_room = Vec::new();
        self.engine.take_sources_with_room(&mut with_room);
        let retry = woken || !done.is_empty() || !with_room.is_empty();
        let has_more = self.slots.iter().any(|request_slot| request_slot.has_more);
        if !retry && !has_more && !self.engine.needs_turn() {
            self.sleep();
        }
        let mut ended = Vec::new();
        for mut completion in done.drain(..) {
            assert_eq!(completion.token.source, 3);
            completion.result = self.failure.take().map_or(completion.result, Err);
            let slot = completion.token.slot as usize;
            if completion.token.slot >= TABLE_OP_SLOTS {
                self.with_context(TABLE_OP_SLOTS, |disk, context| disk.resume_table_op(context, completion));
                continue;
            }
            if let Step::Done(result) =
                self.step(slot, |disk, context, io| disk.resume(context, io, completion))
            {
                ended.push((slot, result));
            }
        }
        self.done = done;
        for slot in 0..self.slots.len() {
            let request_slot = &self.slots[slot];
            if (request_slot.has_more || retry && request_slot.busy)
                && let Step::Done(result) = self.step(slot, Disk::retry)
            {
                ended.push((slot, result));
            }
        }
        ended
    }

    fn sleep(&self) {
        let mut fds =
            [self.engine.event(), self.waker.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let ready = retry_on_intr(|| poll(&mut fds, Some(&SLEEP_MAX))).unwrap();
        assert!(
            ready > 0,
            "no request continues: {:?}",
            self.slots.iter().map(|slot| &slot.io).collect::<Vec<_>>()
        );
    }

    /// Returns the number of operations in the engine.
    pub fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    /// Cancels all requests.
    pub fn cancel(&mut self) {
        let requests = self.slots.iter_mut().map(|request_slot| &mut request_slot.io);
        self.disk.cancel(&mut self.engine, &mut self.attached, requests);
    }

    /// Waits until a request ends. Returns its result.
    pub fn finish(&mut self) -> Result<(), IoError> {
        loop {
            if let Some((_, result)) = self.turn().pop() {
                return result;
            }
        }
    }

    /// Runs one request on the first slot until it ends.
    pub fn run(&mut self, request: Request) -> Result<(), IoError> {
        match self.start(0, request) {
            Step::Done(result) => result,
            _ => self.finish(),
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
        // As a queue, it ends when it has nothing in flight.
        while self.attached.in_flight() > 0 && !std::thread::panicking() {
            self.turn();
        }
        self.disk.detach(&mut self.engine, std::mem::take(&mut self.attached));
    }
}

/// A worker with several requests in flight.
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

    /// Waits until all requests ended. Returns their results.
    pub fn finish(&mut self) -> Vec<Result<(), IoError>> {
        let mut results = Vec::new();
        while results.len() < self.left {
            results.extend(self.worker.turn().into_iter().map(|(_, result)| result));
        }
        self.left = 0;
        results
    }
}
