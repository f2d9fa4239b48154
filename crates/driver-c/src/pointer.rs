//! Checked access to the objects behind C's pointers.
#![expect(unsafe_code, reason = "C's pointers")]

use std::mem::MaybeUninit;
use std::slice;

use crate::error::Fault;

/// Returns a reference to the object of a pointer.
///
/// # Safety
/// `pointer` is null, or points to a `T` that stays and is not written to while the reference is used.
#[inline]
pub(crate) unsafe fn reference<'a, T>(pointer: *const T, name: &'static str) -> Result<&'a T, Fault> {
    check(pointer, name)?;
    // SAFETY: the pointer is not null and is aligned; the rest is the caller's promise.
    Ok(unsafe { &*pointer })
}

/// Returns a slice of the array of a pointer.
///
/// # Safety
/// `pointer` is null, or points to `len` objects of type `T` that stay and are not written to while the slice
/// is used.
#[inline]
pub(crate) unsafe fn array<'a, T>(
    pointer: *const T,
    len: usize,
    name: &'static str,
) -> Result<&'a [T], Fault> {
    if len == 0 {
        return Ok(&[]);
    }
    check(pointer, name)?;
    check_len::<T>(len)?;
    // SAFETY: the pointer is not null and is aligned, and the length fits into memory; the rest is the
    // caller's promise.
    Ok(unsafe { slice::from_raw_parts(pointer, len) })
}

/// Returns a slice of the memory of a pointer, which may be uninitialised.
///
/// # Safety
/// `pointer` is null, or there is room for `len` objects of type `T`, which no other code uses while the
/// slice exists.
#[inline]
pub(crate) unsafe fn room<'a, T>(
    pointer: *mut T,
    len: usize,
    name: &'static str,
) -> Result<&'a mut [MaybeUninit<T>], Fault> {
    if len == 0 {
        return Ok(&mut []);
    }
    check(pointer, name)?;
    check_len::<T>(len)?;
    // SAFETY: the pointer is not null and is aligned, and the length fits into memory; the content may be
    // uninitialised; the rest is the caller's promise.
    Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), len) })
}

/// Writes `value` to a place of the caller.
///
/// # Safety
/// `place` is null, or there is room for a `T`, which no other code uses.
#[inline]
pub(crate) unsafe fn put<T>(place: *mut T, value: T, name: &'static str) -> Result<(), Fault> {
    check(place, name)?;
    // SAFETY: the pointer is not null and is aligned; the rest is the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// Moves a value into a handle, which C owns from now on.
pub(crate) fn handle<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Takes the value of a handle back. Returns `None` for null.
///
/// # Safety
/// The pointer is null, or came from [`handle`] and was not taken back before.
pub(crate) unsafe fn take_back<T>(pointer: *mut T) -> Result<Option<Box<T>>, Fault> {
    if pointer.is_null() {
        return Ok(None);
    }
    check(pointer, "the handle")?;
    // SAFETY: the pointer came from a box, by the caller's promise.
    Ok(Some(unsafe { Box::from_raw(pointer) }))
}

#[inline]
fn check<T>(pointer: *const T, name: &'static str) -> Result<(), Fault> {
    if pointer.is_null() {
        return Err(Fault::Null(name));
    }
    if pointer.is_aligned() { Ok(()) } else { Err(Fault::Unaligned(name)) }
}

#[inline]
fn check_len<T>(len: usize) -> Result<(), Fault> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.map(drop).ok_or(Fault::Argument("a length is larger than any memory"))
}
