//! The registry of a daemon. Adds and removes devices while the daemon runs.

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

/// The interval at which a forced removal calls [`Device::limit_remote_waits`] again, because a request may
/// start further remote operations after a call.
const FORCE_EVERY: Duration = Duration::from_secs(1);

/// Makes a device from its configuration. The program provides this function, because only it knows the kinds
/// of devices.
pub type MakeDevice = dyn Fn(&DeviceConfig) -> Result<Arc<dyn Device>, MakeError> + Send + Sync;

/// The result of [`Registry::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// The registry serves the new device.
    New,
    /// The registry already served a device of this name and configuration.
    Identical,
}

/// The treatment of a device that is in use when it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Does not remove the device while a front-end is connected.
    Refuse,
    /// Stops the device, and waits up to this time until its requests in flight have completed.
    Drain(Duration),
    /// Drains the device, and ends requests early that wait for a remote server. Requests that the kernel
    /// executes cannot be ended early.
    Force(Duration),
}

/// A device as [`Registry::list`] shows it.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The configuration.
    pub config: DeviceConfig,
    /// The state.
    pub state: DeviceState,
    /// The error that ended the device, as a sentence. `None` if the device has not failed.
    pub error: Option<String>,
}

/// Owns the devices of a daemon and the pool that serves them.
///
/// Each device has its own session thread and stop descriptor. A change to one device does not affect the
/// others. Any thread can call any function at any time. [`Registry::add`] and [`Registry::remove`] block
/// only their caller.
///
/// Dropping a registry stops all devices, and waits until their requests in flight have completed.
pub struct Registry {
    state: Arc<RegistryState>,
}

struct RegistryState {
    pool: OnceLock<Arc<Pool>>,
    space: Arc<AddressSpace>,
    make: Box<MakeDevice>,
    devices_max: usize,
    table: Mutex<Table>,
    /// Notified when a session thread ends, and when the entry of a device is removed.
    ended: Condvar,
    /// Signalled when devices are served, and when one ends.
    changed: Waker,
}

/// An open device that is not served yet. Pass it to [`Registry::serve`] after [`Opened::bind`]. Dropping it
/// releases its name.
pub struct Opened {
    registry: Arc<RegistryState>,
    id: u64,
    config: DeviceConfig,
    device: Option<Arc<dyn Device>>,
    socket: Option<Socket>,
}

/// The socket of an [`Opened`] device.
enum Socket {
    /// The address of a socket that is not made yet.
    Address(Address),
    /// A socket that exists.
    Endpoint(Endpoint),
}

impl Drop for Opened {
    fn drop(&mut self) {
        // The name stays in use until the socket and the device are closed.
        self.socket = None;
        self.device = None;
        let was_opening = self.registry.lock().cancel_opening(self.id);
        if was_opening {
            self.registry.notify_changed();
        }
    }
}

/// Reports the end of a session thread to the registry when it is dropped, also after a panic.
struct SessionEndReport {
    registry: Arc<RegistryState>,
    id: u64,
    outcome: Result<(), ServeError>,
}

impl Drop for SessionEndReport {
    fn drop(&mut self) {
        let outcome = std::mem::replace(&mut self.outcome, Ok(()));
        self.registry.session_ended(self.id, outcome);
    }
}

impl Registry {
    /// Makes an empty registry, which can have `devices_max` devices at a time. It calls `make` for each
    /// added device.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn new(
        devices_max: usize,
        make: impl Fn(&DeviceConfig) -> Result<Arc<dyn Device>, MakeError> + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let state = RegistryState {
            pool: OnceLock::new(),
            space: Arc::new(AddressSpace::default()),
            make: Box::new(make),
            devices_max,
            table: Mutex::default(),
            ended: Condvar::new(),
            changed: Waker::new()?,
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Sets the pool that serves the devices. Ignores all pools but the first. Devices can be opened before
    /// this call, so that a daemon starts no workers if its disks cannot be opened.
    pub fn set_pool(&self, pool: Pool) {
        let _ = self.state.pool.set(Arc::new(pool));
    }

    /// Returns the maximum number of devices. The engines of the pool must have reserves for as many.
    pub fn devices_max(&self) -> usize {
        self.state.devices_max
    }

    /// Returns the pool that serves the devices.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.state.pool.get()
    }

    /// Opens a device and serves it. Replaces a device of the same name that has ended.
    ///
    /// # Errors
    /// The device cannot be opened or served, or its name or its socket is in use. The registry has not
    /// changed then, but the ended device that it would have replaced is closed.
    pub fn add(&self, config: DeviceConfig) -> Result<Added, AddError> {
        let Some(mut opened) = self.open(config, None)? else { return Ok(Added::Identical) };
        opened.bind(Instant::now() + TURN_WAIT)?;
        self.serve(vec![opened])?;
        Ok(Added::New)
    }

    /// Opens a device. Its front-ends come from `endpoint`, or connect to the socket path in its
    /// configuration. Returns `None` if an identical device is already served.
    ///
    /// # Errors
    /// The same as those of [`Registry::add`].
    pub fn open(&self, config: DeviceConfig, endpoint: Option<Endpoint>) -> Result<Option<Opened>, AddError> {
        config.check(Notation::Keys).map_err(AddError::Mistake)?;
        let registry = self.state.clone();
        let is_inherited = endpoint.is_some();
        let socket = config.serve.socket_path.as_deref().filter(|_| !is_inherited).map(real_path);
        let reserved = registry.lock().reserve(&config, socket, is_inherited, registry.devices_max)?;
        let Some(Reserved { id, replaced }) = reserved else { return Ok(None) };
        let mut opened = Opened { registry, id, config, device: None, socket: None };
        // Close the ended device first, so that the new one can use its disk and its reserves.
        if let Some(replaced) = replaced {
            replaced.close();
        }
        opened.make_device(endpoint)?;
        Ok(Some(opened))
    }

    /// Serves either all of these devices or, after an error, none.
    ///
    /// # Errors
    /// A thread cannot be started, a device has no socket yet, or the registry has no pool.
    pub fn serve(&self, opened: Vec<Opened>) -> Result<(), AddError> {
        let pool = self.pool().ok_or(AddError::NoPool)?;
        let mut ready = Vec::with_capacity(opened.len());
        for mut opened in opened {
            let (Some(device), Some(Socket::Endpoint(endpoint))) =
                (opened.device.take(), opened.socket.take())
            else {
                return Err(AddError::NoSocket);
            };
            let served = Served::new(opened.config.clone(), device, pool, &self.state.space);
            // An error drops these in this order, so that the name is released last.
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
            if let Err(error) = self.state.start(opened.id, served, endpoint) {
                started.into_iter().for_each(|id| drop(self.state.remove(id, Removal::Drain(Duration::MAX))));
                return Err(error);
            }
            started.push(opened.id);
        }
        self.state.changed.wake();
        Ok(())
    }

    /// Stops and closes a device. Returns `true` when the name and the socket of the device are free, and
    /// `false` if there was no such device.
    ///
    /// # Errors
    /// A front-end is connected and `how` is [`Removal::Refuse`], requests are still in flight at the
    /// deadline, or another caller is adding the device.
    pub fn remove(&self, name: &str, how: Removal) -> Result<bool, RemoveError> {
        let found = self.state.lock().entries.iter().find(|entry| entry.name == name).map(|entry| entry.id);
        match found {
            Some(id) => self.state.remove(id, how),
            None => Ok(false),
        }
    }

    /// Returns the configuration and the state of each device, in the order in which they were added.
    pub fn list(&self) -> Vec<Listed> {
        let table = self.state.lock();
        table
            .entries
            .iter()
            .map(|entry| Listed { config: entry.config.clone(), state: entry.state(), error: entry.error() })
            .collect()
    }

    /// Returns the open devices. Some of them may have ended.
    pub fn devices(&self) -> Vec<Arc<Served>> {
        self.state.lock().entries.iter().filter_map(|entry| entry.served().cloned()).collect()
    }

    /// Returns a descriptor that is readable when devices were added or have ended, until
    /// [`Registry::take_changed`].
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.state.changed.as_fd()
    }

    /// Returns whether devices were added or have ended since the last call.
    pub fn take_changed(&self) -> bool {
        self.state.changed.clear()
    }

    /// Returns whether no device is served, being opened or being closed. Ignores devices that are being
    /// opened after [`Registry::stop`], because they will not be served.
    pub fn is_idle(&self) -> bool {
        self.state.lock().is_idle()
    }

    /// Stops all devices and refuses new ones. Returns immediately; [`Registry::is_idle`] tells when all have
    /// stopped.
    pub fn stop(&self) {
        let mut table = self.state.lock();
        table.is_stopping = true;
        table.entries.iter().filter_map(Entry::served).for_each(|served| served.stop());
        drop(table);
        self.state.changed.wake();
    }

    /// Closes and removes the devices that have ended. Returns the configuration and the error of each that
    /// failed.
    pub fn take_ended(&self) -> Vec<(DeviceConfig, ServeError)> {
        let ended = self.state.lock().close_ended();
        let mut failed = Vec::new();
        for ClosedEntry { id, config, running, outcome } in ended {
            if let Some(running) = running {
                running.close();
            }
            self.state.remove_entry(id);
            failed.extend(outcome.err().map(|error| (config, error)));
        }
        failed
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.stop();
        let mut table = self.state.lock();
        while !table.is_idle() {
            table = self.state.ended.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        drop(table);
        self.take_ended();
    }
}

impl Opened {
    /// Makes the socket of the device, so that front-ends can connect. Waits until `deadline` for other
    /// processes that make sockets in the same directory. A caller that binds several devices waits
    /// [`TURN_WAIT`] for all of them together.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(&mut self, deadline: Instant) -> Result<(), AddError> {
        if let Some(Socket::Address(address)) = &self.socket {
            self.socket = Some(Socket::Endpoint(address.bind(deadline)?));
        }
        Ok(())
    }

    /// Returns the configuration of the device.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Checks the address of the socket, and makes the device.
    fn make_device(&mut self, endpoint: Option<Endpoint>) -> Result<(), AddError> {
        let (config, serve) = (&self.config, &self.config.serve);
        self.socket = Some(match (endpoint, &serve.socket_path) {
            (Some(endpoint), _) => Socket::Endpoint(endpoint),
            (None, Some(path)) => {
                Socket::Address(Address::new(path, serve.socket_mode, serve.socket_group.as_deref())?)
            }
            (None, None) => return Err(AddError::NoSocket),
        });
        self.device = Some(config.span().in_scope(|| (self.registry.make)(config))?);
        Ok(())
    }
}

impl RegistryState {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the callers that wait for the end of a device, and the main thread of the daemon.
    fn notify_changed(&self) {
        self.ended.notify_all();
        self.changed.wake();
    }

    /// Removes the entry of a closed device, which releases its name.
    fn remove_entry(&self, id: u64) {
        let entry = self.lock().remove_entry(id);
        drop(entry);
        self.notify_changed();
    }

    /// Starts the session thread of a device.
    fn start(self: &Arc<Self>, id: u64, served: Arc<Served>, endpoint: Endpoint) -> Result<(), AddError> {
        let name = served.config().name().unwrap_or("session").to_owned();
        let (registry, thread_served) = (self.clone(), served.clone());
        let (start, started) = sync_channel(1);
        // Spawn without the lock: if the thread cannot be started, this drops the socket.
        let thread = thread::Builder::new().name(name).spawn(move || {
            // The thread reports its end to its entry, so it waits until the entry has it.
            if started.recv().is_err() {
                return;
            }
            let mut report = SessionEndReport { registry, id, outcome: Err(ServeError::Panicked) };
            report.outcome = thread_served.config().span().in_scope(|| thread_served.run(endpoint));
            drop(thread_served);
        });
        let running = Running { served, thread: thread.map_err(AddError::Thread)? };
        let refused = self.lock().set_running(id, running);
        match refused {
            None => {
                // The send succeeds, because the thread waits for it.
                let _ = start.send(());
                Ok(())
            }
            Some(running) => {
                drop(start);
                running.close();
                Err(AddError::Stopping)
            }
        }
    }

    /// Records the end of the calling session thread. Closes the device if it is being removed and no caller
    /// waits for its end.
    fn session_ended(&self, id: u64, outcome: Result<(), ServeError>) {
        let closing = self.lock().set_ended(id, outcome);
        match closing {
            Some(Running { served, thread: _ }) => {
                drop(served);
                self.remove_entry(id);
            }
            None => self.notify_changed(),
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
        let timeout = match how {
            // Without a front-end, no request is in flight, so the wait is short.
            Removal::Refuse => Duration::MAX,
            Removal::Drain(timeout) | Removal::Force(timeout) => timeout,
        };
        let mut table = self.wait_for_end(table, id, since, timeout, matches!(how, Removal::Force(_)));
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
        self.remove_entry(id);
        Ok(true)
    }

    /// Waits until the session thread of a device has ended, its entry is removed, or `timeout` has passed.
    /// The first of several callers then closes the device, and the others wait until its entry is removed.
    fn wait_for_end<'t>(
        &'t self,
        mut table: MutexGuard<'t, Table>,
        id: u64,
        since: Instant,
        timeout: Duration,
        is_forced: bool,
    ) -> MutexGuard<'t, Table> {
        let mut force_at = is_forced.then_some(since);
        loop {
            let left = timeout.saturating_sub(since.elapsed());
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
            // Drop this without the lock: it can be the last reference, and closing a device can take long.
            drop(served);
            table = self.lock();
        }
    }
}
