//! Ring metadata that cannot be had in one piece: translated at each access.
#![expect(unsafe_code, reason = "island: atomic access to ring indices")]

use crate::{Gpa, Unmapped, UserAddr, View, shared};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A range of guest memory that crosses from one slot to another, with the face of an [`Area`](crate::Area). Where each slot
/// ends was checked: no 16-bit field at an even offset is cut in two, or misaligned.
#[derive(Debug)]
pub struct Scattered {
    view: Arc<View>,
    user: UserAddr,
    len: usize,
}

impl Scattered {
    /// The `len` bytes at the front-end's address `user`.
    ///
    /// # Errors
    /// They are not all guest memory, or a slot among them begins at an odd address in one space or another.
    pub fn new(view: &Arc<View>, user: UserAddr, len: usize) -> Result<Self, Unmapped> {
        let unmapped = Unmapped { addr: user.0, len: len as u64 };
        let mut at = 0;
        while at < len {
            let found = user.0.checked_add(at as u64).and_then(|user| view.map().find_user(UserAddr(user)));
            let (host, rest) = found.ok_or(unmapped)?;
            if !(at.is_multiple_of(2) && host.as_ptr().addr().is_multiple_of(2)) {
                return Err(unmapped);
            }
            at += usize::try_from(rest).unwrap_or(len).min(len - at);
        }
        Ok(Self { view: view.clone(), user, len })
    }

    /// The host address of `offset`, and how many bytes follow it there; at most `len`.
    ///
    /// # Panics
    /// The range is not in the area: offsets come from our own arithmetic over a validated size, never from the guest.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> (NonNull<u8>, usize) {
        assert!(offset <= self.len && len <= self.len - offset, "ring access out of its area");
        // Found when this was made, in a view that does not change.
        let found = self.view.map().find_user(UserAddr(self.user.0 + offset as u64));
        #[expect(clippy::expect_used, reason = "checked when this was made")]
        let (host, rest) = found.expect("a ring that was in guest memory");
        (host, usize::try_from(rest).unwrap_or(len).min(len))
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
            if let Some(gpa) = self.view.map().gpa_of(UserAddr(self.user.0 + at as u64)) {
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
