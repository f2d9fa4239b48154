//! The driver's end of a virtqueue (virtio 1.3, section 2.7), split unless a doc says otherwise. One thread
//! uses it. A split queue does not allocate after its creation.

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use kickless_memory::{Area, Gpa};
use kickless_spec::features::Features;
use kickless_spec::ring::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, EVENT_LEN, PackedDesc,
    RING_ENTRIES, RING_FLAGS, RING_IDX, USED_F_NO_NOTIFY, UsedElem, avail_len, desc_len, event_passed,
    used_len,
};
use kickless_virtqueue::packed::RingPosition;
use zerocopy::IntoBytes;

use crate::driver::buffer::{Buffer, Used};
use crate::driver::eventfd::Eventfd;
use crate::driver::memory::Ram;
use crate::driver::packed::{self, Packed};

/// Distance of the event index behind the used index while the driver polls. The device looks at the event
/// index now and then. This distance keeps it from finding that its used index has just passed the event
/// index.
const EVENT_LAG: u16 = 1 << 14;
/// Largest distance before the driver moves the event index on, so that the wrapping used index does not
/// reach it.
const EVENT_LAG_MAX: u16 = 3 << 14;

/// One virtqueue.
pub struct Queue {
    index: u16,
    size: u16,
    event_idx: bool,
    /// Front-end addresses of descriptor table, avail ring and used ring.
    user: [u64; 3],
    desc: Area,
    avail: Area,
    used: Area,
    kick: Eventfd,
    call: Eventfd,
    err: Eventfd,
    /// Start index of the device, in the form of SET_VRING_BASE.
    base: u32,
    /// `avail.idx` with the entries that are not published yet.
    next_avail: u16,
    /// `avail.idx` at the last decision whether to kick.
    decided: u16,
    next_used: u16,
    used_event: u16,
    kicks: u64,
    free: Vec<u16>,
    /// A copy of each descriptor's `next`, which the device cannot write.
    next: Vec<u16>,
    /// Number of descriptors of the chain with this head; 0 if the device does not have it.
    lengths: Vec<u16>,
    /// The state of a packed ring. It replaces most of the fields above.
    packed: Option<Packed>,
}

impl Queue {
    /// Creates an empty queue in `ram`, with the ring features of `features`.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn new(ram: &mut Ram, index: u16, size: u16, features: Features) -> Result<Queue> {
        let event_idx = features.contains(Features::EVENT_IDX);
        let packed = features.contains(Features::RING_PACKED);
        let (avail_len, used_len) = match packed {
            true => (EVENT_LEN, EVENT_LEN),
            false => (avail_len(size, event_idx), used_len(size, event_idx)),
        };
        let mut area = |len, align| -> Result<(u64, Area)> {
            let gpa = ram.take(len, align)?;
            Ok((ram.user(gpa), ram.area(gpa, len, align as usize)?))
        };
        let (desc_user, desc) = area(desc_len(size), 16)?;
        let (avail_user, avail) = area(avail_len, 4)?;
        let (used_user, used) = area(used_len, 4)?;
        Ok(Queue {
            index,
            size,
            event_idx,
            user: [desc_user, avail_user, used_user],
            desc,
            avail,
            used,
            kick: Eventfd::new()?,
            call: Eventfd::new()?,
            err: Eventfd::new()?,
            base: if packed { packed::base(RingPosition::FIRST) } else { 0 },
            next_avail: 0,
            decided: 0,
            next_used: 0,
            used_event: 0,
            kicks: 0,
            free: (0..size).rev().collect(),
            next: vec![0; size.into()],
            lengths: vec![0; size.into()],
            packed: packed.then(|| Packed::new(size, event_idx, RingPosition::FIRST)),
        })
    }

    /// Returns its number.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Returns its size.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the front-end addresses of the descriptor table, the avail ring and the used ring.
    pub fn user_addresses(&self) -> [u64; 3] {
        self.user
    }

    /// Returns the start index of the device, in the form of SET_VRING_BASE.
    pub fn base(&self) -> u32 {
        self.base
    }

    /// Sets the start index of the device.
    pub fn set_base(&mut self, base: u32) {
        self.base = base;
    }

    /// Starts both rings at `index`. They must be empty.
    ///
    /// # Errors
    /// The device has chains.
    pub fn begin_at(&mut self, index: u16) -> Result<()> {
        ensure!(self.free.len() == usize::from(self.size), "the device has chains");
        self.base = index.into();
        (self.next_avail, self.decided, self.next_used) = (index, index, index);
        self.avail.store_u16(RING_IDX, index, Ordering::Release);
        self.used.store_u16(RING_IDX, index, Ordering::Release);
        self.set_used_event(index);
        Ok(())
    }

    /// Starts a packed ring at `position`. It must be empty.
    ///
    /// # Errors
    /// The device has chains, or the ring is a split one.
    pub fn begin_at_position(&mut self, position: RingPosition) -> Result<()> {
        ensure!(
            self.packed.is_some() && self.in_flight() == 0,
            "the device has chains, or it is a split ring"
        );
        // Clears the descriptors of the round before.
        let size = self.size;
        for index in 0..size {
            let here = RingPosition { index, wrap: position.wrap == (index < position.index) };
            self.desc.store_u16(here.flags_at(), here.used(), Ordering::Relaxed);
        }
        self.packed = Some(Packed::new(size, self.event_idx, position));
        self.base = packed::base(position);
        Ok(())
    }

    /// Returns the positions of the next descriptor and of the next used one in a packed ring.
    pub fn positions(&self) -> Option<(RingPosition, RingPosition)> {
        self.packed.as_ref().map(Packed::positions)
    }

    /// Writes any descriptor at the next position of a packed ring.
    pub fn append(&mut self, descriptor: PackedDesc) {
        if let Some(packed) = &mut self.packed {
            packed.append(&self.desc, descriptor);
        }
    }

    /// Returns `avail.idx` with the entries that are not published yet.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Returns the index of the next used element to take.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Returns `used.idx` as it is in memory.
    pub fn used_idx(&self) -> u16 {
        self.used.load_u16(RING_IDX, Ordering::Acquire)
    }

    /// Returns the number of kicks sent so far.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Returns the number of chains that the device has.
    pub fn in_flight(&self) -> usize {
        match &self.packed {
            Some(packed) => packed.in_flight(),
            None => self.lengths.iter().filter(|length| **length != 0).count(),
        }
    }

    /// Returns the eventfd for kicks.
    pub fn kick_fd(&self) -> &Eventfd {
        &self.kick
    }

    /// Returns the eventfd for calls.
    pub fn call(&self) -> &Eventfd {
        &self.call
    }

    /// Returns the eventfd for errors.
    pub fn err(&self) -> &Eventfd {
        &self.err
    }

    /// Replaces the eventfd for kicks and returns the old one.
    pub fn replace_kick(&mut self, kick: Eventfd) -> Eventfd {
        std::mem::replace(&mut self.kick, kick)
    }

    /// Replaces the eventfd for calls and returns the old one.
    pub fn replace_call(&mut self, call: Eventfd) -> Eventfd {
        std::mem::replace(&mut self.call, call)
    }

    /// Copies the ring areas to other memory, which the queue uses from then on.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn move_to(&mut self, ram: &mut Ram) -> Result<()> {
        let moved = Queue::new(ram, self.index, self.size, self.ring_features())?;
        for (from, to) in [(&self.desc, &moved.desc), (&self.avail, &moved.avail), (&self.used, &moved.used)]
        {
            for at in (0..from.len()).step_by(2) {
                to.store_u16(at, from.load_u16(at, Ordering::Acquire), Ordering::Release);
            }
        }
        (self.user, self.desc, self.avail, self.used) = (moved.user, moved.desc, moved.avail, moved.used);
        Ok(())
    }

    fn ring_features(&self) -> Features {
        let mut features = Features::empty();
        features.set(Features::EVENT_IDX, self.event_idx);
        features.set(Features::RING_PACKED, self.packed.is_some());
        features
    }

    /// Adds a chain of these buffers and returns its head. Writes an indirect table at `table` if it is
    /// given. The device sees the chain after [`Queue::publish`].
    ///
    /// # Errors
    /// Not enough descriptors are free, or there is no buffer.
    pub fn submit(&mut self, ram: &Ram, buffers: &[Buffer], table: Option<Gpa>) -> Result<u16> {
        ensure!(!buffers.is_empty(), "a chain needs a buffer");
        if let Some(packed) = &mut self.packed {
            let Some(table) = table else { return packed.submit(&self.desc, buffers) };
            let entries = packed::table(buffers);
            ram.map().write(table, entries.as_bytes())?;
            return packed.submit_table(&self.desc, table.0, size_of_val(entries.as_slice()) as u32);
        }
        if let Some(table) = table {
            let entries: Vec<Desc> = chain(buffers, (1u16..).map(Some)).collect();
            ram.map().write(table, entries.as_bytes())?;
            let head = self.allocate(1)?;
            self.write_desc(head, &desc(table, size_of_val(entries.as_slice()) as u32, DESC_F_INDIRECT, 0));
            self.offer(head);
            return Ok(head);
        }
        let head = self.allocate(buffers.len())?;
        let mut at = head;
        let nexts: Vec<u16> = std::iter::successors(Some(head), |at| Some(self.next[usize::from(*at)]))
            .take(buffers.len())
            .collect();
        for entry in chain(buffers, nexts.iter().skip(1).copied().map(Some).chain([None])) {
            self.write_desc(at, &entry);
            at = self.next[usize::from(at)];
        }
        self.offer(head);
        Ok(head)
    }

    /// Takes `count` descriptors, links them in the copy, and returns the first of them.
    fn allocate(&mut self, count: usize) -> Result<u16> {
        ensure!(count <= self.free.len(), "{count} descriptors wanted, {} are free", self.free.len());
        let taken = self.free.split_off(self.free.len() - count);
        for pair in taken.windows(2) {
            self.next[usize::from(pair[0])] = pair[1];
        }
        let head = taken[0];
        self.lengths[usize::from(head)] = count as u16;
        Ok(head)
    }

    /// Writes an entry of the descriptor table. It may be invalid.
    pub fn write_desc(&self, index: u16, desc: &Desc) {
        self.desc.write(size_of::<Desc>() * usize::from(index), desc);
    }

    /// Adds a head to the avail ring. It may be invalid. [`Queue::publish`] shows it to the device.
    #[inline]
    pub fn offer(&mut self, head: u16) {
        let at = RING_ENTRIES + 2 * usize::from(self.next_avail & (self.size - 1));
        self.avail.store_u16(at, head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Sets `avail.idx` to any value and kicks.
    pub fn set_avail_idx(&mut self, index: u16) {
        self.avail.store_u16(RING_IDX, index, Ordering::Release);
        self.kick();
    }

    /// Shows all added chains to the device. Returns whether it wants a kick.
    #[inline]
    #[must_use]
    pub fn publish(&mut self) -> bool {
        if let Some(packed) = &mut self.packed {
            return packed.publish(&self.desc, &self.used);
        }
        // Release: entries and descriptors come before the index; its partner is the device's acquire.
        self.avail.store_u16(RING_IDX, self.next_avail, Ordering::Release);
        // Its partner is the device's fence between enabling kicks and its last look at the index.
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.decided, self.next_avail);
        if self.event_idx {
            let avail_event = RING_ENTRIES + size_of::<UsedElem>() * usize::from(self.size);
            event_passed(self.used.load_u16(avail_event, Ordering::Relaxed), self.next_avail, old)
        } else {
            self.used.load_u16(RING_FLAGS, Ordering::Relaxed) & USED_F_NO_NOTIFY == 0
        }
    }

    /// Kicks, whether the device wants it or not.
    #[inline]
    pub fn kick(&mut self) {
        self.kicks += 1;
        self.kick.signal();
    }

    /// Shows all added chains to the device, and kicks if the device wants it.
    #[inline]
    pub fn flush(&mut self) {
        if self.publish() {
            self.kick();
        }
    }

    /// Returns the number of used elements to take. For a packed ring, returns at most 1.
    #[inline]
    pub fn used_ready(&self) -> u16 {
        if let Some(packed) = &self.packed {
            return packed.is_ready(&self.desc).into();
        }
        self.used_idx().wrapping_sub(self.next_used)
    }

    /// Takes the next used element. [`Queue::used_ready`] must have seen it.
    #[inline]
    pub(crate) fn used_elem(&mut self) -> UsedElem {
        let at = RING_ENTRIES + size_of::<UsedElem>() * usize::from(self.next_used & (self.size - 1));
        self.next_used = self.next_used.wrapping_add(1);
        self.used.read(at)
    }

    /// Takes the next used chain, if there is one, and frees its descriptors.
    ///
    /// # Errors
    /// The device returned a chain that it did not have.
    pub fn take_used(&mut self) -> Result<Option<Used>> {
        if self.used_ready() == 0 {
            return Ok(None);
        }
        if let Some(packed) = &mut self.packed {
            return packed.take(&self.desc).map(Some);
        }
        let elem = self.used_elem();
        let id = elem.id.get();
        let length = self.lengths.get(id as usize).copied().unwrap_or(0);
        ensure!(length > 0, "the device returns chain {id}, which it does not have");
        let head = id as u16;
        self.lengths[usize::from(head)] = 0;
        let mut at = head;
        for _ in 0..length {
            self.free.push(at);
            at = self.next[usize::from(at)];
        }
        Ok(Some(Used { head, len: elem.len.get() }))
    }

    /// Makes the chains of all used elements of a split queue available again, as their descriptors are.
    /// Returns their number. [`Queue::publish`] shows them to the device.
    ///
    /// # Errors
    /// The device returned a chain that it did not have.
    pub fn offer_used(&mut self) -> Result<u16> {
        let count = self.used_ready();
        for _ in 0..count {
            let id = self.used_elem().id.get();
            let length = self.lengths.get(id as usize).copied().unwrap_or(0);
            ensure!(length > 0, "the device returns chain {id}, which it does not have");
            self.offer(id as u16);
        }
        Ok(count)
    }

    /// Takes the next used chain. Sleeps until the device calls.
    ///
    /// # Errors
    /// No chain comes before the deadline, or the device returned a chain that it did not have.
    pub fn wait_used(&mut self, deadline: Instant) -> Result<Used> {
        loop {
            if let Some(used) = self.take_used()? {
                return Ok(used);
            }
            self.enable_calls();
            if self.used_ready() == 0 && !self.call.wait(deadline)? {
                bail!("queue {}: no call for the {} chains in flight", self.index, self.in_flight());
            }
            self.call.take();
        }
    }

    /// Takes the next used chain. Polls without sleeping and without calls.
    ///
    /// # Errors
    /// The same as those of [`Queue::wait_used`].
    pub fn poll_used(&mut self, deadline: Instant) -> Result<Used> {
        self.disable_calls();
        loop {
            if let Some(used) = self.take_used()? {
                return Ok(used);
            }
            ensure!(
                Instant::now() < deadline,
                "queue {}: nothing used of the {} chains in flight",
                self.index,
                self.in_flight()
            );
            std::thread::yield_now();
        }
    }

    /// Returns whether the device wants kicks. For a queue without EVENT_IDX.
    pub fn is_asked_for_kicks(&self) -> bool {
        self.used.load_u16(RING_FLAGS, Ordering::Acquire) & USED_F_NO_NOTIFY == 0
    }

    /// Requests a call for the next used element.
    pub fn enable_calls(&mut self) {
        if let Some(packed) = &self.packed {
            packed.enable_calls(&self.avail);
        } else if self.event_idx {
            self.set_used_event(self.next_used);
        } else {
            self.avail.store_u16(RING_FLAGS, 0, Ordering::Relaxed);
        }
        // Its partner is the device's fence between its store of the used index and its look at the flags or
        // the event index stored above.
        fence(Ordering::SeqCst);
    }

    /// Requests no calls.
    pub fn disable_calls(&mut self) {
        if let Some(packed) = &self.packed {
            packed.disable_calls(&self.avail);
        } else if self.event_idx {
            self.set_used_event(self.next_used.wrapping_sub(EVENT_LAG));
        } else {
            self.avail.store_u16(RING_FLAGS, AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// Keeps calls disabled when indices wrap. A driver that polls for long calls it from time to time.
    #[inline]
    pub(crate) fn keep_calls_disabled(&mut self) {
        if self.event_idx && self.next_used.wrapping_sub(self.used_event) > EVENT_LAG_MAX {
            self.disable_calls();
        }
    }

    fn set_used_event(&mut self, event: u16) {
        self.used_event = event;
        if self.event_idx {
            let at = RING_ENTRIES + 2 * usize::from(self.size);
            self.avail.store_u16(at, event, Ordering::Relaxed);
        }
    }
}

/// Returns a descriptor.
pub fn desc(addr: Gpa, len: u32, flags: u16, next: u16) -> Desc {
    Desc { addr: addr.0.into(), len: len.into(), flags: flags.into(), next: next.into() }
}

/// Returns the descriptors of a chain. `nexts` gives for each descriptor the index of the one after it.
pub fn chain<'a>(
    buffers: &'a [Buffer],
    nexts: impl Iterator<Item = Option<u16>> + 'a,
) -> impl Iterator<Item = Desc> + 'a {
    buffers.iter().zip(nexts).enumerate().map(|(i, (buffer, next))| {
        let write = if buffer.writable { DESC_F_WRITE } else { 0 };
        match next {
            Some(next) if i + 1 < buffers.len() => desc(buffer.addr, buffer.len, write | DESC_F_NEXT, next),
            _ => desc(buffer.addr, buffer.len, write, 0),
        }
    })
}
