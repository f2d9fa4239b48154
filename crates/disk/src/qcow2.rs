//! Images in QEMU's copy-on-write format.
//!
//! The operator says that an image has this format, never its contents. Otherwise, a guest could write the
//! beginning of such an image, with the name of any file of the host in it, to a raw disk. For the same
//! reason, an image must state the format of its backing image. Only files with images are opened because an
//! image names them.
//!
//! The crate `kickless_qcow2` has the format, its check and its tables in memory. It does no I/O, and its
//! documentation says which duties the code here has. The modules here open the images, run the requests,
//! and carry out the operations of the tables. They name the rules (R1 to R9) of
//! `docs/adr/0011-a-table-holds-only-what-may-be-on-disk.md` where they follow them. Each imports only those
//! before it:
//!
//! - [`runtime`]: the buffers and wakers for the tables.
//! - [`pools`], [`layer`], [`budget`], [`opened`] and [`open`]: the buffers and the files of a chain.
//! - [`read`], [`mod@write`], [`copy`], [`extents`], [`decode`]: the requests, run by run. The path of a read
//!   and of a write in place takes no lock.
//! - [`table_ops`] and [`blocking`]: carry out the operations of the tables, on a worker or on the control
//!   path.
//! - [`disk`]: the disk.

pub(crate) mod attached;
mod blocking;
mod budget;
mod copy;
mod decode;
mod decoder;
pub(crate) mod disk;
mod extents;
#[cfg(fuzzing)]
pub mod fuzzing;
mod layer;
mod local_buffers;
mod open;
mod opened;
mod pools;
mod read;
pub(crate) mod request;
mod runtime;
mod sender;
#[cfg(any(test, fuzzing))]
#[path = "../tests/qcow2_sim/mod.rs"]
mod sim;
mod suspend;
mod table_op_slot;
mod table_ops;
mod write;

pub(crate) use read::STEP_BYTES;
