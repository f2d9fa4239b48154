//! A receive ring of a null port: delivers test frames, a timer's expirations.
//!
//! Chains are popped ahead, as *credit*, until they hold the longest frame that the driver has to take. Then kicks stay
//! off, and the task waits for the timer alone ([`Next::Quiet`]). With less, it waits for the driver alone
//! ([`Next::Idle`]), and frames wait for chains. Nothing waits for credit: the ring returns it before it stops and
//! before memory, addresses or translations change, and the next poll finds that it is gone.

use crate::buffers;
use crate::cost::{self, COST_DESCRIPTORS};
use crate::counters::RingCounters;
use crate::credit::Credit;
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
use zerocopy::IntoBytes;

/// Test frames that wait for chains, at most. More are dropped.
const DUE_MAX: u64 = 256;

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
    /// For chains that an earlier process had popped.
    chain: Chain,
}

/// What came of a frame.
enum Delivery {
    /// The driver has it, at this cost.
    Done(u32),
    Dropped,
    /// The driver has not made enough chains available yet.
    Waits,
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

    /// Pops credit until there is enough. Returns what it cost.
    fn fill(&mut self) -> u32 {
        let mut descriptors = 0u32;
        while !self.has_enough() {
            let Some(more) = self.credit.pop(&mut self.vring) else { break };
            descriptors += u32::from(more);
        }
        let cost = descriptors / u32::from(COST_DESCRIPTORS);
        if self.vring.has_cost() { cost.saturating_add(self.vring.take_cost()) } else { cost }
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

    /// Delivers the next frame.
    fn deliver(&mut self) -> Delivery {
        let len = self.layout.header_len + self.port.length(self.number) as usize;
        if len > self.layout.len_max {
            return self.drop_long();
        }
        self.complete_useless();
        let chains = match self.merges() {
            true => self.chains_for(len as u64),
            false => self.credit.chains().next().map(|chain| match chain.writable_len() >= len as u64 {
                true => 1,
                false => 0,
            }),
        };
        let chains = match chains {
            Some(0) => return self.drop_long(),
            Some(chains) => chains,
            None if self.merges() && self.credit.is_full() => return self.drop_long(),
            None => return Delivery::Waits,
        };
        // The ring has at most 32768 entries.
        if !self.vring.use_credit(chains as u16) {
            return Delivery::Waits;
        }
        self.compose(len, chains);
        let whole = self.write(len, chains);
        self.credit.take_oldest(chains);
        self.vring.push_group(&self.group);
        self.number += 1;
        if !whole {
            self.vring.counters().errors.add(1);
            return Delivery::Dropped;
        }
        let payload = (len - self.layout.header_len) as u64;
        self.counters().received_frames.add(1);
        self.counters().received_bytes.add(payload);
        Delivery::Done(cost::of_frame(payload))
    }

    /// Drops a frame that the driver never has room for.
    fn drop_long(&mut self) -> Delivery {
        self.counters().dropped_long.add(1);
        self.number += 1;
        Delivery::Dropped
    }

    /// Completes the oldest chains that cannot even hold a header: no frame can begin there.
    fn complete_useless(&mut self) {
        let least = self.layout.header_len as u64;
        loop {
            let oldest = self.credit.chains().next();
            let Some(id) = oldest.filter(|chain| chain.writable_len() < least).map(|chain| chain.id) else {
                return;
            };
            if !self.vring.use_credit(1) {
                return;
            }
            self.credit.take_oldest(1);
            self.vring.push(id, 0);
            self.vring.counters().errors.add(1);
        }
    }

    /// Returns how many of the oldest chains hold so many bytes, and pops more if they do not; `None`: there are no more.
    fn chains_for(&mut self, len: u64) -> Option<usize> {
        while self.credit.bytes() < len {
            self.credit.pop(&mut self.vring)?;
        }
        let (mut bytes, mut chains) = (0, 0);
        for chain in self.credit.chains() {
            if bytes >= len {
                break;
            }
            bytes += chain.writable_len();
            chains += 1;
        }
        Some(chains)
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

    /// Completes chains that an earlier process had begun to use, without a frame. Whether it wrote them is not known.
    fn complete_again(&mut self) {
        self.return_credit();
        while self.vring.again() > 0 && self.vring.pop(&mut self.chain) {
            self.vring.push(self.chain.id, 0);
        }
    }
}

impl QueueTask for Receive {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn poll(&mut self, _context: &mut Context<'_>, budget: u32) -> Polled {
        self.credit.keep_oldest(self.vring.credit().into());
        if budget == 0 {
            // A task that moves keeps its credit.
            if self.vring.again() > 0 {
                self.complete_again();
            }
            self.vring.publish();
            return Polled { served: 0, cost: 0, next: Next::Idle };
        }
        self.count_due();
        let (mut served, mut cost) = (0, 0u32);
        let next = loop {
            cost = cost.saturating_add(self.fill());
            if self.vring.take_unfinished() || (self.due > 0 && cost >= budget) {
                break Next::More;
            }
            if self.due == 0 {
                break if self.has_enough() { Next::Quiet } else { Next::Idle };
            }
            match self.deliver() {
                Delivery::Done(more) => {
                    served += 1;
                    cost = cost.saturating_add(more);
                }
                Delivery::Dropped => cost = cost.saturating_add(1),
                Delivery::Waits => break Next::Idle,
            }
            self.due -= 1;
        };
        self.vring.publish();
        Polled { served, cost, next }
    }

    fn in_flight(&self) -> usize {
        self.vring.again().into()
    }

    fn event(&self) -> Option<Event<'_>> {
        let timer = self.timer.as_ref()?;
        // Frames that are due wait for the driver, not for the timer.
        let waits = self.due == 0 && self.has_enough();
        let interest = if waits { Interest::Readable } else { Interest::None };
        Some(Event { fd: timer.as_fd(), interest })
    }

    fn return_credit(&mut self) {
        self.credit.give_back(&mut self.vring);
    }

    fn memory_changed(&mut self, _engine: &mut Engine) {
        self.credit.keep_oldest(self.vring.credit().into());
    }
}
