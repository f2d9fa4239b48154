//! The virtio-blk device (virtio 1.3, section 5.2).
//!
//! [`Blk`] is the [`Device`](kickless_device::Device): features, configuration space, and one queue for each
//! virtqueue that runs. A request's way is readable in `queue.rs`: pop, parse (`request.rs`, pure), submit to the
//! [`Disk`](kickless_disk::Disk), complete, push.
//!
//! Each head that is popped is pushed exactly once, whatever fails: a request that cannot be understood is answered with an
//! error status at once, one whose submission finds no room waits in its slot, and one whose I/O fails carries the
//! error to the driver. The disk is shared by all queues; everything else belongs to one queue, and so to one worker.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod budget;
mod config;
mod device;
mod failures;
mod queue;
mod request;
mod shared;
mod slots;

pub use device::{Blk, Options};
pub use request::{Bounds, Kind, Purpose, Reject, Request, extents, parse};
