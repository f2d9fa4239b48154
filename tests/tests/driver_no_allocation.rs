//! Checks that the driver allocates no memory for a request through any interface. One test only, because
//! the counter is one for the whole program.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::thread;

use kickless_driver::{Choice, Completion, Data, Disk, InFlight, Options, Request};
use kickless_tests::allocations::Counting;
use kickless_tests::block_on::unpark_me;
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::hostile_backend::returns_in_time;

#[global_allocator]
static COUNTING: Counting = Counting;

const DISK_SIZE: u64 = 16 << 20;
const BLOCK: usize = 4096;
const REQUESTS: u64 = 10_000;
/// Number of requests after which the driver has all the memory that it keeps.
const WARM_UP: u64 = 1000;
/// Requests in flight, where the interface allows several.
const DEPTH: u64 = 32;

fn offset(number: u64) -> u64 {
    number * BLOCK as u64 % DISK_SIZE
}

/// Makes blocking calls from one thread, with and without copies.
fn blocking(disk: &Disk, requests: u64) {
    let mut bytes = [0; BLOCK];
    for number in 0..requests / 4 {
        disk.write_at(&bytes, offset(number)).unwrap();
        disk.read_at(&mut bytes, offset(number)).unwrap();
        let buffer = disk.buffer(BLOCK).unwrap();
        drop(disk.run(Request::read(offset(number), buffer)).unwrap());
        disk.flush().unwrap();
    }
}

/// Makes blocking calls that need more than one request each.
fn long(disk: &Disk, bytes: &mut [u8]) {
    for _ in 0..16 {
        disk.write_at(bytes, 0).unwrap();
        disk.read_at(bytes, 0).unwrap();
    }
}

fn buffers(disk: &Disk) -> Vec<Data> {
    (0..DEPTH).map(|_| disk.buffer(BLOCK).unwrap().into()).collect()
}

/// Batches with tokens, completed by `wait` or `poll`.
fn polling(disk: &Disk, requests: u64, data: &mut Vec<Data>, batch: &mut Vec<Request>, sleep: bool) {
    let queue = disk.queue_of_thread();
    let (mut sent, mut done) = (0, 0);
    while done < requests {
        while sent < requests
            && let Some(data) = data.pop()
        {
            batch.push(Request::read(offset(sent), data).token(sent));
            sent += 1;
        }
        queue.submit_or_wait(batch).unwrap();
        let each = |completion: Completion| {
            completion.result.unwrap();
            data.push(completion.data);
        };
        done += match sleep {
            true => queue.wait(DEPTH as usize, None, each),
            false => queue.poll(DEPTH as usize, each),
        }
        .unwrap() as u64;
    }
}

/// Submits the next request from the completion of the last one, under the lock of the queue.
fn chains(disk: &Disk, requests: u64, data: &mut Vec<Data>) {
    let queue = disk.queue(0);
    let mut left = requests;
    let mut ended = 0;
    for data in data.drain(..) {
        queue.submit_one(Request::read(0, data)).unwrap();
    }
    while ended < DEPTH {
        let each = |completion: Completion| {
            completion.result.unwrap();
            if left == 0 {
                ended += 1;
                return;
            }
            left -= 1;
            queue.submit_one(Request::read(offset(left), completion.data)).unwrap();
        };
        queue.wait(DEPTH as usize, None, each).unwrap();
    }
}

/// Awaits futures, one at a time and several at once.
fn futures(disk: &Disk, requests: u64, all: &mut Vec<InFlight>, waker: &Waker) {
    let mut context = Context::from_waker(waker);
    for number in 0..requests / 2 {
        let mut future = pin!(disk.read(offset(number), disk.buffer(BLOCK).unwrap()));
        while future.as_mut().poll(&mut context).map(Result::unwrap).is_pending() {
            thread::park();
        }
    }
    let mut left = requests / 2;
    while left > 0 || !all.is_empty() {
        while left > 0 && all.len() < DEPTH as usize {
            all.push(disk.start(Request::read(offset(left), disk.buffer(BLOCK).unwrap())));
            left -= 1;
        }
        let before = all.len();
        all.retain_mut(|future| match Pin::new(future).poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(finished) => {
                finished.result.unwrap();
                false
            }
        });
        if all.len() == before {
            thread::park();
        }
    }
}

/// Runs `run` to warm up, and then counts the allocations of another run.
fn counted(what: &str, mut run: impl FnMut(u64)) {
    run(WARM_UP);
    let before = Counting::count();
    run(REQUESTS);
    let count = Counting::count() - before;
    // Other allocations are allowed if they are rare, such as a queue of waiters that grows for the first
    // time.
    assert!(count < REQUESTS / 100, "{what}: {count} allocations for {REQUESTS} requests");
}

fn every_interface(daemon: &Daemon, packed: Choice) {
    let disk = Disk::connect(Options { packed, queues: 1, ..Options::new(daemon.socket()) }).unwrap();
    counted("blocking", |requests| blocking(&disk, requests));
    let mut bytes = vec![0; 8 << 20];
    counted("long transfers", |_| long(&disk, &mut bytes));
    let (mut data, mut batch) = (buffers(&disk), Vec::with_capacity(DEPTH as usize));
    for sleep in [false, true] {
        counted("polling", |requests| polling(&disk, requests, &mut data, &mut batch, sleep));
    }
    let waker = unpark_me();
    let mut all = Vec::with_capacity(DEPTH as usize);
    counted("futures", |requests| futures(&disk, requests, &mut all, &waker));
    data.clear();
    counted("chains", |requests| {
        data.extend(std::iter::repeat_with(|| Data::from(disk.buffer(BLOCK).unwrap())).take(DEPTH as usize));
        chains(&disk, requests, &mut data);
    });
}

#[test]
fn requests_do_not_allocate() {
    returns_in_time(|| {
        let config = DaemonConfig { queues: 1, ..DaemonConfig::new(format!("null:{DISK_SIZE}")) };
        let daemon = Daemon::start(&config).unwrap();
        for packed in [Choice::Off, Choice::On] {
            every_interface(&daemon, packed);
        }
    });
}
