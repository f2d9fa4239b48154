//! A receive ring of a null port: delivers test frames, a timer's expirations.
//!
//! Chains are popped ahead, as *credit*, until they hold the longest frame that the driver has to take, or the driver has
//! offered no more. While no frame is due, kicks stay off and the task waits for the timer ([`Next::Quiet`]), however
//! little credit there is: the next frame may be a short one, and the driver may have offered more by then. While a frame is
//! due that does not fit, the task waits for the driver alone ([`Next::Idle`]).
//!
//! Nothing waits for credit: the ring returns it before it stops and before memory, addresses or translations change, and
//! the next poll finds that it is gone.

use crate::buffers;
use crate::cost::{self, Budget};
use crate::counters::RingCounters;
use crate::credit::Credit;
use crate::requests::{self, Requests};
use crate::shared::Shared;
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

/// Test frames that wait for chains, at most. More are dropped.
const DUE_MAX: u64 = 256;
/// A worker that spins reads the timer so often. A read takes some 0.2 us, so that most looks are at rings.
const TIMER_INTERVAL: Duration = Duration::from_micros(2);

/// How a driver takes frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// What is in force.
    pub(crate) features: NetFeatures,
    /// Bytes of the header of each frame.
    pub(crate) header_len: usize,
    /// Bytes of the longest frame, header included.
    pub(crate) len_max: usize,
}

/// A running receive ring.
pub(crate) struct Receive {
    vring: Vring,
    shared: Arc<Shared>,
    pair: u16,
    layout: Layout,
    port: NullPort,
    credit: Credit,
    /// `None`: there are no test frames.
    timer: Option<Timer>,
    /// Frames that are to be delivered now.
    due: u64,
    /// The number of the next frame.
    number: u64,
    /// A frame with its header. As long as the longest.
    frame: Vec<u8>,
    /// Completions of one frame. As many as the ring is long.
    group: Vec<(ChainId, u32)>,
    /// Of the present poll.
    budget: Budget,
    /// For chains that an earlier process had popped.
    chain: Chain,
}

impl Receive {
    /// # Errors
    /// The process is out of descriptors.
    pub(crate) fn new(
        mut vring: Vring,
        shared: Arc<Shared>,
        pair: u16,
        layout: Layout,
        port: NullPort,
    ) -> io::Result<Self> {
        vring.show_after(ShowAfter::EARLY);
        let timer = if port.rate > 0 { Some(Timer::new(port.rate)?) } else { None };
        let size = vring.size();
        Ok(Self {
            vring,
            shared,
            pair,
            layout,
            port,
            credit: Credit::new(size),
            timer,
            due: 0,
            number: 0,
            frame: vec![0; layout.len_max],
            group: Vec::with_capacity(size.into()),
            budget: Budget::default(),
            chain: Chain::default(),
        })
    }

    fn counters(&self) -> &RingCounters {
        &self.shared.counters[usize::from(self.vring.index())]
    }

    fn merges(&self) -> bool {
        self.layout.features.contains(NetFeatures::MRG_RXBUF)
    }

    /// Whether any frame finds room, as far as the driver can have room for it.
    fn has_enough(&self) -> bool {
        match self.merges() {
            true => self.credit.bytes() >= self.layout.len_max as u64 || self.credit.is_full(),
            false => !self.credit.is_empty(),
        }
    }

    /// Pops one more chain.
    ///
    /// # Errors
    /// [`Next::Idle`]: the driver has offered no more. [`Next::More`]: the budget is used up, or the chain has been read in
    /// part.
    fn pop(&mut self) -> Result<(), Next> {
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

    /// Takes the timer's expirations.
    fn count_due(&mut self) {
        let Some(timer) = &self.timer else { return };
        let due = self.due + timer.take();
        self.due = due.min(DUE_MAX);
        self.counters().dropped_late.add(due - self.due);
        let says_pairs = self.layout.features.contains(NetFeatures::CTRL_VQ | NetFeatures::MQ);
        if says_pairs && self.pair >= self.shared.pairs.load(Ordering::Relaxed) {
            let unused = std::mem::take(&mut self.due);
            self.counters().dropped_unused.add(unused);
        }
    }

    /// Delivers the frames that are due, then pops credit ahead. Counts in `served` the frames that the driver has.
    fn carry(&mut self, served: &mut u32) -> Next {
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
        while !self.has_enough() {
            match self.pop() {
                Ok(()) => {}
                Err(Next::More) => return Next::More,
                // The next frame may be a short one.
                Err(_) => break,
            }
        }
        Next::Quiet
    }

    /// Delivers the next frame, or drops it. Returns whether the driver has it.
    ///
    /// # Errors
    /// As [`Receive::pop`]: the frame waits for chains.
    fn deliver(&mut self) -> Result<bool, Next> {
        let len = self.layout.header_len + self.port.length(self.number) as usize;
        let chains = match len <= self.layout.len_max {
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
        self.compose(len, chains);
        let whole = self.write(len, chains);
        self.credit.take_oldest(chains);
        self.vring.push_group(&self.group);
        self.number += 1;
        let payload = (len - self.layout.header_len) as u64;
        self.budget.charge(cost::of_frame(payload));
        if !whole {
            self.vring.counters().errors.add(1);
            return Ok(false);
        }
        self.counters().received_frames.add(1);
        self.counters().received_bytes.add(payload);
        Ok(true)
    }

    /// Takes the oldest chains off the credit.
    fn use_credit(&mut self, chains: usize) -> Result<(), Next> {
        // The ring has at most 32768 entries.
        if self.vring.use_credit(chains as u16) {
            return Ok(());
        }
        self.return_credit();
        Err(Next::Idle)
    }

    /// Sees to it that a frame can begin in the oldest chain: completes, empty, chains that cannot even hold a header.
    fn find_first(&mut self) -> Result<(), Next> {
        loop {
            let Some(oldest) = self.credit.oldest() else {
                self.pop()?;
                continue;
            };
            if oldest.writable_len() >= self.layout.header_len as u64 {
                return Ok(());
            }
            let id = oldest.id;
            self.use_credit(1)?;
            self.credit.take_oldest(1);
            self.vring.push(id, 0);
            self.vring.counters().errors.add(1);
        }
    }

    /// Returns how many of the oldest chains hold so many bytes, and pops more if they do not; `None`: the driver never has
    /// room for so many.
    fn chains_for(&mut self, len: u64) -> Result<Option<usize>, Next> {
        self.find_first()?;
        if !self.merges() {
            return Ok(self.credit.oldest().filter(|chain| chain.writable_len() >= len).map(|_| 1));
        }
        while self.credit.bytes() < len {
            match self.pop() {
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

    /// Makes the next frame, of `len` bytes with its header.
    fn compose(&mut self, len: usize, chains: usize) {
        let header = Header { num_buffers: (chains as u16).into(), ..Header::default() };
        let (head, payload) = self.frame[..len].split_at_mut(self.layout.header_len);
        head.copy_from_slice(&header.as_bytes()[..head.len()]);
        TestFrame { pair: self.pair, number: self.number }.write(self.shared.mac, payload);
    }

    /// Writes the frame into the oldest chains, and notes the completion of each. Returns `false` if a buffer is not in
    /// guest memory; nothing counts as written then.
    fn write(&mut self, len: usize, chains: usize) -> bool {
        self.group.clear();
        let (view, marks) = self.vring.memory();
        let mut rest = &self.frame[..len];
        let mut whole = true;
        for chain in self.credit.chains().take(chains) {
            let here = rest.len().min(usize::try_from(chain.writable_len()).unwrap_or(usize::MAX));
            let (part, more) = rest.split_at(here);
            whole &= buffers::write(chain.writable(), view, marks, part).is_ok();
            rest = more;
            self.group.push((chain.id, part.len() as u32));
        }
        if !whole {
            self.group.iter_mut().for_each(|(_, written)| *written = 0);
        }
        whole
    }
}

/// The chains that an earlier process had begun to use, as far as this one stops before it uses them.
impl Requests for Receive {
    fn ring(&mut self) -> (&mut Vring, &mut Chain) {
        (&mut self.vring, &mut self.chain)
    }

    /// Completes the chain without a frame. Whether the earlier process wrote it is not known.
    fn serve(&mut self) -> u32 {
        self.vring.push(self.chain.id, 0);
        0
    }
}

impl QueueTask for Receive {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        self.credit.keep_oldest(self.vring.credit().into());
        if budget == 0 {
            // Chains of an earlier process are in flight, and some of the credit may be such chains.
            self.return_credit();
            return requests::poll(self, 0);
        }
        if context.far_side_due {
            self.count_due();
        }
        self.budget.begin(budget);
        let mut served = 0;
        let next = self.carry(&mut served);
        self.vring.publish();
        Polled { served, cost: self.budget.cost(), next }
    }

    fn in_flight(&self) -> usize {
        self.vring.again().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let timer = self.timer.as_ref()?;
        // Frames that are due wait for the driver, not for the timer.
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
        self.credit.give_back(&mut self.vring);
    }

    fn memory_changed(&mut self, _engine: &mut Engine) {
        self.credit.keep_oldest(self.vring.credit().into());
    }
}
