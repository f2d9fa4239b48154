//! Ring metadata that cannot be had in one piece: translated at each access.
#![expect(unsafe_code, reason = "island: atomic access to ring indices")]

use crate::{Gpa, Unmapped, UserAddr, View, shared};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A range of guest memory that crosses from one slot to another, or, behind a vIOMMU, from one page to another that lies
/// elsewhere, with the face of an [`Area`](crate::Area). Where each piece ends was checked: no 16-bit field at an even offset
/// is cut in two, or misaligned.
#[derive(Debug)]
pub struct Scattered {
    view: Arc<View>,
    /// Where pieces of the front-end's memory begin in it, and what address that is; the first begins at 0.
    runs: Box<[(usize, UserAddr)]>,
    len: usize,
}

impl Scattered {
    /// The `len` bytes at the front-end's address `user`.
    ///
    /// # Errors
    /// They are not all guest memory, or a slot among them begins at an odd address in one space or another.
    pub fn new(view: &Arc<View>, user: UserAddr, len: usize) -> Result<Self, Unmapped> {
        Self::of_runs(view, &[(user, len)])
    }

    /// These bytes of the front-end's, one after the other.
    ///
    /// # Errors
    /// As [`Scattered::new`].
    pub fn of_runs(view: &Arc<View>, pieces: &[(UserAddr, usize)]) -> Result<Self, Unmapped> {
        let (mut runs, mut len) = (Vec::new(), 0);
        for (user, piece) in pieces {
            runs.push((len, *user));
            len += piece;
        }
        let scattered = Self { view: view.clone(), runs: runs.into(), len };
        let mut at = 0;
        while at < len {
            let addr = scattered.run(at).0.0;
            let unmapped = Unmapped { addr, len: (len - at) as u64 };
            let (host, rest) = scattered.find(at, len - at).ok_or(unmapped)?;
            if !(at.is_multiple_of(2) && host.as_ptr().addr().is_multiple_of(2)) {
                return Err(unmapped);
            }
            at += rest;
        }
        Ok(scattered)
    }

    /// The front-end's address of `offset`, and how many bytes follow it in its piece.
    #[inline]
    fn run(&self, offset: usize) -> (UserAddr, usize) {
        let after = self.runs.partition_point(|(start, _)| *start <= offset);
        let end = self.runs.get(after).map_or(self.len, |(start, _)| *start);
        let (start, user) = self.runs.get(after.wrapping_sub(1)).copied().unwrap_or_default();
        // What wraps is found nowhere, as is the end of all addresses.
        (UserAddr(user.0.saturating_add((offset - start) as u64)), end - offset)
    }

    /// The host address of `offset`, and how many of `len` bytes follow it there.
    #[inline]
    fn find(&self, offset: usize, len: usize) -> Option<(NonNull<u8>, usize)> {
        let (user, in_run) = self.run(offset);
        let (host, rest) = self.view.map().find_user(user)?;
        Some((host, usize::try_from(rest).unwrap_or(len).min(len).min(in_run)))
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a ring is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The host address of `offset`, and how many bytes follow it there; at most `len`.
    ///
    /// # Panics
    /// The range is not in the area: offsets come from our own arithmetic over a validated size, never from the guest.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> (NonNull<u8>, usize) {
        assert!(offset <= self.len && len <= self.len - offset, "ring access out of its area");
        // Found when this was made, in a view that does not change.
        #[expect(clippy::expect_used, reason = "checked when this was made")]
        self.find(offset, len).expect("a ring that was in guest memory")
    }

    #[inline]
    fn atomic(&self, offset: usize) -> &AtomicU16 {
        let (host, len) = self.at(offset, 2);
        let at = host.cast::<u16>();
        assert!(len == 2 && at.is_aligned(), "misaligned ring index");
        // SAFETY: in one slot and aligned (checked above), alive as long as `self` holds the view; all of our accesses to
        // ring indices are atomic, and what the guest does to them is not in this program.
        unsafe { AtomicU16::from_ptr(at.as_ptr()) }
    }

    /// As [`Area::load_u16`](crate::Area::load_u16).
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.atomic(offset).load(order))
    }

    /// As [`Area::store_u16`](crate::Area::store_u16).
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        self.atomic(offset).store(value.to_le(), order);
    }

    /// Reads one value at `offset`, once. Must be in the area.
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

    /// Writes one value at `offset`. Must be in the area.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        let bytes = value.as_bytes();
        self.pieces(offset, bytes.len(), |host, done, len| {
            // SAFETY: that many bytes of a slot, which the view keeps mapped.
            unsafe { shared::write(host, &bytes[done..done + len]) }
        });
    }

    /// Calls `each` with the guest-physical pieces of `len` bytes at `offset`. Must be in the area.
    pub fn each_gpa(&self, offset: usize, len: usize, mut each: impl FnMut(Gpa, u64)) {
        let mut at = offset;
        self.pieces(offset, len, |_, _, here| {
            // In memory, as the host address was.
            if let Some(gpa) = self.view.map().gpa_of(self.run(at).0) {
                each(gpa, here as u64);
            }
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
