//! A registry, and a directory for the sockets of its devices.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use kickless_daemon::{DeviceConfig, DeviceState, Endpoint, Kinds, Notation, PoolConfig, Registry, values};
use kickless_testing::eventually;
use kickless_worker::WorkerPool;
use serde_json::Value;
use tempfile::TempDir;

/// A registry, and a directory for its sockets and images.
pub(crate) struct Rig {
    pub(crate) registry: Arc<Registry>,
    pub(crate) dir: TempDir,
}

impl Rig {
    /// Makes a registry of devices of these kinds.
    pub(crate) fn of(kinds: Kinds, workers: u16, devices_max: usize) -> Self {
        kickless_memory::fault::guard().unwrap();
        let pool = PoolConfig { workers: Some(workers), ..PoolConfig::default() };
        let pool =
            WorkerPool::start(&pool.worker_options(devices_max as u32, Notation::Keys).unwrap()).unwrap();
        let registry = Registry::new(devices_max, kinds).unwrap();
        registry.set_pool(pool);
        Self { registry: Arc::new(registry), dir: tempfile::tempdir().unwrap() }
    }

    /// Returns the configuration of a device with these keys.
    pub(crate) fn read(&self, keys: &Value) -> DeviceConfig {
        self.registry.kinds().read(&values(keys.as_object().unwrap())).unwrap()
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Adds a device that ends with an error, and waits until it has ended.
    pub(crate) fn add_failed(&self, mut config: DeviceConfig) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let name = config.name().unwrap().to_owned();
        config.serve.socket_path = None;
        let endpoint = Endpoint::inherited(ours.into()).unwrap();
        self.registry.serve(vec![self.registry.open(config, Some(endpoint)).unwrap().unwrap()]).unwrap();
        theirs.write_all(&[0xff; 64]).unwrap();
        let has_failed = || {
            let mut listed = self.registry.list().into_iter();
            listed.any(|listed| listed.config.name() == Some(&name) && listed.error.is_some())
        };
        eventually("the device does not fail", has_failed);
    }

    /// Returns the names and states of all devices.
    pub(crate) fn states(&self) -> Vec<(String, DeviceState)> {
        let listed = self.registry.list().into_iter();
        listed.map(|listed| (listed.config.name().unwrap_or_default().to_owned(), listed.state)).collect()
    }
}
