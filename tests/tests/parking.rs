//! Parks the rings of disks and cards under verified load, and lets them go on. Server, workers and driver
//! are in this process. `PARKS` is the number of parks for each kind of ring.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use kickless_blk::Blk;
use kickless_device::{Device, Executor, Leave, Operate, Position, QueueTask, Stopped, TaskHandle, Update};
use kickless_disk::{Disk as Backing, DiskSpec};
use kickless_driver::{Card, CardOptions, Choice, Disk, Interest, Options, Outgoing, Request};
use kickless_io::{EngineKind, EngineOptions};
use kickless_net::{Net, Opening, PortName};
use kickless_testing::{LIMIT, Random, eventually};
use kickless_tests::driver::Eventfd;
use kickless_tests::guest::image_dir;
use kickless_tests::hostile_backend::returns_in_time;
use kickless_tests::verified_load::{BLOCK, drive_card, drive_disk, frame};
use kickless_vhost::Server;
use kickless_worker::{Poll, WorkerPool};

/// The parks of each kind of ring, unless `PARKS` says another number.
const PARKS: u32 = 250;
const WORKERS: usize = 2;
const QUEUES: u16 = 2;
/// The requests of a queue in flight.
const DEPTH: u64 = 24;
const DISK_LEN: u64 = QUEUES as u64 * DEPTH * BLOCK as u64;

/// A handle that the session and the test share.
#[derive(Clone)]
struct SharedHandle(Arc<Mutex<Box<dyn TaskHandle>>>);

impl TaskHandle for SharedHandle {
    fn update(&self, update: Update) -> Receiver<()> {
        self.0.lock().unwrap().update(update)
    }

    fn stop_leaving(&self, leave: Leave) -> Receiver<Stopped> {
        self.0.lock().unwrap().stop_leaving(leave)
    }

    fn park(&self) -> Receiver<Position> {
        self.0.lock().unwrap().park()
    }

    fn unpark(&self) {
        self.0.lock().unwrap().unpark();
    }
}

/// An executor that keeps the handles of its tasks.
struct SharingExecutor {
    workers: Arc<dyn Executor>,
    handles: Mutex<Vec<SharedHandle>>,
}

impl Executor for SharingExecutor {
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>> {
        let handle = SharedHandle(Arc::new(Mutex::new(self.workers.spawn(task)?)));
        self.handles.lock().unwrap().push(handle.clone());
        Ok(Box::new(handle))
    }
}

/// Counts what became of parks.
#[derive(Debug, Default)]
struct Parks {
    parked: u32,
    /// The task went on before it was parked.
    given_up: u32,
}

impl SharingExecutor {
    /// Parks all tasks at once and lets them go on, `rounds` times. Moves them between workers meanwhile. In
    /// every fourth round the tasks go on without a wait for the answers.
    fn park_all(&self, pool: &WorkerPool, rounds: u32) -> Parks {
        let mut handles = self.handles.lock().unwrap().clone();
        // Tasks that have stopped, because their rings were started anew, cannot be parked.
        handles.retain(|handle| {
            let is_parked = handle.park().recv_timeout(LIMIT).is_ok();
            handle.unpark();
            is_parked
        });
        assert!(handles.len() >= usize::from(QUEUES));
        let (mut parks, mut random) = (Parks::default(), Random(7));
        for round in 0..rounds {
            if random.one_in(3) {
                pool.move_all(random.below(2) as usize, random.below(2) as usize);
            }
            let answers: Vec<_> = handles.iter().map(TaskHandle::park).collect();
            if round % 4 > 0 {
                for answer in &answers {
                    let position = answer.recv_timeout(LIMIT).unwrap();
                    assert_eq!((position.in_flight, position.is_broken), (0, false), "{position:?}");
                    assert!(position.unpublished.is_empty());
                    parks.parked += 1;
                }
                // Nothing may use the rings for a while.
                thread::sleep(Duration::from_micros(random.below(300)));
            }
            handles.iter().for_each(TaskHandle::unpark);
            if round % 4 == 0 {
                for answer in &answers {
                    // A task that was parked has answered before it could go on.
                    match answer.recv_timeout(LIMIT) {
                        Ok(_) => parks.parked += 1,
                        Err(_) => parks.given_up += 1,
                    }
                    assert_eq!(answer.try_recv(), Err(TryRecvError::Disconnected));
                }
            }
            thread::sleep(Duration::from_micros(random.below(500)));
        }
        parks
    }
}

/// Stops the server when the test ends or fails.
struct Stop(Eventfd);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.signal();
    }
}

/// Serves a device while `test` runs, which gets its tasks, its workers and its socket.
fn serve<T>(
    device: Arc<dyn Device>,
    (engine, poll): (EngineKind, Poll),
    test: impl FnOnce(&SharingExecutor, &WorkerPool, PathBuf) -> T,
) -> T {
    let dir = tempfile::tempdir().unwrap();
    let engine = EngineOptions::new(engine, 64);
    let options = kickless_worker::Options { workers: WORKERS, engine, cpus: Vec::new(), poll };
    let pool = Arc::new(WorkerPool::start(&options).unwrap());
    let executor = Arc::new(SharingExecutor { workers: pool.executor(1), handles: Mutex::default() });
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::scope(|scope| {
        let stop = Stop(Eventfd::new().unwrap());
        let stopped = stop.0.try_clone().unwrap();
        let server = Server::new(device, executor.clone());
        scope.spawn(move || server.serve(&listener, stopped.as_fd()));
        test(&executor, &pool, socket)
    })
}

/// Serves a device, and runs `load` beside parks until there were enough. `load` gets the socket, and calls
/// its last argument once all rings run.
fn park_beside<T>(
    device: Arc<dyn Device>,
    workers: (EngineKind, Poll),
    load: impl FnOnce(PathBuf, &AtomicBool, &mut dyn FnMut()) -> T,
) -> T {
    let rounds = std::env::var("PARKS").map_or(PARKS, |parks| parks.parse().unwrap());
    let is_over = AtomicBool::new(false);
    serve(device, workers, |executor, pool, socket| {
        thread::scope(|scope| {
            let mut parker = None;
            let result = load(socket, &is_over, &mut || {
                let is_over = &is_over;
                parker = Some(scope.spawn(move || {
                    let parks = executor.park_all(pool, rounds);
                    is_over.store(true, Ordering::Relaxed);
                    parks
                }));
            });
            println!("{:?}", parker.unwrap().join().unwrap());
            result
        })
    })
}

/// The kinds of rings: packed and in order.
const KINDS: [(Choice, Choice); 4] = [
    (Choice::Off, Choice::Off),
    (Choice::On, Choice::Off),
    (Choice::Off, Choice::On),
    (Choice::On, Choice::On),
];

fn options() -> kickless_blk::Options {
    kickless_blk::Options { serial: "parked".into(), queues_max: QUEUES, queue_size_max: 256, lock: false }
}

fn park_disks(spec: &DiskSpec, workers: (EngineKind, Poll)) {
    for (packed, in_order) in KINDS {
        let backing = Backing::open(spec, &kickless_disk::Options::default()).unwrap();
        let requests: u64 =
            park_beside(Arc::new(Blk::new(backing, options())), workers, |socket, is_over, go| {
                let options = Options { queues: QUEUES, packed, in_order, ..Options::new(socket) };
                let disk = Disk::connect(options).unwrap();
                thread::scope(|scope| {
                    let drivers: Vec<_> = (0..usize::from(QUEUES))
                        .map(|queue| {
                            let queue = disk.queue(queue);
                            scope.spawn(move || drive_disk(&queue, DEPTH, is_over))
                        })
                        .collect();
                    go();
                    drivers.into_iter().map(|driver| driver.join().unwrap()).sum()
                })
            });
        println!("packed {packed:?}, in order {in_order:?}: {requests} requests");
    }
}

#[test]
fn a_disk_in_memory_goes_on() {
    returns_in_time(|| {
        park_disks(&format!("mem:{DISK_LEN}").parse().unwrap(), (EngineKind::Auto, Poll::default()))
    });
}

#[test]
fn a_disk_without_polling_goes_on() {
    returns_in_time(|| {
        park_disks(&format!("mem:{DISK_LEN}").parse().unwrap(), (EngineKind::Auto, Poll::Never))
    });
}

/// The worker waits for the kernel before it parks.
#[test]
fn a_file_goes_on() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("disk.img");
        File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
        for engine in [EngineKind::Auto, EngineKind::Aio, EngineKind::Threads] {
            park_disks(&DiskSpec::File(image.clone()), (engine, Poll::default()));
        }
    });
}

/// A disk that has stopped on an error is parked with the request that it keeps, which completes when the
/// queue goes on and the disk is resumed.
#[test]
fn a_disk_that_is_stopped_on_an_error_goes_on() {
    returns_in_time(|| {
        let dir = image_dir().unwrap();
        let image = dir.path().join("disk.img");
        File::create_new(&image).unwrap().set_len(DISK_LEN).unwrap();
        let spec = DiskSpec::Fault("enospc@write+nth=1".parse().unwrap(), Box::new(DiskSpec::File(image)));
        let options = kickless_blk::Options { queues_max: 1, ..options() };
        let backing = Backing::open(&spec, &kickless_disk::Options::default()).unwrap();
        let device = Arc::new(Blk::new(backing, options).with_stop_on_error(true));
        serve(device.clone(), (EngineKind::Auto, Poll::default()), |executor, _, socket| {
            let options = Options { queues: 1, packed: Choice::Off, ..Options::new(socket) };
            let disk = Disk::connect(options).unwrap();
            let queue = disk.queue(0);
            let buffer = disk.buffer(BLOCK).unwrap();
            queue.submit_one(Request::write(0, buffer)).unwrap();
            eventually("the disk stops", || device.stopped().is_some());
            let handle = executor.handles.lock().unwrap()[0].clone();
            for _ in 0..20 {
                let position = handle.park().recv_timeout(LIMIT).unwrap();
                assert_eq!((position.next_avail, position.in_flight), (1, 1));
                handle.unpark();
            }
            assert_eq!(
                (device.stopped().map(|stopped| stopped.requests), queue.poll(1, drop).unwrap()),
                (Some(1), 0)
            );
            let _ = handle.park().recv_timeout(LIMIT).unwrap();
            assert!(device.resume());
            handle.unpark();
            let completed = queue.wait(1, Some(LIMIT), |completion| completion.result.unwrap()).unwrap();
            assert_eq!(completed, 1);
        });
    });
}

#[test]
fn a_card_goes_on() {
    returns_in_time(|| {
        for (packed, in_order) in KINDS {
            let descriptor = |_: &str| unreachable!("there is no descriptor");
            let opening =
                Opening { pairs: 1, mac: None, descriptor: &descriptor, handed: Default::default() };
            let port = "loop".parse::<PortName>().unwrap().open(&opening).unwrap();
            let card = Arc::new(Net::new(kickless_net::Options {
                mac: None,
                mtu: None,
                pairs_max: 1,
                queue_size_max: 256,
                offload: true,
                ring_reset: false,
                port,
            }));
            let poll = if in_order == Choice::On { Poll::Never } else { Poll::default() };
            let frames = park_beside(card, (EngineKind::Auto, poll), |socket, is_over, go| {
                let options = CardOptions { packed, in_order, mtu: Some(9000), ..CardOptions::new(socket) };
                let card = Card::connect(options).unwrap();
                let mut pair = card.pair(0).unwrap();
                // Before the first park, because a port drops frames of a ring that does not run yet.
                eventually("both rings run", || {
                    pair.send(&[Outgoing::from(&frame(0)[..])]).unwrap();
                    pair.receive(usize::MAX, |_| {}).unwrap() > 0
                });
                while pair.wait(Interest::Receive, Some(Duration::from_millis(50))).unwrap() {
                    pair.receive(usize::MAX, |_| {}).unwrap();
                }
                go();
                drive_card(&mut pair, is_over)
            });
            println!("packed {packed:?}, in order {in_order:?}: {frames} frames");
        }
    });
}
