//! Wire types of virtio, virtio-blk, virtio-net and vhost-user.
//!
//! This crate has plain data in the layout of the standards, with little-endian integers (`zerocopy`), and
//! the constants that go with it. It has no behaviour.
//!
//! Sources: *Virtual I/O Device (VIRTIO) Version 1.3*, OASIS, is cited as "virtio 1.3, section N".
//! *Vhost-user Protocol*, QEMU `docs/interop/vhost-user.rst`, is cited as "vhost-user".
#![forbid(unsafe_code)]

pub mod blk;
pub mod features;
pub mod net;
pub mod ring;
pub mod vhost_user;
