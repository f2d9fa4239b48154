//! The virtio-blk device behind a transport.

use crate::budget::Budget;
use crate::config;
use crate::device_state::DeviceState;
use crate::failures::Failures;
use crate::halt::Halt;
use crate::metrics::Metrics;
use crate::on_error::ErrorStop;
use crate::queue::Queue;
use kickless_device::{
    ConfigError, Device, DeviceMetrics, InvalidState, Limiter, QueueTask, StartError, StoppedOnError, Vring,
    Words,
};
use kickless_disk::lock::{ImageLock, LOCK_WAIT_MAX, is_held_here};
use kickless_disk::{Disk, Resized};
use kickless_io::Waker;
use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::{debug, error, info, warn};
use zerocopy::IntoBytes;

/// The first bytes of the saved state. One byte follows: `writeback`, 0 or 1.
const STATE_TAG: [u8; 4] = *b"blk1";

/// The error if two devices of this process have the same image.
const LOCKED_BY_THIS_PROCESS: &str = "the image cannot be locked: another device of this process is using it; give each device its own, or \
    make both read-only";

/// The properties of a device that do not come from its disk.
#[derive(Clone, Debug)]
pub struct Options {
    /// The answer to GET_ID. Only the first 20 bytes are used.
    pub serial: String,
    /// The largest number of queues, from 1 to 256.
    pub queues_max: u16,
    /// The largest size of a queue.
    pub queue_size_max: u16,
    /// Locks the image while a queue runs.
    pub lock: bool,
}

/// A virtio-blk device.
#[derive(Debug)]
pub struct Blk {
    shared: Arc<DeviceState>,
    options: Options,
    /// The locks on the image and its backing files.
    locks: Mutex<Vec<ImageLock>>,
    /// The size to which the disk grows when it is smaller. 0: it does not grow by itself.
    size_min: AtomicU64,
    /// Wakes the transport when the configuration space changes. `None` if the process had no descriptor
    /// left. Then the driver sees a new size only when it reads the space again.
    config_changed: Option<Waker>,
}

impl Blk {
    /// Makes a device over this disk.
    pub fn new(disk: Disk, options: Options) -> Self {
        let mut id = [0; blk::ID_LEN];
        let serial = options.serial.as_bytes();
        let len = serial.len().min(id.len());
        id[..len].copy_from_slice(&serial[..len]);
        let (writeback, driver_known, fresh_driver) = Default::default();
        let shared = Arc::new(DeviceState {
            disk,
            budget: Arc::default(),
            id,
            writeback,
            driver_known,
            fresh_driver,
            failures: Failures::default(),
            metrics: Metrics::new(options.queues_max, options.queue_size_max),
            halt: Halt::default(),
            on_error: ErrorStop::default(),
            limiter: Arc::default(),
        });
        Self {
            shared,
            options,
            locks: Mutex::default(),
            size_min: AtomicU64::new(0),
            config_changed: Waker::new().ok(),
        }
    }

    /// Sets the memory for buffer pieces of requests in flight.
    ///
    /// `pieces` counts pieces of 16 bytes beyond the first 32 of each request. Requests that find no room
    /// wait. The default is 2^20 pieces, or 16 MiB.
    #[must_use]
    pub fn with_pieces_max(mut self, pieces: usize) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.budget = Arc::new(Budget::new(pieces));
        }
        self
    }

    /// Limits requests by a limiter, which several devices can share. The default is one of the device's own,
    /// without limits.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Arc<Limiter>) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.limiter = limiter;
        }
        self
    }

    /// Stops on errors that an operator can mend, instead of reporting them: a full file system, or a remote
    /// disk that is away. The default reports all errors.
    #[must_use]
    pub fn with_stop_on_error(mut self, is_on: bool) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.on_error.is_on = is_on;
        }
        self
    }

    /// Returns the disk behind the device.
    pub fn disk(&self) -> &Disk {
        &self.shared.disk
    }

    fn set_locks(&self, locks: Vec<ImageLock>) {
        *self.locks.lock().unwrap_or_else(PoisonError::into_inner) = locks;
    }

    /// Writes everything to the image, and closes it.
    fn write_back(&self) {
        if let Err(error) = self.shared.disk.write_back() {
            error!(%error, "some writes did not reach the image; a host that opens it next may read old data");
        }
    }

    /// Locks the disk, if the options ask for it, and loads its current state.
    fn acquire(&self) -> Result<Vec<ImageLock>, StartError> {
        let (disk, mut locks) = (&self.shared.disk, Vec::new());
        if self.options.lock {
            if let Some(file) = disk.file() {
                locks.push(lock(file, disk.limits().read_only)?);
            }
            disk.acquire_own_lock()
                .map_err(|error| failed(format!("the image cannot be locked: {error}")))?;
        }
        // From here on no other writer exists. This loads what earlier writers, here or on another host, left
        // behind.
        disk.reload().map_err(|error| failed(format!("the image cannot be used: {error}")))?;
        // An image that stayed open could be written after another host has got the lock.
        locks.extend(self.lock_backing().inspect_err(|_| self.write_back())?);
        Ok(locks)
    }

    /// Locks the backing images, if the options ask for it.
    fn lock_backing(&self) -> Result<Vec<ImageLock>, StartError> {
        if !self.options.lock {
            return Ok(Vec::new());
        }
        let under = self.shared.disk.backing_files().map_err(|error| failed(error.to_string()))?;
        under.iter().map(|file| lock(file, true)).collect()
    }
}

fn failed(why: String) -> StartError {
    StartError(why.into())
}

/// Locks an image. Waits for a while if another process has the lock.
fn lock(file: &File, read_only: bool) -> Result<ImageLock, StartError> {
    ImageLock::acquire_within(file, read_only, LOCK_WAIT_MAX).map_err(|error| {
        if error.is_held() && is_held_here(file, read_only) {
            return failed(LOCKED_BY_THIS_PROCESS.into());
        }
        failed(format!("the image cannot be locked: {error}"))
    })
}

impl Device for Blk {
    fn words(&self) -> Words {
        Words { name: "disk", rings_option: "QEMU: num-queues=" }
    }

    fn features(&self) -> Features {
        Features::from_bits_retain(config::features(self.shared.disk.limits()).bits())
            | Features::VERSION_1
            | Features::EVENT_IDX
            | Features::INDIRECT_DESC
            | Features::RING_PACKED
            | Features::IN_ORDER
    }

    /// Its queues can leave requests in the in-flight buffer.
    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::GET_VRING_BASE_INFLIGHT | ProtocolFeatures::GET_VRING_BASE_SKIP_DRAIN
    }

    fn queues_max(&self) -> u16 {
        self.options.queues_max
    }

    fn queue_size_max(&self) -> u16 {
        self.options.queue_size_max
    }

    fn metrics(&self, now_ns: u64) -> DeviceMetrics {
        self.shared.metrics.read(now_ns)
    }

    fn reset(&self) {
        self.shared.driver_known.store(true, Ordering::Relaxed);
        self.shared.fresh_driver.store(true, Ordering::Relaxed);
        self.shared.writeback.store(true, Ordering::Relaxed);
    }

    /// Keeps the cache mode, which may have either value after a reset (virtio 1.3, section 5.2.5). A driver
    /// that reads "off" in the front-end's copy sends no flushes.
    fn reset_driver(&self) {
        self.shared.fresh_driver.store(true, Ordering::Relaxed);
    }

    fn restore_unknown(&self) {
        self.shared.driver_known.store(false, Ordering::Relaxed);
        self.shared.fresh_driver.store(false, Ordering::Relaxed);
        self.shared.writeback.store(false, Ordering::Relaxed);
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let Options { queues_max, queue_size_max, .. } = self.options;
        let (disk, writeback) = (&self.shared.disk, self.shared.writeback());
        let space = config::space((disk.limits(), disk.size()), queues_max, queue_size_max, writeback);
        let from = space.as_bytes().get(offset..).unwrap_or_default();
        let len = from.len().min(into.len());
        into[..len].copy_from_slice(&from[..len]);
        into[len..].fill(0);
    }

    fn write_config(&self, offset: usize, from: &[u8]) -> Result<(), ConfigError> {
        let writeback = config::write(offset, from)?;
        self.shared.driver_known.store(true, Ordering::Relaxed);
        self.shared.writeback.store(writeback, Ordering::Relaxed);
        debug!(writeback, "the driver chose its cache mode");
        Ok(())
    }

    fn config_changes(&self) -> Option<&Waker> {
        self.config_changed.as_ref()
    }

    /// Reads the size of the medium, or makes the medium grow to the size that it has at least. Notifies the
    /// driver if it has grown.
    ///
    /// A disk never shrinks, because the guest would lose data.
    fn refresh(&self) {
        let (disk, size_min) = (&self.shared.disk, self.size_min.load(Ordering::Relaxed));
        let resized = if size_min > disk.size() { disk.grow(size_min) } else { disk.refresh_size() };
        match resized {
            Ok(Resized::Same) => {}
            Ok(Resized::Grown { from, to }) => {
                info!(from, to, "the disk has grown");
                if let Some(config_changed) = &self.config_changed {
                    config_changed.wake();
                }
            }
            Ok(Resized::Shrunk { from, to }) => {
                warn!(
                    from,
                    to,
                    "the medium has become shorter, but a disk cannot shrink under a guest: the disk keeps its size, and \
                     requests beyond the medium fail until it is as long again"
                );
            }
            Err(error) if size_min > disk.size() => {
                warn!(%error, size_min, "the disk cannot grow, and keeps its current size")
            }
            Err(error) => {
                warn!(%error, "the size of the disk cannot be read; the disk keeps its current size")
            }
        }
    }

    fn set_size_min(&self, bytes: u64) {
        self.size_min.store(bytes, Ordering::Relaxed);
    }

    fn size(&self) -> Option<u64> {
        Some(self.shared.disk.size())
    }

    fn set_paused(&self, is_paused: bool) -> bool {
        self.shared.halt.set_paused(is_paused);
        true
    }

    fn stopped(&self) -> Option<StoppedOnError> {
        self.shared.on_error.stopped(&self.shared.halt)
    }

    fn resume(&self) -> bool {
        // Otherwise the requests would fail at once, until the server is tried again by itself.
        self.shared.disk.restart_remote_waits();
        self.shared.on_error.resume(&self.shared.halt)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let on_error = &self.shared.on_error;
        if on_error.is_on { vec![("stops", on_error.stops())] } else { Vec::new() }
    }

    fn limiter(&self) -> Option<&Limiter> {
        Some(&self.shared.limiter)
    }

    fn refresh_due(&self) -> Option<&Waker> {
        self.shared.disk.resized()
    }

    fn open(&self) -> Result<(), StartError> {
        self.set_locks(self.acquire().inspect_err(|_| self.shared.disk.release_own_lock())?);
        self.refresh();
        Ok(())
    }

    fn close(&self) {
        self.write_back();
        self.shared.disk.release_own_lock();
        self.set_locks(Vec::new());
    }

    fn limit_remote_waits(&self) {
        self.shared.on_error.limit();
        self.shared.disk.limit_remote_waits();
    }

    fn save(&self) -> Vec<u8> {
        // If the driver's choice is unknown, `writeback` is off.
        [&STATE_TAG[..], &[self.shared.writeback().into()]].concat()
    }

    fn load(&self, state: &[u8]) -> Result<(), InvalidState> {
        let writeback = match state.strip_prefix(&STATE_TAG) {
            Some([0]) => false,
            Some([1]) => true,
            _ => return Err(InvalidState { kind: "block" }),
        };
        self.shared.driver_known.store(true, Ordering::Relaxed);
        self.shared.fresh_driver.store(false, Ordering::Relaxed);
        self.shared.writeback.store(writeback, Ordering::Relaxed);
        Ok(())
    }

    fn start_queue(&self, vring: Vring, features: Features) -> Result<Box<dyn QueueTask>, StartError> {
        let features = BlkFeatures::from_bits_truncate(features.bits());
        let could_turn_off = features.contains(BlkFeatures::FLUSH | BlkFeatures::CONFIG_WCE);
        if !self.shared.driver_known.swap(true, Ordering::Relaxed)
            && could_turn_off
            && !self.shared.disk.limits().read_only
        {
            warn!(
                "the driver was initialised by another process and may have turned the write cache off: every write is \
                 made durable until it chooses a cache mode or a virtual machine starts"
            );
        }
        if self.shared.fresh_driver.swap(false, Ordering::Relaxed) {
            self.shared.disk.new_driver();
        }
        Ok(Box::new(Queue::new(vring, self.shared.clone(), features)))
    }
}
