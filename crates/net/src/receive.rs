//! Delivers the test frames of a null port to a receive ring. Each expiration of a timer makes one frame due.
//!
//! The task pops chains ahead, as *credit*. It has enough credit when the chains hold the longest frame that
//! the driver must be able to receive. If a frame cannot span several chains, one chain is enough. The task
//! stops popping earlier if the driver has offered no more chains.
//! - No frame is due: the task waits for the timer, and kicks stay off ([`Next::Quiet`]). It does so even
//!   with too little credit, because the next frame may be short, and the driver may have offered more chains
//!   by then.
//! - A frame is due and does not fit: the task waits only for the driver ([`Next::Idle`]).
//!
//! Stops and updates do not wait for credit. The ring unpops all credit before it stops, and before its
//! memory, addresses or translations change. The next poll removes these chains from [`Credit`].

use crate::buffers;
use crate::card_state::CardState;
use crate::cost::{self, Budget};
use crate::counters::RingCounters;
use crate::credit::Credit;
use crate::immediate_ring::{self, ImmediateRing};
use crate::timer::Timer;
use kickless_device::{Context, Event, Interest, Next, Polled, QueueTask, ShowAfter, Vring};
use kickless_io::Engine;
use kickless_net_port::{NullPort, TestFrame};
use kickless_spec::net::{Header, NetFeatures};
use kickless_virtqueue::{Chain, ChainId};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The most test frames that wait for chains. The task drops further ones.
const DUE_MAX: u64 = 256;
/// The interval at which a spinning worker reads the timer. A read takes about 0.2 us, so the worker spends
/// most of its time on rings.
const TIMER_INTERVAL: Duration = Duration::from_micros(2);

/// The format of the frames that a driver receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameFormat {
    /// The features in force.
    pub(crate) features: NetFeatures,
    /// Length of the header of each frame.
    pub(crate) header_len: usize,
    /// Length of the longest frame, header included.
    pub(crate) len_max: usize,
}

/// The task of a receive ring.
pub(crate) struct ReceiveTask {
    vring: Vring,
    card: Arc<CardState>,
    pair: u16,
    format: FrameFormat,
    port: NullPort,
    credit: Credit,
    /// Makes frames due. `None` if the port delivers no test frames.
    timer: Option<Timer>,
    /// Frames that the task must deliver now.
    due: u64,
    /// The number of the next frame.
    number: u64,
    /// Space for one frame with its header. Has the length of the longest frame.
    frame: Vec<u8>,
    /// Completions of the chains of one frame. Has capacity for all chains of the ring.
    group: Vec<(ChainId, u32)>,
    /// The budget of the current poll.
    budget: Budget,
    /// Space for a chain that an earlier process popped.
    chain: Chain,
}

impl ReceiveTask {
    /// Makes the task.
    ///
    /// # Errors
    /// The process has no free descriptor for the timer.
    pub(crate) fn new(
        mut vring: Vring,
        card: Arc<CardState>,
        pair: u16,
        format: FrameFormat,
        port: NullPort,
    ) -> io::Result<Self> {
        vring.show_after(ShowAfter::EARLY);
        let timer = if port.rate > 0 { Some(Timer::new(port.rate)?) } else { None };
        let size = vring.size();
        Ok(Self {
            vring,
            card,
            pair,
            format,
            port,
            credit: Credit::new(size, format.len_max),
            timer,
            due: 0,
            number: 0,
            frame: vec![0; format.len_max],
            group: Vec::with_capacity(size.into()),
            budget: Budget::default(),
            chain: Chain::default(),
        })
    }

    fn counters(&self) -> &RingCounters {
        &self.card.counters[usize::from(self.vring.index())]
    }

    /// Returns whether one frame may span several chains.
    fn merges_chains(&self) -> bool {
        self.format.features.contains(NetFeatures::MRG_RXBUF)
    }

    /// Returns whether the task needs no more credit: the chains have room for the longest frame, or the ring
    /// can hold no more of them. If a frame cannot span several chains, one chain is enough.
    fn has_enough_credit(&self) -> bool {
        match self.merges_chains() {
            true => self.credit.bytes() >= self.format.len_max as u64 || self.credit.is_full(),
            false => !self.credit.is_empty(),
        }
    }

    /// Pops one more chain as credit.
    ///
    /// # Errors
    /// Returns [`Next::Idle`] if the driver has offered no more chains. Returns [`Next::More`] if the budget
    /// is used up, or if the ring has read only a part of the next chain so far.
    fn pop_credit(&mut self) -> Result<(), Next> {
        if self.budget.is_used_up() {
            return Err(Next::More);
        }
        let popped = self.credit.pop(&mut self.vring);
        if self.vring.has_cost() {
            self.budget.charge(self.vring.take_cost());
        }
        match popped {
            Some(descriptors) => {
                self.budget.charge_chain(descriptors);
                Ok(())
            }
            None if self.vring.take_unfinished() => Err(Next::More),
            None => Err(Next::Idle),
        }
    }

    /// Makes one frame due for each expiration of the timer.
    fn take_expirations(&mut self) {
        let Some(timer) = &self.timer else { return };
        let due = self.due + timer.take();
        self.due = due.min(DUE_MAX);
        self.counters().dropped_late.add(due - self.due);
        // Only a driver with these features tells the card how many pairs it uses. It tells a front-end that
        // serves the control ring itself, and not the card.
        let pairs_known = self.format.features.contains(NetFeatures::CTRL_VQ | NetFeatures::MQ)
            && self.card.has_control_ring.load(Ordering::Relaxed);
        if pairs_known && self.pair >= self.card.pairs.load(Ordering::Relaxed) {
            let unused = std::mem::take(&mut self.due);
            self.counters().dropped_unused.add(unused);
        }
    }

    /// Delivers the frames that are due, then pops credit ahead. Adds the number of delivered frames to
    /// `served`.
    fn deliver_and_refill(&mut self, served: &mut u32) -> Next {
        while self.due > 0 {
            if self.budget.is_used_up() {
                return Next::More;
            }
            match self.deliver() {
                Ok(delivered) => *served += u32::from(delivered),
                Err(next) => return next,
            }
            self.due -= 1;
        }
        while !self.has_enough_credit() {
            match self.pop_credit() {
                Ok(()) => {}
                Err(Next::More) => return Next::More,
                // The next frame may be short enough for the present credit.
                Err(_) => break,
            }
        }
        Next::Quiet
    }

    /// Delivers the next frame and returns `true`, or drops it and returns `false`.
    ///
    /// # Errors
    /// The frame waits for chains, as in [`ReceiveTask::pop_credit`].
    fn deliver(&mut self) -> Result<bool, Next> {
        let len = self.format.header_len + self.port.length(self.number) as usize;
        let chains = match len <= self.format.len_max {
            true => self.chains_for(len as u64)?,
            false => None,
        };
        let Some(chains) = chains else {
            self.counters().dropped_long.add(1);
            self.number += 1;
            self.budget.charge(1);
            return Ok(false);
        };
        self.use_credit(chains)?;
        self.build_frame(len, chains);
        let is_written = self.write_frame(len, chains);
        self.credit.remove_oldest(chains);
        self.vring.push_group(&self.group);
        self.number += 1;
        let payload = (len - self.format.header_len) as u64;
        self.budget.charge(cost::of_frame(payload));
        if !is_written {
            self.vring.counters().errors.add(1);
            return Ok(false);
        }
        self.counters().received_frames.add(1);
        self.counters().received_bytes.add(payload);
        Ok(true)
    }

    /// Tells the ring that the oldest chains of the credit are in use from now on.
    ///
    /// # Errors
    /// The ring refuses it. Returns all credit and [`Next::Idle`] then.
    fn use_credit(&mut self, chains: usize) -> Result<(), Next> {
        // The cast is lossless, because a ring has at most 32768 entries.
        if self.vring.use_credit(chains as u16) {
            return Ok(());
        }
        self.return_credit();
        Err(Next::Idle)
    }

    /// Makes the oldest chain one that can hold the header of a frame. Completes shorter chains without a
    /// frame.
    ///
    /// # Errors
    /// As [`ReceiveTask::pop_credit`].
    fn skip_chains_without_header_room(&mut self) -> Result<(), Next> {
        loop {
            let Some(oldest) = self.credit.oldest() else {
                self.pop_credit()?;
                continue;
            };
            if oldest.writable_len() >= self.format.header_len as u64 {
                return Ok(());
            }
            if self.budget.is_used_up() {
                return Err(Next::More);
            }
            let id = oldest.id;
            self.use_credit(1)?;
            self.budget.charge_chain(0);
            self.credit.remove_oldest(1);
            self.vring.push(id, 0);
            self.vring.counters().errors.add(1);
        }
    }

    /// Returns the number of the oldest chains that together hold `len` bytes. Pops more chains if needed.
    /// Returns `None` if the frame must be dropped. A ring of chains like these never has room for it, or a
    /// frame cannot span several chains and the oldest one is too short.
    ///
    /// # Errors
    /// As [`ReceiveTask::pop_credit`].
    fn chains_for(&mut self, len: u64) -> Result<Option<usize>, Next> {
        self.skip_chains_without_header_room()?;
        if !self.merges_chains() {
            return Ok(self.credit.oldest().filter(|chain| chain.writable_len() >= len).map(|_| 1));
        }
        while self.credit.bytes() < len {
            match self.pop_credit() {
                Ok(()) => {}
                Err(Next::Idle) if self.credit.is_full() => return Ok(None),
                Err(next) => return Err(next),
            }
        }
        let (mut bytes, mut chains) = (0, 0);
        for chain in self.credit.chains() {
            if bytes >= len {
                break;
            }
            bytes += chain.writable_len();
            chains += 1;
        }
        Ok(Some(chains))
    }

    /// Builds the next frame in `self.frame`. It has `len` bytes, header included.
    fn build_frame(&mut self, len: usize, chains: usize) {
        let header = Header { num_buffers: (chains as u16).into(), ..Header::default() };
        let (head, payload) = self.frame[..len].split_at_mut(self.format.header_len);
        head.copy_from_slice(&header.as_bytes()[..head.len()]);
        TestFrame { pair: self.pair, number: self.number }.write(self.card.mac, payload);
    }

    /// Writes the frame into the oldest chains, and puts the completion of each into `self.group`. If a
    /// buffer is not in guest memory, returns `false`, and the completions tell the driver that no bytes were
    /// written.
    fn write_frame(&mut self, len: usize, chains: usize) -> bool {
        self.group.clear();
        let (view, marks) = self.vring.memory();
        let mut rest = &self.frame[..len];
        let mut is_written = true;
        for chain in self.credit.chains().take(chains) {
            let here = rest.len().min(usize::try_from(chain.writable_len()).unwrap_or(usize::MAX));
            let (part, more) = rest.split_at(here);
            match buffers::write(chain.writable(), view, marks, part) {
                // Lossless, because each buffer holds a byte of the frame.
                Ok(buffers) => self.budget.charge_descriptors(buffers as u32),
                Err(_) => is_written = false,
            }
            rest = more;
            self.group.push((chain.id, part.len() as u32));
        }
        if !is_written {
            self.group.iter_mut().for_each(|(_, written)| *written = 0);
        }
        is_written
    }
}

/// Serves a task that stops: completes the chains that an earlier process used when it was killed.
impl ImmediateRing for ReceiveTask {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    /// Completes the chain without a frame, because it is unknown whether the earlier process wrote the
    /// frame.
    fn serve(&mut self) -> u32 {
        self.vring.push(self.chain.id, 0);
        0
    }
}

impl QueueTask for ReceiveTask {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        self.credit.truncate(self.vring.credit().into());
        if budget == 0 {
            // The task is stopping. Chains that an earlier process used are in flight, and may be among the
            // credit.
            self.return_credit();
            return immediate_ring::poll(self, 0);
        }
        if context.far_side_due {
            self.take_expirations();
        }
        self.budget.begin(budget);
        let mut served = 0;
        let next = self.deliver_and_refill(&mut served);
        self.vring.publish();
        Polled { served, cost: self.budget.cost(), next }
    }

    fn in_flight(&self) -> usize {
        self.vring.resubmissions().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let timer = self.timer.as_ref()?;
        // While frames are due, the task waits only for the driver.
        let interest = if self.due == 0 { Interest::Readable } else { Interest::None };
        Some(Event { fd: timer.as_fd(), interest })
    }

    fn far_side_interval(&self) -> Duration {
        if self.timer.is_some() { TIMER_INTERVAL } else { Duration::ZERO }
    }

    fn affinity(&self) -> Option<u32> {
        Some(self.pair.into())
    }

    fn return_credit(&mut self) {
        self.credit.unpop_all(&mut self.vring);
    }

    fn memory_changed(&mut self, _engine: &mut Engine) {
        self.credit.truncate(self.vring.credit().into());
    }
}
