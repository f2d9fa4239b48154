//! The state that all rings of a card share.

use crate::card::announcement::Announcements;
use crate::card::counters::RingCounters;
use crate::card::filter::Filter;
use kickless_net_port::{Capture, Direction, Offloads};
use kickless_spec::net::{MAC_LEN, NetFeatures};
use kickless_sync::lock;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The state that all rings of a card share.
///
/// Accesses to the atomics are relaxed. No atomic protects other data, and the transport and the rings order
/// the actions of the driver. Who changes the state tells the port ([`Port::card_changed`]).
///
/// [`Port::card_changed`]: crate::ports::port::Port::card_changed
#[derive(Debug)]
pub(crate) struct CardState {
    pub(crate) mac: Option<[u8; MAC_LEN]>,
    pub(crate) capture: Capture,
    pub(crate) pairs_max: u16,
    /// The MTU in the configuration space. The front-end can set it.
    pub(crate) mtu: AtomicU16,
    /// Pairs of rings that the driver uses. Unknown unless the driver sets it through our control ring.
    pub(crate) pairs: AtomicU16,
    /// Whether our control ring has run since the front-end connected. Otherwise the front-end may serve the
    /// control ring itself.
    pub(crate) has_control_ring: AtomicBool,
    /// Whether the driver's settings are known: it was reset, its state was loaded, or its control ring has
    /// started here.
    pub(crate) settings_are_known: AtomicBool,
    /// The features in force of the ring that started last.
    pub(crate) features: AtomicU64,
    /// The offloads of received frames that the driver has not switched off.
    pub(crate) offloads: AtomicU64,
    /// The frames that the driver wants, and the number of changes of this.
    pub(crate) filter: Mutex<Arc<Filter>>,
    pub(crate) filter_changes: AtomicU64,
    /// The receive rings of each pair that run: one, or for a moment two.
    pub(crate) receiving: Vec<AtomicU32>,
    /// Announcements of the guest's address that the front-end requests.
    pub(crate) announcements: Announcements,
    /// The counters of each ring.
    pub(crate) counters: Vec<RingCounters>,
}

impl CardState {
    /// Returns the offloads that the driver has not switched off.
    pub(crate) fn offloads(&self) -> NetFeatures {
        NetFeatures::from_bits_truncate(self.offloads.load(Ordering::Relaxed))
    }

    /// Sets the offloads that the driver has not switched off.
    pub(crate) fn set_offloads(&self, offloads: NetFeatures) {
        self.offloads.store(offloads.bits(), Ordering::Relaxed);
    }

    /// Returns the present filter.
    pub(crate) fn filter(&self) -> Arc<Filter> {
        lock(&self.filter).clone()
    }

    /// Changes the filter. Receive rings find that out at their next poll.
    pub(crate) fn change_filter(&self, change: impl FnOnce(&mut Filter)) {
        let mut filter = lock(&self.filter);
        change(Arc::make_mut(&mut filter));
        // Under the lock, so that a ring that sees the new number gets this filter or a later one.
        self.filter_changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that the control ring starts, at its beginning or where a driver has got to.
    ///
    /// In the second case the driver has made commands, and counts on them (virtio 1.3, section 5.1.6.5). A
    /// card that did not see them does without offloads of received frames, and filters only by what the
    /// driver sets from now on. So a driver never gets a frame that it cannot handle, and never misses one
    /// that it wants.
    pub(crate) fn control_ring_starts(&self, is_resumed: bool) {
        self.has_control_ring.store(true, Ordering::Relaxed);
        if !self.settings_are_known.swap(true, Ordering::Relaxed) && is_resumed {
            self.set_offloads(NetFeatures::empty());
            self.change_filter(Filter::distrust);
        }
    }

    /// Returns the address in the configuration space.
    pub(crate) fn address(&self) -> Option<[u8; MAC_LEN]> {
        self.filter().address.or(self.mac)
    }

    /// Sets the number of pairs that the driver uses.
    pub(crate) fn set_pairs(&self, pairs: u16) {
        self.pairs.store(pairs, Ordering::Relaxed);
    }

    /// Returns the counters of the receive ring of a pair.
    pub(crate) fn receive_counters(&self, pair: u16) -> &RingCounters {
        &self.counters[2 * usize::from(pair)]
    }

    /// Adds a frame of `len` bytes to the capture, if that is on. `read` copies the first bytes of the frame.
    #[inline]
    pub(crate) fn capture(&self, direction: Direction, pair: u16, len: usize, read: impl FnOnce(&mut [u8])) {
        if self.capture.is_on() {
            self.capture.add(direction, pair, [(len, read)]);
        }
    }

    /// Notes that a receive ring of this pair runs.
    pub(crate) fn receive_started(&self, pair: u16) {
        if let Some(receiving) = self.receiving.get(usize::from(pair)) {
            receiving.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that a receive ring of this pair has ended.
    pub(crate) fn receive_ended(&self, pair: u16) {
        if let Some(receiving) = self.receiving.get(usize::from(pair)) {
            receiving.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns whether a receive ring of this pair runs, and the driver uses the pair as far as is known.
    pub(crate) fn receives(&self, pair: u16) -> bool {
        let is_known = self.has_control_ring.load(Ordering::Relaxed)
            && self.features().contains(NetFeatures::CTRL_VQ | NetFeatures::MQ);
        let runs =
            self.receiving.get(usize::from(pair)).is_some_and(|count| count.load(Ordering::Relaxed) > 0);
        runs && !(is_known && pair >= self.pairs.load(Ordering::Relaxed))
    }

    fn features(&self) -> NetFeatures {
        NetFeatures::from_bits_truncate(self.features.load(Ordering::Relaxed))
    }

    /// Returns the offloads that a TAP may apply to the frames that it delivers.
    pub(crate) fn tap_offloads(&self) -> Offloads {
        let accepted = self.features() & self.offloads();
        let runs = self.receiving.iter().any(|count| count.load(Ordering::Relaxed) > 0);
        let mut offloads = Offloads::empty();
        for (offload, needs) in [
            (Offloads::CHECKSUM, NetFeatures::GUEST_CSUM),
            (Offloads::TSO4, NetFeatures::GUEST_TSO4),
            (Offloads::TSO6, NetFeatures::GUEST_TSO6),
            (Offloads::ECN, NetFeatures::GUEST_ECN),
            (Offloads::USO, NetFeatures::GUEST_USO4 | NetFeatures::GUEST_USO6),
        ] {
            offloads.set(offload, runs && accepted.contains(needs));
        }
        offloads
    }
}
