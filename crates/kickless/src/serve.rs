//! Serves devices until the program ends.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{mem, thread};

use anyhow::{Context, Result, anyhow};
use kickless_control::Server;
use kickless_daemon::{
    AddError, Beside, DeviceConfig, DeviceRef, DeviceState, DeviceStatus, Endpoint, OpenDevice,
    PassedListener, Registry, Shelved, TakenOver, sentence, take_shelved,
};
use kickless_io::Waker;
use kickless_memory::fault;
use kickless_opener::TURN_WAIT;
use kickless_sandbox::Refusals;
use kickless_sync::lock;
use kickless_worker::WorkerPool;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, error, info, warn};

use crate::inherited::Noted;
use crate::notify::{Asked, Relay, ServiceState, Watchdog, interval_of_environment};
use crate::reload::Reload;
use crate::sandbox::{self, Sandbox};
use crate::service::Service;
use crate::signals::Signals;
use crate::uevents::Resizes;
use crate::upgrade::{HandOver, Upgrade, UpgradeEnd, background};
use crate::{control, exit, inherited, log, wire};

/// The longest time that a report of many devices waits for room in the log.
const REPORT_WAIT: Duration = Duration::from_secs(1);
/// The time until the main thread tries again to wait for events, after the kernel had no memory for it.
const POLL_RETRY: Duration = Duration::from_secs(1);

/// The things that the process has from the time when it had all its rights.
pub(crate) struct Start {
    /// The inherited descriptors.
    pub(crate) noted: Noted,
    /// The sockets that the service manager has passed, by the names of their devices.
    pub(crate) sockets: BTreeMap<String, PassedListener>,
    pub(crate) sandbox: Option<Sandbox>,
    /// The daemon to take over from.
    pub(crate) upgrade: Option<Upgrade>,
    /// The devices that the process before has left in the store of the service manager.
    pub(crate) shelved: Option<Shelved>,
    /// The state of the service, for the service manager.
    pub(crate) state: Arc<ServiceState>,
    /// The relay of its messages, if no other process runs it.
    pub(crate) relay: Option<Relay>,
    /// The user of the process.
    pub(crate) user: u32,
}

/// The devices that are to be opened.
struct Opening {
    registry: Arc<Registry>,
    service: Service,
    /// The socket that the parent process has passed.
    endpoint: Option<Endpoint>,
    /// The daemon that has them open.
    upgrade: Option<Upgrade>,
    /// The devices that the process before has left.
    shelved: Option<Shelved>,
    /// This process has taken over from it. Locked while it does.
    has_taken: Arc<Mutex<bool>>,
}

/// Serves all devices until a signal arrives, or until all devices have ended. A device on an inherited
/// connection ends when its front-end disconnects.
///
/// # Errors
/// The devices cannot be served, or one of them failed. The error is one sentence.
pub(crate) fn serve(service: Service, start: Start) -> Result<()> {
    let Start { noted, sockets, mut sandbox, upgrade, shelved, state, relay, user } = start;
    relay.map_or(Ok(()), Relay::start).context("cannot start a thread")?;
    let endpoint = service.fd.map(|fd| inherited::endpoint(&noted, fd)).transpose()?;
    let of_devices = inherited::of_devices(&noted, &service)?;
    if let Some(sandbox) = &mut sandbox {
        sandbox.start()?;
    }
    let signals = Signals::catch()?;
    fault::guard().context("cannot protect the process against front-ends that truncate their memory")?;
    // A container may not have these events. Only a signal tells about new sizes then.
    let resizes =
        Resizes::listen().inspect_err(|error| debug!(%error, "no events about sizes of devices")).ok();
    let asked_to_stop = Waker::new().context("no free descriptor to wait with")?;
    let wait = UnixStream::pair().context("no free descriptor to wait with")?;
    let registry = wire::registry(&service, of_devices, shelved.is_some())?;
    sockets.into_iter().for_each(|(name, socket)| registry.pass_socket(name, socket));
    let (pool, workers) = wire::pool(&service, registry.devices_max())?;
    registry.set_pool(pool);
    registry.set_pool_config(service.pool.clone());
    #[cfg(debug_assertions)]
    crate::attack::start()?;
    // From here on, the process reads what images, servers and front-ends contain and send.
    let refusals = sandbox.as_mut().map(Sandbox::lock).transpose()?.flatten();
    let has_taken = Arc::default();
    let opening = Opening { registry: Arc::new(registry), service, endpoint, upgrade, shelved, has_taken };
    let Opened { registry, devices: opened, service } = open(opening, wait, &signals)?;
    if let Some(sandbox) = &sandbox {
        sandbox.report();
    }
    if let Some(pool) = registry.pool() {
        wire::log_pool(pool, &workers);
        #[cfg(debug_assertions)]
        crate::stall::start(pool)?;
    }
    let mut interval = interval_of_environment();
    let (reload, sockets, upgrade) = match opened {
        OpenDevices::Own { devices, unavailable } => {
            let reload = Reload::start(&service, &registry, service.devices.clone(), &state)?;
            let sockets = serve_own(&registry, &service, devices)?;
            unavailable.into_iter().for_each(|(config, error)| registry.add_unavailable(config, &error));
            if service.devices.is_empty() {
                warn!("the configuration file has no device: devices come by calls only");
            }
            (reload, sockets, None)
        }
        OpenDevices::TakenOver(mut taken, sockets) => {
            let beside = mem::take(&mut taken.beside);
            if let Some(filter) = &beside.log_filter {
                let _ = log::set_filter(filter)
                    .inspect_err(|error| warn!(error, "the filter of the log is lost"));
            }
            if let (None, Some(earlier), Some(_)) = (interval, beside.watchdog, &taken.taken) {
                // The unit may say something else by now, and this process would not know.
                state.set_interval(earlier.as_micros());
                interval = Some(earlier);
            }
            let reload = Reload::start(&service, &registry, beside.of_file, &state)?;
            let sockets = control::take_over(&service.control, sockets, beside.control);
            (reload, sockets, Some(UpgradeEnd(taken)))
        }
    };
    let interval = interval.filter(|_| state.is_watched());
    let hand_over = HandOver::new(&registry, reload.clone(), sockets.listeners(), interval, user)?;
    let control = control::start(
        sockets,
        &registry,
        sandbox::info(sandbox.as_ref()),
        reload.clone(),
        hand_over.clone(),
        asked_to_stop.clone(),
    )?;
    state.ready();
    if let Some(upgrade) = upgrade {
        upgrade.finish(reload.clone())?;
    }
    let outlives_devices = service.outlives_devices();
    let watchdog = interval.map(|interval| Watchdog::new(interval, Instant::now()));
    let events = Events {
        signals,
        asked_to_stop,
        resizes,
        reload,
        hand_over,
        control,
        state,
        refusals,
        outlives_devices,
    };
    let waited = events.serve_until_idle(&registry, watchdog);
    drop(events.control);
    log_counters(&registry, "summary");
    let failed = registry.take_ended().into_iter().map(|(config, error)| match config.name() {
        Some(name) => anyhow::Error::new(error).context(format!("device {name}")),
        None => error.into(),
    });
    failed.map(Err).chain([waited]).find(Result::is_err).unwrap_or(Ok(()))
}

/// Makes the sockets of this process's devices, and serves them. Returns the control sockets.
fn serve_own(
    registry: &Registry,
    service: &Service,
    mut opened: Vec<OpenDevice>,
) -> Result<control::Sockets> {
    // Make all sockets after everything else, and before any device is served. A program that finds its
    // socket then knows that the device is served.
    let deadline = Instant::now() + TURN_WAIT;
    for opened in &mut opened {
        opened.bind(deadline).map_err(|error| with_option(opened.config(), service, error))?;
    }
    let control = control::bind(&service.control)?;
    registry.serve(opened)?;
    Ok(control)
}

/// Adds the option of the device that caused it to an error, with the line of the configuration file. A wrong
/// value on a command line is a wrong command line.
fn with_option(config: &DeviceConfig, service: &Service, error: AddError) -> anyhow::Error {
    let Some(option) = error.option() else { return error.into() };
    match &error {
        AddError::Socket(socket) if socket.is_wrong_value() => {
            service.mistake(config.name(), option, &sentence(&error))
        }
        _ => {
            let place = service.place(config.name(), option);
            anyhow::Error::new(error).context(place)
        }
    }
}

/// Opens the disks on a new thread. A signal can then end the process while a disk does not answer. The
/// process ends immediately in this case, because no device is served yet.
///
/// # Errors
/// A disk cannot be opened. The error is one sentence.
fn open(opening: Opening, wait: (UnixStream, UnixStream), signals: &Signals) -> Result<Opened> {
    let (done, at_end) = wait;
    let (sender, opened) = channel();
    let has_taken = opening.has_taken.clone();
    let opener = move || {
        // The send fails only if the main thread has given up, and then the process ends.
        let _ = sender.send(open_all(opening));
        drop(at_end);
    };
    thread::Builder::new().name("open".into()).spawn(opener).context("cannot start a thread")?;
    loop {
        let mut fds =
            [PollFd::from_borrowed_fd(signals.stop(), PollFlags::IN), PollFd::new(&done, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("the disks cannot be waited for"),
        }
        let has_taken = lock(&has_taken);
        if !fds[0].revents().is_empty() && !*has_taken {
            info!("asked to stop before all disks were open");
            exit::exit_now(0);
        }
        drop(has_taken);
        // A process that has taken over stops in order, when it serves.
        if !fds[1].revents().is_empty() {
            return opened.recv().context("the disks cannot be opened")?;
        }
    }
}

/// The devices before they are served.
struct Opened {
    registry: Arc<Registry>,
    devices: OpenDevices,
    service: Service,
}

enum OpenDevices {
    /// This process has opened them.
    Own {
        devices: Vec<OpenDevice>,
        /// Devices that cannot be opened yet, and the reason.
        unavailable: Vec<(DeviceConfig, AddError)>,
    },
    /// Another process has given them. They are served. The control sockets are those that it did not have.
    TakenOver(TakenOver, control::Sockets),
}

fn open_all(opening: Opening) -> Result<Opened> {
    let Opening { registry, service, mut endpoint, upgrade, shelved, has_taken } = opening;
    if let Some(upgrade) = upgrade {
        let mut sockets = control::Sockets::default();
        let mut bind = |beside: &Beside| -> Result<(), String> {
            let bound = control::bind_missing(&service.control, &beside.control);
            sockets = bound.map_err(|error| sentence(&*error))?;
            Ok(())
        };
        let taken = upgrade.take_over(&registry, &mut bind, &has_taken).unwrap_or_else(|error| {
            // No other process knows these.
            drop(mem::take(&mut sockets));
            // Other destructors would remove names that the other process serves.
            background::fail(&sentence(&*error));
            exit::exit_now(1)
        });
        return Ok(Opened { registry, devices: OpenDevices::TakenOver(taken, sockets), service });
    }
    match shelved.map(|shelved| take_shelved(&registry, shelved)) {
        Some(Ok(taken)) => {
            let sockets = control::bind_missing(&service.control, &taken.beside.control)?;
            return Ok(Opened { registry, devices: OpenDevices::TakenOver(taken, sockets), service });
        }
        Some(Err(why)) => warn!("what the process before has left in the store cannot be used: {why}"),
        None => {}
    }
    let (mut devices, mut unavailable) = (Vec::with_capacity(service.devices.len()), Vec::new());
    for config in &service.devices {
        match registry.open(config.clone(), endpoint.take()) {
            Ok(opened) => devices.extend(opened),
            Err(error @ AddError::Make(_)) if !service.all_or_nothing => {
                unavailable.push((config.clone(), error));
            }
            Err(error) => return Err(with_option(config, &service, error)),
        }
    }
    kickless_opener::forget_holders();
    Ok(Opened { registry, devices: OpenDevices::Own { devices, unavailable }, service })
}

/// The events that the main thread handles while the devices are served.
struct Events {
    signals: Signals,
    /// Signalled by a call that ends the daemon.
    asked_to_stop: Waker,
    resizes: Option<Resizes>,
    reload: Option<Reload>,
    hand_over: Arc<HandOver>,
    /// The control sockets, if there are any.
    control: Option<Server>,
    state: Arc<ServiceState>,
    /// The notes of system calls that the sandbox has refused.
    refusals: Option<&'static Refusals>,
    /// The daemon goes on when no device is served.
    outlives_devices: bool,
}

impl Events {
    /// Waits until no device is served: each has failed, its only front-end has disconnected, or a signal or
    /// a call has stopped it. Goes on without a device after a reload of the configuration file. Logs
    /// counters when a signal requests it. Refreshes the sizes of disks when a signal requests it, or when
    /// an event or a device reports another size. The signal also requests that the configuration file is
    /// read again.
    ///
    /// # Errors
    /// A worker has ended, so that all devices were stopped.
    fn serve_until_idle(&self, registry: &Registry, mut watchdog: Option<Watchdog>) -> Result<()> {
        let Self {
            signals,
            asked_to_stop,
            resizes,
            reload,
            hand_over,
            state,
            refusals,
            outlives_devices,
            ..
        } = self;
        let (resizes, reload) = (resizes.as_ref(), reload.as_ref());
        let pool = registry.pool().context("no workers")?;
        let mut outcome = Ok(());
        let mut is_stopping = false;
        // If none has ended, a reload has taken the last one, and another reload can bring the next.
        let is_removed = |status: DeviceStatus| status.state == DeviceState::Removing;
        let was_taken = || reload.is_some() && registry.list().into_iter().all(is_removed);
        let goes_on = || *outlives_devices || was_taken();
        while !registry.is_idle() || !is_stopping && goes_on() {
            if let Some(watchdog) = &mut watchdog
                && watchdog.look(Instant::now(), || self.ask_threads(pool))
            {
                state.feed();
            }
            if state.is_watched() {
                state.set_status(status(registry));
            }
            // Hold no reference to a device during the wait. Otherwise a removed device would not be closed.
            let due: Vec<Waker> =
                registry.devices().filter_map(|device| device.device().refresh_due()).collect();
            // These two descriptors stay readable, so watch them only until they were readable once.
            let once = |is_over: bool| if is_over { PollFlags::empty() } else { PollFlags::IN };
            let mut fds = vec![
                PollFd::from_borrowed_fd(registry.changed(), PollFlags::IN),
                PollFd::from_borrowed_fd(signals.stop(), once(is_stopping)),
                PollFd::from_borrowed_fd(pool.failed(), once(outcome.is_err())),
                PollFd::from_borrowed_fd(signals.report(), PollFlags::IN),
                PollFd::from_borrowed_fd(signals.refresh(), PollFlags::IN),
                PollFd::from_borrowed_fd(asked_to_stop.as_fd(), PollFlags::IN),
            ];
            fds.extend(refusals.map(|refusals| PollFd::from_borrowed_fd(refusals.as_fd(), PollFlags::IN)));
            fds.extend(resizes.map(|resizes| PollFd::from_borrowed_fd(resizes.as_fd(), PollFlags::IN)));
            fds.extend(due.iter().map(|waker| PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)));
            fds.extend(state.has_unsent().map(|to| PollFd::from_borrowed_fd(to, PollFlags::OUT)));
            let timeout = watchdog.as_ref().map(|watchdog| watchdog.due(Instant::now()));
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    warn!(%error, "cannot wait for signals now");
                    thread::sleep(POLL_RETRY);
                    continue;
                }
            }
            let (stop, failed) = (!fds[1].revents().is_empty(), !fds[2].revents().is_empty());
            registry.take_changed();
            state.try_again();
            if failed && outcome.is_ok() {
                error!("a worker has ended: all devices are stopped, and the program ends");
                outcome = Err(anyhow!("a worker has ended, see the log"));
            }
            if (stop || failed || asked_to_stop.clear()) && !is_stopping {
                is_stopping = true;
                state.stopping();
                hand_over.give_up();
                registry.stop();
            }
            if let Some(refusals) = refusals {
                sandbox::log_refusals(refusals.take_new());
            }
            if signals.take_report() {
                log_counters(registry, "counters");
                refusals.iter().for_each(|refusals| sandbox::log_refusals(refusals.all()));
            }
            let is_due = due.iter().fold(false, |is_due, waker| is_due | waker.clear());
            let is_asked = signals.take_refresh();
            if let (true, Some(reload)) = (is_asked, reload) {
                reload.request();
            }
            if is_asked | is_due | resizes.is_some_and(Resizes::take) {
                registry.devices().for_each(DeviceRef::refresh);
            }
        }
        outcome
    }

    /// Asks each thread that all devices need to answer after a round.
    fn ask_threads(&self, pool: &WorkerPool) -> Vec<Asked> {
        let workers = (0..).zip(pool.pass()).map(|(number, answer)| (format!("worker {number}"), answer));
        let control = self.control.as_ref().map(|control| ("control".to_owned(), control.pass()));
        workers.chain(control).collect()
    }
}

/// Returns the line for `systemctl status`.
fn status(registry: &Registry) -> String {
    let (served, unavailable) = registry.counts();
    let devices = if served == 1 { "device" } else { "devices" };
    match unavailable {
        0 => format!("Serves {served} {devices}"),
        _ => format!("Serves {served} {devices}, and {unavailable} cannot be opened yet"),
    }
}

fn log_counters(registry: &Registry, occasion: &str) {
    let deadline = Instant::now() + REPORT_WAIT;
    for device in registry.devices() {
        let own = device.device().counters();
        device.config().span().in_scope(|| log::without_limits(|| device.statistics().log(occasion, &own)));
        // The device can be closed during the wait.
        drop(device);
        log::wait_until_written(deadline);
    }
}

/// Raises the soft limit on descriptors to the hard limit. Each queue and each region of guest memory needs
/// descriptors. The soft limit is low by default for programs that use `select`.
pub(crate) fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, the present limit may be sufficient.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
