//! Passes sessions from one server to another as two processes do, with both in this process.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test fails by panicking")]

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kickless_blk::Blk;
use kickless_device::Device as _;
use kickless_disk::{Disk, DiskSpec};
use kickless_handover::v1::{Device, Final};
use kickless_handover::{Given, Giving};
use kickless_io::{EngineKind, EngineOptions};
use kickless_memory::Mapper;
use kickless_memory::quota::AddressSpace;
use kickless_vhost::{Parked, RestoreError, Restored, Server};
use kickless_worker::{Poll, WorkerPool};
use tempfile::TempDir;

use crate::driver::Eventfd;

/// Time limit for steps that take a server a moment.
pub const LIMIT: Duration = Duration::from_secs(30);

/// A socket and an image, which one process after another serves.
pub struct Served {
    directory: TempDir,
    listener: UnixListener,
    image_len: u64,
}

impl Served {
    /// Makes a socket, and an image of this length.
    pub fn new(image_len: u64) -> Self {
        let directory = crate::guest::image_dir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let served = Self { directory, listener, image_len };
        std::fs::File::create_new(served.image()).unwrap().set_len(image_len).unwrap();
        served
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// Returns the path of the image.
    pub fn image(&self) -> PathBuf {
        self.directory.path().join("disk.img")
    }

    /// Returns the length of the image.
    pub fn image_len(&self) -> u64 {
        self.image_len
    }

    /// Makes a process that can serve the image. It does not serve yet.
    pub fn process(&self) -> Process {
        Process::new(self, &DiskSpec::File(self.image()))
    }
}

/// A server with its device and its workers, as a process has them.
pub struct Process {
    /// The server.
    pub server: Arc<Server>,
    /// The device.
    pub device: Arc<Blk>,
    listener: UnixListener,
    stop: Arc<Eventfd>,
    _pool: Arc<WorkerPool>,
}

impl Process {
    /// Makes a process that can serve this disk.
    pub fn new(served: &Served, spec: &DiskSpec) -> Self {
        let engine = EngineOptions::new(EngineKind::Auto, 64);
        let options =
            kickless_worker::Options { workers: 2, engine, cpus: Vec::new(), poll: Poll::default() };
        let pool = Arc::new(WorkerPool::start(&options).unwrap());
        let backing = Disk::open(spec, &kickless_disk::Options::default()).unwrap();
        let options = kickless_blk::Options {
            serial: "passed".into(),
            queues_max: 4,
            queue_size_max: 256,
            lock: false,
        };
        let device = Arc::new(Blk::new(backing, options).with_stop_on_error(true));
        let mapper = Mapper::within(Arc::new(AddressSpace::default()).join(1 << 40));
        let server = Server::new(device.clone(), pool.executor(1)).with_mapper(mapper);
        let (listener, stop) = (served.listener.try_clone().unwrap(), Arc::new(Eventfd::new().unwrap()));
        Self { server: Arc::new(server), device, listener, stop, _pool: pool }
    }

    /// Starts the thread of the server.
    pub fn serve(&self) {
        let (server, stop) = (self.server.clone(), self.stop.clone());
        let listener = self.listener.try_clone().unwrap();
        thread::spawn(move || server.serve(&listener, AsFd::as_fd(&*stop)).unwrap());
    }

    /// Tells the thread of the server to end.
    pub fn stop(&self) {
        self.stop.signal();
    }

    /// Parks the server.
    pub fn park(&self) -> Parked {
        self.server.park().wait(Instant::now() + LIMIT).unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop.signal();
    }
}

/// Returns the record of a server that is parked, as the next process reads it.
pub fn record(parked: &Parked) -> (Device, Given) {
    let mut to = Giving::default();
    let device = Device { session: parked.give(&mut to).unwrap(), ..Device::default() };
    let (read, given) = to.record(&device).unwrap().read::<Device>().unwrap();
    assert_eq!(read, device, "the record has changed on its way");
    (read, given)
}

/// Parks the rings, and returns the final record, as the next process reads it.
pub fn final_record(parked: &mut Parked) -> Final {
    parked.park_rings();
    assert!(parked.wait_for_rings(Instant::now() + LIMIT).unwrap());
    let mut state = Final::default();
    parked.give_final(&mut state).unwrap();
    let (read, _) = Giving::default().record(&state).unwrap().read::<Final>().unwrap();
    assert_eq!(read, state, "the record has changed on its way");
    read
}

/// Makes the session in the new process.
///
/// # Errors
/// The new process refuses it.
pub fn restore(new: &Process, (device, mut given): (Device, Given)) -> Result<Restored, RestoreError> {
    new.server.restore(&device, &mut given)
}

/// Lets the new process serve. The old one does not serve again.
pub fn take_over(new: &Process, mut restored: Restored, parked: Parked, state: &Final) {
    restored.receive_final(state).unwrap();
    // A process that has given its devices ends without going on.
    std::mem::forget(parked);
    if state.session.as_ref().is_some_and(|session| session.is_open) {
        new.device.open().unwrap();
    }
    restored.begin().unwrap();
    restored.go_on();
}

/// Passes what a process serves to a new one, which it returns.
pub fn hand_over(served: &Served, old: &Process) -> Process {
    let new = served.process();
    let mut parked = old.park();
    let restored = restore(&new, record(&parked)).unwrap();
    new.serve();
    let state = final_record(&mut parked);
    take_over(&new, restored, parked, &state);
    new
}
