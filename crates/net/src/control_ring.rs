//! The control ring: answers commands.

use crate::buffers;
use crate::control::{Command, Refusal};
use crate::cost::COST_DESCRIPTORS;
use crate::counters::RingCounters;
use crate::shared::Shared;
use kickless_device::{Context, Next, Polled, QueueTask, Vring};
use kickless_io::{Completion, Engine};
use kickless_spec::net::{ERR, NetFeatures, OK};
use kickless_virtqueue::Chain;
use std::io;
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

impl QueueTask for ControlRing {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, _engine: &mut Engine) -> io::Result<()> {
        Ok(())
    }

    fn detach(&mut self, _engine: &mut Engine) {}

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        let (mut served, mut cost) = (0, 0u32);
        let next = loop {
            if budget > 0 && cost >= budget {
                break Next::More;
            }
            if budget == 0 && self.vring.again() == 0 {
                break Next::Idle;
            }
            let popped = self.vring.pop(&mut self.chain);
            if self.vring.has_cost() {
                cost = cost.saturating_add(self.vring.take_cost());
            }
            if !popped {
                break if self.vring.take_unfinished() { Next::More } else { Next::Idle };
            }
            served += 1;
            cost = cost.saturating_add(1 + u32::from(self.chain.descriptors() / COST_DESCRIPTORS));
            self.answer();
        };
        self.vring.publish();
        Polled { served, cost, next }
    }

    fn complete(&mut self, _context: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        completions.clear();
        false
    }

    fn in_flight(&self) -> usize {
        self.vring.again().into()
    }

    fn memory_changed(&mut self, _engine: &mut Engine) {}
}
