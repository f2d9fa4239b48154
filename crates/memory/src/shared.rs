//! Copies from and to memory that others may write at the same time.
#![expect(unsafe_code, reason = "island: the only copies of guest bytes")]

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Reads `into.len()` bytes at `from`.
///
/// # Safety
/// `from` must be valid for that many bytes of shared memory, which no Rust reference covers.
#[inline]
pub unsafe fn read(from: NonNull<u8>, into: &mut [u8]) {
    // SAFETY: `from` is valid for the length by the caller, and `into` is a reference. A reference never
    // covers guest memory, so they do not overlap. A racing write by the guest can tear the copy; callers
    // check the copy afterwards.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) }
}

/// Writes `from` to `to`.
///
/// # Safety
/// `to` must be valid for `from.len()` bytes of shared memory, which no Rust reference covers.
#[inline]
pub unsafe fn write(to: NonNull<u8>, from: &[u8]) {
    // SAFETY: as in `read`, with the roles exchanged.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
}

/// Prefetches a cache line. It accesses nothing, so any address is allowed.
#[inline]
pub(crate) fn prefetch(at: NonNull<u8>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, which neither faults nor changes anything.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.as_ptr().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches a cache line that is written soon, so that no other core keeps a copy. It accesses nothing, so
/// any address is allowed.
#[inline]
pub(crate) fn prefetch_for_write(at: NonNull<u8>) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction, or takes it for a NOP. It neither faults nor
    // changes anything. (The intrinsic is another instruction if the compiler may not assume this one.)
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at.as_ptr(), options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    prefetch(at);
}

/// Length of a cache line.
const LINE: usize = 64;

/// Prefetches the first `len` bytes at `at`, at most two cache lines, as [`prefetch_for_write`] does.
#[inline]
pub(crate) fn prefetch_lines(at: NonNull<u8>, len: u64) {
    prefetch_for_write(at);
    if at.addr().get() % LINE + len.min(LINE as u64) as usize > LINE || len > LINE as u64 {
        prefetch_for_write(at.map_addr(|addr| addr.saturating_add(LINE)));
    }
}

/// The bytes of the lines that [`prefetch_lines`] prefetches.
pub(crate) const PREFETCHED_FIRST: usize = 2 * LINE;

/// Prefetches all lines of `len` bytes at `at` but the first two ([`prefetch_lines`]), to read or to write
/// them soon.
#[inline]
pub(crate) fn prefetch_rest(at: NonNull<u8>, len: usize, to_write: bool) {
    for offset in (PREFETCHED_FIRST..len).step_by(LINE) {
        let line = at.map_addr(|addr| addr.saturating_add(offset));
        if to_write { prefetch_for_write(line) } else { prefetch(line) }
    }
}

/// Copies `len` bytes between two ranges that others may write at the same time.
///
/// # Safety
/// Both must be valid for that many bytes of shared memory, which no Rust reference covers, and they must not
/// overlap.
#[inline]
pub(crate) unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise. A racing write can tear the copy, but we give its bytes no meaning.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) }
}

/// Reads one value, once: the result does not change any more.
///
/// An aligned value is read in words of eight or of four bytes, so that a field of up to that size is not
/// torn.
///
/// # Safety
/// `from` must be valid for `size_of::<T>()` bytes of shared memory.
#[inline]
pub unsafe fn read_obj<T: FromBytes>(from: NonNull<u8>) -> T {
    if size_of::<T>().is_multiple_of(8) && from.cast::<u64>().is_aligned() {
        // SAFETY: the caller's promise, and the alignment was checked above.
        unsafe { read_words::<T, u64>(from) }
    } else if size_of::<T>().is_multiple_of(4) && from.cast::<u32>().is_aligned() {
        // SAFETY: as above.
        unsafe { read_words::<T, u32>(from) }
    } else if size_of::<T>() == 1 {
        // Volatile, so that the compiler neither repeats the read nor leaves it out. SAFETY: the caller's
        // promise; one byte is always aligned.
        unsafe { read_words::<T, u8>(from) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { read_bytes(from) }
    }
}

/// Does the same as [`read_obj`], for aligned values.
///
/// # Safety
/// As [`read_obj`]; also, `from` must be aligned for `W`, of which `T` must be a whole number.
#[inline]
unsafe fn read_words<T: FromBytes, W: FromBytes>(from: NonNull<u8>) -> T {
    let mut value = MaybeUninit::<T>::uninit();
    for i in 0..size_of::<T>() / size_of::<W>() {
        // Volatile, so that the compiler neither repeats the read nor leaves it out. SAFETY: both are valid
        // for the size of `T`, and `from` is aligned, by the caller.
        unsafe {
            let word = from.cast::<W>().add(i).as_ptr().read_volatile();
            value.as_mut_ptr().cast::<W>().add(i).write_unaligned(word);
        }
    }
    // SAFETY: all of its bytes were written, and any bytes are a valid `T` (`FromBytes`).
    unsafe { value.assume_init() }
}

/// Does the same as [`read_obj`], for small or misaligned values. Not inlined, because it is rarely needed.
///
/// # Safety
/// As [`read_obj`].
#[inline(never)]
unsafe fn read_bytes<T: FromBytes>(from: NonNull<u8>) -> T {
    let mut value = MaybeUninit::<T>::uninit();
    for i in 0..size_of::<T>() {
        // SAFETY: both are valid for the size of `T`, `from` by the caller.
        unsafe { value.as_mut_ptr().cast::<u8>().add(i).write(from.add(i).as_ptr().read_volatile()) }
    }
    // SAFETY: all of its bytes were written, and any bytes are a valid `T` (`FromBytes`).
    unsafe { value.assume_init() }
}

/// Writes one value.
///
/// # Safety
/// `to` must be valid for `size_of::<T>()` bytes of shared memory, which no Rust reference covers.
#[inline]
pub unsafe fn write_obj<T: IntoBytes + Immutable>(to: NonNull<u8>, value: &T) {
    // SAFETY: the caller's promise is the same.
    unsafe { write(to, value.as_bytes()) }
}
