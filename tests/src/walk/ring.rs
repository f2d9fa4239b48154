//! The driver's end of a ring that may lie: it writes any descriptor, and keeps no account of chains but
//! their number.

use std::sync::atomic::Ordering;

use anyhow::Result;
use kickless_memory::{Area, Gpa};
use kickless_spec::ring::{
    AVAIL_F_NO_INTERRUPT, DESC_F_NEXT, Desc, EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE, EVENT_FLAGS,
    EVENT_LEN, EVENT_OFF_WRAP, PackedDesc, RING_ENTRIES, RING_FLAGS, RING_IDX, avail_len, desc_len, used_len,
};
use kickless_testing::Random;
use kickless_virtqueue::packed::RingPosition;

use crate::driver::Eventfd;
use crate::driver::memory::Ram;

/// The most descriptors of a chain in the ring.
pub const CHAIN_MAX: u16 = 4;

/// A descriptor of a chain. The ring adds the link to the next one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Piece {
    /// The address.
    pub addr: u64,
    /// The length.
    pub len: u32,
    /// The flags.
    pub flags: u16,
}

/// A ring.
pub struct Ring {
    /// Its number.
    pub index: u16,
    /// Its size.
    pub size: u16,
    /// Front-end addresses of its three areas.
    pub user: [u64; 3],
    /// The addresses of its areas in the guest.
    pub areas: [Gpa; 3],
    /// The eventfds that the device has got last.
    pub kick: Eventfd,
    /// See [`Ring::kick`].
    pub call: Eventfd,
    /// See [`Ring::kick`].
    pub err: Eventfd,
    desc: Area,
    avail: Area,
    used: Area,
    next: u16,
    seen: u16,
    packed: Option<Packed>,
}

/// The state of a packed ring.
struct Packed {
    next: RingPosition,
    used: RingPosition,
    /// Position and flags of the first descriptor that is not published.
    first: Option<(RingPosition, u16)>,
    room: u16,
    id: u16,
    lengths: Vec<u16>,
}

impl Packed {
    fn new(size: u16) -> Packed {
        let (next, used) = (RingPosition::FIRST, RingPosition::FIRST);
        Packed { next, used, first: None, room: size, id: 0, lengths: vec![0; size.into()] }
    }
}

impl Ring {
    /// Makes an empty ring.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn new(ram: &mut Ram, index: u16, size: u16, is_packed: bool) -> Result<Ring> {
        let lengths = match is_packed {
            true => [desc_len(size), EVENT_LEN, EVENT_LEN],
            false => [desc_len(size), avail_len(size, true), used_len(size, true)],
        };
        let mut make = |len: usize| -> Result<(Gpa, Area)> {
            let gpa = ram.take(len, 64)?;
            Ok((gpa, ram.area(gpa, len, 16)?))
        };
        let ((desc_at, desc), (avail_at, avail), (used_at, used)) =
            (make(lengths[0])?, make(lengths[1])?, make(lengths[2])?);
        let areas = [desc_at, avail_at, used_at];
        let packed = is_packed.then(|| Packed::new(size));
        let [kick, call, err] = [Eventfd::new()?, Eventfd::new()?, Eventfd::new()?];
        let user = areas.map(|gpa| ram.user(gpa));
        Ok(Ring { index, size, user, areas, kick, call, err, desc, avail, used, next: 0, seen: 0, packed })
    }

    /// Empties the ring. The device must not have it.
    pub fn clear(&mut self) {
        for area in [&self.desc, &self.avail, &self.used] {
            for at in (0..area.len()).step_by(2) {
                area.store_u16(at, 0, Ordering::Relaxed);
            }
        }
        (self.next, self.seen) = (0, 0);
        self.packed = self.packed.as_ref().map(|_| Packed::new(self.size));
    }

    /// Returns the number of chains that fit into the ring together.
    pub fn slots(&self) -> u16 {
        (self.size / CHAIN_MAX).max(1)
    }

    /// Returns the slot of the next chain.
    pub fn slot(&self) -> u16 {
        match &self.packed {
            Some(packed) => packed.id % self.slots(),
            None => self.next % self.slots(),
        }
    }

    /// Returns the argument of SET_VRING_BASE for an empty ring.
    pub fn base(&self) -> u32 {
        match &self.packed {
            Some(_) => u32::from(RingPosition::FIRST.bits()) * 0x1_0001,
            None => 0,
        }
    }

    /// Takes back the chains that the device has used. Returns their number. A device that reports more than
    /// it had is not believed.
    pub fn reap(&mut self) -> u64 {
        let Some(packed) = &mut self.packed else {
            let used = self.used.load_u16(RING_IDX, Ordering::Acquire);
            let (count, most) = (used.wrapping_sub(self.seen), self.next.wrapping_sub(self.seen));
            let count = count.min(most);
            self.seen = self.seen.wrapping_add(count);
            return count.into();
        };
        let mut count = 0;
        while packed.room < self.size
            && packed.used.is_used(self.desc.load_u16(packed.used.flags_at(), Ordering::Acquire))
        {
            let used: PackedDesc = self.desc.read(packed.used.at());
            let id = used.id.get() % self.size;
            let len =
                std::mem::take(&mut packed.lengths[usize::from(id)]).max(1).min(self.size - packed.room);
            packed.used = packed.used.after(len, self.size);
            packed.room += len;
            count += 1;
        }
        count
    }

    /// Returns whether another chain may be written over descriptors that the device has used.
    pub fn has_room(&self) -> bool {
        match &self.packed {
            Some(packed) => packed.room >= CHAIN_MAX.min(self.size),
            None => self.next.wrapping_sub(self.seen) < self.slots(),
        }
    }

    /// Writes a chain. [`Ring::publish`] shows it to the device.
    pub fn offer(&mut self, chain: &[Piece]) {
        let chain = &chain[..chain.len().min(usize::from(CHAIN_MAX.min(self.size)))];
        let last = chain.len().saturating_sub(1);
        let flags = |at: usize, piece: &Piece| piece.flags | if at < last { DESC_F_NEXT } else { 0 };
        if self.packed.is_some() {
            for (at, piece) in chain.iter().enumerate() {
                self.append(piece, flags(at, piece));
            }
            if let Some(packed) = &mut self.packed {
                packed.lengths[usize::from(packed.id)] = chain.len() as u16;
                packed.id = (packed.id + 1) % self.size;
            }
            return;
        }
        let head = self.slot() * CHAIN_MAX.min(self.size);
        for (at, piece) in chain.iter().enumerate() {
            let index = head + at as u16;
            self.write(index, piece, flags(at, piece), index + 1);
        }
        self.offer_head(head);
    }

    fn append(&mut self, piece: &Piece, flags: u16) {
        let Some(packed) = &mut self.packed else { return };
        let at = packed.next;
        let flags = flags & !(0x8080) | at.available();
        let shown = match packed.first {
            None => self.desc.load_u16(at.flags_at(), Ordering::Relaxed),
            Some(_) => flags,
        };
        let desc = PackedDesc {
            addr: piece.addr.into(),
            len: piece.len.into(),
            id: packed.id.into(),
            flags: shown.into(),
        };
        self.desc.write(at.at(), &desc);
        packed.first.get_or_insert((at, flags));
        packed.next = at.after(1, self.size);
        packed.room = packed.room.saturating_sub(1);
    }

    /// Writes any descriptor of a split ring.
    pub fn write(&mut self, index: u16, piece: &Piece, flags: u16, next: u16) {
        let desc =
            Desc { addr: piece.addr.into(), len: piece.len.into(), flags: flags.into(), next: next.into() };
        self.desc.write(size_of::<Desc>() * usize::from(index % self.size), &desc);
    }

    /// Makes any head of a split ring available.
    pub fn offer_head(&mut self, head: u16) {
        let at = RING_ENTRIES + 2 * usize::from(self.next & (self.size - 1));
        self.avail.store_u16(at, head, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
    }

    /// Shows the chains to the device.
    pub fn publish(&mut self) {
        match &mut self.packed {
            Some(packed) => {
                if let Some((first, flags)) = packed.first.take() {
                    self.desc.store_u16(first.flags_at(), flags, Ordering::Release);
                }
            }
            None => self.avail.store_u16(RING_IDX, self.next, Ordering::Release),
        }
    }

    /// Writes something into the ring that no driver writes.
    pub fn lie(&mut self, random: &mut Random) {
        let any = Piece {
            addr: self.areas[random.below(3) as usize].0,
            len: random.next() as u32,
            flags: random.next() as u16,
        };
        if let Some(packed) = &self.packed {
            let at = match random.below(3) {
                0 => packed.next,
                1 => packed.used,
                _ => RingPosition { index: random.below(self.size.into()) as u16, wrap: random.one_in(2) },
            };
            let desc = PackedDesc {
                addr: any.addr.into(),
                len: any.len.into(),
                id: (random.next() as u16).into(),
                flags: any.flags.into(),
            };
            self.desc.write(at.at(), &desc);
            return;
        }
        let index = random.below(self.size.into()) as u16;
        match random.below(8) {
            0 => self.avail.store_u16(RING_IDX, random.next() as u16, Ordering::Release),
            1 => self.offer_head(random.next() as u16),
            // A loop.
            2 => self.write(index, &any, DESC_F_NEXT, index),
            3 => self.write(index, &any, DESC_F_NEXT, random.next() as u16),
            4 => self.used.store_u16(RING_IDX, random.next() as u16, Ordering::Relaxed),
            5 => self.used.store_u16(RING_FLAGS, random.next() as u16, Ordering::Relaxed),
            6 => self.avail.store_u16(RING_IDX, self.seen.wrapping_sub(1), Ordering::Release),
            _ => self.write(index, &any, any.flags, random.next() as u16),
        }
    }

    /// Asks for calls, or for none, in any of the ways that the features may allow.
    pub fn ask_for_calls(&mut self, random: &mut Random) {
        let event = random.next() as u16;
        if self.packed.is_some() {
            self.avail.store_u16(EVENT_OFF_WRAP, event, Ordering::Relaxed);
            let flags = [EVENT_F_ENABLE, EVENT_F_DISABLE, EVENT_F_DESC, 3, event];
            let flags = flags[random.below(flags.len() as u64) as usize];
            self.avail.store_u16(EVENT_FLAGS, flags, Ordering::Relaxed);
        } else {
            let flags = if random.one_in(2) { 0 } else { AVAIL_F_NO_INTERRUPT };
            self.avail.store_u16(RING_FLAGS, flags, Ordering::Relaxed);
            let at = RING_ENTRIES + 2 * usize::from(self.size);
            self.avail.store_u16(at, event, Ordering::Relaxed);
        }
    }
}
