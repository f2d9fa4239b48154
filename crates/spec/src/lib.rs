//! Wire types of virtio, virtio-blk, virtio-net, virtio-scsi and vhost-user.
//!
//! This crate has plain data in the layout of the standards, with little-endian integers (`zerocopy`), and
//! the constants that go with it. Its few functions compute what the standards say.
//!
//! Sources: *Virtual I/O Device (VIRTIO) Version 1.3*, OASIS, is cited as "virtio 1.3, section N".
//! *Vhost-user Protocol*, QEMU `docs/interop/vhost-user.rst`, is cited as "vhost-user".
//!
//! ```
//! use kickless_spec::ring::{DESC_F_WRITE, Desc};
//! use zerocopy::FromBytes;
//!
//! // A descriptor as it is in guest memory: 512 writable bytes at 0x8000.
//! let bytes = [0, 0x80, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 0, 0];
//! let desc = Desc::read_from_bytes(&bytes).expect("16 bytes are a descriptor");
//! assert_eq!((desc.addr.get(), desc.len.get(), desc.flags.get()), (0x8000, 512, DESC_F_WRITE));
//! ```
#![forbid(unsafe_code)]

pub mod blk;
pub mod checksum;
pub mod features;
pub mod hash;
pub mod net;
pub mod ring;
pub mod scsi;
pub mod vhost_user;
