//! The immutable map of all slots.
#![expect(unsafe_code, reason = "island: pointers into slots")]

use crate::fault::Damaged;
use crate::host_index::HostIndex;
use crate::quota::SLOTS_MAX;
use crate::{Area, Error, Gpa, Slot, Span, Unmapped, UserAddr, shared};
use std::ptr::NonNull;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The most bytes that go through our own memory together when a copy crosses from slot to slot.
const PIECE: usize = 256;

/// All guest memory at one moment. A map never changes: a change of memory makes a new map. Clones share the
/// slots.
#[derive(Clone, Debug, Default)]
pub struct Map {
    /// The largest slot. Most of a guest's memory is in one slot, so a look-up checks it first.
    largest: FlatSlot,
    /// Sorted by guest-physical address, without overlaps.
    slots: Arc<[Slot]>,
    hosts: HostIndex,
}

/// The addresses of a slot of a map, which keeps the slot mapped.
#[derive(Clone, Copy, Debug)]
struct FlatSlot {
    gpa: Gpa,
    len: u64,
    base: NonNull<u8>,
}

// SAFETY: `base` is the address of a slot in the same map, which may be sent and shared.
unsafe impl Send for FlatSlot {}
// SAFETY: as above.
unsafe impl Sync for FlatSlot {}

impl Default for FlatSlot {
    /// Returns a slot without bytes.
    fn default() -> Self {
        Self { gpa: Gpa(0), len: 0, base: NonNull::dangling() }
    }
}

impl Map {
    /// Makes a map of `slots`, in any order.
    ///
    /// # Errors
    /// Too many slots, or two that share guest-physical addresses. The front-end's own addresses may overlap:
    /// they only name ring areas. Of the slots that hold a whole area, the first by guest-physical address is
    /// used.
    pub fn new(mut slots: Vec<Slot>) -> Result<Self, Error> {
        if slots.len() > SLOTS_MAX {
            return Err(Error::TooMany { count: slots.len(), max: SLOTS_MAX });
        }
        slots.sort_by_key(Slot::gpa);
        for pair in slots.windows(2) {
            if pair[0].locate(pair[1].gpa()).is_some() {
                return Err(Error::Overlaps { gpa: pair[1].gpa(), other: pair[0].gpa() });
            }
        }
        Ok(Self::of_sorted(slots))
    }

    fn of_sorted(slots: Vec<Slot>) -> Self {
        let largest = slots.iter().max_by_key(|slot| slot.len());
        let flat = |slot: &Slot| FlatSlot { gpa: slot.gpa(), len: slot.len(), base: slot.base() };
        Self {
            largest: largest.map(flat).unwrap_or_default(),
            hosts: HostIndex::new(&slots),
            slots: slots.into(),
        }
    }

    /// Returns this map with one slot more.
    ///
    /// # Errors
    /// As [`Map::new`].
    pub fn with(&self, slot: Slot) -> Result<Self, Error> {
        let mut slots = self.slots.to_vec();
        // Checked here first, so that the error names the new slot.
        let first = slot.gpa();
        let last = Gpa(first.0 + (slot.len() - 1));
        if let Some(other) = slots.iter().find(|s| s.gpa() <= last && s.gpa().0 + (s.len() - 1) >= first.0) {
            return Err(Error::Overlaps { gpa: first, other: other.gpa() });
        }
        slots.push(slot);
        Self::new(slots)
    }

    /// Returns this map without one slot, and that slot.
    ///
    /// # Errors
    /// No slot has this guest-physical address, front-end address and length.
    pub fn without(&self, gpa: Gpa, user: UserAddr, len: u64) -> Result<(Self, Slot), Error> {
        let mut slots = self.slots.to_vec();
        let at = slots
            .iter()
            .position(|s| s.gpa() == gpa && s.user() == user && s.len() == len)
            .ok_or(Error::NoSuchSlot { gpa, user, len })?;
        let removed = slots.remove(at);
        Ok((Self::of_sorted(slots), removed))
    }

    /// Returns the slots, by increasing guest-physical address.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Returns the damage of a slot that has lost pages, if there is one: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        let slot = self.slots.iter().find(|slot| slot.mapping().is_damaged())?;
        let (gpa, user, len) = (slot.gpa(), slot.user(), slot.len());
        Some(Damaged::Memory { gpa, user, len, first: slot.mapping().report_once() })
    }

    #[cold]
    pub(crate) fn is_damaged(&self) -> bool {
        self.slots.iter().any(|slot| slot.mapping().is_damaged())
    }

    /// Returns the host address of `gpa`, and how many bytes follow it in the same slot.
    #[inline]
    pub(crate) fn find(&self, gpa: Gpa) -> Option<(NonNull<u8>, u64)> {
        let FlatSlot { gpa: first, len, base } = self.largest;
        // An address below the slot wraps to an offset beyond its end, because no slot wraps.
        let offset = gpa.0.wrapping_sub(first.0);
        if offset < len {
            // SAFETY: the offset is smaller than the mapping's length, which fits into isize.
            return Some((unsafe { base.add(offset as usize) }, len - offset));
        }
        self.find_in_others(gpa)
    }

    #[inline(never)]
    fn find_in_others(&self, gpa: Gpa) -> Option<(NonNull<u8>, u64)> {
        // Most guests have few slots: two or three without hot-plug. A scan is faster than a search then.
        let slot = if self.slots.len() <= 8 {
            return self.slots.iter().find_map(|slot| Self::host(slot, gpa));
        } else {
            let after = self.slots.partition_point(|s| s.gpa() <= gpa);
            self.slots.get(after.checked_sub(1)?)?
        };
        Self::host(slot, gpa)
    }

    #[inline]
    fn host(slot: &Slot, gpa: Gpa) -> Option<(NonNull<u8>, u64)> {
        let (offset, rest) = slot.locate(gpa)?;
        // SAFETY: the offset is smaller than the mapping's length.
        Some((unsafe { slot.base().add(offset) }, rest))
    }

    /// Returns the host address of `len` contiguous bytes at `gpa`, if one slot holds them all. Valid as long
    /// as this map.
    #[inline]
    pub fn contiguous(&self, gpa: Gpa, len: u64) -> Option<NonNull<u8>> {
        let (host, rest) = self.find(gpa)?;
        (len <= rest).then_some(host)
    }

    /// Returns the `len` bytes at `gpa`, if one slot holds them all.
    #[inline]
    pub fn span(&self, gpa: Gpa, len: u64) -> Option<Span<'_>> {
        let host = self.contiguous(gpa, len)?;
        // SAFETY: these bytes are in a slot, which this map keeps mapped while it is borrowed. The length of
        // a mapping fits into usize, so `len` does too.
        Some(unsafe { Span::new(host, len as usize) })
    }

    /// Calls `each` with the host pieces of `len` bytes at `gpa`, in order. The range may cross from slot to
    /// slot.
    #[inline]
    pub(crate) fn pieces(
        &self,
        gpa: Gpa,
        len: u64,
        mut each: impl FnMut(NonNull<u8>, usize),
    ) -> Result<(), Unmapped> {
        let unmapped = Unmapped { addr: gpa.0, len };
        let (mut at, mut left) = (gpa, len);
        while left > 0 {
            let (host, rest) = self.find(at).ok_or(unmapped)?;
            let here = rest.min(left);
            each(host, here as usize);
            left -= here;
            if left > 0 {
                at = at.checked_add(here).ok_or(unmapped)?;
            }
        }
        Ok(())
    }

    /// Returns whether all `len` bytes at `gpa` are guest memory.
    #[inline]
    pub fn contains(&self, gpa: Gpa, len: u64) -> bool {
        // The usual case, without the loop: one slot holds the whole range.
        self.contiguous(gpa, len).is_some() || self.contains_pieces(gpa, len)
    }

    #[cold]
    fn contains_pieces(&self, gpa: Gpa, len: u64) -> bool {
        self.pieces(gpa, len, |_, _| {}).is_ok()
    }

    /// Copies guest bytes to `into`.
    ///
    /// # Errors
    /// A part of the range is not guest memory; `into` then holds the bytes before it.
    #[inline]
    pub fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Unmapped> {
        if let Some(host) = self.contiguous(gpa, into.len() as u64) {
            // SAFETY: `contiguous` found that many bytes in a slot of this map.
            unsafe { shared::read(host, into) };
            return Ok(());
        }
        self.read_pieces(gpa, into)
    }

    #[cold]
    fn read_pieces(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Unmapped> {
        let mut done = 0;
        self.pieces(gpa, into.len() as u64, |host, len| {
            // SAFETY: `pieces` gives memory of a slot of this map, valid for `len` bytes.
            unsafe { shared::read(host, &mut into[done..done + len]) };
            done += len;
        })
    }

    /// Copies `from` into guest memory, and marks it in no log. Devices write through a [`crate::View`].
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing is written then.
    #[inline]
    pub fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), Unmapped> {
        if let Some(host) = self.contiguous(gpa, from.len() as u64) {
            // SAFETY: `contiguous` found that many bytes in a slot of this map.
            unsafe { shared::write(host, from) };
            return Ok(());
        }
        self.write_pieces(gpa, from)
    }

    #[cold]
    fn write_pieces(&self, gpa: Gpa, from: &[u8]) -> Result<(), Unmapped> {
        if !self.contains(gpa, from.len() as u64) {
            return Err(Unmapped { addr: gpa.0, len: from.len() as u64 });
        }
        let mut done = 0;
        self.pieces(gpa, from.len() as u64, |host, len| {
            // SAFETY: `pieces` gives memory of a slot of this map, valid for `len` bytes.
            unsafe { shared::write(host, &from[done..done + len]) };
            done += len;
        })
    }

    /// Copies `len` bytes at `at` in `from` to `to`, and marks them in no log.
    ///
    /// # Errors
    /// As [`View::copy_from`](crate::View::copy_from).
    #[inline]
    pub(crate) fn copy_from(&self, to: Gpa, from: &Self, at: Gpa, len: u64) -> Result<(), Unmapped> {
        if let (Some(target), Some(source)) = (self.contiguous(to, len), from.contiguous(at, len))
            // Two ranges of guest memory can be the same memory, and only others may be copied at once.
            && target.addr().get().abs_diff(source.addr().get()) as u64 >= len
        {
            // SAFETY: `contiguous` found that many bytes in a slot of each map, so `len` fits into usize. The
            // ranges do not overlap.
            unsafe { shared::copy(source, target, len as usize) };
            return Ok(());
        }
        self.copy_pieces(to, from, at, len)
    }

    #[cold]
    fn copy_pieces(&self, to: Gpa, from: &Self, at: Gpa, len: u64) -> Result<(), Unmapped> {
        for (map, gpa) in [(self, to), (from, at)] {
            if !map.contains(gpa, len) {
                return Err(Unmapped { addr: gpa.0, len });
            }
        }
        let mut piece = [0; PIECE];
        let mut done = 0;
        while done < len {
            let piece = &mut piece[..(len - done).min(PIECE as u64) as usize];
            // No address wraps, because both maps contain their range.
            from.read(Gpa(at.0 + done), piece)?;
            self.write(Gpa(to.0 + done), piece)?;
            done += piece.len() as u64;
        }
        Ok(())
    }

    /// Reads one value, once.
    ///
    /// # Errors
    /// A part of the range is not guest memory.
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, gpa: Gpa) -> Result<T, Unmapped> {
        if let Some(host) = self.contiguous(gpa, size_of::<T>() as u64) {
            // SAFETY: `contiguous` found that many bytes in a slot of this map.
            return Ok(unsafe { shared::read_obj(host) });
        }
        let mut value = T::new_zeroed();
        self.read_pieces(gpa, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Writes one value.
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing is written then.
    #[inline]
    pub fn write_obj<T: IntoBytes + Immutable>(&self, gpa: Gpa, value: &T) -> Result<(), Unmapped> {
        if let Some(host) = self.contiguous(gpa, size_of::<T>() as u64) {
            // SAFETY: `contiguous` found that many bytes in a slot of this map.
            unsafe { shared::write_obj(host, value) };
            return Ok(());
        }
        self.write_pieces(gpa, value.as_bytes())
    }

    /// Returns the ring area of `len` bytes at the front-end's address `user`, whose host address is a
    /// multiple of `align`.
    ///
    /// # Errors
    /// No single slot holds the whole area, or it is misaligned.
    pub fn area(&self, user: UserAddr, len: usize, align: usize) -> Result<Area, Unmapped> {
        self.slots
            .iter()
            .filter_map(|slot| {
                let offset = user.offset_from(slot.user())?;
                let end = offset.checked_add(len as u64)?;
                if end > slot.len() || offset >= slot.len() {
                    return None;
                }
                // SAFETY: the offset is smaller than the mapping's length.
                let host = unsafe { slot.mapping().base().add(offset as usize) };
                // SAFETY: `len` bytes from `offset` end within the mapping, which the area keeps alive.
                Some(unsafe { Area::new(host, len, slot.mapping().clone()) })
            })
            .find(|area| area.host().as_ptr().addr().is_multiple_of(align))
            .ok_or(Unmapped { addr: user.0, len: len as u64 })
    }

    /// Returns the index of the slots by host address.
    #[inline]
    pub(crate) fn hosts(&self) -> &HostIndex {
        &self.hosts
    }

    /// Returns the guest-physical address of the first byte of an area of this map.
    pub fn gpa_of_area(&self, area: &Area) -> Option<Gpa> {
        let mut found = None;
        let (at, len) = (area.host().as_ptr().addr(), usize::from(!area.is_empty()));
        self.hosts.locate(at, len, |gpa, _| found = found.or(Some(gpa)));
        found
    }

    /// Returns an address that is not guest memory.
    pub fn unmapped_address(&self) -> Gpa {
        // The highest address that no slot holds. That is nearly always the highest of all addresses.
        self.slots.iter().rev().fold(Gpa(u64::MAX), |at, slot| match slot.locate(at) {
            Some(_) => Gpa(slot.gpa().0.wrapping_sub(1)),
            None => at,
        })
    }

    /// Returns the guest-physical address of `len` bytes at the front-end's address `user`, if one slot holds
    /// them all.
    pub fn gpa_of_range(&self, user: UserAddr, len: u64) -> Option<Gpa> {
        self.slots.iter().find_map(|slot| {
            let offset = user.offset_from(slot.user())?;
            let end = offset.checked_add(len)?;
            (end <= slot.len()).then(|| Gpa(slot.gpa().0 + offset))
        })
    }

    /// Returns the guest-physical address of the front-end's address `user`.
    pub fn gpa_of(&self, user: UserAddr) -> Option<Gpa> {
        self.gpa_of_range(user, 1)
    }
}
