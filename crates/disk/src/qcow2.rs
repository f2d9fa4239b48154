//! Images in QEMU's copy-on-write format.
//!
//! The operator says that an image has this format, never its contents. Otherwise, a guest could write the
//! beginning of such an image, with the name of any file of the host in it, to a raw disk. For the same
//! reason, an image must state the format of its backing image. Only files with images are opened because an
//! image names them.
//!
//! `docs/adr/0011-a-table-holds-only-what-may-be-on-disk.md` argues why an image survives a kill and a power
//! cut. The modules name its rules (R1 to R9) where they follow them. Each imports only those before it:
//!
//! - [`mod@format`] and [`check`]: the structures on disk, and their repair. Without I/O of their own.
//! - [`wakers`], [`pins`], [`slices`], [`tables`]: the tables in memory. They emit operations and take
//!   completions.
//! - [`pools`], [`layer`], [`budget`], [`opened`] and [`open`]: the buffers and the files of a chain.
//! - [`read`], [`mod@write`], [`copy`], [`extents`], [`decode`]: the requests, run by run. The path of a read
//!   and of a write in place takes no lock.
//! - [`table_ops`] and [`blocking`]: carry out the operations of the tables, on a worker or on the control
//!   path.
//! - [`disk`]: the disk.

pub(crate) mod attached;
mod blocking;
mod budget;
mod check;
mod copy;
mod decode;
mod decoder;
pub(crate) mod disk;
mod engine_runtime;
mod extents;
mod format;
#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(any(test, fuzzing))]
mod held;
#[cfg(any(test, fuzzing))]
mod hostile;
mod layer;
mod local_buffers;
mod open;
mod opened;
mod pins;
mod pools;
#[cfg(test)]
mod qemu;
mod read;
pub(crate) mod request;
mod runtime;
mod sender;
#[cfg(test)]
mod sim;
mod slices;
mod table_op_slot;
mod table_ops;
mod tables;
mod wakers;
mod write;

pub(crate) use read::STEP_BYTES;
