//! The ports `tap:NAME` and `tap-fd:FD[,FD...]`: a TAP of the host, which may exist already, or the queues of
//! one that another program has opened.
//!
//! A pair of rings has one queue of the TAP. A thread of the card makes the TAP follow the rings.

mod follower;
mod name;
mod receive;
mod state;
mod transmit;

pub(crate) use name::{TAP, TAP_FD};

use super::hand_over::{GivePort, Passing, cannot_give, contradicts};
use super::port::{OpenPort, Port};
use crate::card::state::CardState;
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::receive_task::ReceiveTask;
use crate::ring::transmit_ring::TransmitRing;
use crate::ring::transmit_task::TransmitTask;
use kickless_device::{GiveError, QueueTask, StartError};
use kickless_handover::{Given, Giving, Part};
use kickless_net_port::{SendError, Tap};
use kickless_spec::net::Header;
use receive::TapReceive;
use state::TapState;
use std::io;
use std::sync::Arc;
use tracing::{info, warn};
use transmit::TapTransmit;

/// A TAP that is open.
#[derive(Debug)]
struct TapPort(Arc<TapState>);

impl From<Tap> for OpenPort {
    fn from(tap: Tap) -> Self {
        Self(Arc::new(TapPort(Arc::new(TapState::new(tap)))))
    }
}

impl Port for TapPort {
    fn start(&self, card: &Arc<CardState>) -> io::Result<()> {
        follower::follow(card, &self.0)
    }

    fn close(&self) {
        self.0.end();
    }

    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>> {
        let port = TapReceive::new(self.0.clone(), ring.card.clone(), ring.pair)?;
        Ok(ReceiveTask::boxed(ring, port))
    }

    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
        let port = TapTransmit::new(self.0.clone(), ring.pair)?;
        Ok(TransmitTask::boxed(ring, port))
    }

    fn passing(&self) -> Passing<'_> {
        Passing::Given(self)
    }

    fn announce(&self, frame: &[u8]) {
        let Self(state) = self;
        let sent = match state.tap.queue(0) {
            Ok(mut queue) => queue.send_copy(&Header::default(), frame),
            Err(error) => return warn!(%error, "the guest's address cannot be announced"),
        };
        match sent {
            Ok(()) => info!(tap = state.tap.name(), "the guest's address is announced by RARP"),
            Err(SendError::Gone) => state.report_gone(),
            Err(error) => warn!(tap = state.tap.name(), %error, "the guest's address cannot be announced"),
        }
    }

    fn card_changed(&self, _card: &CardState) {
        self.0.changed();
    }
}

/// The follower is the only one that sets a TAP. The queues keep their frames, and the new process finds the
/// settings as its own follower wants them.
impl GivePort for TapPort {
    fn changes(&self) -> u64 {
        0
    }

    fn give(&self, to: &mut Giving) -> Result<Part, GiveError> {
        self.0.tap.give(to).map_err(cannot_give)
    }

    fn hold(&self) {
        self.0.gate.close();
    }

    fn give_final(&self, _to: &mut Giving) -> Result<Part, GiveError> {
        self.0.gate.wait_until_idle().map_err(cannot_give)?;
        Part::new(&self.0.tap.settings()).map_err(cannot_give)
    }

    fn take_back(&self) {
        self.0.gate.open();
    }

    fn receive_final(&self, state: Part, _given: &Given) -> Result<(), StartError> {
        state.read().and_then(|settings| self.0.tap.believe(&settings)).map_err(contradicts)
    }
}
