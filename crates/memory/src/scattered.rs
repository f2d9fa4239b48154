//! Ring metadata that is not contiguous. Each access is translated.
#![expect(unsafe_code, reason = "island: atomic access to ring indices")]

use crate::{Gpa, Unmapped, UserAddr, View, shared};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A range of guest memory in several pieces, with the methods of an [`Area`](crate::Area).
///
/// The range crosses from one slot to another or, behind a vIOMMU, from page to page. `new` checks the
/// pieces: no 16-bit field at an even offset is split or misaligned.
#[derive(Debug)]
pub struct Scattered {
    view: Arc<View>,
    /// The offset at which each piece begins, and the piece's address in guest memory. Each piece is in one
    /// slot, and the first begins at 0. The front-end's addresses may overlap; they are looked up only once.
    runs: Box<[(usize, Gpa)]>,
    len: usize,
}

impl Scattered {
    /// Returns the `len` bytes at the front-end's address `user`.
    ///
    /// # Errors
    /// A part is not guest memory, or a slot among them begins at an odd address in one of the address
    /// spaces.
    pub fn new(view: &Arc<View>, user: UserAddr, len: usize) -> Result<Self, Unmapped> {
        Self::from_pieces(view, &[(user, len)])
    }

    /// Returns a range that consists of these pieces of the front-end's memory, in order.
    ///
    /// # Errors
    /// As [`Scattered::new`].
    pub fn from_pieces(view: &Arc<View>, pieces: &[(UserAddr, usize)]) -> Result<Self, Unmapped> {
        let map = view.map();
        let (mut runs, mut at) = (Vec::new(), 0);
        for (user, len) in pieces {
            let mut done = 0;
            while done < *len {
                let left = (len - done) as u64;
                // An address that wraps is the highest one, which is in no slot.
                let user = UserAddr(user.0.saturating_add(done as u64));
                let unmapped = Unmapped { addr: user.0, len: left };
                let gpa = map.gpa_of(user).ok_or(unmapped)?;
                let (host, rest) = map.find(gpa).ok_or(unmapped)?;
                if !(at + done).is_multiple_of(2) || !host.as_ptr().addr().is_multiple_of(2) {
                    return Err(unmapped);
                }
                runs.push((at + done, gpa));
                done += rest.min(left) as usize;
            }
            at += len;
        }
        Ok(Self { view: view.clone(), runs: runs.into(), len: at })
    }

    /// Returns the guest-physical address of `offset`, and how many bytes follow it in its piece.
    #[inline]
    fn run(&self, offset: usize) -> (Gpa, usize) {
        let after = self.runs.partition_point(|(start, _)| *start <= offset);
        let end = self.runs.get(after).map_or(self.len, |(start, _)| *start);
        let (start, gpa) = self.runs.get(after.wrapping_sub(1)).copied().unwrap_or_default();
        // The piece is within a slot, so the address does not wrap.
        (Gpa(gpa.0.wrapping_add((offset - start) as u64)), end - offset)
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a ring is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the host address of `offset`, and how many bytes follow it in the piece; at most `len`.
    ///
    /// # Panics
    /// Panics if the range is not in the area. Offsets come from our own arithmetic over a validated size,
    /// never from the guest.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> (NonNull<u8>, usize) {
        assert!(offset <= self.len && len <= self.len - offset, "ring access out of its area");
        let (gpa, in_run) = self.run(offset);
        // The address was found when this value was made, and a view does not change.
        #[expect(clippy::expect_used, reason = "checked when this value was made")]
        let host = self.view.map().contiguous(gpa, 1).expect("a ring that was in guest memory");
        (host, len.min(in_run))
    }

    #[inline]
    fn atomic(&self, offset: usize) -> &AtomicU16 {
        let (host, len) = self.at(offset, 2);
        let at = host.cast::<u16>();
        assert!(len == 2 && at.is_aligned(), "misaligned ring index");
        // SAFETY: in one slot and aligned (checked above), alive as long as `self` holds the view. All of our
        // accesses to ring indices are atomic. The guest's accesses are outside of this program.
        unsafe { AtomicU16::from_ptr(at.as_ptr()) }
    }

    /// Does the same as [`Area::load_u16`](crate::Area::load_u16).
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.atomic(offset).load(order))
    }

    /// Does the same as [`Area::store_u16`](crate::Area::store_u16).
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        self.atomic(offset).store(value.to_le(), order);
    }

    /// Reads one value at `offset`, once. The value must be in the area.
    #[inline]
    pub fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        let (host, len) = self.at(offset, size_of::<T>());
        if len == size_of::<T>() {
            // SAFETY: in one slot, which the view keeps mapped.
            return unsafe { shared::read_obj(host) };
        }
        let mut value = T::new_zeroed();
        let bytes = value.as_mut_bytes();
        self.pieces(offset, bytes.len(), |host, done, len| {
            // SAFETY: that many bytes of a slot, which the view keeps mapped.
            unsafe { shared::read(host, &mut bytes[done..done + len]) }
        });
        value
    }

    /// Writes one value at `offset`. The value must be in the area.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        let bytes = value.as_bytes();
        self.pieces(offset, bytes.len(), |host, done, len| {
            // SAFETY: that many bytes of a slot, which the view keeps mapped.
            unsafe { shared::write(host, &bytes[done..done + len]) }
        });
    }

    /// Calls `each` with the guest-physical pieces of `len` bytes at `offset`. The range must be in the area.
    pub fn each_gpa(&self, offset: usize, len: usize, mut each: impl FnMut(Gpa, u64)) {
        let mut at = offset;
        self.pieces(offset, len, |_, _, here| {
            each(self.run(at).0, here as u64);
            at += here;
        });
    }

    #[inline]
    fn pieces(&self, offset: usize, len: usize, mut each: impl FnMut(NonNull<u8>, usize, usize)) {
        let mut done = 0;
        while done < len {
            let (host, here) = self.at(offset + done, len - done);
            each(host, done, here);
            done += here;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::{Map, Slot};

    /// A slot at an odd front-end's address overlaps the slot in which a ring begins.
    #[test]
    fn the_front_end_s_addresses_are_looked_up_once() {
        let slot = |gpa, user| {
            let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 0x2000).unwrap();
            Slot::map(&file, 0, Gpa(gpa), UserAddr(user), 0x2000).unwrap()
        };
        let (odd, even) = (slot(0, 0x1_1001), slot(0x10_0000, 0x1_0000));
        let view = Arc::new(View::new(Map::new(vec![odd, even]).unwrap()));
        let ring = Scattered::new(&view, UserAddr(0x1_0800), 0x1800).unwrap();
        for offset in (0..0x1800).step_by(2) {
            ring.store_u16(offset, offset as u16, Ordering::Relaxed);
            let there: [u8; 2] = view.map().read_obj(Gpa(0x10_0800 + offset as u64)).unwrap();
            assert_eq!(u16::from_le_bytes(there), offset as u16);
        }
    }
}
