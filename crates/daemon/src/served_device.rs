//! A device that the daemon serves to front-ends.

use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use kickless_device::{Executor, Limiter, Operate, Unsupported};
use kickless_io::Waker;
use kickless_memory::Mapper;
use kickless_memory::quota::AddressSpace;
use kickless_opener::Entry;
use kickless_vhost::{Ended, Server, Statistics};
use kickless_worker::WorkerPool;
use tracing::{error, warn};

use super::config::{DeviceConfig, Served};
use super::error::ServeError;
use super::lifecycle::Reference;
use super::sentence::sentence;
use super::socket::{Endpoint, PassedListener};

/// A device, its server, and the descriptor that stops it.
pub struct ServedDevice {
    config: DeviceConfig,
    device: Arc<dyn Operate>,
    server: Server,
    executor: Arc<dyn Executor>,
    limiter: Arc<Limiter>,
    stop: Waker,
    /// A duplicate of the socket on which front-ends connect, for the next process.
    listener: Option<PassedListener>,
    /// The device takes no new requests.
    is_drained: AtomicBool,
    /// Calls of [`DeviceRef::refresh`] that the refreshing thread has not finished; 0 if no such thread runs.
    refreshes: Arc<AtomicU64>,
    /// The right to use the things of the host that the device needs. Locked while the capture changes, which
    /// can wait for a file. So the last change is the one that is recorded. Dropped after the device.
    pub(crate) entry: Mutex<Entry>,
}

/// A reference to a device that the registry has opened. It may have ended.
///
/// The device is not closed, and its name stays in use, while a reference exists. So a caller keeps it only
/// for a short time.
pub struct DeviceRef(pub(crate) Reference<ServedDevice>);

impl Deref for DeviceRef {
    type Target = ServedDevice;

    fn deref(&self) -> &ServedDevice {
        &self.0
    }
}

impl DeviceRef {
    /// Refreshes the device ([`Operate::refresh`]) on a new thread, and returns immediately. The caller must
    /// not wait for the file system or the server behind one device, which may never answer. Calls during a
    /// refresh together cause one more refresh.
    pub fn refresh(self) {
        let refreshes = self.refreshes.clone();
        if refreshes.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let span = self.config.span();
        let refresh = move || {
            let mut seen = 1;
            loop {
                self.config.span().in_scope(|| self.device.refresh());
                match self.refreshes.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return,
                    Err(newer) => seen = newer,
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("refresh".into()).spawn(refresh) {
            refreshes.store(0, Ordering::Release);
            span.in_scope(|| warn!(%error, "cannot refresh the device now"));
        }
    }
}

impl ServedDevice {
    /// Puts a device behind a server, with its share of the workers, its limits, and its share of the address
    /// space.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub(crate) fn new(
        config: DeviceConfig,
        device: Arc<dyn Operate>,
        (pool, limiter): (&Arc<WorkerPool>, Arc<Limiter>),
        space: &Arc<AddressSpace>,
    ) -> io::Result<Self> {
        let mapper = Mapper::within(space.join(config.serve.memory_max));
        let mapper = if config.serve.allow_slow_memory { mapper } else { mapper.refuse_slow() };
        let executor = pool.limited_executor(config.share.weight, limiter.clone());
        let server = Server::new(device.clone(), executor.clone()).with_mapper(mapper);
        let (stop, is_drained) = (Waker::new()?, AtomicBool::new(false));
        let (refreshes, entry) = (Arc::default(), Mutex::default());
        let listener = None;
        Ok(Self { config, device, server, executor, limiter, stop, listener, is_drained, refreshes, entry })
    }

    /// Notes the socket on which front-ends connect.
    pub(crate) fn with_listener(self, listener: PassedListener) -> Self {
        Self { listener: Some(listener), ..self }
    }

    /// Returns the socket on which front-ends connect, if there is one.
    pub(crate) fn listener(&self) -> Option<&PassedListener> {
        self.listener.as_ref()
    }

    /// Returns the server.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// Notes that the device takes no new requests, because it did so in another process.
    pub(crate) fn note_drained(&self, is_drained: bool) {
        self.is_drained.store(is_drained, Ordering::Relaxed);
    }

    /// Keeps the right to use the things of the host that the device needs.
    pub(crate) fn with_entry(self, entry: Entry) -> Self {
        Self { entry: Mutex::new(entry), ..self }
    }

    /// Returns the properties of the device for the log, when it begins to serve front-ends of this endpoint.
    pub(crate) fn for_log(&self, endpoint: &Endpoint) -> Served {
        let (path, rights) = match endpoint {
            Endpoint::Listening(listener) => {
                let address = listener.socket().local_addr().ok();
                (address.and_then(|address| address.as_pathname().map(Path::to_owned)), listener.rights())
            }
            Endpoint::Connected(_) | Endpoint::Restored => (None, None),
        };
        Served {
            version: env!("CARGO_PKG_VERSION"),
            socket: path.map(|path| path.display().to_string()),
            socket_mode: rights.map(|rights| format!("{:04o}", rights.mode)),
            socket_owner: rights.map(|rights| format!("{}:{}", rights.uid, rights.gid)),
            size: self.device.size().ok(),
            queue_size: self.config.serve.queue_size,
        }
    }

    /// Returns the configuration of the device.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Returns the device.
    pub fn device(&self) -> &dyn Operate {
        &*self.device
    }

    /// Returns the limiter of the device.
    pub(crate) fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    /// Returns the counters of the queues of the device.
    pub fn statistics(&self) -> &Statistics {
        self.server.statistics()
    }

    /// Returns whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    /// Returns whether the device keeps its disk although no front-end uses it: writes did not reach it.
    pub(crate) fn keeps_disk(&self) -> bool {
        self.server.keeps_device()
    }

    /// Returns whether the device takes no new requests.
    pub fn is_drained(&self) -> bool {
        self.is_drained.load(Ordering::Relaxed)
    }

    /// Makes the device take no new requests, or take them again.
    ///
    /// # Errors
    /// This kind of device cannot do it.
    pub(crate) fn set_drained(&self, is_drained: bool) -> Result<(), Unsupported> {
        let set = self.device.set_paused(is_drained);
        self.is_drained.store(set.is_ok() && is_drained, Ordering::Relaxed);
        set
    }

    /// Changes the weight of the device beside others.
    pub(crate) fn set_weight(&self, weight: u32) {
        self.executor.set_weight(weight);
    }

    /// Stops the server if no front-end is connected. Returns whether it stopped the server.
    pub(crate) fn stop_if_free(&self) -> bool {
        let closed = self.server.close_if_free();
        if closed {
            self.stop.wake();
        }
        closed
    }

    /// Stops the server if no front-end is connected, or else when the front-end leaves. Returns whether it
    /// stopped the server now.
    pub(crate) fn stop_when_free(&self) -> bool {
        let closed = self.server.close_when_free();
        if closed {
            self.stop.wake();
        }
        closed
    }

    /// Serves later front-ends again after [`ServedDevice::stop_when_free`]. Returns `false` if it is too
    /// late for that.
    pub(crate) fn keep(&self) -> bool {
        self.server.keep_open()
    }

    /// Returns whether the device refuses all front-ends.
    pub(crate) fn is_closed(&self) -> bool {
        self.server.is_closed()
    }

    /// Returns whether the device is removed when its front-end has left.
    pub fn is_leaving(&self) -> bool {
        self.server.closes_when_free()
    }

    /// Tells the session thread to end. It stops the rings, and waits until all requests in flight have
    /// completed.
    pub(crate) fn stop(&self) {
        self.stop.wake();
    }

    /// Serves front-ends from `endpoint` until [`ServedDevice::stop`]. Then closes `endpoint`, so that new
    /// front-ends are refused. If the last session could not close the device, tries it again.
    ///
    /// # Errors
    /// The listener or the connection failed, or the device cannot be closed.
    pub(crate) fn run(&self, endpoint: Endpoint) -> Result<(), ServeError> {
        let ended = match &endpoint {
            Endpoint::Listening(listener) => {
                self.server.serve(listener.socket(), self.stop.as_fd()).map_err(|ended| match ended {
                    Ended::NotClosed(error) => ServeError::NotClosed(error),
                    Ended::Host(error) => ServeError::Listener(error),
                    ended => ServeError::Listener(io::Error::other(ended)),
                })
            }
            Endpoint::Connected(connection) => {
                connection.try_clone().map_err(ServeError::Connection).and_then(|connection| {
                    only_session(self.server.serve_connection(connection, self.stop.as_fd()))
                })
            }
            Endpoint::Restored => only_session(self.server.serve_restored(self.stop.as_fd())),
        };
        drop(endpoint);
        let served = self.close(ended);
        if let (Err(error), Some(_)) = (&served, self.config.name()) {
            error!(error = sentence(error), "the device has ended; other devices continue");
        }
        served
    }

    /// Closes the device at the end of its service, unless the last session has just tried it.
    fn close(&self, ended: Result<(), ServeError>) -> Result<(), ServeError> {
        if ended.as_ref().is_err_and(ServeError::keeps_disk) {
            return ended;
        }
        let Err(error) = self.device.close() else { return ended };
        if let Err(other) = ended {
            error!(error = sentence(&other), "the device is no longer served");
        }
        Err(ServeError::NotClosed(error))
    }
}

/// Returns the end of a device that has one session.
fn only_session(ended: Result<(), Ended>) -> Result<(), ServeError> {
    match ended {
        Ok(()) | Err(Ended::Stopped) => Ok(()),
        Err(Ended::NotClosed(error)) => Err(ServeError::NotClosed(error)),
        Err(ended) => Err(ServeError::Dropped(ended)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use kickless_opener::Listener;
    use rustix::net::{Shutdown, shutdown};
    use tempfile::TempDir;

    use super::*;
    use crate::config::{Notation, PoolConfig};
    use crate::testing::{fake_config, fake_device};

    #[test]
    fn a_device_that_ended_has_no_socket() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let endpoint = Endpoint::Listening(Listener::bind(&path, 0o600).unwrap());
        // The listener fails from now on.
        let Endpoint::Listening(listener) = &endpoint else { panic!("{endpoint:?}") };
        shutdown(listener.socket(), Shutdown::Both).unwrap();
        let pool = PoolConfig::default().worker_options(1, Notation::Keys).unwrap();
        let pool = Arc::new(WorkerPool::start(&pool).unwrap());
        let (config, space) = (fake_config("a"), Arc::new(AddressSpace::default()));
        let served = ServedDevice::new(config, fake_device(), (&pool, Arc::default()), &space).unwrap();
        let ended = served.run(endpoint).unwrap_err();
        assert!(ended.to_string().contains("no more front-ends can be served"), "{ended:#}");
        assert!(!path.exists() && UnixStream::connect(&path).is_err());
    }
}
