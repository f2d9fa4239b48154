//! Answers the commands in the control ring.

use crate::card::control::{Command, CommandError};
use crate::card::counters::RingCounters;
use crate::card::state::CardState;
use crate::ports::port::Port;
use crate::ring::buffers;
use crate::ring::cost;
use crate::ring::immediate::{self, ImmediateRing};
use kickless_device::{Context, Polled, QueueTask, Vring};
use kickless_spec::net::{ERR, NetFeatures, OK};
use kickless_virtqueue::Chain;
use std::sync::Arc;
use tracing::debug;

/// The task of a control ring.
pub(crate) struct ControlTask {
    vring: Vring,
    card: Arc<CardState>,
    port: Arc<dyn Port>,
    features: NetFeatures,
    chain: Chain,
    /// Space for a command.
    command: Box<[u8]>,
}

impl ControlTask {
    pub(crate) fn new(
        vring: Vring,
        card: Arc<CardState>,
        port: Arc<dyn Port>,
        features: NetFeatures,
    ) -> Self {
        let command = vec![0; Command::LEN_MAX].into_boxed_slice();
        Self { vring, card, port, features, chain: Chain::default(), command }
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

    fn execute(&mut self) -> Result<(), CommandError> {
        let len = buffers::read(self.chain.readable(), self.vring.view(), &mut self.command)
            .map_err(|_| CommandError::Short)?;
        let card = &self.card;
        match Command::parse(&self.command[..len], self.features, card.pairs_max)? {
            Command::SetPairs(pairs) => {
                card.set_pairs(pairs);
                self.port.card_changed(card);
            }
            Command::Announced => {}
            Command::SetMode(mode, is_on) => card.change_filter(|filter| filter.modes.set(mode, is_on)),
            Command::SetTables { unicast, multicast } => {
                card.change_filter(|filter| filter.set_tables(unicast, multicast));
            }
            Command::SetAddress(address) => card.change_filter(|filter| filter.address = Some(address)),
            Command::SetVlan(vlan, is_accepted) => {
                card.change_filter(|filter| filter.set_vlan(vlan, is_accepted));
            }
            Command::SetOffloads(offloads) => {
                card.set_offloads(offloads);
                self.port.card_changed(card);
            }
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
        // Reading a long table costs as much as a frame of this length.
        cost::of_frame(self.chain.readable_len().min(Command::LEN_MAX as u64))
    }
}

impl QueueTask for ControlTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        immediate::poll(self, budget)
    }

    fn in_flight(&self) -> usize {
        self.vring.resubmissions().into()
    }
}
