//! The parts of a network card.

use crate::error::Error;
use crate::parts::{Amounts, Checked, Fd, Part, Span};
use serde::{Deserialize, Serialize};

/// All of a card that the new process makes before the pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// The MTU in the configuration space, from which rings compute the longest frame.
    pub mtu: u16,
    /// The file of a capture that is on and has been suspended.
    pub capture: Option<Capture>,
    /// The part of its port: [`Tap`], also of the uplink of a switch, [`Stream`], or nothing.
    pub port: Part,
}

/// The file of a capture, at the end of its last block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capture {
    /// The file, with its lock.
    pub file: Fd,
    /// The offset of its statistics.
    pub statistics_at: u64,
    /// The offset of its end.
    pub end: u64,
    /// Its start in nanoseconds since the epoch, the frames that were added, and those of them that could not
    /// be written.
    pub counts: Amounts,
}

/// A TAP with its queues. Reading or detaching one would lose its frames.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// The name of the interface.
    pub name: String,
    /// The queues.
    pub queues: Vec<Fd>,
    /// Queues can be detached.
    pub detaches: bool,
    /// The kernel segments UDP.
    pub segments_udp: bool,
}

/// The settings of a TAP in the pause, which no process changes before the new one serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapFinal {
    /// Whether each queue is attached.
    pub attached: Vec<bool>,
    /// The offloads in force, with the kernel's numbers.
    pub offloads: u32,
}

/// A stream socket that carries frames. `None` while no other program is connected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// The connection.
    pub socket: Option<Fd>,
    /// The pipe with the errors of the program at the other end, if this daemon has started it.
    pub errors: Option<Fd>,
}

/// The uplink of a switch in the pause. Each card that names the uplink gives it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UplinkFinal {
    /// The settings of its TAP.
    pub tap: TapFinal,
    /// Its counters.
    pub counters: Amounts,
}

/// Describes a card in the pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardFinal {
    /// The settings of the driver, as a card saves them for another host: pairs, offloads and filter.
    pub settings: Span,
    /// These settings are known.
    pub settings_are_known: bool,
    /// The control ring has run since the front-end connected.
    pub has_control_ring: bool,
    /// The card is open: its port runs.
    pub is_open: bool,
    /// The features in force of the ring that started last.
    pub features: u64,
    /// The nanoseconds until the card has made no more than its share of announcements.
    pub announces_in_ns: u64,
    /// The counters of each ring.
    pub rings: Vec<Amounts>,
    /// The counters of the card beside them.
    pub counters: Amounts,
    /// The frames that a capture has dropped for lack of room, or because it was suspended.
    pub capture_dropped: u64,
    /// The part of its port: [`TapFinal`], [`UplinkFinal`], [`StreamFinal`], or nothing.
    pub port: Part,
}

/// The bytes of a stream that are neither in its socket nor in a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamFinal {
    /// The socket that was given is still the connection. Otherwise the new process connects again.
    pub is_connected: bool,
    /// Bytes that were received and delivered to no ring.
    pub received: Span,
    /// Bytes that the socket has not taken.
    pub unsent: Span,
}

impl Checked for Card {
    fn check(&self) -> Result<(), Error> {
        match &self.capture {
            Some(capture) if capture.statistics_at > capture.end => {
                Err(Error::field("end of a capture", capture.end))
            }
            _ => Ok(()),
        }
    }
}

impl Checked for CardFinal {
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl Checked for Tap {
    fn check(&self) -> Result<(), Error> {
        match self.queues.is_empty() {
            true => Err(Error::field("number of queues", 0)),
            false => Ok(()),
        }
    }
}

impl Checked for TapFinal {
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl TapFinal {
    /// Checks that these are settings of a TAP with this number of queues, which detaches them or not.
    ///
    /// # Errors
    /// The first field that contradicts it.
    pub fn check_against(&self, queues: usize, detaches: bool) -> Result<(), Error> {
        match self.attached.len() == queues && (detaches || !self.attached.contains(&false)) {
            true => Ok(()),
            false => Err(Error::field("attached queues", format!("{:?}", self.attached))),
        }
    }
}

impl Checked for UplinkFinal {
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl Checked for Stream {
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl Checked for StreamFinal {
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }
}
