//! Takes the frames of a transmit ring for a null port: checks, counts and discards them.

use crate::buffers;
use crate::card_state::CardState;
use crate::cost;
use crate::counters::RingCounters;
use crate::frame::{Frame, InvalidFrame};
use crate::immediate_ring::{self, ImmediateRing};
use kickless_device::{Context, Polled, QueueTask, ShowAfter, Vring};
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use tracing::debug;
use zerocopy::IntoBytes;

/// The task of a transmit ring.
pub(crate) struct TransmitTask {
    vring: Vring,
    card: Arc<CardState>,
    pair: u16,
    features: NetFeatures,
    header_len: usize,
    enabled: bool,
    chain: Chain,
}

impl TransmitTask {
    pub(crate) fn new(
        mut vring: Vring,
        card: Arc<CardState>,
        pair: u16,
        features: NetFeatures,
        header_len: usize,
    ) -> Self {
        // A driver does not wait for sent frames. It collects their used elements when it needs room in the
        // ring.
        vring.show_after(ShowAfter::PUBLISH);
        Self { vring, card, pair, features, header_len, enabled: true, chain: Chain::default() }
    }

    fn counters(&self) -> &RingCounters {
        &self.card.counters[usize::from(self.vring.index())]
    }

    /// Checks and counts the frame in the popped chain, and completes the chain. Returns the cost of the
    /// frame.
    fn take_frame(&mut self) -> u32 {
        let len = self.chain.readable_len();
        if !self.enabled {
            self.counters().sent_disabled.add(1);
        } else {
            match self.parse() {
                Ok(frame) => {
                    self.counters().sent_frames.add(1);
                    self.counters().sent_bytes.add(frame.len.into());
                }
                Err(error) => {
                    debug!(queue = self.vring.index(), head = self.chain.id.head(), %error, "frame dropped");
                    self.counters().sent_invalid.add(1);
                    self.vring.counters().errors.add(1);
                }
            }
        }
        self.vring.push(self.chain.id, 0);
        cost::of_frame(len)
    }

    fn parse(&self) -> Result<Frame, InvalidFrame> {
        let mut header = Header::default();
        let bytes = &mut header.as_mut_bytes()[..self.header_len];
        let read = buffers::read(self.chain.readable(), self.vring.view(), bytes);
        match read {
            Ok(len) if len == self.header_len => {
                Frame::parse(&header, self.header_len, self.chain.readable_len(), self.features)
            }
            _ => Err(InvalidFrame::Short),
        }
    }
}

impl ImmediateRing for TransmitTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    fn serve(&mut self) -> u32 {
        self.take_frame()
    }
}

impl QueueTask for TransmitTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        immediate_ring::poll(self, budget)
    }

    fn in_flight(&self) -> usize {
        self.vring.resubmissions().into()
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.pair.into())
    }

    fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }
}
