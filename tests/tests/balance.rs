//! Moves a queue to another worker under load and checks that no request or data is lost.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use kickless_driver::{Buffer, Choice, Completion, Disk, Options, Queue, Request};
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::image_dir;
use kickless_tests::hostile_backend::returns_in_time;

/// Shorter than the limit of [`returns_in_time`] for the whole test.
const LIMIT: Duration = Duration::from_secs(45);
/// Bytes of a request. With such long requests, copying is nearly all the work.
const CHUNK: usize = 256 << 10;
/// Number of requests in flight per queue. Each request has a chunk of its own.
const DEPTH: u64 = 16;
const QUEUES: u16 = 4;
/// Queues that are on the same worker when there are two workers.
const BUSY: [usize; 2] = [0, 2];
/// Number of reads per version of a chunk. The test compares all bytes of one read, and only the first
/// bytes of each block of the others. So the driver has less work than the worker.
const READS: u64 = 8;
const BLOCK: usize = 32 << 10;
const DISK_LEN: u64 = BUSY.len() as u64 * DEPTH * CHUNK as u64;
/// Number of requests that a queue completes after the move, besides those in flight during the move.
const AFTERWARDS: u64 = 50 * DEPTH;

/// The bytes of every version of every chunk, without the stamps.
struct Content(Vec<u8>);

impl Content {
    fn new() -> Content {
        Content(pattern(1, CHUNK))
    }

    /// Returns the stamp of a block: its chunk, version and number.
    fn stamp(chunk: u64, version: u64, block: usize) -> [u8; 8] {
        (version << 32 | chunk << 16 | block as u64).to_le_bytes()
    }

    fn write(&self, buffer: &mut Buffer, chunk: u64, version: u64) {
        assert_eq!(buffer.write(0, &self.0), CHUNK);
        for block in 0..CHUNK / BLOCK {
            buffer.write(block * BLOCK, &Content::stamp(chunk, version, block));
        }
    }

    fn check_stamps(buffer: &Buffer, chunk: u64, version: u64) {
        for block in 0..CHUNK / BLOCK {
            let mut found = [0; 8];
            assert_eq!(buffer.read(block * BLOCK, &mut found), found.len());
            assert_eq!(found, Content::stamp(chunk, version, block), "chunk {chunk}, block {block}");
        }
    }

    fn check(&self, found: &[u8], chunk: u64, version: u64) {
        for (index, (found, expected)) in found.chunks(BLOCK).zip(self.0.chunks(BLOCK)).enumerate() {
            let (stamp, rest) = found.split_at(8);
            assert_eq!(stamp, Content::stamp(chunk, version, index), "chunk {chunk}, block {index}");
            assert!(rest == &expected[8..], "chunk {chunk}, block {index}");
        }
    }
}

/// A chain of requests for one chunk: a write, [`READS`] reads, the next write.
struct Slot {
    chunk: u64,
    /// The last version written, or the one that a write in flight writes.
    version: u64,
    reads: u64,
}

impl Slot {
    fn offset(&self) -> u64 {
        self.chunk * CHUNK as u64
    }

    fn write(&mut self, content: &Content, mut buffer: Buffer, token: u64) -> Request {
        (self.version, self.reads) = (self.version + 1, 0);
        content.write(&mut buffer, self.chunk, self.version);
        Request::write(self.offset(), buffer).token(token)
    }

    /// Checks a completion and returns the next request, or `None` if the test stops.
    fn next(&mut self, content: &Content, completion: Completion, goes_on: bool) -> Option<Request> {
        completion.result.unwrap();
        let buffer = completion.data.into_buffer().unwrap();
        match self.reads {
            0 => {}
            1 => content.check(&buffer.to_vec(), self.chunk, self.version),
            _ => Content::check_stamps(&buffer, self.chunk, self.version),
        }
        if !goes_on {
            return None;
        }
        if self.reads == READS {
            return Some(self.write(content, buffer, completion.token));
        }
        self.reads += 1;
        Some(Request::read(self.offset(), buffer).token(completion.token))
    }
}

/// Keeps a queue busy until `until` requests have completed. Returns their final number and the version of
/// each chunk.
fn drive(queue: &Queue, first: u64, until: &AtomicU64, completed: &AtomicU64) -> (u64, Vec<u64>) {
    let content = Content::new();
    let mut slots: Vec<Slot> =
        (0..DEPTH).map(|at| Slot { chunk: first + at, version: 0, reads: 0 }).collect();
    let mut batch: Vec<Request> = (0..)
        .zip(&mut slots)
        .map(|(token, slot)| slot.write(&content, queue.disk().buffer(CHUNK).unwrap(), token))
        .collect();
    let (mut count, mut in_flight) = (0, 0);
    loop {
        in_flight += batch.len();
        queue.submit_or_wait(&mut batch).unwrap();
        if in_flight == 0 {
            return (count, slots.iter().map(|slot| slot.version).collect());
        }
        let mut done = Vec::new();
        in_flight -= queue.wait(usize::MAX, None, |completion| done.push(completion)).unwrap();
        count += done.len() as u64;
        completed.store(count, Ordering::Relaxed);
        let goes_on = count < until.load(Ordering::Relaxed);
        batch.extend(done.into_iter().filter_map(|completion| {
            let slot = &mut slots[completion.token as usize];
            slot.next(&content, completion, goes_on)
        }));
    }
}

/// Puts load on two queues of one worker until one of them moves, then compares all data.
fn check_move(disk: &Path, arguments: &[&str], packed: Choice) {
    let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let daemon =
        Daemon::start(&DaemonConfig { queues: QUEUES, arguments, ..DaemonConfig::new(disk) }).unwrap();
    let options =
        Options { queues: QUEUES, packed, reconnect_limit: Duration::ZERO, ..Options::new(daemon.socket()) };
    let disk = Disk::connect(options).unwrap();
    assert_eq!(disk.queues(), usize::from(QUEUES));
    let (until, completed) = (AtomicU64::new(u64::MAX), BUSY.map(|_| AtomicU64::new(0)));
    let (moved, driven) = thread::scope(|scope| {
        let drivers = [0, 1].map(|at| {
            let (queue, until, completed) = (disk.queue(BUSY[at]), &until, &completed[at]);
            scope.spawn(move || drive(&queue, at as u64 * DEPTH, until, completed))
        });
        let moved = daemon.log().wait_for("moving a queue", LIMIT, |line| {
            line.contains("queue moved to another worker").then(|| line.to_owned())
        });
        // Both queues continue to the same number of requests, past that of the queue with more of them.
        let most = completed.iter().map(|completed| completed.load(Ordering::Relaxed)).max().unwrap();
        until.store(most + AFTERWARDS, Ordering::Relaxed);
        (moved, drivers.map(|driver| driver.join().unwrap()))
    });
    println!("{} and {} requests: {}", driven[0].0, driven[1].0, moved.unwrap());

    // Reads through every queue, moved or not.
    let content = Content::new();
    let versions = driven.iter().flat_map(|(_, versions)| versions);
    for (chunk, version) in (0..).zip(versions) {
        for queue in 0..QUEUES {
            let read = Request::read(chunk * CHUNK as u64, disk.buffer(CHUNK).unwrap());
            let queue = disk.queue(queue.into());
            queue.submit_one(read).unwrap();
            queue
                .wait(1, None, |completion| {
                    completion.result.unwrap();
                    let found = completion.data.into_buffer().unwrap().to_vec();
                    content.check(&found, chunk, *version);
                })
                .unwrap();
        }
    }
    let chunks = BUSY.len() as u64 * DEPTH;
    let requests = driven[0].0 + driven[1].0 + chunks * u64::from(QUEUES);
    assert_eq!(disk.counters().completed, requests);
    drop(disk);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0));
    let counted = |name: &str| -> u64 {
        let words = log.iter().filter(|line| line.contains(" summary ")).flat_map(|line| line.split(' '));
        words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok()).sum()
    };
    assert_eq!((counted("requests"), counted("errors")), (requests, 0), "{log:#?}");
    assert!(counted("moves") > 0, "{log:#?}");
    assert_eq!(log.iter().find(|line| line.contains(" WARN ") || line.contains(" ERROR ")), None);
}

#[test]
fn a_queue_of_a_disk_in_memory_moves() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has such workers");
        return;
    }
    returns_in_time(|| check_move(format!("mem:{DISK_LEN}").as_ref(), &["--workers=2"], Choice::Off));
}

/// The move waits until the engine has completed the requests in flight.
#[test]
fn a_packed_queue_of_a_file_moves() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has such workers");
        return;
    }
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("disk.img");
        File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
        check_move(&image, &["--workers=2", "--cache=writeback"], Choice::On);
    });
}
