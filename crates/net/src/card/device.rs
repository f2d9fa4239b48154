//! The virtio-net [`Device`].

use crate::card::announcement::Announcements;
use crate::card::control_ring::ControlTask;
use crate::card::counters::{self, RingCounters};
use crate::card::filter::Filter;
use crate::card::saved_state::{PAIRS_UNKNOWN, SavedState};
use crate::card::state::CardState;
use crate::card::{config, features};
use crate::ports::card_port::CardPort;
use crate::ports::loop_source::LoopSource;
use crate::ports::null::receive::TestSource;
use crate::ports::stream::{StreamSource, StreamTransmitTask};
use crate::ports::switch::uplink::{Share, Uplink};
use crate::ports::tap::follower as tap_follower;
use crate::ports::tap::receive::TapSource;
use crate::ports::tap::transmit::TapTransmitTask;
use crate::ports::xdp;
use crate::ports::xdp::{XdpSource, XdpTransmitTask};
use crate::ring::limited::LimitedTask;
use crate::ring::receive_ring::{FrameFormat, ReceiveRing};
use crate::ring::receive_task::{ReceiveTask, Source};
use crate::ring::roles::{Role, rings_max, role};
use crate::ring::transmit_ring::{TransmitFormat, TransmitRing};
use crate::ring::transmit_task::TransmitTask;
use kickless_device::{
    CaptureTo, CloseError, ConfigError, Device, DeviceMessage, DeviceMetrics, Direction, Disabled, Driver,
    InvalidState, Limiter, MessageError, Operate, OwnProtocolFeatures, QueueTask, StartError, Vring, Words,
};
use kickless_net_port::{Capture, OpenPort};
use kickless_spec::features::Features;
use kickless_spec::net::{MAC_LEN, MTU_DEFAULT, MTU_MAX, MTU_MIN, NetFeatures};
use kickless_spec::vhost_user::ProtocolFeatures;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracing::warn;
use zerocopy::IntoBytes;

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
    card: Arc<CardState>,
    queue_size_max: u16,
    offload: bool,
    ring_reset: bool,
    /// The MTU that a front-end finds when it connects.
    mtu: u16,
    /// The uplink of the card's switch.
    uplink: Option<Arc<Uplink>>,
    /// Makes the uplink run while the device is open.
    uplink_share: Mutex<Option<Share>>,
}

impl Net {
    /// Makes a card.
    pub fn new(options: Options) -> Self {
        let (rings, mtu) = (rings_max(options.pairs_max), options.mtu.unwrap_or(MTU_DEFAULT));
        let uplink = match &options.port {
            OpenPort::Switch(switch, Some(tap)) => Some(Uplink::of(&switch.name, tap)),
            _ => None,
        };
        let card = Arc::new(CardState {
            mac: options.mac,
            capture: Capture::default(),
            port: CardPort::new(options.port, options.pairs_max, options.mac),
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
            limiter: Arc::default(),
            counters: (0..rings).map(|_| RingCounters::default()).collect(),
        });
        Self {
            card,
            queue_size_max: options.queue_size_max,
            offload: options.offload,
            ring_reset: options.ring_reset,
            mtu,
            uplink,
            uplink_share: Mutex::default(),
        }
    }

    /// Limits frames by a limiter, which several cards can share. The default is one of the card's own,
    /// without limits.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Arc<Limiter>) -> Self {
        if let Some(card) = Arc::get_mut(&mut self.card) {
            card.limiter = limiter;
        }
        self
    }

    fn mtu(&self) -> u16 {
        self.card.mtu.load(Ordering::Relaxed)
    }

    fn uplink_share(&self) -> MutexGuard<'_, Option<Share>> {
        self.uplink_share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the uplink run, if the card's switch has one.
    fn start_uplink(&self) -> io::Result<()> {
        let Some(uplink) = &self.uplink else { return Ok(()) };
        let mut share = self.uplink_share();
        if share.is_none() {
            *share = Some(uplink.share()?);
        }
        Ok(())
    }

    /// Forgets what a driver has set through the control ring. It uses this many pairs.
    fn forget_settings(&self, pairs: u16) {
        self.card.settings_are_known.store(pairs != PAIRS_UNKNOWN, Ordering::Relaxed);
        self.card.set_pairs(pairs);
        self.card.set_offloads(NetFeatures::GUEST_OFFLOADS);
        self.card.change_filter(|filter| *filter = Filter::new(self.card.mac));
    }
}

impl Device for Net {
    fn words(&self) -> Words {
        Words { name: "network card", rings_option: RINGS_OPTION }
    }

    fn features(&self) -> Features {
        let own = features::offered(self.card.mac.is_some(), self.card.pairs_max, self.offload);
        let mut ring_reset = Features::RING_RESET;
        ring_reset.set(Features::RING_RESET, self.ring_reset);
        Features::from_bits_retain(own.bits())
            | ring_reset
            | Features::VERSION_1
            | Features::EVENT_IDX
            | Features::INDIRECT_DESC
            | Features::RING_PACKED
            | Features::IN_ORDER
    }

    fn protocol_features(&self) -> OwnProtocolFeatures {
        OwnProtocolFeatures {
            offered: ProtocolFeatures::MTU | ProtocolFeatures::RARP,
            // QEMU 7.2 sends ADD_MEM_REG and REM_MEM_REG again for each pair of rings over the same
            // connection. It sends SET_MEM_TABLE only once.
            withheld: ProtocolFeatures::CONFIGURE_MEM_SLOTS,
        }
    }

    fn message(&self, message: DeviceMessage) -> Result<(), MessageError> {
        match message {
            DeviceMessage::SetMtu(mtu) => match u16::try_from(mtu) {
                Ok(mtu) if mtu >= MTU_MIN => {
                    // A front-end repeats this for each pair of rings.
                    if self.card.mtu.swap(mtu, Ordering::Relaxed) != mtu {
                        self.card.port.warn_of_mtu(mtu);
                    }
                }
                _ => return Err(MessageError::Mtu { mtu, min: MTU_MIN.into(), max: MTU_MAX.into() }),
            },
            DeviceMessage::SendRarp(mac) => {
                self.card.announcements.request(&self.card.port, &self.card.capture, mac);
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
        let started = match &self.card.port {
            CardPort::Stream(port) => port.start(),
            CardPort::Switch(_) => self.start_uplink(),
            CardPort::Xdp(_) => xdp::watch(&self.card),
            _ => tap_follower::follow(&self.card),
        };
        started.map_err(|error| no_resource("thread", &error))
    }

    fn close(&self) -> Result<(), CloseError> {
        match &self.card.port {
            CardPort::Tap(port) => port.end(),
            CardPort::Stream(port) => port.end(),
            CardPort::Switch(_) => {
                *self.uplink_share() = None;
            }
            CardPort::Xdp(port) => port.end(),
            CardPort::Null(_) | CardPort::Loop(_) => {}
        }
        Ok(())
    }

    fn save(&self) -> Vec<u8> {
        let pairs = self.card.pairs.load(Ordering::Relaxed);
        let offloads = self.card.offloads() & NetFeatures::GUEST_OFFLOADS;
        SavedState { pairs, offloads, filter: Some(Filter::clone(&self.card.filter())) }.save()
    }

    fn load(&self, state: &[u8]) -> Result<(), InvalidState> {
        let invalid = InvalidState { kind: "network" };
        let SavedState { pairs, offloads, filter } =
            SavedState::load(state, self.card.pairs_max).ok_or(invalid)?;
        self.card.settings_are_known.store(true, Ordering::Relaxed);
        self.card.set_pairs(pairs);
        self.card.set_offloads(offloads);
        // An earlier version accepted all frames.
        let filter = filter.unwrap_or_else(|| Filter::new(self.card.mac));
        self.card.change_filter(|here| *here = filter);
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
                let source = source(&card, pair).map_err(|error| no_resource("descriptor", &error))?;
                let task = ReceiveTask::new(ReceiveRing::new(vring, card.clone(), pair, format), source);
                LimitedTask::new(task, card, Direction::Read)
            }
            Role::Transmit { pair } => {
                let format = TransmitFormat { features: in_force, header_len };
                let ring = TransmitRing::new(vring, card, pair, format);
                transmit_task(ring).map_err(|error| no_resource("descriptor", &error))?
            }
            Role::Control if features.bits() & NetFeatures::CTRL_VQ.bits() != 0 => {
                card.control_ring_starts(vring.is_resumed());
                Box::new(ControlTask::new(vring, card, in_force))
            }
            Role::Control => return Err(no_ring()),
        })
    }
}

impl Operate for Net {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut sums = counters::sums(&self.card.counters);
        sums.extend(self.uplink.iter().flat_map(|uplink| uplink.counters()));
        if let CardPort::Xdp(port) = &self.card.port {
            sums.push(("dropped_by_kernel", port.queues.dropped()));
        }
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
        let set = match to {
            Some(to) => capture.begin(to.path, to.device, to.len_max),
            None => capture.end(),
        };
        set.map_err(|error| StartError(error.into()))
    }

    fn limiter(&self) -> Option<&Limiter> {
        Some(&self.card.limiter)
    }
}

/// Ends the thread of the port.
impl Drop for Net {
    fn drop(&mut self) {
        // A card writes nothing back, so this cannot fail.
        let _ = self.close();
    }
}

/// Returns the source of the frames of a pair.
fn source(card: &Arc<CardState>, pair: u16) -> io::Result<Source> {
    Ok(match &card.port {
        CardPort::Null(port) if port.rate == 0 => Source::None,
        CardPort::Null(port) => Source::Test(TestSource::new(port.clone())?),
        CardPort::Loop(_) | CardPort::Switch(_) => Source::Loop(LoopSource::new(card.clone(), pair)?),
        CardPort::Tap(port) => {
            Source::Tap(Box::new(TapSource::new(port.tap.queue(pair)?, card.clone(), pair)))
        }
        CardPort::Stream(port) => Source::Stream(StreamSource::new(port.receiver()?)),
        CardPort::Xdp(port) => Source::Xdp(XdpSource::new(port.queues.queue(pair)?)),
    })
}

/// Returns the task of a transmit ring.
fn transmit_task(ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
    let (card, pair) = (ring.card.clone(), ring.pair);
    let limited = card.clone();
    Ok(match &card.port {
        CardPort::Tap(port) => {
            LimitedTask::new(TapTransmitTask::new(ring, port.tap.queue(pair)?), limited, Direction::Write)
        }
        CardPort::Stream(port) => {
            LimitedTask::new(StreamTransmitTask::new(ring, port.sender()?), limited, Direction::Write)
        }
        CardPort::Xdp(port) => {
            let task = XdpTransmitTask::new(ring, port.queues.queue(pair)?)?;
            LimitedTask::new(task, limited, Direction::Write)
        }
        _ => LimitedTask::new(TransmitTask::new(ring), limited, Direction::Write),
    })
}

fn no_resource(what: &str, error: &io::Error) -> StartError {
    StartError(format!("the card cannot have a {what}: {error}").into())
}
