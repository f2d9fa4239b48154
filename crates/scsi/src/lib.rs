//! virtio-scsi (virtio 1.3, section 5.6) on the disks of `kickless-disk`.
//!
//! This is the part that takes bytes and returns values: it parses requests, and makes sense data. It has no
//! rings, no threads and no I/O. All bytes may come from a hostile guest. Nothing here panics, and no guest
//! makes it allocate or loop without bound.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod address;
mod sense;
mod task;

pub use address::{Address, InvalidAddress};
pub use sense::{FieldPointer, SENSE_LEN_MAX, Sense, SenseData};
pub use task::{ControlError, ControlRequest, TaskFunction};
