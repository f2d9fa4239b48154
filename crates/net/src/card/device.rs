//! The virtio-net [`Device`].

use super::announcement::Announcements;
use super::control_ring::ControlTask;
use super::counters::{self, RingCounters};
use super::filter::Filter;
use super::saved_state::{PAIRS_UNKNOWN, SavedState};
use super::state::CardState;
use super::{config, features};
use crate::ports::OpenPort;
use crate::ports::port::Port;
use crate::ring::receive_ring::{FrameFormat, ReceiveRing};
use crate::ring::roles::{Role, rings_max, role};
use crate::ring::transmit_ring::{TransmitFormat, TransmitRing};
use kickless_device::{
    CaptureTo, CloseError, ConfigError, Device, DeviceMessage, DeviceMetrics, Disabled, Driver, InvalidState,
    MessageError, Operate, OwnProtocolFeatures, QueueTask, RING_FEATURES, StartError, Vring, Words,
};
use kickless_net_port::Capture;
use kickless_spec::features::Features;
use kickless_spec::net::{MAC_LEN, MTU_DEFAULT, MTU_MAX, MTU_MIN, NetFeatures};
use kickless_spec::vhost_user::ProtocolFeatures;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tracing::warn;
use zerocopy::IntoBytes;

/// The most bytes that the front-end of a card reads: the 28 of the configuration space (virtio 1.3, section
/// 5.1.4), and some for a later version. QEMU's disks have always read 36 at least, and read 60 today.
const CONFIG_BYTES_MAX: usize = 32;

/// The option of a front-end that sets the number of pairs.
const RINGS_OPTION: &str = "QEMU: queues=";

/// The properties of a card.
#[derive(Debug)]
pub struct Options {
    /// The Ethernet address. Without one, the front-end or the driver chooses it.
    pub mac: Option<[u8; MAC_LEN]>,
    /// The MTU. The default is that of Ethernet. The front-end can set another.
    pub mtu: Option<u16>,
    /// The maximum number of pairs of rings, from 1 to 127.
    pub pairs_max: u16,
    /// The largest size of a ring.
    pub queue_size_max: u16,
    /// Whether the card offers checksum and segmentation offloads.
    pub offload: bool,
    /// Whether the card offers the driver to reset single rings. The transport stops such a ring and starts
    /// it anew when the front-end says so. QEMU 7.2 passes the feature to the driver and then does not say
    /// so, and the ring stays at its old addresses.
    pub ring_reset: bool,
    /// The port that the card sends frames to and receives them from.
    pub port: OpenPort,
}

/// A virtio-net device.
#[derive(Debug)]
pub struct Net {
    pub(super) card: Arc<CardState>,
    pub(super) port: Arc<dyn Port>,
    /// The port has been started, and not closed since.
    pub(super) is_open: AtomicBool,
    /// The number of changes of what the next process makes the card of, apart from those of the port.
    pub(super) changes: AtomicU64,
    queue_size_max: u16,
    offload: bool,
    ring_reset: bool,
    /// The MTU that a front-end finds when it connects.
    mtu: u16,
}

impl Net {
    /// Makes a card.
    pub fn new(options: Options) -> Self {
        let (rings, mtu) = (rings_max(options.pairs_max), options.mtu.unwrap_or(MTU_DEFAULT));
        let card = Arc::new(CardState {
            mac: options.mac,
            capture: Capture::default(),
            pairs_max: options.pairs_max,
            mtu: AtomicU16::new(mtu),
            pairs: AtomicU16::new(PAIRS_UNKNOWN),
            has_control_ring: AtomicBool::new(false),
            settings_are_known: AtomicBool::new(false),
            features: AtomicU64::new(0),
            offloads: AtomicU64::new(NetFeatures::GUEST_OFFLOADS.bits()),
            filter: Mutex::new(Arc::new(Filter::new(options.mac))),
            filter_changes: AtomicU64::new(0),
            receiving: (0..options.pairs_max).map(|_| AtomicU32::new(0)).collect(),
            announcements: Announcements::default(),
            counters: (0..rings).map(|_| RingCounters::default()).collect(),
        });
        Self {
            card,
            port: options.port.0,
            is_open: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            queue_size_max: options.queue_size_max,
            offload: options.offload,
            ring_reset: options.ring_reset,
            mtu,
        }
    }

    pub(super) fn mtu(&self) -> u16 {
        self.card.mtu.load(Ordering::Relaxed)
    }

    /// Forgets what a driver has set through the control ring. It uses this many pairs.
    fn forget_settings(&self, pairs: u16) {
        self.card.settings_are_known.store(pairs != PAIRS_UNKNOWN, Ordering::Relaxed);
        self.card.set_pairs(pairs);
        self.card.set_offloads(NetFeatures::GUEST_OFFLOADS);
        self.card.change_filter(|filter| *filter = Filter::new(self.card.mac));
        self.port.card_changed(&self.card);
    }
}

impl Device for Net {
    fn words(&self) -> Words {
        Words { name: "network card", rings_option: RINGS_OPTION }
    }

    fn features(&self) -> Features {
        let own = features::offered(self.card.mac.is_some(), self.card.pairs_max, self.offload);
        let mut features = Features::from_bits_retain(own.bits()) | RING_FEATURES;
        features.set(Features::RING_RESET, self.ring_reset);
        features
    }

    fn protocol_features(&self) -> OwnProtocolFeatures {
        OwnProtocolFeatures {
            offered: ProtocolFeatures::MTU | ProtocolFeatures::RARP,
            // QEMU 7.2 sends ADD_MEM_REG and REM_MEM_REG again for each pair of rings over the same
            // connection. It sends SET_MEM_TABLE only once.
            withheld: ProtocolFeatures::CONFIGURE_MEM_SLOTS,
            config_bytes_max: Some(CONFIG_BYTES_MAX),
        }
    }

    fn message(&self, message: DeviceMessage) -> Result<(), MessageError> {
        match message {
            DeviceMessage::SetMtu(mtu) => match u16::try_from(mtu) {
                Ok(mtu) if mtu >= MTU_MIN => {
                    // A front-end repeats this for each pair of rings.
                    if self.card.mtu.swap(mtu, Ordering::Relaxed) != mtu {
                        self.changes.fetch_add(1, Ordering::Relaxed);
                        self.port.mtu_changed(mtu);
                    }
                }
                _ => return Err(MessageError::Mtu { mtu, min: MTU_MIN.into(), max: MTU_MAX.into() }),
            },
            DeviceMessage::SendRarp(mac) => {
                if let Some(frame) = self.card.announcements.request(&self.card.capture, mac) {
                    self.port.announce(&frame);
                }
            }
        }
        Ok(())
    }

    fn queues_max(&self) -> u16 {
        rings_max(self.card.pairs_max)
    }

    fn queue_size_max(&self) -> u16 {
        self.queue_size_max
    }

    fn disabled(&self, index: u16) -> Disabled {
        // Transmit rings have odd numbers, with and without MQ.
        if index % 2 == 1 { Disabled::Drained } else { Disabled::LeftAlone }
    }

    fn reset(&self, driver: Driver) {
        match driver {
            // A driver starts with one pair, with and without MQ (virtio 1.3, section 5.1.5).
            Driver::Fresh | Driver::SameFrontEnd => self.forget_settings(1),
            Driver::Unknown => self.forget_settings(PAIRS_UNKNOWN),
        }
    }

    fn connected(&self) {
        self.card.mtu.store(self.mtu, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.card.has_control_ring.store(false, Ordering::Relaxed);
        self.forget_settings(PAIRS_UNKNOWN);
    }

    fn read_config(&self, offset: usize, into: &mut [u8]) {
        let space = config::space(self.card.address(), self.mtu(), self.card.pairs_max);
        let from = space.as_bytes().get(offset..).unwrap_or_default();
        let len = from.len().min(into.len());
        into[..len].copy_from_slice(&from[..len]);
        into[len..].fill(0);
    }

    fn write_config(&self, offset: usize, from: &[u8]) -> Result<(), ConfigError> {
        Err(ConfigError::ReadOnly { offset, end: offset.saturating_add(from.len()) })
    }

    fn open(&self) -> Result<(), StartError> {
        self.port.start(&self.card).map_err(|error| no_resource("thread", &error))?;
        self.is_open.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn close(&self) -> Result<(), CloseError> {
        self.is_open.store(false, Ordering::Relaxed);
        self.port.close();
        Ok(())
    }

    fn save(&self) -> Vec<u8> {
        let pairs = self.card.pairs.load(Ordering::Relaxed);
        let offloads = self.card.offloads() & NetFeatures::GUEST_OFFLOADS;
        SavedState { pairs, offloads, filter: Filter::clone(&self.card.filter()) }.save()
    }

    fn load(&self, state: &[u8]) -> Result<(), InvalidState> {
        let invalid = InvalidState { kind: "network" };
        let SavedState { pairs, offloads, filter } =
            SavedState::load(state, self.card.pairs_max).ok_or(invalid)?;
        self.card.settings_are_known.store(true, Ordering::Relaxed);
        self.card.set_pairs(pairs);
        self.card.set_offloads(offloads);
        self.card.change_filter(|here| *here = filter);
        self.port.card_changed(&self.card);
        Ok(())
    }

    fn start_queue(&self, mut vring: Vring, features: Features) -> Result<Box<dyn QueueTask>, StartError> {
        // Each ring of a card uses its chains in the order in which they are available.
        if let Some((given, used)) = vring.continue_from_used() {
            warn!(
                queue = vring.index(),
                given,
                used,
                "a split ring continues from its used index, because the front-end gave another one: the frames \
                 that an earlier back-end had in flight are carried again"
            );
        }
        let (in_force, header_len) = (features::in_force(features), features::header_len(features));
        let card = self.card.clone();
        let no_ring = || {
            let pairs = self.card.pairs_max;
            let why = format!(
                "the card has {pairs} pairs of rings and no such ring with these features: the front-end may want more \
                 pairs than the card has ({RINGS_OPTION})"
            );
            StartError(why.into())
        };
        Ok(match role(vring.index(), self.card.pairs_max, in_force).ok_or_else(no_ring)? {
            Role::Receive { pair } => {
                self.card.features.store(in_force.bits(), Ordering::Relaxed);
                let len_max = features::receive_len_max(in_force, header_len, self.mtu());
                let format = FrameFormat { features: in_force, header_len, len_max };
                let task = self.port.receive(ReceiveRing::new(vring, card, pair, format));
                task.map_err(|error| no_resource("descriptor", &error))?
            }
            Role::Transmit { pair } => {
                let format = TransmitFormat { features: in_force, header_len };
                let task = self.port.transmit(TransmitRing::new(vring, card, pair, format));
                task.map_err(|error| no_resource("descriptor", &error))?
            }
            Role::Control if features.bits() & NetFeatures::CTRL_VQ.bits() != 0 => {
                card.control_ring_starts(vring.is_resumed());
                self.port.card_changed(&card);
                Box::new(ControlTask::new(vring, card, self.port.clone(), in_force))
            }
            Role::Control => return Err(no_ring()),
        })
    }
}

impl Operate for Net {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut sums = counters::sums(&self.card.counters);
        sums.extend(self.port.counters());
        let announcements = &self.card.announcements;
        sums.push(("announcements", announcements.requested.load(Ordering::Relaxed)));
        sums.push(("announcements_limited", announcements.limited.load(Ordering::Relaxed)));
        sums
    }

    fn metrics(&self, _now_ns: u64) -> DeviceMetrics {
        DeviceMetrics { operations: counters::operations(&self.card.counters), ..DeviceMetrics::default() }
    }

    fn set_capture(&self, to: Option<&CaptureTo<'_>>) -> Result<(), StartError> {
        let capture = &self.card.capture;
        self.changes.fetch_add(1, Ordering::Relaxed);
        let set = match to {
            Some(to) => capture.begin(to.path, to.device, to.len_max),
            None => capture.end(),
        };
        set.map_err(|error| StartError(error.into()))
    }
}

/// Ends the thread of the port.
impl Drop for Net {
    fn drop(&mut self) {
        // A card writes nothing back, so this cannot fail.
        let _ = self.close();
    }
}

fn no_resource(what: &str, error: &io::Error) -> StartError {
    StartError(format!("the card cannot have a {what}: {error}").into())
}
