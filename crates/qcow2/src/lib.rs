//! Images in QEMU's copy-on-write format: their structures, check, repair, and tables in memory.
//!
//! This crate does no I/O. It has three parts:
//!
//! - **The format**: [`Header`], [`Geometry`], the entries of tables ([`mod@entry`]) and the reference counts
//!   ([`mod@refcount`]), versions 2 and 3.
//! - **The check**: [`check()`] compares the reference counts of an image with its references, and [`repair`]
//!   mends them.
//! - **The tables**: [`Tables`] changes the mapping of an image while requests use it. The image survives a
//!   kill of the process and a power cut at any moment, without losing what it has answered.
//!
//! An image is hostile. Its bytes cannot make a function panic, run without end, or allocate without bound.
//!
//! # Check an image
//! A caller gives access to the bytes of an image with [`ReadImage`], and with [`WriteImage`] for [`repair`].
//! A slice of bytes can be read:
//!
//! ```
//! use kickless_qcow2::{Header, Report, WINDOW, check};
//!
//! // Four clusters of 512 bytes: header, L1 table, refcount table, refcount block.
//! let mut image = vec![0; 4 * 512];
//! let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
//! put(0, b"QFI\xfb\0\0\0\x03");
//! put(20, &9_u32.to_be_bytes()); // 2^9 bytes in a cluster
//! put(24, &32768_u64.to_be_bytes()); // the size of the virtual disk
//! put(36, &1_u32.to_be_bytes()); // entries of the L1 table
//! put(40, &512_u64.to_be_bytes()); // its place
//! put(48, &1024_u64.to_be_bytes()); // the place of the refcount table
//! put(56, &1_u32.to_be_bytes()); // its clusters
//! put(96, &4_u32.to_be_bytes()); // 2^4 bits in a reference count
//! put(100, &104_u32.to_be_bytes()); // the length of the header
//! put(1024, &1536_u64.to_be_bytes()); // the place of the refcount block
//! put(1536, &[0, 1, 0, 1, 0, 1, 0, 7]); // the last count is wrong
//!
//! let header = Header::parse(&image, image.len() as u64)?;
//! assert_eq!((header.size, header.geometry.cluster()), (32768, 512));
//! let report = check(&image.as_slice(), WINDOW)?;
//! assert_eq!(report, Report { leaks: 1, ..Report::default() });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The tables, and who carries out their operations
//! The owner of an image reads its header and its first tables ([`TableParts`], [`read_table`]), and makes
//! three objects:
//!
//! - [`Slices`]: the cache of L2 tables. A request looks up its mapping there, without a lock
//!   ([`Slices::look`]).
//! - [`Pins`]: a request holds a [`Pin`] from the look-up to the end of its transfer. A cluster that lost its
//!   mapping is not used again before that.
//! - [`Tables`]: plans all changes. The owner keeps it behind a mutex, and never waits while it is locked.
//!
//! `Tables` emits operations on the image file ([`Tables::next_op`]), while [`Tables::has_due`] says that
//! there are some. The owner carries them out, on any thread and in any order, and reports each once
//! ([`Tables::complete`]). A transfer is whole, or has failed. An operation that was not carried out goes
//! back ([`Tables::take_back`]).
//!
//! A write whose [`Look`] is not in place asks [`Tables::plan_write`], and a discard asks [`Tables::clear`].
//! The answers say where to write, and which changes of tables the request waits for ([`Ticket`],
//! [`Tables::written`]). A request that waits is woken by its waker, and asks again. It may be woken without
//! a reason.
//!
//! `docs/adr/0011-a-table-holds-only-what-may-be-on-disk.md` argues why an image survives a cut. The modules
//! name its rules (R1 to R9) where they follow them.
//!
//! # What the program brings
//! Operations need memory that the program's way of I/O accepts, and waking a request depends on how the
//! program runs requests. So both are types of the program ([`Runtime`]), and the tables are generic over
//! them. They depend on no engine: an error of an operation is a plain [`Errno`]. With plain vectors instead,
//! direct I/O would copy each block of a table.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod check;
mod format;
mod pins;
mod read;
mod runtime;
mod slices;
mod tables;
mod wakers;

// The tests beside the sources name this crate as other crates do.
#[cfg(test)]
extern crate self as kickless_qcow2;
#[cfg(test)]
#[path = "../tests/images/mod.rs"]
mod images;
#[cfg(test)]
#[path = "../tests/sim/mod.rs"]
mod sim;

pub use check::image::{ReadImage, WriteImage};
pub use check::repair::repair;
pub use check::report::{CheckError, Report};
pub use check::{WINDOW, check};
pub use format::bad_image::BadImage;
pub use format::extensions::Bitmaps;
pub use format::geometry::{
    Geometry, GuestCluster, GuestOffset, HostCluster, HostOffset, SliceIndex, Version,
};
pub use format::header::{Backing, BackingFormat, Compression, Header, HeaderChange, TableAt};
pub use format::{entry, refcount};
pub use pins::{Pin, Pins};
pub use read::{read_table, snapshot_tables, used_bytes};
pub use runtime::Runtime;
pub use rustix::io::Errno;
pub use slices::{Look, Slices};
pub use tables::cluster_copies::Copying;
pub use tables::grow::GrowError;
pub use tables::ops::{OpId, TableOp, TableOpKind};
pub use tables::plan::{Clear, ClearPlan, CopyFrom, CopyPlan, SyncMark, Ticket, Under, WritePlan, Written};
pub use tables::state::{TableParts, Tables, TablesOptions};
