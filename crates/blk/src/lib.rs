//! The virtio-blk device (virtio 1.3, section 5.2).
//!
//! [`Blk`] is the [`Device`](kickless_device::Device). It has the features, the configuration space, and a
//! queue for each running virtqueue. `queue.rs` shows the path of a request: pop, parse (`request.rs`, pure),
//! submit to the [`Disk`](kickless_disk::Disk), complete, push.
//!
//! Each popped head is pushed exactly once, whatever fails:
//!
//! - A malformed request gets an error status at once.
//! - A request that finds no room in the engine waits in its slot.
//! - A request whose I/O fails reports the error to the driver.
//!
//! All queues share the disk and the state of the device (`device_state.rs`). Everything else belongs to one
//! queue, and so to one worker.
//!
//! ```
//! use kickless_blk::{Blk, Options};
//! use kickless_device::Device;
//! use kickless_disk::{Disk, DiskSpec};
//!
//! let disk = Disk::open(&DiskSpec::Memory(64 << 20), &kickless_disk::Options::default())?;
//! let options = Options { serial: "disk-1".into(), queues_max: 4, queue_size_max: 256, lock: true };
//! let device = Blk::new(disk, options);
//! // The configuration space begins with the capacity in sectors.
//! let mut capacity = [0; 8];
//! device.read_config(0, &mut capacity);
//! assert_eq!(u64::from_le_bytes(capacity), (64 << 20) / 512);
//! # Ok::<(), kickless_disk::Error>(())
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod budget;
mod config;
mod device;
mod device_state;
mod failures;
mod halt;
mod hand_over;
mod handed_disk;
mod metrics;
mod on_error;
mod operation;
mod queue;
mod request;
mod slots;

pub use device::{Blk, Options};
pub use handed_disk::{HandedDisk, HandedError};
pub use request::{Bounds, Kind, RangeOp, Reject, Request, extents, parse};
