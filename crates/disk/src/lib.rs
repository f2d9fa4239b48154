//! The storage behind a virtio-blk device.
//!
//! A [`Disk`] is one of:
//!
//! - a file or block device, RAM, or nothing at all;
//! - an image in QEMU's format, with its backing images;
//! - storage behind a library: an export of an NBD server, or an image of a Ceph cluster (the feature `rbd`);
//! - for tests, one of these with faults.
//!
//! Any number of workers use one disk at the same time, each through its own engine ([`Disk::attach`]). They
//! share only immutable state, and state that is locked on rare paths.
//!
//! # A request
//! A device keeps an [`Io`] in each of its request slots. It puts the guest's buffers there
//! ([`Io::buffers_mut`]) and calls [`Disk::start`]. The result is a [`Step`]:
//!
//! - [`Step::Pending`]: an operation is in the worker's engine. Its completion, recognised by the token, goes
//!   to [`Disk::resume`].
//! - [`Step::Busy`]: the request waits for something. [`Disk::retry`] goes on later.
//! - [`Step::More`]: the request has done one step. [`Disk::retry`] does the next.
//! - [`Step::Done`]: the result of the request. It comes exactly once.
//!
//! The others may come any number of times, because short transfers are continued and unaligned ones are
//! split.
//!
//! ```
//! use kickless_disk::{Disk, DiskSpec, Io, IoContext, Options, Request, Step};
//! use kickless_io::{Engine, EngineKind, Waker};
//! use kickless_memory::Marks;
//!
//! let disk = Disk::open(&DiskSpec::Null(1 << 30), &Options::default())?;
//! let mut engine = Engine::open(EngineKind::Auto, 16)?;
//! let (mut attached, waker, mut marks) = (disk.attach(&mut engine)?, Waker::new()?, Marks::off());
//! let mut context = IoContext {
//!     engine: &mut engine,
//!     task: 0,
//!     slot: 0,
//!     attached: &mut attached,
//!     waker: &waker,
//!     lost_writes: &mut disk.lost_writes_seen(0),
//!     marks: &mut marks,
//! };
//! let step = disk.start(&mut context, &mut Io::default(), Request::Flush);
//! assert_eq!(step, Step::Done(Ok(())));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The control path
//! A disk has the methods of [`DiskControl`] too: for its size, its locks, and its way from one owner to the
//! next.
//!
//! # Owners
//! A [`Medium`] takes the disk for each guest, and gives it up afterwards. In between, other programs and
//! hosts may change or replace it.
//!
//! # The next process
//! A disk passes to the next process of its host while its guest goes on ([`DiskHandOver`]): its open files
//! with their locks, its memory, or its connection. That process makes the disk of them
//! ([`Disk::of_handed`]).
//!
//! # Order
//! Requests in flight have no order, as on any disk. But no write undoes another: if the target's blocks are
//! larger than the guest's sectors, a write of a part of a block excludes other writes to that block until it
//! is done.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod attached;
mod buffer_pool;
mod buffers;
mod catch;
mod control;
mod disk;
mod error;
mod fault;
mod file;
mod hand_over;
mod handed_image;
mod image_file;
mod io;
mod io_context;
mod library;
mod library_disk;
mod limits;
pub mod lock;
mod lost_writes;
pub mod medium;
mod memory;
mod nbd;
mod null;
#[cfg_attr(not(feature = "rbd"), allow(dead_code, unused_imports, reason = "each library uses a part of it"))]
mod offload;
mod op_sender;
mod options;
mod piece;
mod qcow2;
mod range;
#[cfg(feature = "rbd")]
mod rbd;
mod request;
mod resized;
mod spec;
mod writeback;

pub use attached::{Attached, TABLE_OP_SLOTS};
pub use catch::catches_panic;
pub use control::DiskControl;
pub use disk::{Disk, FaultDisk};
pub use error::{Error, IoError};
pub use file::FileDisk;
pub use hand_over::{DiskHandOver, Suspended};
pub use io::Io;
pub use io_context::IoContext;
pub use library_disk::LibraryDisk;
pub use limits::{Limits, RangeLimits, SECTOR};
pub use lost_writes::LostWritesSeen;
pub use medium::Medium;
pub use memory::MemoryDisk;
#[cfg(fuzzing)]
pub use nbd::fuzzing as nbd_fuzzing;
pub use null::NullDisk;
pub use options::{Cache, Options, UnknownCache};
#[cfg(fuzzing)]
pub use qcow2::fuzzing as qcow2_fuzzing;
pub use request::{Extent, Request, Step};
pub use resized::Resized;
pub use spec::fault_rules::{BadRule, FaultRules};
pub use spec::nbd_uri::{BadUri, NbdUri};
pub use spec::rbd_name::{BadRbdName, RbdName};
pub use spec::{BadDiskSpec, DiskSpec, parse_disk_size};
