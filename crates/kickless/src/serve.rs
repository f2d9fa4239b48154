//! Serving devices: from the first descriptor to the last request.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use anyhow::{Context, Result, anyhow};
use kickless_blk::Blk;
use kickless_io::Waker;
use kickless_memory::fault;
use kickless_vhost::{Ended, Server};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{debug, error, info, warn};

use crate::listen::{Address, Endpoint};
use crate::service::{Device, Said, Service, Socket};
use crate::signals::Signals;
use crate::uevents::Resizes;
use crate::wire::{self, Served};

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
    endpoint: Endpoint,
}

/// Serves all devices until a signal comes, or until the only front-end has left where there is but one.
///
/// # Errors
/// They cannot be served, or one of them not any longer: one sentence.
pub(crate) fn serve(service: &Service) -> Result<()> {
    // First: a descriptor that we opened ourselves must not be mistaken for one that was passed on to us.
    let origins = in_spans(service, |device| origin(device, service.said))?;
    let signals = Signals::catch()?;
    fault::guard().context("the process cannot be kept from a front-end that takes its memory away")?;
    raise_descriptor_limit();
    let servers = wire::servers(service)?;
    let ended = UnixStream::pair().context("no descriptors are left to wait with")?;
    // In a container there may be no such thing; then it takes a signal.
    let resizes = Resizes::listen().inspect_err(|error| debug!(%error, "sizes of devices are not told")).ok();
    // Last, and all of them before any is served: a socket that is there is one that is served.
    let mut ready = Vec::with_capacity(servers.len());
    for ((device, served), origin) in service.devices.iter().zip(servers).zip(origins) {
        let endpoint = match origin {
            Origin::Inherited(endpoint) => endpoint,
            Origin::Path(address) => address.bind()?,
        };
        let Served { disk, server } = served;
        ready.push(Ready { device, disk, server, endpoint });
    }
    for Ready { device, .. } in &ready {
        let disk = &device.disk.blk_file;
        device.span().in_scope(|| info!(version = env!("CARGO_PKG_VERSION"), %disk, "serving"));
    }
    let served = serve_all(&ready, &signals, resizes.as_ref(), ended);
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

/// A thread serves each device, and this one waits for signals until all of these have ended. The first error of theirs, if any;
/// a device that cannot be served any longer leaves the others alone. All threads hold on to the second of the pair, so that the
/// first hears when the last of them has ended.
fn serve_all(
    ready: &[Ready<'_>],
    signals: &Signals,
    resizes: Option<&Resizes>,
    (ended, running): (UnixStream, UnixStream),
) -> Result<()> {
    thread::scope(|scope| {
        let running = Arc::new(running);
        let mut threads = Vec::with_capacity(ready.len());
        let mut started = Ok(());
        for each in ready {
            let name = each.device.name.clone().unwrap_or_else(|| "session".into());
            let running = running.clone();
            let thread = thread::Builder::new().name(name).spawn_scoped(scope, move || {
                let served = each.device.span().in_scope(|| serve_one(each, signals));
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
        let (report, look) = (|| log_counters(ready, "counters"), || look_at_sizes(ready));
        wait_until(&ended, signals, &Sizes { resizes, ready }, report, look);
        let ends: Vec<Result<()>> = threads.into_iter().map(joined).collect();
        ends.into_iter().fold(started, Result::and)
    })
}

fn joined(thread: ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    thread.join().unwrap_or_else(|_| Err(anyhow!("a session panicked")))
}

fn serve_one(ready: &Ready<'_>, signals: &Signals) -> Result<()> {
    let Ready { device, server, endpoint, .. } = ready;
    let served = match endpoint {
        Endpoint::Listening(listener) => {
            server.serve(&listener.socket, signals.stop()).context("no front-end can be served any more")
        }
        Endpoint::Connected(connection) => {
            let connection = connection.try_clone().context("the connection of --fd cannot be used")?;
            match server.serve_connection(connection, signals.stop()) {
                Ok(()) | Err(Ended::Stopped) => Ok(()),
                Err(ended) => Err(ended).context("the connection of --fd was dropped"),
            }
        }
    };
    let Some(name) = &device.name else { return served };
    served
        .inspect_err(|error| error!(error = format!("{error:#}"), "served no longer; other devices are"))
        .with_context(|| format!("device {name}"))
}

/// Who tells of disks that have another size: the host's kernel of block devices, and some disks themselves.
struct Sizes<'a> {
    resizes: Option<&'a Resizes>,
    ready: &'a [Ready<'a>],
}

impl Sizes<'_> {
    fn wakers(&self) -> impl Iterator<Item = &Waker> {
        self.ready.iter().filter_map(|ready| ready.disk.resized())
    }

    /// What becomes readable when one is told of.
    fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let kernel = self.resizes.map(|resizes| PollFd::from_borrowed_fd(resizes.as_fd(), PollFlags::IN));
        kernel
            .into_iter()
            .chain(self.wakers().map(|waker| PollFd::from_borrowed_fd(waker.as_fd(), PollFlags::IN)))
    }

    /// Takes all that has been told; whether that was anything.
    fn take(&self) -> bool {
        let told = self.wakers().fold(false, |told, waker| told | waker.clear());
        told | self.resizes.is_some_and(Resizes::take)
    }
}

/// Calls `report` and `look` whenever a signal asks for it, and `look` also when what lies behind a disk has another size,
/// until the other end of `ended` is closed.
fn wait_until(ended: &UnixStream, signals: &Signals, sizes: &Sizes<'_>, report: impl Fn(), look: impl Fn()) {
    loop {
        let mut fds = vec![
            PollFd::new(ended, PollFlags::IN),
            PollFd::from_borrowed_fd(signals.report(), PollFlags::IN),
            PollFd::from_borrowed_fd(signals.look(), PollFlags::IN),
        ];
        fds.extend(sizes.fds());
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return warn!(%error, "signals cannot be waited for any more"),
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        if signals.take_report() {
            report();
        }
        if signals.take_look() | sizes.take() {
            look();
        }
    }
}

fn look_at_sizes(ready: &[Ready<'_>]) {
    for Ready { device, disk, .. } in ready {
        device.span().in_scope(|| disk.look_at_size());
    }
}

fn log_counters(ready: &[Ready<'_>], occasion: &str) {
    for Ready { device, server, .. } in ready {
        device.span().in_scope(|| server.statistics().log(occasion));
    }
}

/// Each queue and each piece of guest memory takes descriptors, and the limit on them is low for the sake of programs that
/// use `select`.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where this is refused, the limit that there is may do.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
