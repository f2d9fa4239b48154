//! The devices of a daemon, which come and go while it runs.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
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
use super::table::{ClosedEntry, DeviceState, Entry, Phase, Reserved, Running, Table};

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

/// A device as [`Registry::list`] shows it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The configuration.
    pub config: DeviceConfig,
    /// The state.
    pub state: DeviceState,
    /// The reason why it ended, as a sentence; `None`: it did not fail.
    pub error: Option<String>,
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
    /// Notified when a session thread has ended, and when a device is gone.
    ended: Condvar,
    /// Signalled when a device has come, or one has ended.
    changed: Waker,
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
        // The name is in use until its socket and its device are gone.
        self.origin = None;
        self.device = None;
        let was_opening = self.shared.lock().give_up(self.id);
        if was_opening {
            self.shared.has_changed();
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

    /// Returns the number of devices that there can be at a time. The engines of the pool have reserves for as many.
    pub fn devices_max(&self) -> usize {
        self.shared.devices_max
    }

    /// Returns the pool that serves the devices.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.shared.pool.get()
    }

    /// Opens a device and serves it. It replaces a device of its name that is not served any longer.
    ///
    /// # Errors
    /// It cannot be opened or served, or its name or its socket is in use. Nothing has changed then, but that a device that it
    /// would have replaced is closed.
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
        let is_inherited = endpoint.is_some();
        let socket = config.serve.socket_path.as_deref().filter(|_| !is_inherited).map(real_path);
        let reserved = shared.lock().reserve(&config, socket, is_inherited, shared.devices_max)?;
        let Some(Reserved { id, replaced }) = reserved else { return Ok(None) };
        let mut opened = Opened { shared, id, config, device: None, origin: None };
        // A device that is not served any longer makes room for its successor.
        if let Some(replaced) = replaced {
            replaced.close();
        }
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
            // In this order they are dropped: the name is given back last.
            ready.push((endpoint, Arc::new(served.map_err(AddError::Thread)?), opened));
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
        for (endpoint, served, opened) in ready {
            if let Err(error) = self.shared.start(opened.id, served, endpoint) {
                started
                    .into_iter()
                    .for_each(|id| drop(self.shared.remove(id, Removal::Drain(Duration::MAX))));
                return Err(error);
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
            .map(|entry| Listed { config: entry.config.clone(), state: entry.state(), error: entry.error() })
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

    /// Returns whether no device is served, being closed, or being opened. After [`Registry::stop`] a device that is being
    /// opened does not count: it is not served when it is open.
    pub fn is_idle(&self) -> bool {
        self.shared.lock().is_idle()
    }

    /// Stops all devices, and lets none come any more. Returns at once; [`Registry::is_idle`] tells when they have stopped.
    pub fn stop(&self) {
        let mut table = self.shared.lock();
        table.is_stopping = true;
        table.entries.iter().filter_map(Entry::served).for_each(|served| served.stop());
        drop(table);
        self.shared.changed.wake();
    }

    /// Forgets the devices that are not served any longer; returns the error of each that failed, with its configuration.
    pub fn take_ended(&self) -> Vec<(DeviceConfig, ServeError)> {
        let ended = self.shared.lock().close_ended();
        let mut failed = Vec::new();
        for ClosedEntry { id, config, running, outcome } in ended {
            if let Some(running) = running {
                running.close();
            }
            self.shared.forget(id);
            failed.extend(outcome.err().map(|error| (config, error)));
        }
        failed
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.stop();
        let mut table = self.shared.lock();
        while !table.is_idle() {
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

    /// Tells those who wait, and the daemon, that the table has changed.
    fn has_changed(&self) {
        self.ended.notify_all();
        self.changed.wake();
    }

    /// Gives the name of a device back that is closed.
    fn forget(&self, id: u64) {
        let entry = self.lock().take(id);
        drop(entry);
        self.has_changed();
    }

    /// Starts the session thread of a device.
    fn start(self: &Arc<Self>, id: u64, served: Arc<Served>, endpoint: Endpoint) -> Result<(), AddError> {
        let name = served.config().name().unwrap_or("session").to_owned();
        let (shared, of_thread) = (self.clone(), served.clone());
        let (begin, begins) = sync_channel(1);
        // A thread that cannot be started drops the socket, so this is not under the lock.
        let thread = thread::Builder::new().name(name).spawn(move || {
            // It reports its end to the table, so it begins when it is in there.
            if begins.recv().is_err() {
                return;
            }
            let mut report = Report { shared, id, outcome: Err(ServeError::Panicked) };
            report.outcome = of_thread.config().span().in_scope(|| of_thread.run(endpoint));
            drop(of_thread);
        });
        let running = Running { served, thread: thread.map_err(AddError::Thread)? };
        let refused = self.lock().begin(id, running);
        match refused {
            None => {
                // The thread waits for it.
                let _ = begin.send(());
                Ok(())
            }
            Some(running) => {
                drop(begin);
                running.close();
                Err(AddError::Stopping)
            }
        }
    }

    /// Takes note that a session thread, this one, has ended. Closes the device if it is to be removed and no caller waits
    /// for that.
    fn has_ended(&self, id: u64, outcome: Result<(), ServeError>) {
        let closing = self.lock().end(id, outcome);
        match closing {
            Some(Running { served, thread: _ }) => {
                drop(served);
                self.forget(id);
            }
            None => self.has_changed(),
        }
    }

    fn remove(&self, id: u64, how: Removal) -> Result<bool, RemoveError> {
        let since = Instant::now();
        let mut table = self.lock();
        let Some(entry) = table.find(id) else { return Ok(false) };
        let name = entry.name.clone();
        match &entry.phase {
            Phase::Opening(_) => return Err(RemoveError::BeingAdded { name }),
            Phase::Running(running) if how == Removal::Refuse => {
                if !running.served.stop_if_free() {
                    return Err(RemoveError::InUse { name });
                }
            }
            Phase::Running(running) => running.served.stop(),
            Phase::Ended(..) | Phase::Closing => {}
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
        let closing = entry.close();
        drop(table);
        let Some(ClosedEntry { config, running, .. }) = closing else {
            return Err(RemoveError::Deadline { name, waited: since.elapsed() });
        };
        if let Some(running) = running {
            running.close();
        }
        config.span().in_scope(|| info!("removed"));
        self.forget(id);
        Ok(true)
    }

    /// Waits until the session thread of a device has ended or the device is gone, or the patience is over. Of several
    /// callers the first closes the device, and the others wait until it is gone.
    fn wait_for_end<'t>(
        &'t self,
        mut table: MutexGuard<'t, Table>,
        id: u64,
        since: Instant,
        patience: Duration,
        is_forced: bool,
    ) -> MutexGuard<'t, Table> {
        let mut force_at = is_forced.then_some(since);
        loop {
            let left = patience.saturating_sub(since.elapsed());
            let served = match table.find(id).map(|entry| &entry.phase) {
                None | Some(Phase::Ended(..)) => return table,
                Some(_) if left.is_zero() => return table,
                Some(Phase::Running(running)) if force_at.is_some_and(|at| at <= Instant::now()) => {
                    running.served.clone()
                }
                Some(_) => {
                    let wait = self.ended.wait_timeout(table, left.min(FORCE_EVERY));
                    table = wait.unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            };
            force_at = Some(Instant::now() + FORCE_EVERY);
            drop(table);
            served.device().limit_remote_waits();
            // This can be the last reference, and to close a device takes long: not under the lock.
            drop(served);
            table = self.lock();
        }
    }
}
