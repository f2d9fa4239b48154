//! A card's port of a switch, and its share in the uplink.

use super::delivery::Forwarder;
use super::port::SwitchPort;
use super::transmit::SwitchTransmit;
use super::uplink::{Share, Uplink};
use crate::card::state::CardState;
use crate::frame::loop_queue::{Batch, HEADER, LoopQueue, PLAIN};
use crate::ports::hand_over::Passing;
use crate::ports::inbox::{InboxReceive, Inboxes};
use crate::ports::port::Port;
use crate::ring::receive_ring::ReceiveRing;
use crate::ring::receive_task::ReceiveTask;
use crate::ring::transmit_ring::TransmitRing;
use crate::ring::transmit_task::TransmitTask;
use kickless_device::QueueTask;
use kickless_sync::lock;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// A port of a switch that a card has.
#[derive(Debug)]
pub(super) struct SwitchCard {
    port: Arc<SwitchPort>,
    /// The uplink of the switch.
    uplink: Option<Arc<Uplink>>,
    /// Makes the uplink run while the device is open.
    share: Mutex<Option<Share>>,
}

impl SwitchCard {
    pub(super) fn new(port: SwitchPort, uplink: Option<Arc<Uplink>>) -> Self {
        Self { port: Arc::new(port), uplink, share: Mutex::default() }
    }
}

impl Inboxes for SwitchPort {
    fn inbox(&self, pair: u16) -> Option<&LoopQueue> {
        SwitchPort::inbox(self, pair)
    }
}

impl Port for SwitchCard {
    /// Makes the uplink run, if there is one.
    fn start(&self, _card: &Arc<CardState>) -> io::Result<()> {
        let Some(uplink) = &self.uplink else { return Ok(()) };
        let mut share = lock(&self.share);
        if share.is_none() {
            *share = Some(uplink.share()?);
        }
        Ok(())
    }

    fn close(&self) {
        *lock(&self.share) = None;
    }

    fn receive(&self, ring: ReceiveRing) -> io::Result<Box<dyn QueueTask>> {
        let port = InboxReceive::new(self.port.clone(), ring.card.clone(), ring.pair)?;
        Ok(ReceiveTask::boxed(ring, port))
    }

    fn transmit(&self, ring: TransmitRing) -> io::Result<Box<dyn QueueTask>> {
        Ok(TransmitTask::boxed(ring, SwitchTransmit::new(self.port.clone())))
    }

    /// The next process makes its own switch of this name. Only the TAP of an uplink passes to it.
    fn passing(&self) -> Passing<'_> {
        match &self.uplink {
            Some(uplink) => Passing::Given(&**uplink),
            None => Passing::Anew,
        }
    }

    /// A switch without other ports has nobody to tell.
    fn announce(&self, frame: &[u8]) {
        let mut frames = Batch::default();
        let space = frames.push(HEADER + frame.len());
        space[..HEADER].copy_from_slice(&PLAIN);
        space[HEADER..].copy_from_slice(frame);
        self.port.forward(0, &mut frames, &mut Forwarder::default(), u32::MAX);
    }

    fn card_changed(&self, card: &CardState) {
        self.port.set_pairs(card.pairs.load(Ordering::Relaxed));
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.uplink.iter().flat_map(|uplink| uplink.counters()).collect()
    }
}
