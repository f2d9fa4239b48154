//! The registry of a daemon. Adds and removes devices while the daemon runs.

mod changes;
mod groups;
mod leaving;
mod sockets;

use groups::Groups;
pub use leaving::Removal;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kickless_device::{Handed, Operate};
use kickless_memory::quota::{AddressSpace, files_max};
use kickless_opener::{
    Address, Descriptors, Entry, SocketError, TURN_WAIT, descriptor_name, enter, real_path,
};
use kickless_sync::lock;
use kickless_worker::{WorkerPool, WorkerTimes};
use serde::Deserialize;
use tracing::{Span, error, info, warn};

use super::config::{DeviceConfig, Kinds, Making, Notation, PoolConfig};
use super::device_status::{DeviceState, DeviceStatus, state};
use super::error::{AddError, FindError, RemoveError, ServeError};
use super::freeze::{BeingUpgraded, Change, Changes, Freeze, FreezeError};
use super::lifecycle::Lifecycle;
use super::sentence::sentence;
use super::served_device::{DeviceRef, ServedDevice};
use super::socket::{Endpoint, PassedListener};
use super::table::{Entry as TableEntry, Wanted};
use super::unavailable::Unavailable;

/// The result of [`Registry::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddOutcome {
    /// The registry serves the new device.
    New,
    /// The registry already served a device of this name and configuration.
    Identical,
}

/// The treatment of a device that is in use when it is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemoveMode {
    /// Does not remove the device while a front-end is connected.
    #[default]
    Refuse,
    /// Stops the device. Its requests in flight complete.
    Drain,
    /// Stops the device, and ends requests early that wait for a remote server. Requests that the kernel
    /// executes cannot be ended early.
    Force,
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
    pool: OnceLock<Arc<WorkerPool>>,
    space: Arc<AddressSpace>,
    kinds: Kinds,
    groups: Groups,
    /// The descriptors that the program inherited for devices, by their numbers.
    inherited: Descriptors,
    devices_max: usize,
    devices: Arc<Lifecycle<ServedDevice>>,
    unavailable: Unavailable,
    changes: Changes,
    /// The sockets that the service manager has passed, by the names of their devices.
    passed: Mutex<BTreeMap<String, PassedListener>>,
    /// The number of processes that have passed these devices on.
    upgrades: AtomicU64,
    /// The configuration of the pool. Its polling rule changes at run time.
    pool_config: Mutex<PoolConfig>,
}

/// An open device that is not served yet. Pass it to [`Registry::serve`] after [`OpenDevice::bind`]. Dropping
/// it releases its name.
pub struct OpenDevice {
    registry: Arc<RegistryState>,
    id: u64,
    config: DeviceConfig,
    device: Option<Arc<dyn Operate>>,
    socket: Option<Socket>,
    /// The right to use the things of the host that the device needs.
    entry: Entry,
}

/// The socket of an [`OpenDevice`].
enum Socket {
    /// The address of a socket that is not made yet.
    Address(Address),
    /// A socket that exists.
    Endpoint(Endpoint),
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        // The name stays in use until the socket and the device are closed. Both need the entry.
        self.socket = None;
        self.device = None;
        drop(mem::take(&mut self.entry));
        self.registry.devices.cancel_opening(self.id);
    }
}

/// A session thread that waits for permission to serve its device.
pub(crate) struct Prepared {
    /// Permits the thread to serve front-ends of this endpoint.
    start: SyncSender<Endpoint>,
    thread: JoinHandle<()>,
    served: Arc<ServedDevice>,
    /// Has the name until the device is served. Dropped last.
    opened: OpenDevice,
}

impl Prepared {
    /// Returns the device.
    pub(crate) fn served(&self) -> &ServedDevice {
        &self.served
    }

    /// Ends the thread, and closes the device. Returns what has the name.
    pub(crate) fn cancel(self) -> OpenDevice {
        let Self { start, thread, served, opened } = self;
        drop(start);
        // Without permission, the thread does not panic.
        let _ = thread.join();
        drop(served);
        opened
    }
}

impl Registry {
    /// Makes an empty registry, which can have `devices_max` devices of these kinds at a time.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn new(devices_max: usize, kinds: Kinds) -> std::io::Result<Self> {
        Self::with_inherited(devices_max, kinds, Descriptors::default())
    }

    /// Makes an empty registry, as [`Registry::new`] does. Devices can use these inherited descriptors, which
    /// have their numbers as names.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn with_inherited(devices_max: usize, kinds: Kinds, inherited: Descriptors) -> std::io::Result<Self> {
        let state = RegistryState {
            pool: OnceLock::new(),
            space: Arc::new(AddressSpace::default().with_files(files_max(devices_max))),
            kinds,
            groups: Groups::default(),
            inherited,
            devices_max,
            devices: Arc::new(Lifecycle::new()?),
            unavailable: Unavailable::default(),
            changes: Changes::default(),
            passed: Mutex::default(),
            upgrades: AtomicU64::default(),
            pool_config: Mutex::default(),
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Sets the pool that serves the devices. Ignores all pools but the first. Devices can be opened before
    /// this call, so that a daemon starts no workers if its disks cannot be opened.
    pub fn set_pool(&self, pool: WorkerPool) {
        let _ = self.state.pool.set(Arc::new(pool));
    }

    /// Returns the number of upgrades since a process opened the devices itself.
    pub fn upgrades(&self) -> u64 {
        self.state.upgrades.load(Ordering::Relaxed)
    }

    /// Notes the number of upgrades, this process's own included.
    pub(crate) fn set_upgrades(&self, count: u64) {
        self.state.upgrades.store(count, Ordering::Relaxed);
    }

    /// Begins a change of devices or of the pool. Each caller of a function that adds, removes or changes one
    /// does so first.
    ///
    /// # Errors
    /// The devices pass to another process.
    pub fn begin_change(&self) -> Result<Change<'_>, BeingUpgraded> {
        self.state.changes.begin()
    }

    /// Refuses changes from now on. Waits up to `deadline` for those that go on.
    ///
    /// # Errors
    /// A change goes on for longer, or another caller has frozen the devices.
    pub(crate) fn freeze(&self, deadline: Instant) -> Result<Freeze<'_>, FreezeError> {
        self.state.changes.freeze(deadline)
    }

    /// Returns the kinds of devices.
    pub fn kinds(&self) -> &Kinds {
        &self.state.kinds
    }

    /// Returns the maximum number of devices. The engines of the pool must have reserves for as many.
    pub fn devices_max(&self) -> usize {
        self.state.devices_max
    }

    /// Returns the pool that serves the devices.
    pub fn pool(&self) -> Option<&Arc<WorkerPool>> {
        self.state.pool.get()
    }

    /// Returns the configuration of the pool.
    pub fn pool_config(&self) -> PoolConfig {
        lock(&self.state.pool_config).clone()
    }

    /// Returns the time in nanoseconds on the clock of the pool, and the times of each worker.
    pub fn worker_times(&self) -> (u64, Vec<WorkerTimes>) {
        self.pool().map_or_else(Default::default, |pool| (pool.clock().now(), pool.times()))
    }

    /// Records the configuration that the pool was started with.
    pub fn set_pool_config(&self, config: PoolConfig) {
        *lock(&self.state.pool_config) = config;
    }

    /// Adds a device as [`Registry::add`] does. If it cannot be opened, lists it as
    /// [`DeviceState::Unavailable`], and tries it again at intervals until it is served or removed. Returns
    /// the result of the first try.
    ///
    /// # Errors
    /// Returns those of [`Registry::add`]. The device is tried again only if it could not be opened
    /// ([`AddError::Make`]).
    pub fn add_when_available(self: &Arc<Self>, config: DeviceConfig) -> Result<AddOutcome, AddError> {
        let added = self.add(config.clone());
        if let Err(error @ AddError::Make(_)) = &added {
            self.add_unavailable(config, error);
        }
        added
    }

    /// Lists a device that could not be opened, and tries it again at intervals until it is served or
    /// removed.
    pub fn add_unavailable(self: &Arc<Self>, config: DeviceConfig, error: &AddError) {
        self.list_unavailable(config, error.sentence());
    }

    /// Lists a device that could not be opened for the reason `error`.
    pub(crate) fn list_unavailable(self: &Arc<Self>, config: DeviceConfig, error: String) {
        let span = config.span();
        span.in_scope(|| warn!(error, "the device is unavailable, and is tried again"));
        let Some(id) = self.state.unavailable.insert(config, error) else { return };
        let registry = Arc::downgrade(self);
        let state = self.state.clone();
        let retry = move || {
            while let Some(config) = state.unavailable.wait_until_due(id) {
                let Some(registry) = registry.upgrade() else { return };
                let Ok(_change) = registry.begin_change() else {
                    // Tried again after the next interval, if this process goes on.
                    state.unavailable.not_tried(id);
                    continue;
                };
                let error = registry.add_now(config, &Descriptors::default()).err();
                let error = error.map(|error| error.sentence());
                state.unavailable.tried(id, error);
            }
        };
        if let Err(error) = thread::Builder::new().name("retry".into()).spawn(retry) {
            self.state.unavailable.tried(id, None);
            span.in_scope(|| warn!(%error, "the device cannot be tried again: add it when it is available"));
        }
    }

    /// Opens a device and serves it. Replaces a device of the same name that has ended, after that one is
    /// closed.
    ///
    /// # Errors
    /// The device cannot be opened or served, or its name or its socket is in use. The registry has not
    /// changed then, but the ended device that it would have replaced is closed.
    pub fn add(&self, config: DeviceConfig) -> Result<AddOutcome, AddError> {
        self.add_given(config, &Descriptors::default())
    }

    /// Adds a device as [`Registry::add`] does. The paths `fd:NAME` in its configuration stand for these
    /// descriptors, of which the device gets duplicates.
    ///
    /// # Errors
    /// The same as those of [`Registry::add`], and a descriptor is missing or of the wrong kind.
    pub fn add_given(&self, config: DeviceConfig, given: &Descriptors) -> Result<AddOutcome, AddError> {
        let name = config.name().unwrap_or_default().to_owned();
        let unavailable = &self.state.unavailable;
        if unavailable.find(&name).is_some_and(|known| known != config) {
            return Err(AddError::Different { name });
        }
        let added = self.add_now(config, given)?;
        // It is served now. Its thread finds that out, if it is just being tried.
        unavailable.remove(&name, Duration::ZERO);
        Ok(added)
    }

    fn add_now(&self, config: DeviceConfig, given: &Descriptors) -> Result<AddOutcome, AddError> {
        let socket = config.serve.socket_path.as_deref();
        let endpoint = match socket.and_then(|path| Some((path, descriptor_name(path)?))) {
            None => None,
            Some((path, name)) => {
                let endpoint = Endpoint::given(given.duplicate(name)?);
                Some(endpoint.map_err(|problem| SocketError::of(path, problem))?)
            }
        };
        let Some(mut opened) = self.open_given(config, endpoint, given)? else {
            return Ok(AddOutcome::Identical);
        };
        opened.bind(Instant::now() + TURN_WAIT)?;
        self.serve(vec![opened])?;
        Ok(AddOutcome::New)
    }

    /// Opens a device. Its front-ends come from `endpoint`, or connect to the socket path in its
    /// configuration. Returns `None` if an identical device is already served.
    ///
    /// # Errors
    /// The same as those of [`Registry::add`].
    pub fn open(
        &self,
        config: DeviceConfig,
        endpoint: Option<Endpoint>,
    ) -> Result<Option<OpenDevice>, AddError> {
        self.open_given(config, endpoint, &Descriptors::default())
    }

    fn open_given(
        &self,
        config: DeviceConfig,
        endpoint: Option<Endpoint>,
        given: &Descriptors,
    ) -> Result<Option<OpenDevice>, AddError> {
        config.check(Notation::Keys).map_err(AddError::Mistake)?;
        let registry = self.state.clone();
        let entry = enter(&config.grants())?;
        let passed =
            if endpoint.is_none() { self.passed_socket(&config).map_err(AddError::Thread)? } else { None };
        let is_inherited = endpoint.is_some() || !config.descriptors().is_empty();
        // A passed socket has a name that a file can have, so the device can be compared with that of a file.
        let endpoint = endpoint.or_else(|| passed.map(PassedListener::into_endpoint));
        let socket = match &endpoint {
            Some(endpoint) => endpoint.identity(),
            None => config.serve.socket_path.as_deref().map(real_path),
        };
        let wanted = Wanted {
            config: &config,
            socket: socket.as_deref(),
            is_inherited,
            devices_max: registry.devices_max,
        };
        let Some(id) = registry.devices.reserve(&wanted)? else { return Ok(None) };
        let mut opened = OpenDevice { registry, id, config, device: None, socket: None, entry };
        opened.make_device(endpoint, given)?;
        Ok(Some(opened))
    }

    /// Serves either all of these devices or, after an error, none.
    ///
    /// # Errors
    /// A thread cannot be started, a device has no socket yet, or the registry has no pool.
    pub fn serve(&self, opened: Vec<OpenDevice>) -> Result<(), AddError> {
        let pool = self.pool().ok_or(AddError::NoPool)?;
        let mut ready = Vec::with_capacity(opened.len());
        for mut opened in opened {
            let (Some(device), Some(Socket::Endpoint(endpoint))) =
                (opened.device.take(), opened.socket.take())
            else {
                return Err(AddError::NoSocket);
            };
            let served = self.state.served_device(pool, device, &mut opened)?;
            let served = match &endpoint {
                Endpoint::Listening(listener) => {
                    served.with_listener(PassedListener::of(listener).map_err(AddError::Thread)?)
                }
                Endpoint::Connected(_) | Endpoint::Restored => served,
            };
            // An error drops these in this order, so that the name is released last.
            ready.push((endpoint, Arc::new(served), opened));
        }
        for (endpoint, served, _) in &ready {
            let config = served.config();
            config.span().in_scope(|| config.kind.log_served(&served.for_log(endpoint)));
        }
        let mut prepared = Vec::with_capacity(ready.len());
        for (endpoint, served, opened) in ready {
            match self.state.prepare(opened, served) {
                Ok(thread) => prepared.push((endpoint, thread)),
                Err(error) => {
                    cancel(prepared);
                    return Err(error);
                }
            }
        }
        self.state.begin(prepared).map_err(|prepared| {
            cancel(prepared);
            AddError::Stopping
        })
    }

    /// Reserves the name of a device that another process serves, and takes the rights that it needs.
    /// `is_inherited` says that its front-ends, or what is behind it, come from descriptors.
    ///
    /// # Errors
    /// As for [`Registry::add`].
    pub(crate) fn reserve(&self, config: DeviceConfig, is_inherited: bool) -> Result<OpenDevice, AddError> {
        let registry = self.state.clone();
        let entry = enter(&config.grants())?;
        let path = config.serve.socket_path.as_deref();
        let passed = self.passed_socket(&config).map_err(AddError::Thread)?;
        let socket = match passed.map(PassedListener::into_endpoint) {
            Some(endpoint) => endpoint.identity(),
            None => path.filter(|path| descriptor_name(path).is_none()).map(real_path),
        };
        let (socket, devices_max) = (socket.as_deref(), registry.devices_max);
        let wanted = Wanted { config: &config, socket, is_inherited, devices_max };
        let name = || config.name().unwrap_or_default().to_owned();
        let id = registry.devices.reserve(&wanted)?.ok_or_else(|| AddError::Different { name: name() })?;
        Ok(OpenDevice { registry, id, config, device: None, socket: None, entry })
    }

    /// Puts a device that another process has given behind a server.
    ///
    /// # Errors
    /// The process has no free descriptor, or the registry has no pool.
    pub(crate) fn served_device(&self, opened: &mut OpenDevice) -> Result<ServedDevice, AddError> {
        let device = opened.device.take().ok_or(AddError::NoSocket)?;
        self.state.served_device(self.pool().ok_or(AddError::NoPool)?, device, opened)
    }

    /// Starts the session thread of a device that another process has given.
    ///
    /// # Errors
    /// The process has no free thread.
    pub(crate) fn prepare_handed(
        &self,
        opened: OpenDevice,
        served: ServedDevice,
    ) -> Result<Prepared, AddError> {
        self.state.prepare(opened, Arc::new(served))
    }

    /// Serves devices that another process has given. A registry that is being stopped stops them too.
    pub(crate) fn begin_handed(&self, prepared: Vec<(Prepared, Endpoint)>) {
        let prepared = prepared.into_iter().map(|(prepared, endpoint)| (endpoint, prepared)).collect();
        if let Err(prepared) = self.state.begin(prepared) {
            cancel(prepared);
        }
    }

    /// Returns a reference to a served device.
    pub(crate) fn served(&self, name: &str) -> Result<DeviceRef, FindError> {
        let devices = &self.state.devices;
        let id = {
            let table = devices.lock();
            let found = table.entries.iter().find(|entry| entry.name == name).map(|entry| entry.id);
            found.ok_or_else(|| FindError::no_device(name, table.names()))?
        };
        let reference = devices.reference(id).map(DeviceRef);
        reference.ok_or_else(|| FindError::NotServed { name: name.into() })
    }

    /// Stops and closes a device. Waits up to `timeout` until it is closed. Returns `true` when the name and
    /// the socket of the device are free and no thread uses its disk, and `false` if there was no such
    /// device.
    ///
    /// # Errors
    /// A front-end is connected and `how` is [`RemoveMode::Refuse`], another caller is adding the device, or
    /// the device is not closed in time. In the last case, the device is still removed later.
    pub fn remove(&self, name: &str, how: RemoveMode, timeout: Duration) -> Result<bool, RemoveError> {
        let stop = |served: &ServedDevice| match how {
            RemoveMode::Refuse => served.stop_if_free(),
            RemoveMode::Drain | RemoveMode::Force => {
                served.stop();
                true
            }
        };
        // Repeated, because a request may start further remote operations after a call.
        let force: Option<fn(&ServedDevice)> =
            (how == RemoveMode::Force).then_some(|served| served.device().limit_remote_waits());
        self.remove_by(name, stop, timeout, force)
    }

    /// Removes a device that `stop` stops. `stop` returns whether it did.
    fn remove_by(
        &self,
        name: &str,
        stop: impl FnOnce(&ServedDevice) -> bool,
        timeout: Duration,
        force: Option<fn(&ServedDevice)>,
    ) -> Result<bool, RemoveError> {
        let devices = &self.state.devices;
        match self.state.unavailable.remove(name, timeout) {
            Some(true) => return Ok(true),
            Some(false) => {}
            None => return Err(RemoveError::BeingAdded { name: name.to_owned() }),
        }
        let found = devices
            .lock()
            .entries
            .iter()
            .find(|entry| entry.name == name)
            .map(|entry| (entry.id, entry.config.span()));
        let Some((id, span)) = found else { return Ok(false) };
        self.close_again(id, &span);
        let removed = devices.remove(id, timeout, stop, force)?;
        if removed {
            span.in_scope(|| info!("removed"));
        }
        Ok(removed)
    }

    /// Tries once more to close a device that has ended and keeps its disk.
    fn close_again(&self, id: u64, span: &Span) {
        let devices = &self.state.devices;
        let keeps_disk = devices.lock().find(id).is_some_and(|entry| entry.keeps_disk().is_some());
        let Some(served) = keeps_disk.then(|| devices.reference(id)).flatten() else { return };
        span.in_scope(|| match served.device().close() {
            Ok(()) => info!("all writes have reached the disk now"),
            Err(error) => error!(%error, "the device is removed, and its disk given up all the same"),
        });
    }

    /// Returns the configuration and the state of each device, in the order in which they were added. Devices
    /// that cannot be opened yet come last.
    pub fn list(&self) -> Vec<DeviceStatus> {
        let unavailable = self.state.unavailable.all().into_iter().map(|(config, error)| DeviceStatus {
            config,
            state: DeviceState::Unavailable,
            error: Some(error),
            is_inherited: false,
            is_leaving: false,
        });
        let table = self.state.devices.lock();
        let served = table.entries.iter().map(|entry| {
            let ended = entry.outcome().and_then(|outcome| outcome.as_ref().err());
            let (state, stopped) = state(entry);
            DeviceStatus {
                config: entry.config.clone(),
                state,
                error: ended.map(|error| sentence(error)).or(stopped),
                is_inherited: entry.is_inherited,
                is_leaving: entry.device().is_some_and(|device| device.is_leaving()),
            }
        });
        let served: Vec<_> = served.collect();
        drop(table);
        // A device that is being tried may be in the table too.
        let is_served = |name: Option<&str>| served.iter().any(|status| status.config.name() == name);
        let unavailable: Vec<_> = unavailable.filter(|status| !is_served(status.config.name())).collect();
        served.into_iter().chain(unavailable).collect()
    }

    /// Returns the number of devices that are served, and of those that cannot be opened yet.
    pub fn counts(&self) -> (usize, usize) {
        let unavailable = self.state.unavailable.all().len();
        let table = self.state.devices.lock();
        let is_served = |entry: &&TableEntry<_>| entry.device().is_some() && entry.outcome().is_none();
        (table.entries.iter().filter(is_served).count(), unavailable)
    }

    /// Returns references to the open devices, one at a time. Some of the devices may have ended.
    ///
    /// A device whose turn comes after its removal has begun is left out.
    pub fn devices(&self) -> impl Iterator<Item = DeviceRef> + use<'_> {
        let devices = &self.state.devices;
        let ids: Vec<u64> = devices.lock().entries.iter().map(|entry| entry.id).collect();
        ids.into_iter().filter_map(|id| devices.reference(id).map(DeviceRef))
    }

    /// Returns a descriptor that is readable when devices were added or have ended, until
    /// [`Registry::take_changed`].
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.state.devices.signal().as_fd()
    }

    /// Returns whether devices were added or have ended since the last call.
    pub fn take_changed(&self) -> bool {
        self.state.devices.signal().clear()
    }

    /// Returns whether no device is served, being opened, being tried or being closed. Ignores devices that
    /// are being opened after [`Registry::stop`], because they will not be served. Ignores also devices that
    /// cannot be closed, because a thread still uses them: a call on their disk may never return.
    pub fn is_idle(&self) -> bool {
        self.state.unavailable.is_empty() && self.state.devices.lock().is_idle()
    }

    /// Stops all devices and refuses new ones. Returns immediately; [`Registry::is_idle`] tells when all have
    /// stopped.
    pub fn stop(&self) {
        self.state.unavailable.clear();
        self.state.devices.stop(ServedDevice::stop);
    }

    /// Closes and removes the devices that have ended. Does not wait for those that a thread still uses;
    /// these are removed later. Returns the configuration and the error of each that failed.
    pub fn take_ended(&self) -> Vec<(DeviceConfig, ServeError)> {
        self.state.devices.take_ended()
    }
}

/// Ends the threads of devices that are not served.
fn cancel(prepared: Vec<(Endpoint, Prepared)>) {
    for (endpoint, prepared) in prepared {
        // The name of the socket is removed before that of the device is free.
        drop(endpoint);
        drop(prepared.cancel());
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.stop();
        self.state.devices.wait_until_idle();
        self.take_ended();
    }
}

impl OpenDevice {
    /// Makes the socket of the device, so that front-ends can connect. Waits until `deadline` for other
    /// processes that make sockets in the same directory. A caller that binds several devices waits
    /// [`TURN_WAIT`] for all of them together.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(&mut self, deadline: Instant) -> Result<(), AddError> {
        if let Some(Socket::Address(address)) = &self.socket {
            self.socket = Some(Socket::Endpoint(Endpoint::Listening(address.listen(deadline)?)));
        }
        Ok(())
    }

    /// Returns the configuration of the device.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Makes a device that another process gives.
    ///
    /// # Errors
    /// The host, or what the other process gives, does not fit its configuration.
    pub(crate) fn make_handed(&mut self, handed: Handed<'_>) -> Result<(), AddError> {
        // A device that is made again has entered them with the one before.
        self.entry.replace(&self.config.grants())?;
        self.make(&Descriptors::default(), Some(handed))
    }

    fn make(&mut self, given: &Descriptors, handed: Option<Handed<'_>>) -> Result<(), AddError> {
        let (config, state) = (&self.config, &self.registry);
        let making = Making {
            name: config.name(),
            queue_size_max: config.serve.queue_size,
            given,
            inherited: &state.inherited,
            handed: RefCell::new(handed),
        };
        self.device = Some(config.span().in_scope(|| state.kinds.make(&config.kind, &making))?);
        Ok(())
    }

    /// Checks the address of the socket, and makes the device.
    fn make_device(&mut self, endpoint: Option<Endpoint>, given: &Descriptors) -> Result<(), AddError> {
        let serve = &self.config.serve;
        self.socket = Some(match (endpoint, &serve.socket_path) {
            (Some(endpoint), _) => Socket::Endpoint(endpoint),
            (None, Some(path)) => Socket::Address(Address::new(
                path,
                serve.socket_mode.map(|mode| mode.0),
                serve.socket_group.as_deref(),
            )?),
            (None, None) => return Err(AddError::NoSocket),
        });
        self.make(given, None)
    }
}

impl RegistryState {
    /// Puts a device behind a server.
    fn served_device(
        &self,
        pool: &Arc<WorkerPool>,
        device: Arc<dyn Operate>,
        opened: &mut OpenDevice,
    ) -> Result<ServedDevice, AddError> {
        let limiter = self.groups.limiter(&opened.config.kind);
        let served = ServedDevice::new(opened.config.clone(), device, (pool, limiter), &self.space);
        // The socket of a device that is not served needs the entry until its removal.
        Ok(served.map_err(AddError::Thread)?.with_entry(mem::take(&mut opened.entry)))
    }

    /// Lets session threads serve their devices, each with its endpoint.
    ///
    /// # Errors
    /// The registry is being stopped. Returns what it was given.
    fn begin(&self, prepared: Vec<(Endpoint, Prepared)>) -> Result<(), Vec<(Endpoint, Prepared)>> {
        let served = prepared.iter().map(|(_, prepared)| (prepared.opened.id, prepared.served.clone()));
        if !self.devices.set_running(served) {
            return Err(prepared);
        }
        for (endpoint, Prepared { start, served, .. }) in prepared {
            // The session thread must have the last reference.
            drop(served);
            // The send succeeds, because the thread waits for it.
            let _ = start.send(endpoint);
        }
        Ok(())
    }

    /// Starts the session thread of a device. An error drops `opened`, which has the name, last.
    fn prepare(&self, opened: OpenDevice, served: Arc<ServedDevice>) -> Result<Prepared, AddError> {
        let name = served.config().name().unwrap_or("session").to_owned();
        let (start, may_start) = sync_channel(1);
        let (devices, id, thread_served) = (self.devices.clone(), opened.id, served.clone());
        let session = move || {
            // The end of the session is recorded in the entry of the device. So wait until the entry has the
            // device.
            let Ok(endpoint) = may_start.recv() else { return };
            let served = thread_served;
            let run = || served.config().span().in_scope(|| served.run(endpoint));
            let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or(Err(ServeError::Panicked));
            let (span, is_leaving) = (served.config().span(), served.is_closed());
            if devices.end(id, served, outcome, is_leaving) {
                span.in_scope(|| info!("removed, because its front-end has left"));
            }
        };
        let thread = thread::Builder::new().name(name).spawn(session).map_err(AddError::Thread)?;
        Ok(Prepared { start, thread, served, opened })
    }
}
