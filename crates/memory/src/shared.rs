//! Copies from and to memory that others write at the same time.
#![expect(unsafe_code, reason = "island: the only copies of guest bytes")]

use std::ptr::NonNull;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Reads `into.len()` bytes at `from`.
///
/// # Safety
/// `from` must be valid for that many bytes of shared memory, which no Rust reference covers.
#[inline]
pub(crate) unsafe fn read(from: NonNull<u8>, into: &mut [u8]) {
    // SAFETY: both are valid for the length: `from` by the caller, `into` as a reference; a reference never covers
    // guest memory, so they do not overlap. A racing write by the guest can tear the copy, which is checked afterwards.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) }
}

/// Writes `from` to `to`.
///
/// # Safety
/// `to` must be valid for `from.len()` bytes of shared memory, which no Rust reference covers.
#[inline]
pub(crate) unsafe fn write(to: NonNull<u8>, from: &[u8]) {
    // SAFETY: as in `read`, with the roles exchanged.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
}

/// Copies `len` bytes between two places that others may write at the same time.
///
/// # Safety
/// Both must be valid for that many bytes of shared memory, which no Rust reference covers, and they must not overlap.
#[inline]
pub(crate) unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise. A racing write can tear the copy; neither side's bytes mean anything to us.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) }
}

/// Reads one value, once: what is returned does not change under the caller's hands.
///
/// # Safety
/// `from` must be valid for `size_of::<T>()` bytes of shared memory.
#[inline]
pub(crate) unsafe fn read_obj<T: FromBytes>(from: NonNull<u8>) -> T {
    /// Anywhere in memory, as the guest puts it.
    #[repr(C, packed)]
    struct Unaligned<T>(std::mem::MaybeUninit<T>);

    // Volatile, so that the compiler can neither repeat the read nor leave it out.
    // SAFETY: `from` is valid by the caller, and the type has alignment 1.
    let value = unsafe { from.cast::<Unaligned<T>>().as_ptr().read_volatile() }.0;
    // SAFETY: `T` may hold any bytes (`FromBytes`), and these were read.
    unsafe { value.assume_init() }
}

/// Writes one value.
///
/// # Safety
/// `to` must be valid for `size_of::<T>()` bytes of shared memory, which no Rust reference covers.
#[inline]
pub(crate) unsafe fn write_obj<T: IntoBytes + Immutable>(to: NonNull<u8>, value: &T) {
    // SAFETY: the caller's promise is the same.
    unsafe { write(to, value.as_bytes()) }
}
