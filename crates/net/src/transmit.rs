//! A transmit ring of a null port: takes frames, checks and counts them.

use crate::buffers;
use crate::cost;
use crate::counters::RingCounters;
use crate::frame::{Frame, Invalid};
use crate::requests::{self, Requests};
use crate::shared::Shared;
use kickless_device::{Context, Polled, QueueTask, ShowAfter, Vring};
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use tracing::debug;
use zerocopy::IntoBytes;

/// A running transmit ring. It completes frames in the order in which it pops them, at once.
pub(crate) struct Transmit {
    vring: Vring,
    shared: Arc<Shared>,
    pair: u16,
    features: NetFeatures,
    header_len: usize,
    enabled: bool,
    chain: Chain,
}

impl Transmit {
    pub(crate) fn new(
        mut vring: Vring,
        shared: Arc<Shared>,
        pair: u16,
        features: NetFeatures,
        header_len: usize,
    ) -> Self {
        // A driver takes sent frames back when it has to, not while it waits for them.
        vring.show_after(ShowAfter::PUBLISH);
        Self { vring, shared, pair, features, header_len, enabled: true, chain: Chain::default() }
    }

    fn counters(&self) -> &RingCounters {
        &self.shared.counters[usize::from(self.vring.index())]
    }

    /// Takes the frame in the popped chain. Returns its cost.
    fn take(&mut self) -> u32 {
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
                    debug!(queue = self.vring.index(), head = self.chain.id.head, %error, "frame dropped");
                    self.counters().sent_invalid.add(1);
                    self.vring.counters().errors.add(1);
                }
            }
        }
        self.vring.push(self.chain.id, 0);
        cost::of_frame(len)
    }

    fn parse(&self) -> Result<Frame, Invalid> {
        let mut header = Header::default();
        let bytes = &mut header.as_mut_bytes()[..self.header_len];
        let read = buffers::read(self.chain.readable(), self.vring.view(), bytes);
        match read {
            Ok(len) if len == self.header_len => {
                Frame::parse(&header, self.header_len, self.chain.readable_len(), self.features)
            }
            _ => Err(Invalid::Short),
        }
    }
}

impl Requests for Transmit {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    fn serve(&mut self) -> u32 {
        self.take()
    }
}

impl QueueTask for Transmit {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        requests::poll(self, budget)
    }

    fn in_flight(&self) -> usize {
        self.vring.again().into()
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.pair.into())
    }

    fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }
}
