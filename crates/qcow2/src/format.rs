//! Parses and encodes the structures of the format: header, tables, entries and reference counts.
//!
//! The standard is `docs/interop/qcow2.txt` of QEMU. All numbers in an image are big-endian. An image is
//! hostile: each function takes any bytes.

pub(crate) mod bad_image;
pub mod entry;
pub(crate) mod extensions;
pub(crate) mod geometry;
pub(crate) mod header;
pub(crate) mod numbers;
pub mod refcount;
pub(crate) mod snapshots;

#[cfg(test)]
mod header_tests;
#[cfg(test)]
mod tests;
