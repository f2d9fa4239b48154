//! Serving devices: from the first descriptor to the last request.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use kickless_blk::Blk;
use kickless_io::Waker;
use kickless_memory::fault;
use kickless_vhost::{Ended, Server};
use kickless_worker::Pool;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, error, info, warn};

use crate::exit;
use crate::listen::{Address, Endpoint, TURN_WAIT};
use crate::log;
use crate::service::{Device, Said, Service, Socket};
use crate::signals::Signals;
use crate::uevents::Resizes;
use crate::wire::{self, Parts, Served};

/// How long counters of many devices wait for the log to have room.
const REPORT_WAIT: Duration = Duration::from_secs(1);

/// Where front-ends are to come from.
enum Origin {
    Inherited(Endpoint),
    Path(Address),
}

/// A device that can be served.
struct Ready<'s> {
    device: &'s Device,
    disk: Arc<Blk>,
    server: Server,
}

/// Serves all devices until a signal comes, or until the only front-end has left where there is but one.
///
/// # Errors
/// They cannot be served, or one of them not any longer: one sentence.
pub(crate) fn serve(service: Service) -> Result<()> {
    exit::when_a_thread_panics(kickless_disk::catches_panic);
    let service = &Arc::new(service);
    // Before anything is opened that stays open: a descriptor of ours must not be mistaken for one that was passed on to us.
    let origins = in_spans(service, |device| origin(device, service.said))?;
    let signals = Signals::catch()?;
    fault::guard().context("the process cannot be kept from a front-end that takes its memory away")?;
    raise_descriptor_limit();
    let Parts { pool, served } = open(service, &signals)?;
    let ended = UnixStream::pair().context("no descriptors are left to wait with")?;
    // In a container there may be no such thing; then it takes a signal.
    let resizes = Resizes::listen().inspect_err(|error| debug!(%error, "sizes of devices are not told")).ok();
    // Last, and all of them before any is served: a socket that is there is one that is served.
    let turns_until = Instant::now() + TURN_WAIT;
    let endpoint = |origin| match origin {
        Origin::Inherited(endpoint) => Ok(endpoint),
        Origin::Path(address) => address.bind(turns_until),
    };
    let endpoints = origins.into_iter().map(endpoint).collect::<Result<Vec<_>>>()?;
    let served = service.devices.iter().zip(served);
    let ready: Vec<_> =
        served.map(|(device, Served { disk, server })| Ready { device, disk, server }).collect();
    for Ready { device, .. } in &ready {
        let disk = &device.disk.blk_file;
        device.span().in_scope(|| info!(version = env!("CARGO_PKG_VERSION"), %disk, "serving"));
    }
    let told = Told { signals: &signals, pool: &pool, resizes: resizes.as_ref(), ready: &ready };
    let served = serve_all(&told, endpoints, ended);
    log_counters(&ready, "summary");
    served
}

/// What `each` makes of every device, with the log's lines marked by the device's name.
pub(crate) fn in_spans<T>(service: &Service, each: impl Fn(&Device) -> Result<T>) -> Result<Vec<T>> {
    service.devices.iter().map(|device| device.span().in_scope(|| each(device))).collect()
}

fn origin(device: &Device, said: Said) -> Result<Origin> {
    match &device.socket {
        Socket::Inherited(fd) => Ok(Origin::Inherited(Endpoint::inherit(*fd)?)),
        Socket::Path { path, mode, group } => {
            let address = Address::new(path, *mode, group.as_deref(), |option| device.option(said, option));
            Ok(Origin::Path(address?))
        }
    }
}

/// Opens the disks and starts the workers, on a thread of its own: a disk that does not answer must not keep a signal from
/// ending the process. Nothing is served yet, so the process ends at once then.
///
/// # Errors
/// Something that is asked for cannot be had: one sentence.
fn open(service: &Arc<Service>, signals: &Signals) -> Result<Parts> {
    let (done, opening) = UnixStream::pair().context("no descriptors are left to wait with")?;
    let (sender, opened) = channel();
    let service = service.clone();
    let opener = move || {
        // Whoever waits ends with this process.
        let _ = sender.send(wire::parts(&service));
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

/// A thread serves each device, and this one waits for signals until all of these have ended. The first error of theirs, if any;
/// a device that cannot be served any longer leaves the others alone. All threads hold on to the second of the pair, so that the
/// first hears when the last of them has ended.
fn serve_all(
    told: &Told<'_>,
    endpoints: Vec<Endpoint>,
    (ended, running): (UnixStream, UnixStream),
) -> Result<()> {
    let Told { signals, ready, .. } = *told;
    thread::scope(|scope| {
        let running = Arc::new(running);
        let mut threads = Vec::with_capacity(ready.len());
        let mut started = Ok(());
        for (each, endpoint) in ready.iter().zip(endpoints) {
            let name = each.device.name.clone().unwrap_or_else(|| "session".into());
            let running = running.clone();
            let thread = thread::Builder::new().name(name).spawn_scoped(scope, move || {
                let served = each.device.span().in_scope(|| serve_one(each, endpoint, signals.stop()));
                drop(running);
                served
            });
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    signals.end();
                    started = Err(error).context("no threads can be started");
                    break;
                }
            }
        }
        drop(running);
        let waited = wait_until(&ended, told);
        let ends: Vec<Result<()>> = threads.into_iter().map(joined).collect();
        ends.into_iter().fold(started, Result::and).and(waited)
    })
}

fn joined(thread: ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    thread.join().unwrap_or_else(|_| Err(anyhow!("a session panicked")))
}

/// Serves front-ends from `endpoint`, which is closed when they cannot be served any more: those that come then are refused.
fn serve_one(
    Ready { device, server, .. }: &Ready<'_>,
    endpoint: Endpoint,
    stop: BorrowedFd<'_>,
) -> Result<()> {
    let served = match &endpoint {
        Endpoint::Listening(listener) => {
            server.serve(&listener.socket, stop).context("no front-end can be served any more")
        }
        Endpoint::Connected(connection) => {
            let connection = connection.try_clone().context("the connection of --fd cannot be used")?;
            match server.serve_connection(connection, stop) {
                Ok(()) | Err(Ended::Stopped) => Ok(()),
                Err(ended) => Err(ended).context("the connection of --fd was dropped"),
            }
        }
    };
    drop(endpoint);
    let Some(name) = &device.name else { return served };
    served
        .inspect_err(|error| error!(error = format!("{error:#}"), "served no longer; other devices are"))
        .with_context(|| format!("device {name}"))
}

/// News for the main thread while the devices are served.
#[derive(Clone, Copy)]
struct Told<'a> {
    signals: &'a Signals,
    /// A worker may end that should not.
    pool: &'a Pool,
    /// The kernel tells of block devices that have another size, and some disks do themselves.
    resizes: Option<&'a Resizes>,
    ready: &'a [Ready<'a>],
}

impl Told<'_> {
    fn wakers(&self) -> impl Iterator<Item = &Waker> {
        self.ready.iter().filter_map(|ready| ready.disk.resized())
    }

    /// Returns the descriptors that become readable when a disk has another size.
    fn sizes(&self) -> impl Iterator<Item = PollFd<'_>> {
        let kernel = self.resizes.map(|resizes| PollFd::from_borrowed_fd(resizes.as_fd(), PollFlags::IN));
        kernel
            .into_iter()
            .chain(self.wakers().map(|waker| PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)))
    }

    /// Takes all that has been told of sizes; whether that was anything.
    fn take_sizes(&self) -> bool {
        let told = self.wakers().fold(false, |told, waker| told | waker.clear());
        told | self.resizes.is_some_and(Resizes::take)
    }
}

/// Logs counters and looks at sizes whenever a signal asks for it, and looks at sizes also when what lies behind a disk has
/// another one, until the other end of `ended` is closed.
///
/// # Errors
/// A worker has ended, and all devices with it.
fn wait_until(ended: &UnixStream, told: &Told<'_>) -> Result<()> {
    let Told { signals, pool, ready, .. } = told;
    let mut outcome = Ok(());
    loop {
        let mut fds = vec![
            PollFd::new(ended, PollFlags::IN),
            PollFd::from_borrowed_fd(signals.report(), PollFlags::IN),
            PollFd::from_borrowed_fd(signals.look(), PollFlags::IN),
            // It stays readable.
            PollFd::from_borrowed_fd(
                pool.failed(),
                if outcome.is_ok() { PollFlags::IN } else { PollFlags::empty() },
            ),
        ];
        fds.extend(told.sizes());
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                warn!(%error, "signals cannot be waited for any more");
                return outcome;
            }
        }
        if !fds[0].revents().is_empty() {
            return outcome;
        }
        if outcome.is_ok() && !fds[3].revents().is_empty() {
            error!("a worker has ended: all devices are stopped, and the program ends");
            outcome = Err(anyhow!("a worker has ended, see the log"));
            signals.end();
        }
        if signals.take_report() {
            log_counters(ready, "counters");
        }
        if signals.take_look() | told.take_sizes() {
            look_at_sizes(ready);
        }
    }
}

fn look_at_sizes(ready: &[Ready<'_>]) {
    for Ready { device, disk, .. } in ready {
        device.span().in_scope(|| disk.look_at_size());
    }
}

fn log_counters(ready: &[Ready<'_>], occasion: &str) {
    let deadline = Instant::now() + REPORT_WAIT;
    for Ready { device, server, .. } in ready {
        device.span().in_scope(|| log::in_full(|| server.statistics().log(occasion)));
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

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use rustix::net::{Shutdown, shutdown};
    use tempfile::TempDir;

    use super::*;
    use crate::cli::{Request, Work, parse};

    #[test]
    fn a_device_that_ended_has_no_socket() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("socket");
        let line = format!("kickless blk --blk-file=null:1M --socket-path={}", path.display());
        let Ok(Request::Run { work: Work::Serve(service), .. }) = parse(line.split(' ').map(OsString::from))
        else {
            panic!("{line}")
        };
        let [device] = &service.devices[..] else { panic!("{service:?}") };
        let Origin::Path(address) = origin(device, service.said).unwrap() else { panic!("{device:?}") };
        let endpoint = address.bind(Instant::now()).unwrap();
        // It cannot be listened on any more.
        let Endpoint::Listening(listener) = &endpoint else { panic!("{endpoint:?}") };
        shutdown(&listener.socket, Shutdown::Both).unwrap();
        let Served { disk, server } = wire::parts(&service).unwrap().served.remove(0);
        let (never, _other) = UnixStream::pair().unwrap();
        let ready = Ready { device, disk, server };
        let ended = serve_one(&ready, endpoint, never.as_fd()).unwrap_err();
        assert!(ended.to_string().contains("no front-end can be served any more"), "{ended:#}");
        assert!(!path.exists() && UnixStream::connect(&path).is_err());
    }
}
