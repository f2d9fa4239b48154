//! The control queue: one command at a time, whose caller waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kickless_memory::Area;
use kickless_spec::features::Features;
use kickless_spec::net::{CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, ControlHeader, ERR, OK};
use kickless_virtqueue::driver::{Buffer, Completer, Submitter};

use crate::connection::deadline_after;
use crate::error::Error;
use crate::event::{Event, Kicker};
use crate::layout::Layout;
use crate::link::Link;
use crate::memory::Region;
use crate::poll::{readable, sleep};

/// The number of descriptors. A command takes two, and only one command is in flight. Some more follow those
/// that the back-end did not answer in time.
const SIZE: u16 = 16;
/// The memory of a command: its header and its data, and then the answer in a cache line of its own.
const SLOT: usize = 128;
const ANSWER: usize = SLOT - 64;
/// The content of an answer before the device writes it.
const NO_ANSWER: u8 = 0xff;

/// The driver's end of the control queue.
pub(crate) struct ControlQueue {
    /// The number of the queue.
    pub(crate) index: u8,
    layout: Layout,
    submitter: Submitter,
    completer: Completer,
    slots: Area,
    region: Arc<Region>,
    kicker: Arc<Kicker>,
    pub(crate) kick: Event,
    pub(crate) call: Event,
}

/// Returns the layout of a control queue from the device's address `start` on.
pub(crate) fn layout(start: u64, features: Features) -> Result<Layout, Error> {
    Layout::new(start, SIZE, features, usize::from(SIZE) * SLOT)
}

impl ControlQueue {
    pub(crate) fn new(
        index: u8,
        layout: Layout,
        region: &Arc<Region>,
        kicker: Arc<Kicker>,
    ) -> Result<Self, Error> {
        let (submitter, completer) = layout.rings(region)?;
        Ok(Self {
            index,
            submitter,
            completer,
            slots: region.area(layout.data(), usize::from(SIZE) * SLOT, 64)?,
            region: region.clone(),
            kicker,
            kick: Event::new()?,
            call: Event::new()?,
            layout,
        })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Makes the ring anew, for a back-end that does not know it yet.
    pub(crate) fn restart(&mut self) -> Result<(), Error> {
        (self.submitter, self.completer) = self.layout.rings(&self.region)?;
        self.kick = Event::new()?;
        Ok(())
    }

    /// Tells the device how many pairs to use, and waits for its answer. `is_lost` returns whether the
    /// connection of the ring is lost.
    ///
    /// # Errors
    /// - The back-end refuses the command, or does not answer within `limit`.
    /// - [`Error::Closed`]: the connection was lost.
    /// - The back-end broke the rules of the ring.
    pub(crate) fn set_pairs(
        &mut self,
        pairs: u16,
        link: &Link,
        limit: Duration,
        is_lost: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let timeout = || Error::CommandTimeout { limit };
        let deadline = deadline_after(limit);
        if is_lost() {
            return Err(Error::Closed);
        }
        // Commands that were not answered in time may be answered by now.
        while self.pop()?.is_some() {}
        // Two descriptors, whatever earlier commands have left.
        if self.submitter.room() < 2 {
            return Err(timeout());
        }
        let Some(id) = self.submitter.next_id() else { return Err(timeout()) };
        let slot = usize::from(id) * SLOT;
        self.slots.write(slot, &ControlHeader { class: CTRL_MQ, command: CTRL_MQ_VQ_PAIRS_SET });
        self.slots.write(slot + size_of::<ControlHeader>(), &pairs.to_le());
        self.slots.write(slot + ANSWER, &NO_ANSWER);
        let addr = self.layout.data() + slot as u64;
        let len = (size_of::<ControlHeader>() + size_of_val(&pairs)) as u32;
        let buffers = [
            Buffer { addr, len, writable: false },
            Buffer { addr: addr + ANSWER as u64, len: 1, writable: true },
        ];
        if self.submitter.add(&buffers, None).is_err() {
            return Err(timeout());
        }
        if self.submitter.publish() {
            self.kicker.kick(&self.kick);
        }
        loop {
            match self.pop()? {
                Some(done) if done == id => break,
                Some(_) => {}
                None if link.is_dead() => return Err(link.dead_error()),
                None if is_lost() || link.control.poll_events().closed => return Err(Error::Closed),
                None if Instant::now() >= deadline => return Err(timeout()),
                None if self.completer.enable_calls() => {}
                None => {
                    sleep(
                        &mut [readable(&self.call), readable(&link.control), readable(&link.stop)],
                        Some(deadline),
                    );
                    self.call.take();
                }
            }
        }
        match self.slots.read::<u8>(slot + ANSWER) {
            OK => Ok(()),
            ERR => Err(Error::CommandRefused),
            answer => Err(Error::CommandAnswer { answer }),
        }
    }

    /// Takes the id of an answered command back.
    fn pop(&mut self) -> Result<Option<u16>, Error> {
        let popped = self.completer.pop();
        let done = popped.map_err(|source| Error::InvalidUsed { queue: self.index.into(), source })?;
        Ok(done.map(|done| {
            self.completer.give_back(done.id);
            done.id
        }))
    }
}
