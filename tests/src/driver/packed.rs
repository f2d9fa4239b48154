//! Implements the parts of the driver's end that differ in a packed virtqueue (virtio 1.3, section 2.8).

use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, ensure};
use kickless_memory::Area;
use kickless_spec::ring::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE, EVENT_FLAGS,
    EVENT_OFF_WRAP, PackedDesc,
};
use kickless_virtqueue::packed::RingPosition;

use crate::driver::{Buffer, Used};

/// The driver's positions in a packed ring. The queue owns the areas.
pub(crate) struct Packed {
    size: u16,
    event_idx: bool,
    /// Position of the next descriptor to write.
    next: RingPosition,
    /// Position of the next used descriptor.
    used: RingPosition,
    /// Position and flags of the first descriptor that is not published yet.
    first: Option<(RingPosition, u16)>,
    unpublished: u16,
    /// Number of free positions.
    room: u16,
    free: Vec<u16>,
    /// Number of descriptors of each chain by its id; 0 if the device does not have it.
    lengths: Vec<u16>,
}

impl Packed {
    /// Creates the state of a ring that begins at `start`.
    pub(crate) fn new(size: u16, event_idx: bool, start: RingPosition) -> Packed {
        Packed {
            size,
            event_idx,
            next: start,
            used: start,
            first: None,
            unpublished: 0,
            room: size,
            free: (0..size).rev().collect(),
            lengths: vec![0; size.into()],
        }
    }

    /// Returns the positions of the next descriptor to write and of the next used one.
    pub(crate) fn positions(&self) -> (RingPosition, RingPosition) {
        (self.next, self.used)
    }

    pub(crate) fn in_flight(&self) -> usize {
        usize::from(self.size) - self.free.len()
    }

    /// Adds a chain and returns its id.
    pub(crate) fn submit(&mut self, desc: &Area, buffers: &[Buffer]) -> Result<u16> {
        self.append_chain(desc, &descriptors(buffers))
    }

    /// Adds a chain with an indirect table that is in memory already, and returns its id.
    pub(crate) fn submit_table(&mut self, desc: &Area, addr: u64, len: u32) -> Result<u16> {
        self.append_chain(desc, &[entry(addr, len, DESC_F_INDIRECT)])
    }

    fn append_chain(&mut self, desc: &Area, chain: &[PackedDesc]) -> Result<u16> {
        let count = u16::try_from(chain.len())?;
        ensure!(count <= self.room, "{count} descriptors wanted, {} are free", self.room);
        let id = self.free.pop().context("no id is free")?;
        (self.room, self.lengths[usize::from(id)]) = (self.room - count, count);
        for descriptor in chain {
            self.append(desc, PackedDesc { id: id.into(), ..*descriptor });
        }
        Ok(id)
    }

    /// Writes any descriptor at the next position. The device sees it after [`Packed::publish`].
    pub(crate) fn append(&mut self, desc: &Area, descriptor: PackedDesc) {
        let at = self.next;
        let flags = descriptor.flags.get() | at.available();
        // The first descriptor keeps its old flags, at which the device stops.
        let shown =
            if self.first.is_none() { desc.load_u16(at.flags_at(), Ordering::Relaxed) } else { flags };
        desc.write(at.at(), &PackedDesc { flags: shown.into(), ..descriptor });
        self.first.get_or_insert((at, flags));
        self.next = at.after(1, self.size);
        self.unpublished += 1;
    }

    /// Shows all appended descriptors to the device. Returns whether it wants a kick.
    pub(crate) fn publish(&mut self, desc: &Area, theirs: &Area) -> bool {
        let Some((first, flags)) = self.first.take() else { return false };
        // Release: the rest of the batch comes before these flags; its partner is the device's acquire.
        desc.store_u16(first.flags_at(), flags, Ordering::Release);
        // Its partner is the device's fence between enabling kicks and its last look at the flags.
        fence(Ordering::SeqCst);
        let count = std::mem::take(&mut self.unpublished);
        match theirs.load_u16(EVENT_FLAGS, Ordering::Acquire) {
            EVENT_F_DISABLE => false,
            EVENT_F_DESC if self.event_idx => {
                let event = RingPosition::from_bits(theirs.load_u16(EVENT_OFF_WRAP, Ordering::Relaxed));
                (0..count).any(|n| first.after(n, self.size) == event)
            }
            _ => true,
        }
    }

    /// Returns whether the next used descriptor is there.
    pub(crate) fn is_ready(&self, desc: &Area) -> bool {
        self.used.is_used(desc.load_u16(self.used.flags_at(), Ordering::Acquire))
    }

    /// Takes the next used descriptor.
    pub(crate) fn take(&mut self, desc: &Area) -> Result<Used> {
        let used: PackedDesc = desc.read(self.used.at());
        let id = used.id.get();
        let count = self.lengths.get_mut(usize::from(id)).map_or(0, std::mem::take);
        ensure!(count > 0, "the device returns chain {id}, which it does not have");
        self.used = self.used.after(count, self.size);
        self.room += count;
        self.free.push(id);
        Ok(Used { head: id, len: used.len.get() })
    }

    /// Requests a call for the next used descriptor.
    pub(crate) fn enable_calls(&self, ours: &Area) {
        if self.event_idx {
            ours.store_u16(EVENT_OFF_WRAP, self.used.bits(), Ordering::Relaxed);
            ours.store_u16(EVENT_FLAGS, EVENT_F_DESC, Ordering::Release);
        } else {
            ours.store_u16(EVENT_FLAGS, EVENT_F_ENABLE, Ordering::Relaxed);
        }
    }

    /// Requests no calls.
    pub(crate) fn disable_calls(&self, ours: &Area) {
        ours.store_u16(EVENT_FLAGS, EVENT_F_DISABLE, Ordering::Relaxed);
    }
}

/// Returns the argument of SET_VRING_BASE for a ring whose device takes and uses descriptors from this
/// position.
pub(crate) fn base(position: RingPosition) -> u32 {
    u32::from(position.bits()) << 16 | u32::from(position.bits())
}

/// Returns a descriptor without a chain's id.
pub fn entry(addr: u64, len: u32, flags: u16) -> PackedDesc {
    PackedDesc { addr: addr.into(), len: len.into(), id: 0.into(), flags: flags.into() }
}

/// Returns the ring descriptors of a chain.
fn descriptors(buffers: &[Buffer]) -> Vec<PackedDesc> {
    let last = buffers.len().saturating_sub(1);
    let flags = |(i, descriptor): (usize, PackedDesc)| {
        let next = if i < last { DESC_F_NEXT } else { 0 };
        PackedDesc { flags: (descriptor.flags.get() | next).into(), ..descriptor }
    };
    table(buffers).into_iter().enumerate().map(flags).collect()
}

/// Returns the indirect table of a chain.
pub fn table(buffers: &[Buffer]) -> Vec<PackedDesc> {
    let write = |writable| if writable { DESC_F_WRITE } else { 0 };
    buffers.iter().map(|buffer| entry(buffer.addr.0, buffer.len, write(buffer.writable))).collect()
}
