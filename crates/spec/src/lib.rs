//! Wire types of virtio, virtio-blk, virtio-net and vhost-user.
//!
//! Plain data with the layout that the standards give, little-endian integers included (`zerocopy`), and the numbers
//! that go with them. Nothing here does anything. Sources: *Virtual I/O Device (VIRTIO) Version 1.3*, OASIS (cited as
//! "virtio 1.3, section N"), and *Vhost-user Protocol*, QEMU `docs/interop/vhost-user.rst` (cited as "vhost-user").
#![forbid(unsafe_code)]

pub mod blk;
pub mod features;
pub mod net;
pub mod ring;
pub mod vhost_user;
