//! Tests our driver with real back-ends: all requests, interfaces and queue options.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use kickless_driver::{Choice, Completion, Disk, Error, Failure, Invalid, Options, Queue, Request, Waiting};
use kickless_spec::blk::BlkFeatures;
use kickless_spec::features::Features;
use kickless_testing::pattern;
use kickless_tests::block_on::block_on;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program, built_program};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tempfile::TempDir;

const SIZE: usize = 16 << 20;
const LIMIT: Duration = Duration::from_secs(30);

/// A back-end with an image of zeroes.
struct Served {
    daemon: Daemon,
    _dir: TempDir,
}

fn serve(program: Program) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let image: PathBuf = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(SIZE as u64).unwrap();
    // The storage daemon uses O_DIRECT, which some file systems lack.
    let daemon = Daemon::start(&DaemonConfig { program, ..DaemonConfig::new(&image) }).unwrap();
    Served { daemon, _dir: dir }
}

impl Served {
    fn options(&self) -> Options {
        Options { connect_timeout: LIMIT, ..Options::new(self.daemon.socket()) }
    }

    fn connect(&self) -> Disk {
        Disk::connect(self.options()).unwrap()
    }
}

/// Defines one test per back-end for each function.
macro_rules! with_each_back_end {
    ($($name:ident)*) => {
        mod kickless {
            $(#[test] fn $name() { super::$name(super::Program::Kickless); })*
        }
        mod storage_daemon {
            $(#[test] fn $name() { super::$name(super::Program::StorageDaemon); })*
        }
    };
}

with_each_back_end! {
    all_ring_options_and_requests
    threads_share_a_queue
    all_interfaces_at_once
    requests_of_several_buffers
    parts_of_a_shared_buffer
    memory_of_the_caller
    dropped_futures_complete
    a_full_ring_refuses_requests
    unplugged_under_load
    closed_under_load
    closing_ends_requests_in_flight
    sleeping_on_the_descriptor
    spinning
}

/// Writes at random offsets and compares reads with a model.
fn verify(disk: &Disk, seed: u64, rounds: u64) {
    let mut model = vec![0u8; SIZE];
    let mut random = seed | 1;
    let mut next = move |max: usize| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 33) as usize % max
    };
    for round in 0..rounds {
        let len = (1 + next(if round % 8 == 0 { 2048 } else { 16 })) * 512;
        let at = next((SIZE - len) / 512) * 512;
        if next(3) == 0 {
            let mut read = vec![1; len];
            disk.read_at(&mut read, at as u64).unwrap();
            assert!(read == model[at..at + len], "{len} bytes at {at}");
        } else {
            model[at..at + len].copy_from_slice(&pattern(seed + round, len));
            disk.write_at(&model[at..at + len], at as u64).unwrap();
        }
    }
    disk.flush().unwrap();
    let mut whole = vec![1; SIZE];
    disk.read_at(&mut whole, 0).unwrap();
    assert!(whole == model);
    disk.write_at(&vec![0; SIZE], 0).unwrap();
}

fn all_ring_options_and_requests(program: Program) {
    let served = serve(program);
    let offered = served.connect().features();
    let both = [Choice::Off, Choice::Auto];
    let mut seed = 1;
    for (packed, in_order) in both.into_iter().flat_map(|packed| both.map(|in_order| (packed, in_order))) {
        if packed == Choice::Auto && !offered.contains(Features::RING_PACKED) {
            continue;
        }
        for (event_idx, indirect) in both.into_iter().flat_map(|e| both.map(|i| (e, i))) {
            for (queues, queue_size) in [(1, 4), (2, 16), (4, 256)] {
                let disk = Disk::connect(Options {
                    packed,
                    in_order,
                    event_idx,
                    indirect,
                    queues,
                    queue_size,
                    ..served.options()
                })
                .unwrap();
                assert_eq!(disk.queues(), usize::from(queues));
                assert_eq!(disk.features().contains(Features::RING_PACKED), packed == Choice::Auto);
                seed += 1;
                verify(&disk, seed, 24);
                requests(&disk, program);
            }
        }
    }
}

fn requests(disk: &Disk, program: Program) {
    assert_eq!(disk.size().unwrap(), SIZE as u64);
    assert!(disk.block_size().unwrap() >= 512);
    let id = disk.get_id().unwrap();
    assert!(program == Program::Kickless || id == "vhost_user_blk", "{id}");
    let mut block = [1; 4096];
    if disk.blk_features().contains(BlkFeatures::WRITE_ZEROES) {
        disk.write_at(&[5; 8192], 0).unwrap();
        disk.write_zeroes(0, 4096, true).unwrap();
        disk.read_at(&mut block, 0).unwrap();
        assert_eq!(block, [0; 4096]);
        disk.read_at(&mut block, 4096).unwrap();
        assert_eq!(block, [5; 4096]);
        disk.write_zeroes(4096, 4096, false).unwrap();
    } else {
        let refused = disk.write_zeroes(0, 4096, true).unwrap_err();
        assert!(matches!(refused, Error::Invalid(Invalid::NotOffered { .. })), "{refused:?}");
    }
    if disk.blk_features().contains(BlkFeatures::DISCARD) {
        disk.discard(0, 1 << 20).unwrap();
    } else {
        assert!(matches!(disk.discard(0, 4096), Err(Error::Invalid(Invalid::NotOffered { .. }))));
    }
    for (offset, len) in [(1u64, 512), (0, 511), (SIZE as u64, 512), (u64::MAX - 511, 512)] {
        let wrong = disk.read_at(&mut block[..len], offset).unwrap_err();
        assert!(matches!(wrong, Error::Invalid(_)), "{wrong:?}");
    }
    disk.read_at(&mut [], 0).unwrap();
    if disk.blk_features().contains(BlkFeatures::CONFIG_WCE) {
        disk.set_writeback(false).unwrap();
        assert_eq!(disk.config().unwrap().writeback, 0);
        disk.write_at(&[9; 512], 0).unwrap();
        disk.set_writeback(true).unwrap();
    }
    disk.write_at(&vec![0; 1 << 20], 0).unwrap();
}

fn threads_share_a_queue(program: Program) {
    let served = serve(program);
    for indirect in [Choice::Off, Choice::Auto] {
        let options = Options { queues: 1, queue_size: 8, indirect, ..served.options() };
        let disk = Disk::connect(options).unwrap();
        let part = SIZE as u64 / 8;
        thread::scope(|scope| {
            for number in 0..8u64 {
                let disk = disk.clone();
                scope.spawn(move || {
                    for round in 0..100 {
                        let data = pattern(number * 1000 + round, 4096 << (round % 4));
                        let at = number * part + round % 32 * 32768;
                        disk.write_at(&data, at).unwrap();
                        let mut read = vec![0; data.len()];
                        disk.read_at(&mut read, at).unwrap();
                        assert!(read == data);
                    }
                });
            }
        });
        let counters = disk.counters();
        assert_eq!(counters.submitted, counters.completed);
    }
}

/// Reads and writes blocks of 4 KiB in batches and checks each.
fn batches(disk: &Disk, queue: &Queue, first: u64, rounds: u64) {
    let mut buffers: Vec<_> = (0..16).map(|_| disk.buffer(4096).unwrap()).collect();
    for round in 0..rounds {
        for write in [true, false] {
            let mut batch: Vec<Request> = (0u64..)
                .zip(buffers.drain(..))
                .map(|(n, mut buffer)| {
                    let at = (first + n) * 4096;
                    if write {
                        buffer.write(0, &pattern(round * 100 + n, 4096));
                        Request::write(at, buffer).token(n)
                    } else {
                        buffer.write(0, &[0; 4096]);
                        Request::read(at, buffer).token(n)
                    }
                })
                .collect();
            queue.submit_or_wait(&mut batch).unwrap();
            let mut done = 0;
            while done < 16 {
                let limit = Some(LIMIT);
                // Other threads use other numbers for their tokens on this queue, and wait for theirs in
                // loops of their own.
                let count = queue.wait(16 - done, limit, |completion| {
                    completion.result.unwrap();
                    let buffer = completion.data.into_buffer().unwrap();
                    if !write {
                        assert!(buffer.to_vec() == pattern(round * 100 + completion.token, 4096));
                    }
                    buffers.push(buffer);
                });
                let count = count.unwrap();
                assert!(count > 0, "no request completed");
                done += count;
            }
        }
    }
}

fn all_interfaces_at_once(program: Program) {
    let served = serve(program);
    let disk = Disk::connect(Options { queues: 1, queue_size: 32, ..served.options() }).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| batches(&disk, &disk.queue(0), 0, 100));
        for number in 1..3u64 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..100 {
                    let (data, at) = (pattern(round, 4096), number << 20);
                    disk.write_at(&data, at).unwrap();
                    let mut read = [0; 4096];
                    disk.read_at(&mut read, at).unwrap();
                    assert!(read == data[..]);
                }
            });
        }
        scope.spawn(|| {
            for round in 0..100 {
                let mut buffer = disk.buffer(4096).unwrap();
                buffer.write(0, &pattern(round, 4096));
                let buffer = block_on(disk.write(3 << 20, buffer)).unwrap();
                let buffer = block_on(disk.read(3 << 20, buffer)).unwrap();
                assert!(buffer.to_vec() == pattern(round, 4096));
            }
        });
    });
}

fn requests_of_several_buffers(program: Program) {
    let served = serve(program);
    for indirect in [Choice::Off, Choice::Auto] {
        let disk = Disk::connect(Options { indirect, queue_size: 64, ..served.options() }).unwrap();
        for lens in [vec![512; 16], vec![4096, 512, 8192], vec![512; 30]] {
            let data = pattern(lens.len() as u64, lens.iter().sum());
            let mut at = 0;
            let buffers: Vec<_> = lens
                .iter()
                .map(|len| {
                    let mut buffer = disk.buffer(*len).unwrap();
                    buffer.write(0, &data[at..at + len]);
                    at += len;
                    buffer
                })
                .collect();
            disk.run(Request::write(0, buffers)).unwrap();
            let buffers: Vec<_> = lens.iter().rev().map(|len| disk.buffer(*len).unwrap()).collect();
            let read = disk.run(Request::read(0, buffers)).unwrap();
            let read: Vec<u8> = read.pieces().iter().flat_map(|buffer| buffer.to_vec()).collect();
            assert!(read == data);
        }
        let many: Vec<_> = (0..200).map(|_| disk.buffer(512).unwrap()).collect();
        let refused = disk.run(Request::read(0, many)).unwrap_err();
        assert!(matches!(refused, Error::Invalid(Invalid::TooManyPieces { .. })), "{refused:?}");
        let other = Disk::connect(Options { reply_timeout: Duration::from_millis(300), ..served.options() });
        // A back-end that serves one front-end at a time takes this one later.
        if let Ok(other) = other {
            let foreign = disk.run(Request::read(0, other.buffer(512).unwrap())).unwrap_err();
            assert!(matches!(foreign, Error::Invalid(Invalid::ForeignBuffer)), "{foreign:?}");
        }
    }
}

fn parts_of_a_shared_buffer(program: Program) {
    let served = serve(program);
    let disk = Disk::connect(Options { buffer_memory: 2 << 20, ..served.options() }).unwrap();
    let queue = disk.queue(0);
    let shared = disk.buffer(2 << 20).unwrap().share();
    assert_eq!(shared.capacity(), 2 << 20);
    assert!(shared.buffer((2 << 20) - 511, 512).is_none() && shared.buffer(u64::MAX, 512).is_none());
    for write in [true, false] {
        let mut batch = Vec::new();
        for n in 0..64u64 {
            let mut part = shared.buffer(n * 4096, 4096).unwrap();
            part.write(0, &if write { pattern(n, 4096) } else { vec![0; 4096] });
            let at = n * 8192;
            let request = if write { Request::write(at, part) } else { Request::read(at, part) };
            batch.push(request.token(n));
        }
        queue.submit_or_wait(&mut batch).unwrap();
        let mut done = 0;
        while done < 64 {
            let count = queue.wait(64, Some(LIMIT), |completion| {
                completion.result.unwrap();
                let part = completion.data.into_buffer().unwrap();
                assert!(part.to_vec() == pattern(completion.token, 4096));
            });
            done += count.unwrap();
        }
    }
    // The buffer is free again with its last part.
    let part = shared.buffer(4096, 4096).unwrap();
    drop(shared);
    let all = || disk.buffer(2 << 20);
    assert!(matches!(all(), Err(Error::NoMemory { .. })));
    let data = disk.run(Request::read(8192, part)).unwrap();
    assert!(data.pieces()[0].to_vec() == pattern(1, 4096));
    drop(data);
    drop(all().unwrap());
}

fn memory_of_the_caller(program: Program) {
    let served = serve(program);
    let disk = served.connect();
    let file: OwnedFd = memfd_create("mine", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4 << 20).unwrap();
    let busy = Arc::new(AtomicBool::new(true));
    thread::scope(|scope| {
        let (others, still) = (disk.clone(), busy.clone());
        scope.spawn(move || {
            while still.load(Ordering::Relaxed) {
                others.write_at(&pattern(1, 65536), 8 << 20).unwrap();
                let mut read = vec![0; 65536];
                others.read_at(&mut read, 8 << 20).unwrap();
                assert!(read == pattern(1, 65536));
            }
        });
        for round in 0..50 {
            let memory = disk.register(&file, 1 << 20, 2 << 20).unwrap();
            let data = pattern(round, 8192);
            let mut buffer = memory.buffer((2 << 20) - 8192, 8192).unwrap();
            assert!(memory.buffer((2 << 20) - 8191, 8192).is_none());
            rustix::io::pwrite(&file, &data, (3 << 20) - 8192).unwrap();
            disk.run(Request::write(0, buffer)).unwrap();
            let mut read = vec![0; 8192];
            disk.read_at(&mut read, 0).unwrap();
            assert!(read == data);
            buffer = memory.buffer(0, 8192).unwrap();
            disk.run(Request::read(0, buffer)).unwrap();
            rustix::io::pread(&file, &mut read[..], 1 << 20).unwrap();
            assert!(read == data);
            if round % 2 == 0 {
                disk.unregister(memory).unwrap();
            } else {
                let buffer = memory.buffer(0, 512).unwrap();
                assert!(matches!(disk.unregister(memory), Err(Error::Busy)));
                drop(buffer);
            }
        }
        busy.store(false, Ordering::Relaxed);
    });
}

fn dropped_futures_complete(program: Program) {
    let served = serve(program);
    let disk = Disk::connect(Options { buffer_memory: 2 << 20, ..served.options() }).unwrap();
    let fits = 2 << 20 >> 12;
    for round in 0..20u64 {
        let mut started = 0;
        for number in 0..fits {
            let mut buffer = disk.buffer(4096).unwrap();
            buffer.write(0, &pattern(round * 1000 + number, 4096));
            let mut future = Box::pin(disk.start(Request::write(number * 4096, buffer)));
            // Without room, a request is dropped before its submission.
            let before = disk.counters().submitted;
            let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            started += u64::from(disk.counters().submitted > before && number == started);
            drop((polled, future));
        }
        let deadline = Instant::now() + LIMIT;
        while disk.queue_of_thread().in_flight() > 0 {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
        // All memory is free again.
        drop(disk.buffer(2 << 20).unwrap());
        assert!(started >= 16, "only {started} requests were submitted");
        for number in 0..started {
            let mut read = vec![0; 4096];
            disk.read_at(&mut read, number * 4096).unwrap();
            assert!(read == pattern(round * 1000 + number, 4096), "{number} of {started} in round {round}");
        }
    }
}

fn a_full_ring_refuses_requests(program: Program) {
    let served = serve(program);
    let options = Options { queues: 1, queue_size: 16, indirect: Choice::Off, ..served.options() };
    let disk = Disk::connect(options).unwrap();
    let queue = disk.queue(0);
    let reads = |count: u64| -> Vec<Request> {
        (0..count).map(|n| Request::read(n * 512, disk.buffer(512).unwrap()).token(n)).collect()
    };
    let mut batch = reads(20);
    // No thread takes completions, so only the number of descriptors counts: three per request.
    assert_eq!(queue.submit(&mut batch).unwrap(), 5);
    assert!(matches!(queue.submit(&mut batch), Err(Error::Full)));
    assert_eq!(batch.len(), 15);
    let refused = queue.submit_one(Request::flush()).unwrap_err();
    assert!(matches!(refused.error, Error::Full));
    assert_eq!(refused.request.kind(), kickless_driver::Kind::Flush);
    queue.submit_or_wait(&mut batch).unwrap();
    let mut tokens = Vec::new();
    while tokens.len() < 20 {
        assert!(queue.wait(3, Some(LIMIT), |completion| tokens.push(completion.token)).unwrap() > 0);
    }
    tokens.sort_unstable();
    assert_eq!(tokens, (0..20).collect::<Vec<_>>());
    assert_eq!(queue.wait(1, Some(Duration::from_millis(10)), |_| panic!("nothing")).unwrap(), 0);
    // An invalid request stays in the batch, with those after it.
    let mut batch = reads(2);
    batch.insert(1, Request::discard(1, 1));
    assert!(matches!(queue.submit(&mut batch), Err(Error::Invalid(_))));
    assert_eq!(batch.len(), 2);
    while queue.in_flight() > 0 {
        queue.poll(1, |_| {}).unwrap();
    }
}

fn under_load(program: Program, end: impl Fn(&Disk)) {
    for _ in 0..10 {
        // The storage daemon of QEMU 7.2 ends if a front-end connects while it waits for the requests in
        // flight of the last one.
        let served = serve(program);
        let disk = Disk::connect(Options { queues: 2, queue_size: 16, ..served.options() }).unwrap();
        let done = AtomicU64::new(0);
        let lost = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in 0..4u64 {
                let (disk, done) = (&disk, &done);
                scope.spawn(move || {
                    let mut buffer = vec![0; 4096];
                    while disk.read_at(&mut buffer, number * 4096).is_ok() {
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            scope.spawn(|| {
                let queue = disk.queue(0);
                loop {
                    let mut batch = vec![
                        Request::read(0, disk.buffer(512).unwrap()),
                        Request::read(0, disk.buffer(512).unwrap()),
                    ];
                    if queue.submit_or_wait(&mut batch).is_err() {
                        break;
                    }
                    let mut left = 2;
                    while left > 0 {
                        let waited = queue.wait(2, Some(LIMIT), |completion| {
                            left -= 1;
                            lost.lock().unwrap().extend(completion.result.err());
                        });
                        assert!(waited.is_ok_and(|count| count > 0), "{left} are lost");
                    }
                }
            });
            scope.spawn(|| {
                while !matches!(block_on(disk.start(Request::flush())).result, Err(Error::Dead(_))) {}
            });
            while done.load(Ordering::Relaxed) < 50 {
                thread::yield_now();
            }
            end(&disk);
        });
        assert!(matches!(*disk.failure().unwrap(), Error::Unplugged));
        assert!(lost.lock().unwrap().iter().all(|failure| *failure == Failure::Dead));
        assert!(matches!(disk.flush(), Err(Error::Dead(_))));
    }
}

fn unplugged_under_load(program: Program) {
    under_load(program, Disk::unplug);
}

fn closed_under_load(program: Program) {
    under_load(program, Disk::close);
}

fn closing_ends_requests_in_flight(program: Program) {
    let served = serve(program);
    let disk = Disk::connect(Options { queues: 1, ..served.options() }).unwrap();
    let queue = disk.queue(0);
    let writes = (0..60).map(|block| {
        let mut buffer = disk.buffer(256 << 10).unwrap();
        buffer.write(0, &[7; 256 << 10]);
        Request::write(block * (256 << 10), buffer).token(block)
    });
    queue.submit_or_wait(&mut writes.collect()).unwrap();
    disk.close();
    let mut done = Vec::new();
    while queue.poll(64, |completion| done.push(completion.result)).is_ok() {}
    assert_eq!(done, [Ok(()); 60]);
}

fn sleeping_on_the_descriptor(program: Program) {
    let served = serve(program);
    let disk = Disk::connect(Options { queues: 1, ..served.options() }).unwrap();
    let queue = disk.queue(0);
    let events = queue.events().unwrap();
    thread::scope(|scope| {
        // Another thread finds some of our completions.
        scope.spawn(|| (0..200).for_each(|_| disk.flush().unwrap()));
        for round in 0..200u64 {
            let mut batch: Vec<_> = (0..4)
                .map(|n| Request::read(n * 512, disk.buffer(512).unwrap()).token(round * 4 + n))
                .collect();
            queue.submit_or_wait(&mut batch).unwrap();
            let mut left = 4;
            while left > 0 {
                left -= queue.poll(4, |completion| assert_eq!(completion.token / 4, round)).unwrap();
                if left > 0 && events.arm() {
                    let mut fds = [PollFd::new(&events, PollFlags::IN)];
                    let limit = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
                    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "{left} of round {round} are lost");
                }
            }
        }
    });
}

fn spinning(program: Program) {
    let served = serve(program);
    for time in [Duration::from_micros(50), Duration::MAX] {
        let disk = Disk::connect(Options { waiting: Waiting::Spin(time), ..served.options() }).unwrap();
        verify(&disk, 77, 50);
        batches(&disk, &disk.queue(1), 0, 20);
        disk.write_at(&vec![0; 1 << 20], 0).unwrap();
    }
}

#[test]
fn a_polling_driver_gets_no_calls() {
    let served = serve(Program::Kickless);
    for packed in [Choice::Off, Choice::On] {
        for event_idx in [Choice::Off, Choice::On] {
            let disk = Disk::connect(Options { packed, event_idx, ..served.options() }).unwrap();
            let queue = disk.queue(0);
            let mut buffer = Some(disk.buffer(4096).unwrap());
            for _ in 0..1000 {
                queue.submit_one(Request::read(0, buffer.take().unwrap())).unwrap();
                while buffer.is_none() {
                    queue.poll(1, |completion| buffer = completion.data.into_buffer()).unwrap();
                }
            }
            // One call comes with the start of the ring, and one when an event index wraps.
            let calls = disk.counters().calls;
            assert!(calls <= 4, "{packed:?} {event_idx:?}: {calls} calls");
        }
    }
}

/// A poller's function runs under a lock of its queue.
#[test]
fn a_callback_may_not_wait() {
    let served = serve(Program::Kickless);
    let disk = served.connect();
    let queue = disk.queue(0);
    let memory = memfd_create("caller", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, 4096).unwrap();
    let each = |completion: Completion| {
        completion.result.unwrap();
        let refused = [
            disk.register(&memory, 0, 4096).map(drop),
            disk.set_writeback(true),
            disk.flush(),
            disk.read_at(&mut [0; 512], 0),
            queue.wait(1, None, |_| {}).map(drop),
        ];
        assert!(refused.iter().all(|refused| matches!(refused, Err(Error::InCallback))), "{refused:?}");
        assert_eq!(disk.size().unwrap(), SIZE as u64);
        // This needs the lock too, and leaves it to another thread.
        disk.unplug();
        assert!(matches!(disk.size(), Err(Error::Dead(_))));
    };
    queue.submit_one(Request::read(0, disk.buffer(4096).unwrap())).unwrap();
    assert_eq!(queue.wait(1, Some(LIMIT), each).unwrap(), 1);
}

#[test]
fn the_example_runs() {
    let served = serve(Program::Kickless);
    let example = built_program("examples/read_write").unwrap();
    let output = Command::new(example).arg(served.daemon.socket()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("written and read back"), "{output:?}");
}
