//! An image of a Ceph cluster, through librbd.
//!
//! Workers submit requests straight to the library, and its threads answer them. All other calls wait for the
//! cluster, possibly for ever. So a separate thread makes them, and callers wait for it only for a limited
//! time.

mod control;
mod ffi;
mod in_flight;
mod lock;

use crate::control::DiskControl;
use crate::hand_over::DiskHandOver;
use crate::library::Library;
use crate::lock::LockError;
use crate::offload::{Offload, OffloadOp, WakeBatch};
use crate::{Cache, Error, IoError, Limits, Options, RangeLimits, RbdName, Resized, SECTOR};
use control::{Control, Job, Message, Outcome};
use ffi::{Cluster, Image, Pool, Shape, c_text};
use in_flight::InFlight;
use kickless_io::Waker;
use kickless_spec::hash::fnv1a;
use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;
use tracing::Span;

/// The longest time to open a disk.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

/// The largest discard or write-zeroes request in bytes, which is some hundred objects.
const RANGE_MAX: u64 = 1 << 30;

/// The granularity of discards (`rbd_discard_granularity_bytes`), if the library does not report it.
const DISCARD_BYTES: u64 = 64 << 10;

/// The default client.
const ADMIN: &str = "admin";

/// An open image. Dropping it closes the image.
#[derive(Debug)]
pub(crate) struct Rbd {
    /// `None` only while it is dropped.
    image: Option<Arc<Image>>,
    control: Arc<Control>,
    in_flight: Arc<InFlight>,
    clock: Option<JoinHandle<()>>,
    name: RbdName,
    identity: String,
    offload: Arc<Offload>,
    read_only: bool,
    has_lock: bool,
}

/// The properties of an image when it was opened.
struct Opened {
    image: Arc<Image>,
    shape: Shape,
    id: String,
    /// The granularity of discards in bytes.
    granularity: u64,
}

impl Rbd {
    /// Opens an image.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(name: &RbdName, options: &Options) -> Result<(Self, Arc<Offload>), Error> {
        let failed = |source: io::Error| Error::Library { disk: name.to_string(), source };
        if name.snapshot.is_some() && !options.read_only {
            return Err(failed(io::Error::other("a snapshot is read-only: use --read-only")));
        }
        let (control, messages) = Control::new().map_err(failed)?;
        let control = Arc::new(control);
        let (opened_sender, opened_receiver) = sync_channel(1);
        let (thread_control, thread_name, options_copy) = (control.clone(), name.clone(), *options);
        let span = Span::current();
        Builder::new()
            .name("rbd-control".into())
            .spawn(move || {
                span.in_scope(|| {
                    serve(&thread_control, &messages, &thread_name, &options_copy, &opened_sender)
                })
            })
            .map_err(failed)?;
        let opened = match opened_receiver.recv_timeout(OPEN_WITHIN) {
            Ok(opened) => opened.map_err(failed)?,
            Err(RecvTimeoutError::Timeout) => {
                return Err(failed(io::Error::other("the cluster does not answer")));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed(io::Error::other("the thread for the image has ended")));
            }
        };
        let Opened { image, shape, id, granularity } = opened;
        let size = shape.size - shape.size % SECTOR;
        let in_flight = Arc::new(InFlight::new(name.stop_timeout));
        let (theirs, span) = (in_flight.clone(), Span::current());
        let run_clock = move || span.in_scope(|| theirs.run_clock());
        let clock = Builder::new().name("rbd-clock".into()).spawn(run_clock);
        let mut rbd = Self {
            image: Some(image),
            control,
            in_flight,
            clock: None,
            name: name.clone(),
            identity: identity(name, &id),
            // Without a cache, a completed write is durable. But an image may have its own settings that turn
            // a cache on.
            offload: Offload::new(limits(shape, granularity, options.read_only), size, false),
            read_only: options.read_only,
            has_lock: shape.has_lock,
        };
        // From here on, a drop closes the image on every path.
        rbd.clock = Some(clock.map_err(failed)?);
        if size == 0 || shape.size > i64::MAX as u64 {
            return Err(Error::Size(shape.size));
        }
        let offload = rbd.offload.clone();
        Ok((rbd, offload))
    }

    fn with_lock(&self, job: Job) -> Result<(), LockError> {
        if self.read_only {
            return Ok(());
        }
        if !self.has_lock {
            return Err(LockError::None);
        }
        self.request(job, lock::ACQUIRE_WITHIN)
    }

    fn request(&self, job: Job, within: Duration) -> Result<(), LockError> {
        match self.control.request(job, within) {
            Some(outcome) => {
                self.in_flight.clear_silence();
                outcome
            }
            None => {
                self.in_flight.mark_silent();
                Err(LockError::Failed(io::Error::other("the cluster does not answer")))
            }
        }
    }
}

impl DiskHandOver for Rbd {
    fn refuses(&self) -> Option<&'static str> {
        Some(
            "a guest uses an rbd: disk, which cannot be handed over: the cluster gives its lock to one client, and another \
             one could take it in between",
        )
    }
}

impl DiskControl for Rbd {
    fn identity(&self) -> &str {
        &self.identity
    }

    /// Compares with the size that the cluster reported last.
    fn refresh_size(&self) -> io::Result<Resized> {
        let bytes = self.control.size();
        let to = bytes - bytes % SECTOR;
        let from = self.offload.grow(to);
        Ok(match to {
            _ if to > from => Resized::Grown { from, to },
            _ if to < from => Resized::Shrunk { from, to: bytes },
            _ => Resized::Same,
        })
    }

    fn resized(&self) -> Option<&Waker> {
        Some(self.control.resized())
    }

    /// Checks whether another client uses the image, as far as the cluster reports it.
    fn check_own_lock(&self) -> Result<(), LockError> {
        self.with_lock(Job::Check)
    }

    fn acquire_own_lock(&self) -> Result<(), LockError> {
        self.with_lock(Job::Acquire)
    }

    fn release_own_lock(&self) {
        if self.read_only || !self.has_lock {
            return;
        }
        if let Err(error) = self.request(Job::Release, self.in_flight.stop_wait()) {
            tracing::error!(image = %self.name, %error, "the lock of the image could not be released");
        }
    }

    fn reload(&self, _locks: bool) -> io::Result<()> {
        self.request(Job::Invalidate, lock::ACQUIRE_WITHIN).map_err(io::Error::other)
    }

    fn write_back(&self) -> io::Result<()> {
        // The image may be given up although the cluster is away, if there is nothing to lose.
        let Some(writes) = self.in_flight.unflushed() else { return Ok(()) };
        self.request(Job::Flush, self.in_flight.stop_wait()).map_err(io::Error::other)?;
        self.in_flight.record_flush(writes);
        Ok(())
    }

    fn limit_remote_waits(&self) {
        self.in_flight.limit_remote_waits();
    }
}

impl Library for Rbd {
    fn scheme(&self) -> &'static str {
        "rbd:"
    }

    fn submit(&self, op: OffloadOp) {
        let Some(image) = &self.image else { return };
        // The library would silently shorten the operation at the end of the image.
        if op.at + op.len > self.control.size() {
            return op.answer(Err(IoError::Shrunk), &mut WakeBatch::default());
        }
        let (kind, at, len) = (op.kind, op.at, op.len);
        if let Some(submission) = self.in_flight.insert(op) {
            image.submit(kind, (at, len), submission);
        }
    }
}

impl Drop for Rbd {
    fn drop(&mut self) {
        // The thread has the last reference now.
        self.image = None;
        if !self.control.end(self.in_flight.stop_wait()) {
            tracing::error!(image = %self.name, "the Ceph cluster does not answer; the image stays open");
        }
        self.in_flight.end();
        let _ = self.clock.take().map(JoinHandle::join);
    }
}

/// Runs the thread: opens the image, reports it, and does jobs until it must close the image.
fn serve(
    control: &Arc<Control>,
    messages: &Receiver<Message>,
    name: &RbdName,
    options: &Options,
    tell: &SyncSender<io::Result<Opened>>,
) {
    let opened = match open(control, name, options) {
        Ok(opened) => opened,
        Err(error) => {
            // The caller may have given up.
            let _ = tell.send(Err(error));
            return;
        }
    };
    control.set_size(opened.shape.size);
    let image = opened.image.clone();
    // No object has an empty name, so a notification to it has no receiver.
    let header = c_text(&format!("rbd_header.{}", opened.id)).unwrap_or_default();
    let closing = match tell.send(Ok(opened)) {
        Ok(()) => control.run(messages, |job| perform(&image, &header, job), || image.size()),
        Err(_) => None,
    };
    // The image is closed here, which may take any time, because nothing else uses it any more.
    drop(image);
    drop(closing);
}

fn perform(image: &Image, header: &CStr, job: Job) -> Outcome {
    match job {
        Job::Check => lock::check(image, header),
        Job::Acquire => lock::acquire(image, header),
        Job::Release => lock::release(image),
        Job::Invalidate => image.invalidate_cache().map_err(lock::failed),
        Job::Flush => image.flush().map_err(lock::failed),
    }
}

fn open(control: &Arc<Control>, name: &RbdName, options: &Options) -> io::Result<Opened> {
    let cluster = connect(name, options)?;
    let granularity = cluster.get(c"rbd_discard_granularity_bytes").ok().and_then(|text| text.parse().ok());
    let rights = if options.read_only { "read" } else { "write" };
    let said = |error: io::Error, missing: String| match error.kind() {
        io::ErrorKind::NotFound => io::Error::other(missing),
        io::ErrorKind::PermissionDenied => {
            let client = client(name);
            io::Error::other(format!(
                "the cluster does not let {client} {rights} it (`ceph auth get {client}`)"
            ))
        }
        _ => error,
    };
    let no_pool = || format!("there is no pool {:?}", name.pool);
    let mut pool = Pool::open(cluster, &c_text(&name.pool)?).map_err(|error| said(error, no_pool()))?;
    if let Some(namespace) = &name.namespace {
        let c_namespace = c_text(namespace)?;
        if !pool.has_namespace(&c_namespace).map_err(|error| said(error, no_pool()))? {
            return Err(io::Error::other(format!(
                "there is no namespace {namespace:?} in pool {:?}",
                name.pool
            )));
        }
        pool.enter_namespace(&c_namespace);
    }
    let snapshot = name.snapshot.as_deref().map(c_text).transpose()?;
    let mut image = Image::open(pool, &c_text(&name.image)?, snapshot.as_deref(), options.read_only)
        .map_err(|error| {
            let missing = match &name.snapshot {
                Some(snapshot) => format!("there is no image {:?} with a snapshot {snapshot:?}", name.image),
                None => format!("there is no image {:?}", name.image),
            };
            said(error, missing)
        })?;
    // An image opened for reading gets no notifications, because that would need a right to write.
    image.watch(control.clone())?;
    let shape = image.shape()?;
    let id = image.id().unwrap_or_default();
    let granularity = granularity.filter(|&bytes: &u64| bytes >= SECTOR).unwrap_or(DISCARD_BYTES);
    Ok(Opened { image: Arc::new(image), shape, id, granularity })
}

fn connect(name: &RbdName, options: &Options) -> io::Result<Cluster> {
    let cluster = Cluster::new(Some(&c_text(name.id.as_deref().unwrap_or(ADMIN))?))?;
    let path = name.conf.as_ref().map(|path| CString::new(path.as_os_str().as_bytes()));
    let path = path.transpose().map_err(io::Error::other)?;
    match cluster.read_conf(path.as_deref()) {
        Ok(()) => {}
        // All settings of such a file can be given in the name too.
        Err(_) if name.conf.is_none() && !name.settings.is_empty() => {}
        Err(error) => {
            let what = name.conf.as_ref().map_or("no configuration of Ceph's is found".into(), |path| {
                format!("the configuration {} cannot be read", path.display())
            });
            return Err(io::Error::other(format!("{what}: {error}")));
        }
    }
    // Ceph's cache corresponds to the host's page cache for files, as in QEMU.
    let cached: &CStr = if options.cache == Cache::Writeback { c"true" } else { c"false" };
    cluster.set(c"rbd_cache", cached)?;
    for (key, value) in &name.settings {
        cluster
            .set(&c_text(key)?, &c_text(value)?)
            .map_err(|error| io::Error::other(format!("Ceph refuses the setting {key}={value}: {error}")))?;
    }
    cluster.connect().map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::PermissionDenied => format!("it knows no {} with this key", client(name)),
            // The libraries give no more details.
            io::ErrorKind::NotFound => {
                format!("no monitor is named, or no keyring of {} found", client(name))
            }
            _ => error.to_string(),
        };
        io::Error::other(format!("the cluster cannot be connected to: {why}"))
    })?;
    Ok(cluster)
}

/// Returns the name of this client in the cluster.
fn client(name: &RbdName) -> String {
    format!("client.{}", name.id.as_deref().unwrap_or(ADMIN))
}

/// Returns the limits. The best size is a run of objects, as in Linux's own Ceph driver. The smallest is the
/// granularity of discards.
fn limits(shape: Shape, granularity: u64, read_only: bool) -> Limits {
    let ranges = (!read_only).then(|| RangeLimits::bytes(RANGE_MAX, granularity));
    let best = shape.object.saturating_mul(shape.stripes.max(1)) / SECTOR;
    Limits {
        min_io_size: u16::try_from(granularity / SECTOR).unwrap_or(0),
        opt_io_size: u32::try_from(best).unwrap_or(0),
        discard: ranges,
        write_zeroes: ranges.map(|ranges| RangeLimits { alignment: 1, ..ranges }),
        zeroes_may_unmap: ranges.is_some(),
        ..Limits::plain(read_only)
    }
}

/// Returns the cluster's id of the image, so that the two can be matched. For a snapshot, or if the id is too
/// long, returns a hash (FNV-1a) of all names.
fn identity(name: &RbdName, id: &str) -> String {
    let plain = format!("rbd-{id}");
    if !id.is_empty() && name.snapshot.is_none() && plain.len() <= 20 && plain.is_ascii() {
        return plain;
    }
    let text = format!("{:?} {:?} {:?} {id} {:?}", name.pool, name.namespace, name.image, name.snapshot);
    let hash = fnv1a(text.as_bytes());
    format!("rbd-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities() {
        let of = |text: &str, id: &str| identity(&text.parse().unwrap(), id);
        assert_eq!(of("rbd:p/i", "1015279560bb"), "rbd-1015279560bb");
        let hashed = [of("rbd:p/i@s", "1015279560bb"), of("rbd:p/i", ""), of("rbd:p/i", &"1".repeat(17))];
        for (number, identity) in hashed.iter().enumerate() {
            assert!(identity.len() == 20 && !hashed[..number].contains(identity), "{hashed:?}");
        }
    }

    #[test]
    fn shapes() {
        let shape = Shape { size: 1 << 30, object: 4 << 20, stripes: 1, has_lock: true };
        let found = limits(shape, 64 << 10, false);
        assert_eq!((found.min_io_size, found.opt_io_size), (128, 8192));
        assert_eq!(found.discard.map(|discard| discard.alignment), Some(128));
        assert_eq!(found.write_zeroes.map(|zeroes| zeroes.alignment), Some(1));
        assert!(limits(shape, 64 << 10, true).discard.is_none());
        let odd = limits(Shape { object: u64::MAX, stripes: 0, ..shape }, 64 << 20, false);
        assert_eq!((odd.min_io_size, odd.opt_io_size), (0, 0));
    }
}
