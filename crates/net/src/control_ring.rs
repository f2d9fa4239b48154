//! Answers the commands in the control ring.

use crate::buffers;
use crate::card_state::CardState;
use crate::control::{Command, CommandError};
use crate::counters::RingCounters;
use crate::immediate_ring::{self, ImmediateRing};
use kickless_device::{Context, Polled, QueueTask, Vring};
use kickless_spec::net::{ERR, NetFeatures, OK};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use tracing::debug;

/// The task of a control ring.
pub(crate) struct ControlTask {
    vring: Vring,
    card: Arc<CardState>,
    features: NetFeatures,
    chain: Chain,
}

impl ControlTask {
    pub(crate) fn new(vring: Vring, card: Arc<CardState>, features: NetFeatures) -> Self {
        Self { vring, card, features, chain: Chain::default() }
    }

    fn counters(&self) -> &RingCounters {
        &self.card.counters[usize::from(self.vring.index())]
    }

    /// Executes the command in the popped chain, and writes the answer into the first writable byte of the
    /// chain.
    fn answer(&mut self) {
        let answer = match self.execute() {
            Ok(()) => {
                self.counters().commands.add(1);
                OK
            }
            Err(error) => {
                debug!(queue = self.vring.index(), head = self.chain.id.head(), %error, "command refused");
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

    fn execute(&self) -> Result<(), CommandError> {
        let mut bytes = [0; Command::LEN_MAX];
        let len = buffers::read(self.chain.readable(), self.vring.view(), &mut bytes)
            .map_err(|_| CommandError::Short)?;
        match Command::parse(&bytes[..len], self.features, self.card.pairs_max)? {
            Command::SetPairs(pairs) => self.card.set_pairs(pairs),
            Command::Announced => {}
        }
        Ok(())
    }
}

impl ImmediateRing for ControlTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    fn serve(&mut self) -> u32 {
        self.answer();
        1
    }
}

impl QueueTask for ControlTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        immediate_ring::poll(self, budget)
    }

    fn in_flight(&self) -> usize {
        self.vring.resubmissions().into()
    }
}
