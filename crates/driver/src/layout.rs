//! The addresses of a queue's rings, and of the driver's data of each id, in the device's own memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kickless_spec::features::Features;
use kickless_spec::ring::{avail_len, desc_len, used_len};
use kickless_virtqueue::driver::{self, Completer, Submitter};

use crate::connection::RingSetup;
use crate::error::Error;
use crate::memory::Region;

const PAGE: u64 = 4096;
/// The alignment of the parts. Processors prefetch cache lines in pairs.
const LINE: u64 = 128;

/// The shape and the addresses of a queue.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    setup: RingSetup,
    options: driver::Options,
    event_idx: bool,
    data: u64,
    end: u64,
}

impl Layout {
    /// Lays out a queue from the device's address `start` on. `data_len` bytes for the driver's use follow
    /// the rings.
    ///
    /// # Errors
    /// The size of the queue is invalid.
    pub(crate) fn new(start: u64, size: u16, features: Features, data_len: usize) -> Result<Self, Error> {
        let has = |feature| features.contains(feature);
        let (event_idx, indirect) = (has(Features::EVENT_IDX), has(Features::INDIRECT_DESC));
        let options = match has(Features::RING_PACKED) {
            true => driver::Options::packed(size, event_idx, indirect),
            false => driver::Options::new(size, event_idx, indirect),
        };
        let options = options.map_err(|_| Error::QueueSize { size })?.with_in_order(has(Features::IN_ORDER));
        // The event areas of a packed ring are smaller than the rings of a split one, so either fits.
        let driver = (start + desc_len(size) as u64).next_multiple_of(LINE);
        let device = (driver + avail_len(size, true) as u64).next_multiple_of(LINE);
        let data = (device + used_len(size, true) as u64).next_multiple_of(PAGE);
        let end = (data + data_len as u64).next_multiple_of(PAGE);
        let setup = RingSetup { size, packed: has(Features::RING_PACKED), desc: start, driver, device };
        Ok(Self { setup, options, event_idx, data, end })
    }

    /// Returns the first address after the queue.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn size(&self) -> u16 {
        self.setup.size
    }

    /// Returns whether EVENT_IDX was negotiated: each side names the event for which it wants a notification.
    pub(crate) fn event_idx(&self) -> bool {
        self.event_idx
    }

    /// Returns the largest number of completions for pollers that one poll takes from the ring.
    ///
    /// In a packed ring, it is half of the requests in flight. So these go round in two groups, one at each
    /// end. Without the limit, a poll goes on while the device shows more, until it has all of them, and each
    /// end waits for the other one. With 8, 32 and 128 requests in flight to a disk that answers at once, the
    /// limit gave 1.21, 1.06 and 1.06 times the requests where a cache line takes 390 ns between the
    /// processors. In a split ring, a poll ends at the used index, and the limit gave 0.88 to 0.97.
    #[inline]
    pub(crate) fn poll_max(&self, in_flight: u64) -> usize {
        match self.setup.packed {
            // A device that shows completions of nothing breaks the rules, which a poll of one finds.
            true => (in_flight.div_ceil(2) as usize).max(1),
            false => usize::MAX,
        }
    }

    pub(crate) fn indirect(&self) -> bool {
        self.options.indirect()
    }

    pub(crate) fn setup(&self) -> &RingSetup {
        &self.setup
    }

    /// Makes the rings empty, and returns the driver's ends of them.
    pub(crate) fn rings(&self, region: &Arc<Region>) -> Result<(Submitter, Completer), Error> {
        let RingSetup { desc, driver, device, .. } = self.setup;
        let rings = region.area(desc, (self.data - desc) as usize, 16)?;
        // This stores word by word, because another thread may be polling the ring.
        (0..rings.len()).step_by(2).for_each(|at| rings.store_u16(at, 0, Ordering::Relaxed));
        let areas = driver::Areas {
            desc: region.area(desc, (driver - desc) as usize, 16)?,
            driver: region.area(driver, (device - driver) as usize, 4)?,
            device: region.area(device, (self.data - device) as usize, 4)?,
        };
        Ok(driver::queue(self.options, areas))
    }

    /// Returns the device's address of the data after the rings.
    pub(crate) fn data(&self) -> u64 {
        self.data
    }
}
