//! The virtio-blk device behind a transport.

use crate::budget::Budget;
use crate::config::{self, Choices};
use crate::device_state::DeviceState;
use crate::failures::Failures;
use crate::halt::Halt;
use crate::handed_disk::HandedDisk;
use crate::metrics::Metrics;
use crate::on_error::ErrorStop;
use crate::queue::Queue;
use kickless_device::{
    CloseError, ConfigError, Device, DeviceMetrics, Driver, InvalidState, Operate, OwnProtocolFeatures,
    QueueTask, RING_FEATURES, StartError, StoppedOnError, Unsupported, Vring, Words,
};
use kickless_disk::{Disk, Medium, Resized};
use kickless_io::Waker;
use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tracing::{debug, error, info, warn};
use zerocopy::IntoBytes;

/// The first bytes of the saved state. One byte follows: `writeback`, 0 or 1.
const STATE_TAG: [u8; 4] = *b"blk1";

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
    pub(crate) shared: Arc<DeviceState>,
    options: Options,
    /// The size to which the disk grows when it is smaller. 0: it does not grow by itself.
    size_min: AtomicU64,
    /// The bytes of a logical block that drivers see.
    block_size: u32,
    /// Wakes the transport when the configuration space changes. `None` if the process had no descriptor
    /// left. Then the driver sees a new size only when it reads the space again.
    config_changed: Option<Waker>,
    /// The configuration space that the guest has read in the process from which this one takes the device
    /// over.
    pub(crate) handed_space: Option<Vec<u8>>,
}

impl Blk {
    /// Makes a device over this disk.
    pub fn new(disk: Disk, options: Options) -> Self {
        let medium = Medium::new(disk, options.lock);
        Self::of_medium(medium, options)
    }

    /// Makes a device over a disk that another process still uses. Nothing is written or sent until
    /// [`HandOver::begin`](kickless_device::HandOver::begin), and [`Blk::check_handed`] comes before that.
    pub fn of_handed(handed: HandedDisk, options: Options) -> Self {
        let HandedDisk { disk, config_space } = handed;
        let device = Self::of_medium(Medium::of_handed(disk, options.lock), options);
        // The queues that start until then know their driver.
        device.shared.driver_known.store(true, Ordering::Relaxed);
        Self { handed_space: Some(config_space), ..device }
    }

    fn of_medium(medium: Medium, options: Options) -> Self {
        let mut id = [0; blk::ID_LEN];
        let serial = options.serial.as_bytes();
        let len = serial.len().min(id.len());
        id[..len].copy_from_slice(&serial[..len]);
        let (writeback, driver_known, fresh_driver) = Default::default();
        let shared = Arc::new(DeviceState {
            medium,
            has_lost_writes: false.into(),
            budget: Arc::default(),
            id,
            writeback,
            driver_known,
            fresh_driver,
            failures: Failures::default(),
            metrics: Metrics::new(options.queues_max, options.queue_size_max),
            halt: Halt::default(),
            on_error: ErrorStop::default(),
            discard: AtomicBool::new(true),
        });
        Self {
            shared,
            options,
            size_min: AtomicU64::new(0),
            block_size: blk::SECTOR_SIZE as u32,
            config_changed: Waker::new().ok(),
            handed_space: None,
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

    /// Stops on errors that an operator can mend, instead of reporting them: a full file system, or a remote
    /// disk that is away. The default reports all errors.
    #[must_use]
    pub fn with_stop_on_error(mut self, is_on: bool) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.on_error.is_on = is_on;
        }
        self
    }

    /// Sets the bytes of a logical block that drivers see, a power of two. The default is 512 for each disk,
    /// because partition tables count in these. Requests of single sectors are always served.
    #[must_use]
    pub fn with_block_size(mut self, bytes: u32) -> Self {
        self.block_size = bytes;
        self
    }

    /// Returns the disk behind the device. Another one can replace it when the next guest starts.
    pub fn disk(&self) -> Arc<Disk> {
        self.shared.medium.disk()
    }

    /// Returns the configuration space.
    pub(crate) fn config_space(&self) -> Vec<u8> {
        let Options { queues_max, queue_size_max, .. } = self.options;
        let (disk, writeback, discard) = (self.disk(), self.shared.writeback(), self.shared.discard());
        let choices = Choices { block_size: self.block_size, writeback, discard };
        let space = config::space((disk.limits(), disk.size()), queues_max, queue_size_max, choices);
        space.as_bytes().to_vec()
    }

    /// Notifies the driver that the size of the disk has changed.
    fn resized(&self, (from, to): (u64, u64)) {
        info!(from, to, "the disk has {}", if to > from { "grown" } else { "become smaller" });
        if let Some(config_changed) = &self.config_changed {
            config_changed.wake();
        }
    }
}

impl Device for Blk {
    fn words(&self) -> Words {
        Words { name: "disk", rings_option: "QEMU: num-queues=" }
    }

    fn features(&self) -> Features {
        Features::from_bits_retain(config::features(self.disk().limits()).bits()) | RING_FEATURES
    }

    /// Its queues can leave requests in the in-flight buffer.
    fn protocol_features(&self) -> OwnProtocolFeatures {
        OwnProtocolFeatures {
            offered: ProtocolFeatures::GET_VRING_BASE_INFLIGHT | ProtocolFeatures::GET_VRING_BASE_SKIP_DRAIN,
            withheld: ProtocolFeatures::empty(),
            config_bytes_max: None,
        }
    }

    fn queues_max(&self) -> u16 {
        self.options.queues_max
    }

    fn queue_size_max(&self) -> u16 {
        self.options.queue_size_max
    }

    /// Keeps the cache mode for the driver behind the same front-end. It may have either value after a reset
    /// (virtio 1.3, section 5.2.5), and a driver that reads "off" in the front-end's copy sends no flushes.
    fn reset(&self, driver: Driver) {
        self.shared.fresh_driver.store(driver != Driver::Unknown, Ordering::Relaxed);
        match driver {
            Driver::SameFrontEnd => {}
            Driver::Fresh | Driver::Unknown => {
                self.shared.driver_known.store(driver == Driver::Fresh, Ordering::Relaxed);
                self.shared.writeback.store(driver == Driver::Fresh, Ordering::Relaxed);
            }
        }
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let space = self.config_space();
        let from = space.get(offset..).unwrap_or_default();
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

    /// Looks at the disk, because a front-end reads the configuration space before its guest starts.
    fn connected(&self) {
        if let Err(error) = self.shared.medium.look() {
            // Another host may be writing to it. The start of the first ring says what is wrong.
            debug!(%error, "the disk cannot be looked at before its guest starts");
        }
    }

    fn open(&self) -> Result<(), StartError> {
        let before = self.disk().size();
        self.shared.medium.take().map_err(|error| StartError(error.into()))?;
        let now = self.disk().size();
        if now != before {
            self.resized((before, now));
        }
        self.refresh();
        Ok(())
    }

    fn close(&self) -> Result<(), CloseError> {
        let (medium, has_lost_writes) = (&self.shared.medium, &self.shared.has_lost_writes);
        // The kernel reports an error once, so a second attempt would succeed without the lost writes.
        if has_lost_writes.load(Ordering::Relaxed) {
            return Err(CloseError("a flush of the guest has to say so first".into()));
        }
        medium.give_up().map_err(|error| {
            error!(%error, "writes that were acknowledged did not reach the disk: it stays locked, and the next flush fails");
            has_lost_writes.store(!self.disk().reports_losses(), Ordering::Relaxed);
            CloseError(error.into())
        })
    }

    fn limit_remote_waits(&self) {
        self.shared.on_error.limit();
        self.disk().limit_remote_waits();
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
            && !self.disk().limits().read_only
        {
            warn!(
                "the driver was initialised by another process and may have turned the write cache off: every write is \
                 made durable until it chooses a cache mode or a virtual machine starts"
            );
        }
        if self.shared.fresh_driver.swap(false, Ordering::Relaxed) {
            self.disk().new_driver();
        }
        Ok(Box::new(Queue::new(vring, self.shared.clone(), features)))
    }
}

impl Operate for Blk {
    fn metrics(&self, now_ns: u64) -> DeviceMetrics {
        self.shared.metrics.read(now_ns)
    }

    /// Reads the size of the medium, and makes the medium grow to the size that it has at least. Notifies the
    /// driver if it has grown.
    ///
    /// A disk never shrinks under a guest, because the guest would lose data.
    fn refresh(&self) {
        let size_min = self.size_min.load(Ordering::Relaxed);
        let refreshed = self.shared.medium.refresh(size_min);
        let size = self.disk().size();
        match refreshed {
            Ok(Resized::Same) => {}
            Ok(Resized::Grown { from, to }) => self.resized((from, to)),
            Ok(Resized::Shrunk { from, to }) => {
                warn!(
                    from,
                    to,
                    "the medium has become shorter, but a disk cannot shrink under a guest: the disk keeps its size, and \
                     requests beyond the medium fail until it is as long again"
                );
            }
            Err(error) if size_min > size => {
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

    /// Sets whether space of the disk goes back to the host. Notifies the driver of a change, because the
    /// field `write_zeroes_may_unmap` goes with it.
    fn set_discard(&self, is_on: bool) {
        self.shared.medium.set_keeps_space(!is_on);
        let was_on = self.shared.discard.swap(is_on, Ordering::Relaxed);
        if let Some(config_changed) = self.config_changed.as_ref().filter(|_| was_on != is_on) {
            config_changed.wake();
        }
    }

    fn size(&self) -> Result<u64, Unsupported> {
        Ok(self.disk().size())
    }

    fn set_paused(&self, is_paused: bool) -> Result<(), Unsupported> {
        self.shared.halt.set_paused(is_paused);
        Ok(())
    }

    fn stopped(&self) -> Option<StoppedOnError> {
        self.shared.on_error.stopped(&self.shared.halt)
    }

    fn resume(&self) -> bool {
        // Otherwise the requests would fail at once, until the server is tried again by itself.
        self.disk().restart_remote_waits();
        self.shared.on_error.resume(&self.shared.halt)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let on_error = &self.shared.on_error;
        if on_error.is_on { vec![("stops", on_error.stops())] } else { Vec::new() }
    }

    fn refresh_due(&self) -> Option<Waker> {
        self.shared.medium.resized()
    }
}
