//! A port: its kind, its name, and the open port of a card.
//!
//! A port has a folder, whose items only its line in [`super::PORTS`] names.

use super::hand_over::Passing;
use crate::card::state::CardState;
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::transmit_ring::TransmitRing;
use kickless_device::{Handed, QueueTask};
use kickless_net_port::TapError;
use kickless_opener::Target;
use kickless_spec::net::MAC_LEN;
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::{error, fmt, io};

/// The reason for which a text names no port, or a port cannot be opened. It is one sentence for an operator.
pub type PortError = Box<dyn error::Error + Send + Sync>;

/// The name that a text names, or one sentence about what is wrong with it.
pub(crate) type Parsed = Result<Arc<dyn Name>, PortError>;

/// A kind of port, as an operator chooses it.
pub(crate) struct PortKind {
    /// The form of its names, as in `tap:NAME`.
    pub(crate) form: &'static str,
    /// Its part of the help of the option `--port`.
    pub(crate) help: &'static str,
    /// The number of pairs of rings of a card with such a port.
    pub(crate) pairs: Pairs,
    /// Parses a name. Returns `None` if the text does not name such a port.
    pub(crate) parse: fn(&str) -> Option<Parsed>,
}

/// The number of pairs of rings that a kind of port suggests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairs {
    /// One is enough for most cards.
    One,
    /// As many as the name of the port has descriptors.
    Descriptors,
    /// As many as a card usually has.
    Usual,
}

/// The name of a port. Its text is the one that it is parsed from.
pub(crate) trait Name: fmt::Debug + fmt::Display + Send + Sync {
    /// Returns the number of pairs of rings that the port decides on, if it does.
    fn pairs(&self) -> Option<u16>;

    /// Returns the largest MTU whose frames the port carries, if that is less than any other port does.
    fn mtu_max(&self) -> Option<u16>;

    /// Returns the descriptors that the port needs: numbers of inherited ones, and names of those of a call.
    fn descriptors(&self) -> &[String] {
        &[]
    }

    /// Returns the thing of the host that the port uses by its name. A sandbox refuses all others.
    fn target(&self) -> Option<Target>;

    /// Opens the port, or takes the one over that another process gives ([`Opening::take_handed`]).
    ///
    /// # Errors
    /// The host does not provide what the port needs, or a program is missing.
    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError>;
}

/// The properties of the card that a port is opened for.
pub struct Opening<'a> {
    /// The number of pairs of rings of the card.
    pub pairs: u16,
    /// The Ethernet address of the card, if it is fixed.
    pub mac: Option<[u8; MAC_LEN]>,
    /// Returns a descriptor by its number or name.
    pub descriptor: &'a dyn Fn(&str) -> Result<OwnedFd, TapError>,
    /// The port as the process gives it that this one takes over from. `None` for a card that is new.
    pub handed: RefCell<Option<Handed<'a>>>,
}

impl<'a> Opening<'a> {
    /// Returns the port that another process gives, if the card is not new. The port changes nothing that
    /// others see before it starts.
    pub(crate) fn take_handed(&self) -> Option<Handed<'a>> {
        self.handed.take()
    }
}

impl fmt::Debug for Opening<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening").field("pairs", &self.pairs).field("mac", &self.mac).finish_non_exhaustive()
    }
}

/// A port that is open, for one card.
#[derive(Clone, Debug)]
pub struct OpenPort(pub(crate) Arc<dyn Port>);

impl<P: Port + 'static> From<P> for OpenPort {
    fn from(port: P) -> Self {
        Self(Arc::new(port))
    }
}

/// A port that is open: what its card asks of it, outside of the data path.
pub(crate) trait Port: fmt::Debug + Send + Sync {
    /// Starts what the port needs while rings of the card run, such as a thread. It may have been started.
    ///
    /// # Errors
    /// The process cannot have another thread or descriptor.
    fn start(&self, card: &Arc<CardState>) -> io::Result<()>;

    /// Ends what [`Port::start`] has started. It may not have been started.
    fn close(&self);

    /// Returns the task of a receive ring: a [`ReceiveTask`](crate::ring::receive_task::ReceiveTask).
    ///
    /// # Errors
    /// The process has no free descriptor.
    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>>;

    /// Returns the task of a transmit ring: a [`TransmitTask`](crate::ring::transmit_task::TransmitTask).
    ///
    /// # Errors
    /// The process has no free descriptor.
    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>>;

    /// Returns the way in which the port passes to the next process of its host.
    fn passing(&self) -> Passing<'_>;

    /// Sends a frame that no ring has, at once or never: the guest has moved here.
    fn announce(&self, frame: &[u8]);

    /// Follows the state of the card, which the front-end or the driver has changed. Does not wait.
    fn card_changed(&self, _card: &CardState) {}

    /// Takes note of an MTU of the front-end. A refusal would leave the guest without a card.
    fn mtu_changed(&self, _mtu: u16) {}

    /// Returns counters beside those of the rings.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
