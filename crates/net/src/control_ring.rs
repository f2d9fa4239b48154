//! The control ring: answers commands.

use crate::buffers;
use crate::control::{Command, Refusal};
use crate::counters::RingCounters;
use crate::requests::{self, Requests};
use crate::shared::Shared;
use kickless_device::{Context, Polled, QueueTask, Vring};
use kickless_spec::net::{ERR, NetFeatures, OK};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::debug;

/// A running control ring.
pub(crate) struct ControlRing {
    vring: Vring,
    shared: Arc<Shared>,
    features: NetFeatures,
    chain: Chain,
}

impl ControlRing {
    pub(crate) fn new(vring: Vring, shared: Arc<Shared>, features: NetFeatures) -> Self {
        Self { vring, shared, features, chain: Chain::default() }
    }

    fn counters(&self) -> &RingCounters {
        &self.shared.counters[usize::from(self.vring.index())]
    }

    /// Carries the command in the popped chain out, and answers it in its first writable byte.
    fn answer(&mut self) {
        let answer = match self.carry_out() {
            Ok(()) => {
                self.counters().commands.add(1);
                OK
            }
            Err(error) => {
                debug!(queue = self.vring.index(), head = self.chain.id.head, %error, "command refused");
                self.counters().commands_refused.add(1);
                self.vring.counters().errors.add(1);
                ERR
            }
        };
        let (view, marks) = self.vring.memory();
        let written = buffers::first(self.chain.writable())
            .is_some_and(|at| view.write_obj(at, &answer, marks).is_ok());
        self.vring.push(self.chain.id, written.into());
    }

    fn carry_out(&self) -> Result<(), Refusal> {
        let mut bytes = [0; Command::LEN_MAX];
        let len = buffers::read(self.chain.readable(), self.vring.view(), &mut bytes)
            .map_err(|_| Refusal::Short)?;
        match Command::parse(&bytes[..len], self.features, self.shared.pairs_max)? {
            Command::SetPairs(pairs) => self.shared.pairs.store(pairs, Ordering::Relaxed),
            Command::Announced => {}
        }
        Ok(())
    }
}

impl Requests for ControlRing {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    fn serve(&mut self) -> u32 {
        self.answer();
        1
    }
}

impl QueueTask for ControlRing {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        requests::poll(self, budget)
    }

    fn in_flight(&self) -> usize {
        self.vring.again().into()
    }
}
