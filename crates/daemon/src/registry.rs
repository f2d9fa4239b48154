//! The devices of a daemon, which come and go while it runs.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kickless_device::Device;
use kickless_io::Waker;
use kickless_memory::quota::AddressSpace;
use kickless_worker::Pool;
use tracing::info;

use super::config::{DeviceConfig, DeviceKind, Notation};
use super::error::{AddError, MakeError, RemoveError, ServeError};
use super::served::Served;
use super::socket::{Address, Endpoint, TURN_WAIT, real_path};

/// How often a forced removal ends requests that wait for a remote server: a request in several parts may have begun another.
const FORCE_EVERY: Duration = Duration::from_secs(1);

/// Makes a device of its configuration. Only the program knows the kinds of devices.
pub type MakeDevice = dyn Fn(&DeviceConfig) -> Result<Arc<dyn Device>, MakeError> + Send + Sync;

/// The result of [`Registry::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// The device is served from now on.
    New,
    /// A device of this name and this configuration was served already.
    Identical,
}

/// How a device that is in use is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The device stays if a front-end is connected.
    Refuse,
    /// The device takes no new requests, and those in flight complete within this time.
    Drain(Duration),
    /// As [`Removal::Drain`], and requests that wait for a remote server fail early. A request that is with the kernel
    /// cannot be taken back.
    Force(Duration),
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// It is being opened.
    Opening,
    /// It waits for a front-end.
    Free,
    /// A front-end is connected.
    Connected,
    /// It takes no new requests, and is removed when the last one in flight ends.
    Removing,
    /// It is not served any longer: see the log.
    Ended,
}

/// A device as [`Registry::list`] shows it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The configuration.
    pub config: DeviceConfig,
    /// The state.
    pub state: DeviceState,
}

/// Owns the devices of a daemon and the pool that serves them.
///
/// Each device has a session thread and a stop descriptor of its own. A change to one device does not touch the others.
/// Every function may be called by any thread at any time. [`Registry::add`] and [`Registry::remove`] block their caller
/// and no one else.
///
/// Dropping a registry stops all devices, and waits until their requests in flight have completed.
pub struct Registry {
    shared: Arc<Shared>,
}

struct Shared {
    pool: OnceLock<Arc<Pool>>,
    space: Arc<AddressSpace>,
    make: Box<MakeDevice>,
    devices_max: usize,
    table: Mutex<Table>,
    /// Notified when a session thread has ended.
    ended: Condvar,
    /// Signalled when a device has come, or one has ended.
    changed: Waker,
}

#[derive(Default)]
struct Table {
    /// In the order in which the devices came.
    entries: Vec<Entry>,
    /// The id of the next entry.
    next: u64,
    is_stopping: bool,
}

struct Entry {
    id: u64,
    /// Empty for a device without a name.
    name: String,
    config: DeviceConfig,
    /// The real path of its socket.
    socket: Option<PathBuf>,
    phase: Phase,
    is_removing: bool,
    /// Callers that wait for its end. The last of them removes the entry.
    waiters: usize,
}

enum Phase {
    Opening,
    Running(Arc<Served>, JoinHandle<()>),
    Ended(Arc<Served>, JoinHandle<()>, Result<(), ServeError>),
}

impl Entry {
    fn served(&self) -> Option<&Arc<Served>> {
        match &self.phase {
            Phase::Opening => None,
            Phase::Running(served, _) | Phase::Ended(served, ..) => Some(served),
        }
    }

    fn state(&self) -> DeviceState {
        match &self.phase {
            Phase::Opening => DeviceState::Opening,
            Phase::Ended(..) => DeviceState::Ended,
            Phase::Running(..) if self.is_removing => DeviceState::Removing,
            Phase::Running(served, _) if served.is_connected() => DeviceState::Connected,
            Phase::Running(..) => DeviceState::Free,
        }
    }
}

impl Table {
    fn find(&mut self, id: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    fn take(&mut self, id: u64) -> Option<Entry> {
        let at = self.entries.iter().position(|entry| entry.id == id)?;
        Some(self.entries.remove(at))
    }

    /// Takes the device of this name if it is not served any longer.
    fn take_ended(&mut self, name: &str) -> Option<Entry> {
        let ended = |entry: &Entry| {
            entry.name == name && matches!(entry.phase, Phase::Ended(..)) && !entry.is_removing
        };
        let at = self.entries.iter().position(ended)?;
        Some(self.entries.remove(at))
    }

    /// Reserves the name and the socket of a device. `None`: the same device is served already. The path of the socket is
    /// resolved before, because that asks the file system, which may not answer.
    fn reserve(
        &mut self,
        config: &DeviceConfig,
        socket: Option<PathBuf>,
        is_inherited: bool,
        devices_max: usize,
    ) -> Result<Option<u64>, AddError> {
        if self.is_stopping {
            return Err(AddError::Stopping);
        }
        let name = config.name().unwrap_or_default().to_owned();
        if let Some(at) = self.entries.iter().position(|entry| entry.name == name) {
            let entry = &self.entries[at];
            match (&entry.phase, entry.is_removing) {
                (_, true) => return Err(AddError::Busy { name, doing: "removed" }),
                (Phase::Opening, _) => return Err(AddError::Busy { name, doing: "added" }),
                (Phase::Running(..), _) if entry.config == *config && !is_inherited => return Ok(None),
                (Phase::Running(..) | Phase::Ended(..), _) => return Err(AddError::Different { name }),
            }
        }
        if socket.is_none() && !is_inherited {
            return Err(AddError::NoSocket);
        }
        if let Some(path) = &socket
            && let Some(other) = self.entries.iter().find(|entry| entry.socket.as_ref() == Some(path))
        {
            return Err(AddError::SocketTaken { name: other.name.clone(), path: path.clone() });
        }
        if self.entries.len() >= devices_max {
            return Err(AddError::Full { max: devices_max });
        }
        let id = self.next;
        self.next += 1;
        let config = config.clone();
        let (phase, is_removing, waiters) = (Phase::Opening, false, 0);
        self.entries.push(Entry { id, name, config, socket, phase, is_removing, waiters });
        Ok(Some(id))
    }
}

/// A device that is open. It is served once it has its socket ([`Opened::bind`]) and [`Registry::serve`] gets it. Dropping it
/// gives its name back.
pub struct Opened {
    shared: Arc<Shared>,
    id: u64,
    config: DeviceConfig,
    device: Option<Arc<dyn Device>>,
    origin: Option<Origin>,
}

/// The source of front-ends.
enum Origin {
    /// A socket that is to be made.
    Path(Address),
    /// A socket that is there.
    Endpoint(Endpoint),
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut table = self.shared.lock();
        if table.find(self.id).is_some_and(|entry| matches!(entry.phase, Phase::Opening)) {
            table.take(self.id);
        }
    }
}

/// Tells the registry that a session thread has ended, whatever ended it.
struct Report {
    shared: Arc<Shared>,
    id: u64,
    outcome: Result<(), ServeError>,
}

impl Drop for Report {
    fn drop(&mut self) {
        let outcome = std::mem::replace(&mut self.outcome, Ok(()));
        self.shared.has_ended(self.id, outcome);
    }
}

impl Registry {
    /// Makes a registry without devices. `make` makes those that are added; there can be `devices_max` at a time.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new(
        devices_max: usize,
        make: impl Fn(&DeviceConfig) -> Result<Arc<dyn Device>, MakeError> + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let shared = Shared {
            pool: OnceLock::new(),
            space: Arc::new(AddressSpace::default()),
            make: Box::new(make),
            devices_max,
            table: Mutex::default(),
            ended: Condvar::new(),
            changed: Waker::new()?,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Gives the registry the pool that serves its devices. Devices can be opened before, so that a daemon starts no workers
    /// if its disks cannot be opened. Another pool than the first is ignored.
    pub fn set_pool(&self, pool: Pool) {
        let _ = self.shared.pool.set(Arc::new(pool));
    }

    /// Returns the pool that serves the devices.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.shared.pool.get()
    }

    /// Opens a device and serves it.
    ///
    /// # Errors
    /// It cannot be opened or served, or its name or its socket is in use. Nothing has changed then.
    pub fn add(&self, config: DeviceConfig) -> Result<Added, AddError> {
        let Some(mut opened) = self.open(config, None)? else { return Ok(Added::Identical) };
        opened.bind(Instant::now() + TURN_WAIT)?;
        self.serve(vec![opened])?;
        Ok(Added::New)
    }

    /// Opens a device, whose front-ends come from `endpoint` or else connect to the path of its configuration. `None`: the
    /// same device is served already.
    ///
    /// # Errors
    /// As [`Registry::add`].
    pub fn open(&self, config: DeviceConfig, endpoint: Option<Endpoint>) -> Result<Option<Opened>, AddError> {
        config.check(Notation::Keys).map_err(AddError::Mistake)?;
        let shared = self.shared.clone();
        // A device that is not served any longer makes room for its successor.
        let ended = shared.lock().take_ended(config.name().unwrap_or_default());
        drop(ended);
        let is_inherited = endpoint.is_some();
        let socket = config.serve.socket_path.as_deref().filter(|_| !is_inherited).map(real_path);
        let reserved = shared.lock().reserve(&config, socket, is_inherited, shared.devices_max)?;
        let Some(id) = reserved else { return Ok(None) };
        let mut opened = Opened { shared, id, config, device: None, origin: None };
        opened.fill(endpoint)?;
        Ok(Some(opened))
    }

    /// Serves these devices, all or none.
    ///
    /// # Errors
    /// A thread cannot be started, a device has no socket yet, or the registry has no pool.
    pub fn serve(&self, opened: Vec<Opened>) -> Result<(), AddError> {
        let pool = self.pool().ok_or(AddError::NoPool)?;
        let mut ready = Vec::with_capacity(opened.len());
        for mut opened in opened {
            let (Some(device), Some(Origin::Endpoint(endpoint))) =
                (opened.device.take(), opened.origin.take())
            else {
                return Err(AddError::NoSocket);
            };
            let served = Served::new(opened.config.clone(), device, pool, &self.shared.space);
            ready.push((opened, Arc::new(served.map_err(AddError::Thread)?), endpoint));
        }
        for (_, served, _) in &ready {
            let config = served.config();
            let version = env!("CARGO_PKG_VERSION");
            config.span().in_scope(|| match &config.kind {
                DeviceKind::Blk(disk) => info!(version, disk = %disk.blk_file, "serving"),
                DeviceKind::Net(card) => info!(version, port = %card.port, "serving"),
            });
        }
        let mut started = Vec::with_capacity(ready.len());
        for (opened, served, endpoint) in ready {
            if let Err(error) = self.shared.start(opened.id, served, endpoint) {
                started
                    .into_iter()
                    .for_each(|id| drop(self.shared.remove(id, Removal::Drain(Duration::MAX))));
                return Err(AddError::Thread(error));
            }
            started.push(opened.id);
        }
        self.shared.changed.wake();
        Ok(())
    }

    /// Stops a device and forgets it. When this returns `true`, the name and the socket of the device are free; `false`:
    /// there was no such device.
    ///
    /// # Errors
    /// The device is in use and `how` does not allow for that, or requests are still in flight at the deadline.
    pub fn remove(&self, name: &str, how: Removal) -> Result<bool, RemoveError> {
        let found = self.shared.lock().entries.iter().find(|entry| entry.name == name).map(|entry| entry.id);
        match found {
            Some(id) => self.shared.remove(id, how),
            None => Ok(false),
        }
    }

    /// Returns the configuration and the state of each device, in the order in which they came.
    pub fn list(&self) -> Vec<Listed> {
        let table = self.shared.lock();
        table
            .entries
            .iter()
            .map(|entry| Listed { config: entry.config.clone(), state: entry.state() })
            .collect()
    }

    /// Returns the devices that are open, those included that are not served any longer.
    pub fn devices(&self) -> Vec<Arc<Served>> {
        self.shared.lock().entries.iter().filter_map(|entry| entry.served().cloned()).collect()
    }

    /// Returns the descriptor that is readable when devices have come or ended, until [`Registry::take_changed`].
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.shared.changed.as_fd()
    }

    /// Returns whether devices have come or ended since the last call.
    pub fn take_changed(&self) -> bool {
        self.shared.changed.clear()
    }

    /// Returns whether no device is served.
    pub fn is_idle(&self) -> bool {
        !self.shared.lock().entries.iter().any(|entry| matches!(entry.phase, Phase::Running(..)))
    }

    /// Stops all devices, and lets none come any more. Returns at once; [`Registry::is_idle`] tells when they have stopped.
    pub fn stop(&self) {
        let mut table = self.shared.lock();
        table.is_stopping = true;
        table.entries.iter().filter_map(Entry::served).for_each(|served| served.stop());
    }

    /// Forgets the devices that are not served any longer; returns the error of each that failed, with its configuration.
    pub fn take_ended(&self) -> Vec<(DeviceConfig, ServeError)> {
        let mut table = self.shared.lock();
        let is_over = |entry: &mut Entry| entry.waiters == 0 && matches!(entry.phase, Phase::Ended(..));
        let ended: Vec<Entry> = table.entries.extract_if(.., is_over).collect();
        // Closing a device takes its time, and others need the table meanwhile.
        drop(table);
        let mut failed = Vec::new();
        for entry in ended {
            if let Phase::Ended(_, thread, outcome) = entry.phase {
                // It has nothing left to do but to end, and a panic is its outcome.
                let _ = thread.join();
                failed.extend(outcome.err().map(|error| (entry.config, error)));
            }
        }
        failed
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.stop();
        let mut table = self.shared.lock();
        while table.entries.iter().any(|entry| matches!(entry.phase, Phase::Running(..))) {
            table = self.shared.ended.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        drop(table);
        self.take_ended();
    }
}

impl Opened {
    /// Makes the socket of the device, on which front-ends can connect then. Waits until `turns_until` for other processes
    /// that make sockets in the same directory, [`TURN_WAIT`] for all devices together.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(&mut self, turns_until: Instant) -> Result<(), AddError> {
        if let Some(Origin::Path(address)) = &self.origin {
            self.origin = Some(Origin::Endpoint(address.bind(turns_until)?));
        }
        Ok(())
    }

    /// Returns the configuration of the device.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Checks the socket and makes the device.
    fn fill(&mut self, endpoint: Option<Endpoint>) -> Result<(), AddError> {
        let (config, serve) = (&self.config, &self.config.serve);
        self.origin = Some(match (endpoint, &serve.socket_path) {
            (Some(endpoint), _) => Origin::Endpoint(endpoint),
            (None, Some(path)) => {
                Origin::Path(Address::new(path, serve.socket_mode, serve.socket_group.as_deref())?)
            }
            (None, None) => return Err(AddError::NoSocket),
        });
        self.device = Some(config.span().in_scope(|| (self.shared.make)(config))?);
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the session thread of a device.
    fn start(self: &Arc<Self>, id: u64, served: Arc<Served>, endpoint: Endpoint) -> std::io::Result<()> {
        let mut table = self.lock();
        let is_stopping = table.is_stopping;
        let Some(entry) = table.find(id) else { return Ok(()) };
        let name = served.config().name().unwrap_or("session").to_owned();
        let (shared, of_thread) = (self.clone(), served.clone());
        // The thread reports its end under the lock that is held here, so not before it is in the table.
        let thread = thread::Builder::new().name(name).spawn(move || {
            let mut report = Report { shared, id, outcome: Err(ServeError::Panicked) };
            report.outcome = of_thread.config().span().in_scope(|| of_thread.run(endpoint));
            drop(of_thread);
        })?;
        if is_stopping {
            served.stop();
        }
        entry.phase = Phase::Running(served, thread);
        Ok(())
    }

    /// Takes note that a session thread has ended.
    fn has_ended(&self, id: u64, outcome: Result<(), ServeError>) {
        let mut table = self.lock();
        let mut gone = None;
        if let Some(entry) = table.find(id) {
            let forgotten = entry.is_removing && entry.waiters == 0;
            entry.phase = match std::mem::replace(&mut entry.phase, Phase::Opening) {
                Phase::Running(served, thread) => Phase::Ended(served, thread, outcome),
                other => other,
            };
            if forgotten {
                gone = table.take(id);
            }
        }
        drop(table);
        // Without the lock: a disk may take its time to close.
        drop(gone);
        self.ended.notify_all();
        self.changed.wake();
    }

    fn remove(&self, id: u64, how: Removal) -> Result<bool, RemoveError> {
        let since = Instant::now();
        let mut table = self.lock();
        let Some(entry) = table.find(id) else { return Ok(false) };
        let name = entry.name.clone();
        match &entry.phase {
            Phase::Opening => return Err(RemoveError::BeingAdded { name }),
            Phase::Running(served, _) if how == Removal::Refuse => {
                if !served.stop_if_free() {
                    return Err(RemoveError::InUse { name });
                }
            }
            Phase::Running(served, _) => served.stop(),
            Phase::Ended(..) => {}
        }
        entry.is_removing = true;
        entry.waiters += 1;
        let patience = match how {
            // No request is in flight.
            Removal::Refuse => Duration::MAX,
            Removal::Drain(patience) | Removal::Force(patience) => patience,
        };
        let mut table = self.wait_for_end(table, id, since, patience, matches!(how, Removal::Force(_)));
        let Some(entry) = table.find(id) else { return Ok(true) };
        entry.waiters -= 1;
        if !matches!(entry.phase, Phase::Ended(..)) {
            return Err(RemoveError::Deadline { name, waited: since.elapsed() });
        }
        let entry = table.take(id);
        drop(table);
        if let Some(Entry { phase: Phase::Ended(served, thread, _), config, .. }) = entry {
            let _ = thread.join();
            drop(served);
            config.span().in_scope(|| info!("removed"));
        }
        Ok(true)
    }

    /// Waits until the session thread of a device has ended, or the patience is over.
    fn wait_for_end<'t>(
        &'t self,
        mut table: MutexGuard<'t, Table>,
        id: u64,
        since: Instant,
        patience: Duration,
        is_forced: bool,
    ) -> MutexGuard<'t, Table> {
        loop {
            let served = match table.find(id).map(|entry| &entry.phase) {
                Some(Phase::Running(served, _)) => served.clone(),
                _ => return table,
            };
            let left = patience.saturating_sub(since.elapsed());
            if left.is_zero() {
                return table;
            }
            if is_forced {
                drop(table);
                served.device().limit_remote_waits();
                table = self.lock();
                if !table.find(id).is_some_and(|entry| matches!(entry.phase, Phase::Running(..))) {
                    return table;
                }
            }
            drop(served);
            let wait = self.ended.wait_timeout(table, left.min(FORCE_EVERY));
            table = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
