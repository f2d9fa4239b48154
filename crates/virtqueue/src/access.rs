//! Accesses of the device's end to its three areas, contiguous or not.
#![expect(unsafe_code, reason = "island: accesses whose bounds were checked before")]

use crate::device::Region;
use crate::packed::Words;
use kickless_memory::{Area, Gpa, Marks, Records, Scattered};
use std::sync::atomic::{Ordering, fence};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Access to an area: translated once ([`Area`]), or at each access ([`Scattered`]).
pub(crate) trait Access: Words {
    /// The in-flight region of a queue with this access.
    type Region: Region;

    /// Reads one value at `offset`, once.
    fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T;

    /// Loads a 16-bit field, relaxed.
    ///
    /// # Safety
    /// Two bytes at `offset` are in the area, which starts at an even address, as does the field.
    unsafe fn load_unchecked(&self, offset: usize) -> u16;

    /// Loads two 64-bit fields, each once.
    ///
    /// # Safety
    /// Sixteen bytes at `offset` are in the area. The area starts at a multiple of 16, and `offset` is a
    /// multiple of 16.
    unsafe fn load_words_unchecked(&self, offset: usize) -> [u64; 2];

    /// Writes one value.
    ///
    /// # Safety
    /// `size_of::<T>()` bytes at `offset` are in the area.
    unsafe fn write_unchecked<T: IntoBytes + Immutable>(&self, offset: usize, value: &T);

    /// Asks the processor to load the cache line at `offset`, if that needs no translation.
    fn prefetch(&self, _offset: usize) {}

    /// Asks the processor for the cache line at `offset`, to write to it soon, if that needs no translation.
    fn prefetch_for_write(&self, _offset: usize) {}

    /// Marks `len` bytes at `offset` as written. The area begins at `first` in guest memory.
    fn mark(&self, first: Gpa, offset: usize, len: usize, marks: &mut Marks);
}

impl Access for Area {
    type Region = Records;

    #[inline(always)]
    fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        Area::read(self, offset)
    }

    #[inline(always)]
    unsafe fn load_unchecked(&self, offset: usize) -> u16 {
        // SAFETY: the caller's promise is the same.
        unsafe { self.load_u16_unchecked(offset) }
    }

    #[inline(always)]
    unsafe fn load_words_unchecked(&self, offset: usize) -> [u64; 2] {
        // SAFETY: the caller's promise: both words are in the area, and aligned.
        unsafe { [self.load_u64_unchecked(offset), self.load_u64_unchecked(offset + 8)] }
    }

    #[inline(always)]
    unsafe fn write_unchecked<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        // SAFETY: the caller's promise is the same.
        unsafe { Area::write_unchecked(self, offset, value) }
    }

    #[inline(always)]
    fn prefetch(&self, offset: usize) {
        Area::prefetch(self, offset);
    }

    #[inline(always)]
    fn prefetch_for_write(&self, offset: usize) {
        Area::prefetch_for_write(self, offset);
    }

    #[inline(always)]
    fn mark(&self, first: Gpa, offset: usize, len: usize, marks: &mut Marks) {
        marks.wrote(Gpa(first.0 + offset as u64), len as u64);
    }
}

impl Words for Scattered {
    #[inline]
    fn load(&self, at: usize, order: Ordering) -> u16 {
        self.load_u16(at, order)
    }

    #[inline]
    fn store(&self, at: usize, value: u16, order: Ordering) {
        self.store_u16(at, value, order);
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// The methods whose names end with `_unchecked` check their bounds here too, because each access has to find
/// its slot.
impl Access for Scattered {
    type Region = Records;

    #[inline]
    fn read<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        Scattered::read(self, offset)
    }

    #[inline]
    unsafe fn load_unchecked(&self, offset: usize) -> u16 {
        self.load_u16(offset, Ordering::Relaxed)
    }

    #[inline]
    unsafe fn load_words_unchecked(&self, offset: usize) -> [u64; 2] {
        Scattered::read::<[u64; 2]>(self, offset).map(u64::from_le)
    }

    #[inline]
    unsafe fn write_unchecked<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        Scattered::write(self, offset, value);
    }

    #[inline]
    fn mark(&self, _: Gpa, offset: usize, len: usize, marks: &mut Marks) {
        self.each_gpa(offset, len, |gpa, len| marks.wrote(gpa, len));
    }
}
