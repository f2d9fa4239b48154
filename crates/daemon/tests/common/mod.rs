//! A registry of disks, and load on them.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod hooked;
pub(crate) mod made;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kickless_daemon::{
    DeviceConfig, DeviceState, Endpoint, Kinds, Making, Notation, PoolConfig, Registry, values,
};
use kickless_driver::Options;
use kickless_kinds::{BlkConfig, kinds};
pub(crate) use kickless_testing::LIMIT;
use kickless_testing::{eventually, pattern};
use kickless_worker::WorkerPool;
use made::{Made, MadeDevice};
use serde_json::json;
use tempfile::TempDir;

pub(crate) const BLOCK: usize = 4096;

/// A registry, and a directory for its sockets and images.
pub(crate) struct Rig {
    pub(crate) registry: Registry,
    pub(crate) dir: TempDir,
}

impl Rig {
    pub(crate) fn new(workers: u16, devices_max: usize) -> Self {
        Self::with_kinds(workers, devices_max, kinds())
    }

    /// Makes a registry whose devices `make` makes.
    pub(crate) fn with_devices(
        workers: u16,
        devices_max: usize,
        make: impl Fn(&BlkConfig, &Making<'_>) -> MadeDevice + Send + Sync + 'static,
    ) -> Self {
        Self::with_kinds(workers, devices_max, Kinds::new(Made(make)))
    }

    fn with_kinds(workers: u16, devices_max: usize, kinds: Kinds) -> Self {
        kickless_memory::fault::guard().unwrap();
        let pool = PoolConfig { workers: Some(workers), ..PoolConfig::default() };
        let pool =
            WorkerPool::start(&pool.worker_options(devices_max as u32, Notation::Keys).unwrap()).unwrap();
        let registry = Registry::new(devices_max, kinds).unwrap();
        registry.set_pool(pool);
        Self { registry, dir: tempfile::tempdir().unwrap() }
    }

    /// Returns the configuration of a device with this name and disk.
    pub(crate) fn config(&self, name: &str, disk: &str) -> DeviceConfig {
        let config =
            json!({ "name": name, "socket-path": self.socket(name), "blk-file": disk, "cache": "writeback" });
        self.registry.kinds().read(&values(config.as_object().unwrap())).unwrap()
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn connect(&self, name: &str) -> Disk {
        connect(&self.socket(name))
    }

    /// Adds a device that ends with an error, and waits until it has ended.
    pub(crate) fn add_failed(&self, name: &str) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut config = self.config(name, "mem:1M");
        config.serve.socket_path = None;
        let endpoint = Endpoint::inherited(ours.into()).unwrap();
        self.registry.serve(vec![self.registry.open(config, Some(endpoint)).unwrap().unwrap()]).unwrap();
        theirs.write_all(&[0xff; 64]).unwrap();
        let has_failed = || {
            let mut listed = self.registry.list().into_iter();
            listed.any(|listed| listed.config.name() == Some(name) && listed.error.is_some())
        };
        eventually("the device does not fail", has_failed);
    }

    /// Returns the names and states of all devices.
    pub(crate) fn states(&self) -> Vec<(String, DeviceState)> {
        let listed = self.registry.list().into_iter();
        listed.map(|listed| (listed.config.name().unwrap_or_default().to_owned(), listed.state)).collect()
    }
}

pub(crate) type Disk = kickless_driver::Disk;

pub(crate) fn connect(socket: &Path) -> Disk {
    let options = Options {
        queues: 2,
        queue_size: 64,
        reconnect_limit: Duration::ZERO,
        connect_timeout: LIMIT,
        ..Options::new(socket)
    };
    Disk::connect(options).unwrap()
}

/// Returns the content of block `block` of a device in this version.
pub(crate) fn content(device: u64, block: u64, version: u64) -> Vec<u8> {
    pattern(device << 48 | block << 24 | version, BLOCK)
}
