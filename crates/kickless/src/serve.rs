//! Serving devices: from the first descriptor to the last request.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use kickless_daemon::{AddError, DeviceConfig, Endpoint, Notation, Opened, Registry, Served, TURN_WAIT};
use kickless_io::Waker;
use kickless_memory::fault;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, error, info, warn};

use crate::service::Service;
use crate::signals::Signals;
use crate::uevents::Resizes;
use crate::{exit, inherited, log, wire};

/// How long counters of many devices wait for the log to have room.
const REPORT_WAIT: Duration = Duration::from_secs(1);
/// How long the main thread does without news when the kernel has no memory for its wait.
const POLL_RETRY: Duration = Duration::from_secs(1);

/// Serves all devices until a signal comes, or until the only front-end has left where there is but one.
///
/// # Errors
/// They cannot be served, or one of them not any longer: one sentence.
pub(crate) fn serve(service: Service) -> Result<()> {
    exit::when_a_thread_panics(kickless_disk::catches_panic);
    // Before anything is opened that stays open: a descriptor of ours must not be mistaken for one that was passed on to us.
    let inherited = service.fd.map(inherited::endpoint).transpose()?;
    let signals = Signals::catch()?;
    fault::guard().context("the process cannot be kept from a front-end that takes its memory away")?;
    raise_descriptor_limit();
    let notation = service.notation;
    let (registry, mut opened) = open(service, inherited, &signals)?;
    // In a container there may be no such thing; then it takes a signal.
    let resizes = Resizes::listen().inspect_err(|error| debug!(%error, "sizes of devices are not told")).ok();
    // Last, and all of them before any is served: a socket that is there is one that is served.
    let turns_until = Instant::now() + TURN_WAIT;
    for opened in &mut opened {
        opened.bind(turns_until).map_err(|error| named(opened.config(), notation, error))?;
    }
    registry.serve(opened)?;
    let waited = serve_until_idle(&registry, &signals, resizes.as_ref());
    log_counters(&registry.devices(), "summary");
    let failed = registry.take_ended().into_iter().map(|(config, error)| match config.name() {
        Some(name) => anyhow::Error::new(error).context(format!("device {name}")),
        None => error.into(),
    });
    failed.map(Err).chain([waited]).find(Result::is_err).unwrap_or(Ok(()))
}

/// Adds to an error the option of the device that is to blame.
fn named(config: &DeviceConfig, notation: Notation, error: AddError) -> anyhow::Error {
    match error.option() {
        Some(option) => {
            let option = config.option(notation, option);
            anyhow::Error::new(error).context(option)
        }
        None => error.into(),
    }
}

/// Opens the disks and starts the workers, on a thread of its own: a disk that does not answer must not keep a signal from
/// ending the process. Nothing is served yet, so the process ends at once then.
///
/// # Errors
/// Something that is asked for cannot be had: one sentence.
fn open(service: Service, inherited: Option<Endpoint>, signals: &Signals) -> Result<(Registry, Vec<Opened>)> {
    let (done, opening) = UnixStream::pair().context("no descriptors are left to wait with")?;
    let (sender, opened) = channel();
    let opener = move || {
        // Whoever waits ends with this process.
        let _ = sender.send(open_all(service, inherited));
        drop(opening);
    };
    thread::Builder::new().name("open".into()).spawn(opener).context("no threads can be started")?;
    loop {
        let mut fds =
            [PollFd::from_borrowed_fd(signals.stop(), PollFlags::IN), PollFd::new(&done, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("the disks cannot be waited for"),
        }
        if !fds[0].revents().is_empty() {
            info!("asked to stop before all disks were open");
            exit::at_once(0);
        }
        if !fds[1].revents().is_empty() {
            return opened.recv().context("the disks cannot be opened")?;
        }
    }
}

fn open_all(service: Service, mut inherited: Option<Endpoint>) -> Result<(Registry, Vec<Opened>)> {
    wire::check_cpus(service.pool.cpus(), service.notation)?;
    let registry = wire::registry(&service)?;
    let mut all = Vec::with_capacity(service.devices.len());
    for config in service.devices {
        let opened = registry.open(config.clone(), inherited.take());
        all.extend(opened.map_err(|error| named(&config, service.notation, error))?);
    }
    registry.set_pool(wire::pool(&service.pool, registry.devices_max(), service.notation)?);
    Ok((registry, all))
}

/// Serves until no device is served any longer: each has failed, or its only front-end has left, or a signal came. Logs
/// counters when a signal asks for it. Looks at the sizes of disks when a signal asks for it, or what lies behind a disk has
/// another size.
///
/// # Errors
/// A worker has ended, and all devices with it.
fn serve_until_idle(registry: &Registry, signals: &Signals, resizes: Option<&Resizes>) -> Result<()> {
    let pool = registry.pool().context("no workers")?;
    let mut outcome = Ok(());
    let mut is_stopping = false;
    while !registry.is_idle() {
        // A device is not held while this waits: one that is removed is closed then.
        let due: Vec<Waker> =
            registry.devices().iter().filter_map(|served| served.device().refresh_due().cloned()).collect();
        // These stay readable.
        let once = |is_over: bool| if is_over { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![
            PollFd::from_borrowed_fd(registry.changed(), PollFlags::IN),
            PollFd::from_borrowed_fd(signals.stop(), once(is_stopping)),
            PollFd::from_borrowed_fd(pool.failed(), once(outcome.is_err())),
            PollFd::from_borrowed_fd(signals.report(), PollFlags::IN),
            PollFd::from_borrowed_fd(signals.look(), PollFlags::IN),
        ];
        fds.extend(resizes.map(|resizes| PollFd::from_borrowed_fd(resizes.as_fd(), PollFlags::IN)));
        fds.extend(due.iter().map(|waker| PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                warn!(%error, "signals cannot be waited for just now");
                thread::sleep(POLL_RETRY);
                continue;
            }
        }
        let (stop, failed) = (!fds[1].revents().is_empty(), !fds[2].revents().is_empty());
        registry.take_changed();
        if failed && outcome.is_ok() {
            error!("a worker has ended: all devices are stopped, and the program ends");
            outcome = Err(anyhow!("a worker has ended, see the log"));
        }
        if (stop || failed) && !is_stopping {
            is_stopping = true;
            registry.stop();
        }
        if signals.take_report() {
            log_counters(&registry.devices(), "counters");
        }
        let is_due = due.iter().fold(false, |is_due, waker| is_due | waker.clear());
        if signals.take_look() | is_due | resizes.is_some_and(Resizes::take) {
            registry.devices().iter().for_each(Served::refresh);
        }
    }
    outcome
}

fn log_counters(devices: &[Arc<Served>], occasion: &str) {
    let deadline = Instant::now() + REPORT_WAIT;
    for served in devices {
        served.config().span().in_scope(|| log::in_full(|| served.statistics().log(occasion)));
        log::wait_until_written(deadline);
    }
}

/// Each queue and each piece of guest memory takes descriptors, and the limit on them is low for the sake of programs that
/// use `select`.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where this is refused, the limit that there is may do.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
