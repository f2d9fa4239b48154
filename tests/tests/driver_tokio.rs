//! Runs the driver's futures and its descriptor under tokio: many tasks on a few threads, and a queue that
//! one task polls.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::time::Duration;

use kickless_driver::{Disk, Options, Request};
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use tempfile::TempDir;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Builder;
use tokio::time::timeout;

const SIZE: u64 = 16 << 20;
const BLOCK: usize = 8192;
const LIMIT: Duration = Duration::from_secs(60);

fn serve(program: Program) -> (Daemon, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(SIZE).unwrap();
    (Daemon::start(&DaemonConfig { program, ..DaemonConfig::new(&image) }).unwrap(), dir)
}

/// Writes and reads back the blocks of one task. Drops some reads while they are in flight.
async fn task(disk: Disk, nth: u64) {
    for round in 0..20 {
        let offset = (nth * 20 + round) * BLOCK as u64;
        let data = pattern(offset, BLOCK);
        let mut buffer = disk.buffer(BLOCK).unwrap();
        buffer.write(0, &data);
        let buffer = disk.write(offset, buffer).await.unwrap();
        let given_up = timeout(Duration::ZERO, disk.read(offset, disk.buffer(BLOCK).unwrap())).await;
        assert!(given_up.is_err() || given_up.unwrap().is_ok());
        assert_eq!(disk.read(offset, buffer).await.unwrap().to_vec(), data);
    }
}

fn many_tasks(program: Program) {
    let (daemon, _dir) = serve(program);
    let disk = Disk::connect(Options::new(daemon.socket())).unwrap();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..64).map(|nth| tokio::spawn(task(disk.clone(), nth))).collect();
        for task in tasks {
            timeout(LIMIT, task).await.unwrap().unwrap();
        }
        disk.start(Request::flush()).await.result.unwrap();
    });
}

/// Uses no thread of the driver: the task sleeps on the queue's descriptor and polls.
fn a_descriptor(program: Program) {
    let (daemon, _dir) = serve(program);
    let disk = Disk::connect(Options { reactor: false, ..Options::new(daemon.socket()) }).unwrap();
    let queue = disk.queue(0);
    let runtime = Builder::new_current_thread().enable_io().enable_time().build().unwrap();
    let polled = async {
        #[expect(deprecated, reason = "its replacement is unsafe for every descriptor")]
        let events = AsyncFd::new(queue.events().unwrap()).unwrap();
        let (mut submitted, mut done) = (0, 0);
        while done < 500 {
            while submitted < 500 && submitted < done + 16 {
                let buffer = disk.buffer(BLOCK).unwrap();
                queue.submit_one(Request::read(submitted * 512, buffer).token(submitted)).unwrap();
                submitted += 1;
            }
            let sleeps = events.get_ref().arm();
            if sleeps {
                events.readable().await.unwrap().clear_ready();
            }
            queue
                .poll(usize::MAX, |completion| {
                    assert!(completion.result.is_ok());
                    done += 1;
                })
                .unwrap();
        }
    };
    runtime.block_on(async { timeout(LIMIT, polled).await }).unwrap();
}

#[test]
fn many_tasks_with_kickless() {
    many_tasks(Program::Kickless);
}

#[test]
fn many_tasks_with_the_storage_daemon() {
    many_tasks(Program::StorageDaemon);
}

#[test]
fn a_descriptor_with_kickless() {
    a_descriptor(Program::Kickless);
}

#[test]
fn a_descriptor_with_the_storage_daemon() {
    a_descriptor(Program::StorageDaemon);
}
