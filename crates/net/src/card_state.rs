//! The state that all rings of a card share.

use crate::counters::RingCounters;
use kickless_net_port::Port;
use kickless_spec::net::MAC_LEN;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64};

/// The state that all rings of a card share.
///
/// Accesses to the atomics are relaxed. No atomic protects other data, and the transport and the rings order
/// the actions of the driver.
#[derive(Debug)]
pub(crate) struct CardState {
    pub(crate) mac: Option<[u8; MAC_LEN]>,
    pub(crate) port: Port,
    pub(crate) pairs_max: u16,
    /// The MTU in the configuration space. The front-end can set it.
    pub(crate) mtu: AtomicU16,
    /// Pairs of rings that the driver uses. Unknown unless the driver sets it through our control ring.
    pub(crate) pairs: AtomicU16,
    /// Whether our control ring has run since the front-end connected. Otherwise the front-end may serve the
    /// control ring itself.
    pub(crate) has_control_ring: AtomicBool,
    /// Announcements that the front-end requested.
    pub(crate) announcements: AtomicU64,
    /// The counters of each ring.
    pub(crate) counters: Vec<RingCounters>,
}
