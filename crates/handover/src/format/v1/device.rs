//! A device: its socket, its session, and the part of its kind.

use crate::error::Error;
use crate::format::v1::plan::Listener;
use crate::format::v1::ring::RingFinal;
use crate::format::v1::session::{Session, SessionFinal};
use crate::parts::{Amounts, Checked, Part};
use serde::{Deserialize, Serialize};

/// All of a device that the new process makes before the pause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// The socket on which it accepts front-ends. `None`: it serves one connection.
    pub listener: Option<Listener>,
    /// The session, if a front-end is connected.
    pub session: Option<Session>,
    /// The part of its kind.
    pub own: Part,
}

/// Describes a device in the pause: indices, numbers, and all else that changes until then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Final {
    /// The end of the session. Present if the device has a session.
    pub session: Option<SessionFinal>,
    /// The rings of the session, in the same order.
    pub rings: Vec<RingFinal>,
    /// The index at which each ring stopped in earlier sessions.
    pub stops: Vec<Option<u16>>,
    /// No front-end is served after the present one.
    pub is_last_session: bool,
    /// An operator lets it take no new requests.
    pub is_drained: bool,
    /// The state of its limits. Devices of a group have the same.
    pub tokens: Tokens,
    /// The counters of each queue.
    pub queue_counters: Vec<Amounts>,
    /// The counters of the device.
    pub counters: Amounts,
    /// The time at which its first ring was asked to park (CLOCK_MONOTONIC).
    pub parked_ns: u64,
    /// The part of its kind.
    pub own: Part,
}

/// The nanoseconds after which each bucket of limits is full again, by name. A bucket that is full is not
/// there.
pub type Tokens = Amounts;

impl Checked for Device {
    fn check(&self) -> Result<(), Error> {
        self.listener.as_ref().map_or(Ok(()), Listener::check)?;
        self.session.as_ref().map_or(Ok(()), Session::check)
    }
}

impl Checked for Final {
    fn check(&self) -> Result<(), Error> {
        self.session.as_ref().map_or(Ok(()), SessionFinal::check)
    }
}

impl Final {
    /// Checks that this belongs to the device that was described.
    ///
    /// # Errors
    /// The first field that contradicts it.
    pub fn check_against(&self, device: &Device) -> Result<(), Error> {
        if self.session.is_some() != device.session.is_some() {
            return Err(Error::field("session", self.session.is_some()));
        }
        let rings = device.session.as_ref().map_or(&[][..], |session| &session.rings);
        if rings.len() != self.rings.len() {
            return Err(Error::field("number of rings", self.rings.len()));
        }
        std::iter::zip(&self.rings, rings).try_for_each(|(at_last, ring)| at_last.check(ring))
    }
}
