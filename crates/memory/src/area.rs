//! Ring metadata that is translated once.
#![expect(unsafe_code, reason = "island: atomic access to ring indices, and addresses to prefetch")]

use crate::{Mapping, shared};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A contiguous, aligned range of guest memory: a descriptor table, an available ring or a used ring.
///
/// The address is translated once. The pointer has a validated length and keeps its mapping alive.
#[derive(Debug)]
pub struct Area {
    host: NonNull<u8>,
    len: usize,
    mapping: Arc<Mapping>,
}

impl Area {
    /// # Safety
    /// Makes an area of `len` bytes at `host`.
    ///
    /// `host` must be valid for `len` bytes of shared memory as long as `mapping` lives.
    pub(crate) unsafe fn new(host: NonNull<u8>, len: usize, mapping: Arc<Mapping>) -> Self {
        Self { host, len, mapping }
    }

    pub(crate) fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the area has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the mapping that holds the area.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Returns the host address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// Panics if the range is not in the area. Offsets come from our own arithmetic over a validated size,
    /// never from the guest.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset <= self.len && len <= self.len - offset, "ring access out of its area");
        // SAFETY: the range is in the area, as checked above.
        unsafe { self.host.add(offset) }
    }

    #[inline]
    fn atomic(&self, offset: usize) -> &AtomicU16 {
        let at = self.at(offset, 2).cast::<u16>();
        assert!(at.is_aligned(), "misaligned ring index");
        // SAFETY: in bounds and aligned (checked above), alive as long as `self`. All of our accesses to ring
        // indices are atomic. The guest's accesses are outside of this program.
        unsafe { AtomicU16::from_ptr(at.as_ptr()) }
    }

    /// Loads the little-endian 16-bit field at `offset`, which must be even and in the area.
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.atomic(offset).load(order))
    }

    /// Stores the little-endian 16-bit field at `offset`, which must be even and in the area.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        self.atomic(offset).store(value.to_le(), order);
    }

    /// Reads one value at `offset`, once. The value must be in the area.
    #[inline]
    pub fn read<T: FromBytes>(&self, offset: usize) -> T {
        // SAFETY: `at` checks the bounds; the memory is alive as long as `self`.
        unsafe { shared::read_obj(self.at(offset, size_of::<T>())) }
    }

    /// Writes one value at `offset`. The value must be in the area.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        // SAFETY: `at` checks the bounds; the memory is alive as long as `self`.
        unsafe { shared::write_obj(self.at(offset, size_of::<T>()), value) }
    }

    /// Copies the bytes at `offset` into `into`. All of them must be in the area.
    #[inline]
    pub fn read_bytes(&self, offset: usize, into: &mut [u8]) {
        // SAFETY: `at` checks the bounds; the memory is alive as long as `self`.
        unsafe { shared::read(self.at(offset, into.len()), into) }
    }

    /// Copies `from` to `offset`. All of its bytes must fit into the area.
    #[inline]
    pub fn write_bytes(&self, offset: usize, from: &[u8]) {
        // SAFETY: `at` checks the bounds; the memory is alive as long as `self`.
        unsafe { shared::write(self.at(offset, from.len()), from) }
    }

    /// Asks the processor to load the cache line at `offset`. Has no effect if that is not in the area.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: the offset is in the area, as checked above.
            shared::prefetch(unsafe { self.host.add(offset) });
        }
    }

    /// Asks the processor for the cache line at `offset`, to write to it soon. Has no effect if that is not
    /// in the area.
    #[inline]
    pub fn prefetch_for_write(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: the offset is in the area, as checked above.
            shared::prefetch_for_write(unsafe { self.host.add(offset) });
        }
    }

    /// Writes up to `count` values from `offset` on, until `values` ends. All `count` must be in the area.
    #[inline]
    pub fn write_each<T: IntoBytes + Immutable>(
        &self,
        offset: usize,
        count: usize,
        values: impl Iterator<Item = T>,
    ) {
        let len = count.checked_mul(size_of::<T>());
        let start = self.at(offset, len.unwrap_or(usize::MAX));
        for (index, value) in (0..count).zip(values) {
            // SAFETY: `at` has checked the bounds of `count` values; the memory is alive as long as `self`.
            unsafe { shared::write_obj(start.add(index * size_of::<T>()), &value) }
        }
    }

    /// Does the same as [`Area::load_u16`] with relaxed order, for callers that have checked the offset.
    ///
    /// # Safety
    /// Two bytes at `offset` are in the area, at an even host address.
    #[inline]
    pub unsafe fn load_u16_unchecked(&self, offset: usize) -> u16 {
        debug_assert!(self.at(offset, 2).cast::<u16>().is_aligned());
        // SAFETY: in bounds and aligned by the caller, alive as long as `self`; otherwise as in `atomic`.
        u16::from_le(
            unsafe { AtomicU16::from_ptr(self.host.add(offset).cast().as_ptr()) }.load(Ordering::Relaxed),
        )
    }

    /// Loads a little-endian 64-bit field, once, for callers that have checked the offset before.
    ///
    /// # Safety
    /// Eight bytes at `offset` are in the area, at a host address that is a multiple of eight.
    #[inline]
    pub unsafe fn load_u64_unchecked(&self, offset: usize) -> u64 {
        debug_assert!(self.at(offset, 8).cast::<u64>().is_aligned());
        // SAFETY: in bounds and aligned by the caller, alive as long as `self`. This program writes there by
        // copies and atomics only.
        u64::from_le(unsafe { self.host.add(offset).cast::<u64>().as_ptr().read_volatile() })
    }

    /// Does the same as [`Area::write`], for callers that have checked the offset.
    ///
    /// # Safety
    /// `size_of::<T>()` bytes at `offset` are in the area.
    #[inline]
    pub unsafe fn write_unchecked<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        debug_assert!(self.at(offset, size_of::<T>()) >= self.host);
        // SAFETY: in bounds by the caller; the memory is alive as long as `self`.
        unsafe { shared::write_obj(self.host.add(offset), value) }
    }
}

// SAFETY: shared memory that any thread may access, by atomics and copies only, while the mapping lives.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

/// Contiguous guest memory for the length of a borrow, such as an indirect table. It takes no reference
/// count.
#[derive(Clone, Copy, Debug)]
pub struct Span<'m> {
    host: NonNull<u8>,
    len: usize,
    mapping: PhantomData<&'m Mapping>,
}

impl Span<'_> {
    /// # Safety
    /// Makes a span of `len` bytes at `host`.
    ///
    /// `host` must be valid for `len` bytes of shared memory for the lifetime of the span.
    #[inline]
    pub(crate) unsafe fn new(host: NonNull<u8>, len: usize) -> Self {
        Self { host, len, mapping: PhantomData }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the span has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads one value at `offset`, once.
    ///
    /// # Panics
    /// Panics if the value is not in the span. The caller must have checked the offset that the guest gave.
    #[inline]
    pub fn read<T: FromBytes>(&self, offset: usize) -> T {
        assert!(offset <= self.len && size_of::<T>() <= self.len - offset, "read out of its span");
        // SAFETY: checked above; the mapping that the span borrows keeps the memory mapped.
        unsafe { shared::read_obj(self.host.add(offset)) }
    }
}
