//! Tests our driver with a back-end that ends: killed repeatedly under verified load, or gone for good.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_driver::{Choice, Disk, Error, Options, Request, Waiting};
use kickless_testing::pattern;
use kickless_tests::daemon::{check_sandbox, child_command, kickless_binary};
use kickless_tests::transcript::Transcript;
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// A back-end that is killed and restarted on the same socket and image.
struct KilledBackend {
    child: Child,
    log: Transcript,
    dir: TempDir,
}

fn start(dir: &Path) -> (Child, Transcript) {
    let argument = |name: &str, file: &str| format!("--{name}={}", dir.join(file).display());
    let mut child = child_command(kickless_binary().unwrap())
        .arg("blk")
        .args([argument("socket-path", "blk.sock"), argument("blk-file", "disk.img")])
        .args(["--num-queues=4", "--serial=backend"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = Transcript::of("back-end", child.stderr.take().unwrap());
    (child, log)
}

impl KilledBackend {
    fn new() -> KilledBackend {
        let dir = tempfile::tempdir().unwrap();
        File::create_new(dir.path().join("disk.img")).unwrap().set_len(SIZE).unwrap();
        let (child, log) = start(dir.path());
        KilledBackend { child, log, dir }
    }

    fn options(&self) -> Options {
        let socket: PathBuf = self.dir.path().join("blk.sock");
        Options { connect_timeout: LIMIT, reconnect_limit: LIMIT, ..Options::new(socket) }
    }

    /// Kills the back-end with SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        check_sandbox(self.log.wait_for_end(LIMIT).unwrap()).unwrap();
    }

    fn restart(&mut self) {
        (self.child, self.log) = start(self.dir.path());
    }

    /// Restarts the back-end as a supervisor does. The kernel keeps the dead process's lock of the image
    /// while it has I/O of that process in flight. The next process refuses to start until then.
    fn restart_until_it_serves(&mut self) {
        if self.child.try_wait().unwrap().is_some() {
            self.restart();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for KilledBackend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes to one part of the disk until `stop` is set, and checks the earlier writes.
fn load(disk: &Disk, part: u64, stop: &AtomicBool, done: &AtomicU64) {
    const BLOCKS: u64 = 64;
    let first = part * BLOCKS * 4096;
    let mut written = [0u64; BLOCKS as usize];
    let mut round = 1;
    while !stop.load(Ordering::Relaxed) {
        let block = round * 7 % BLOCKS;
        let at = first + block * 4096;
        let data = pattern(part << 32 | round, 4096);
        disk.write_at(&data, at).unwrap();
        written[block as usize] = round;
        let other = round * 13 % BLOCKS;
        let mut read = vec![0; 4096];
        disk.read_at(&mut read, first + other * 4096).unwrap();
        let expected = match written[other as usize] {
            0 => vec![0; 4096],
            round => pattern(part << 32 | round, 4096),
        };
        assert!(read == expected, "block {other} of part {part} in round {round}");
        if round % 50 == 0 {
            disk.flush().unwrap();
        }
        round += 1;
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Does the same as [`load`] with batches, by polling.
fn polling_load(disk: &Disk, part: u64, stop: &AtomicBool, done: &AtomicU64) {
    let queue = disk.queue(part as usize);
    let first = part * 64 * 4096;
    let mut buffers: Vec<_> = (0..16).map(|_| disk.buffer(4096).unwrap()).collect();
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        for write in [true, false] {
            let requests = (0u64..).zip(buffers.drain(..)).map(|(n, mut buffer)| {
                let at = first + n * 4096;
                buffer.write(0, &if write { pattern(round * 100 + n, 4096) } else { vec![0; 4096] });
                if write { Request::write(at, buffer) } else { Request::read(at, buffer) }.token(n)
            });
            let mut batch: Vec<_> = requests.collect();
            queue.submit_or_wait(&mut batch).unwrap();
            let deadline = Instant::now() + LIMIT;
            let mut seen = 0u32;
            while seen != 0xffff {
                let polled = queue.poll(4, |completion| {
                    completion.result.unwrap();
                    assert_eq!(seen & 1 << completion.token, 0, "completed twice");
                    seen |= 1 << completion.token;
                    let buffer = completion.data.into_buffer().unwrap();
                    assert!(write || buffer.to_vec() == pattern(round * 100 + completion.token, 4096));
                    buffers.push(buffer);
                });
                if polled.unwrap() == 0 {
                    thread::yield_now();
                }
                assert!(Instant::now() < deadline, "{seen:#x} of 16");
            }
            done.fetch_add(16, Ordering::Relaxed);
        }
        round += 1;
    }
}

fn killed(times: u64, change: impl Fn(Options) -> Options) {
    let mut backend = KilledBackend::new();
    let disk = Disk::connect(change(backend.options())).unwrap();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for part in 0..5 {
            let (disk, stop, done) = (&disk, &stop, &done);
            let load = if part == 0 { polling_load } else { load };
            scope.spawn(move || {
                // A failure of one thread ends the whole test.
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    load(disk, part, stop, done);
                }));
                stop.store(true, Ordering::Relaxed);
                outcome.unwrap();
            });
        }
        for time in 0..times {
            let before = done.load(Ordering::Relaxed);
            let deadline = Instant::now() + LIMIT;
            while done.load(Ordering::Relaxed) < before + 100 && !stop.load(Ordering::Relaxed) {
                assert!(
                    Instant::now() < deadline,
                    "no request completed after kill {time}: {:?}",
                    disk.failure()
                );
                backend.restart_until_it_serves();
            }
            backend.kill();
            // From time to time, no process has the socket for a while.
            if time % 10 == 0 {
                thread::sleep(Duration::from_millis(50));
            }
            backend.restart();
        }
        let before = done.load(Ordering::Relaxed);
        let deadline = Instant::now() + LIMIT;
        while done.load(Ordering::Relaxed) < before + 100 && !stop.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "no request completed at the end");
            backend.restart_until_it_serves();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(disk.failure().is_none());
    let counters = disk.counters();
    assert_eq!(counters.submitted, counters.completed);
    assert_eq!(disk.get_id().unwrap(), "backend");
}

#[test]
fn killed_a_hundred_times() {
    killed(100, |options| Options { queues: 2, queue_size: 64, ..options });
}

#[test]
fn killed_with_other_queues() {
    let off = Choice::Off;
    killed(15, |options| Options { queues: 1, queue_size: 16, indirect: off, event_idx: off, ..options });
    killed(15, |options| Options { queues: 4, packed: off, waiting: Waiting::Spin(LIMIT), ..options });
}

#[test]
fn killed_with_memory_of_the_callers_own() {
    let mut backend = KilledBackend::new();
    let disk = Disk::connect(backend.options()).unwrap();
    disk.set_writeback(false).unwrap();
    let file = rustix::fs::memfd_create("mine", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    let memory = disk.register(&file, 0, 1 << 20).unwrap();
    for round in 0..10u64 {
        let data = pattern(round, 1 << 20);
        rustix::io::pwrite(&file, &data, 0).unwrap();
        disk.run(Request::write(0, memory.buffer(0, 1 << 20).unwrap())).unwrap();
        backend.kill();
        let other = disk.register(&file, 0, 4096).unwrap();
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut read = vec![0; 1 << 20];
                disk.read_at(&mut read, 0).unwrap();
                read
            });
            thread::sleep(Duration::from_millis(round));
            backend.restart();
            while !reader.is_finished() {
                backend.restart_until_it_serves();
            }
            assert!(reader.join().unwrap() == data);
        });
        disk.run(Request::write(0, other.buffer(0, 4096).unwrap())).unwrap();
        disk.unregister(other).unwrap();
    }
    assert_eq!(disk.config().unwrap().writeback, 0);
    // The back-end knows this setting too, because the driver sends it again after each start.
    disk.set_writeback(true).unwrap();
}

#[test]
fn a_back_end_gone_for_good_ends_the_disk() {
    for limit in [Duration::ZERO, Duration::from_millis(300)] {
        let mut backend = KilledBackend::new();
        let disk = Disk::connect(Options { reconnect_limit: limit, ..backend.options() }).unwrap();
        disk.write_at(&[1; 4096], 0).unwrap();
        backend.kill();
        let start = Instant::now();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let error = disk.read_at(&mut [0; 4096], 0).unwrap_err();
                    assert!(matches!(error, Error::Dead(_)), "{error:?}");
                });
            }
            scope.spawn(|| {
                let queue = disk.queue(1);
                let mut batch = vec![Request::read(0, disk.buffer(512).unwrap())];
                if queue.submit(&mut batch).is_ok() {
                    let mut result = Ok(());
                    queue.wait(1, Some(LIMIT), |completion| result = completion.result).unwrap();
                    result.unwrap_err();
                }
            });
        });
        assert!(start.elapsed() >= limit && start.elapsed() < limit + Duration::from_secs(10));
        match &*disk.failure().unwrap() {
            Error::Closed => assert!(limit.is_zero()),
            // A back-end announces a possible change of its configuration when it starts. The driver may
            // just have asked for it.
            Error::Protocol { request: "GET_CONFIG", .. } => assert!(limit.is_zero()),
            Error::Gone { limit: named, .. } => assert_eq!(*named, limit),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn another_disk_after_a_reconnection_is_refused() {
    let mut backend = KilledBackend::new();
    let disk = Disk::connect(backend.options()).unwrap();
    backend.kill();
    File::options().write(true).open(backend.dir.path().join("disk.img")).unwrap().set_len(SIZE / 2).unwrap();
    backend.restart();
    thread::scope(|scope| {
        let reader = scope.spawn(|| disk.read_at(&mut [0; 4096], 0).unwrap_err());
        while !reader.is_finished() {
            backend.restart_until_it_serves();
        }
    });
    assert!(matches!(*disk.failure().unwrap(), Error::Incompatible { .. }));
}
