//! State of a card that all its rings share.

use crate::counters::RingCounters;
use kickless_net_port::Port;
use kickless_spec::net::MAC_LEN;
use std::sync::atomic::{AtomicU16, AtomicU64};

/// State of a card that all its rings share.
///
/// Each atomic stands for itself, and is accessed relaxed: the transport and the rings order what the driver does.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) mac: Option<[u8; MAC_LEN]>,
    pub(crate) port: Port,
    pub(crate) pairs_max: u16,
    /// The MTU of the configuration space. The front-end can set it.
    pub(crate) mtu: AtomicU16,
    /// Pairs of rings that the driver uses, if it says so in a control ring of ours.
    pub(crate) pairs: AtomicU16,
    /// Announcements that the front-end asked for.
    pub(crate) announcements: AtomicU64,
    /// Of each ring.
    pub(crate) counters: Vec<RingCounters>,
}
