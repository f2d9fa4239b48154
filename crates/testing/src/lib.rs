//! Provides helpers that the tests of several crates share.
//!
//! Only tests depend on this crate. Some of them are tests of crates on which this crate depends itself, such
//! as `kickless-virtqueue`. For the unit tests of such a crate, cargo builds that crate twice: once with the
//! tests, and once for this crate. The types of the two builds differ. So these unit tests use only helpers
//! without types of their own crate. Integration tests use all helpers.
//!
//! A helper panics on an error, so that the calling test fails. Only a helper that needs rights or programs
//! that a machine may lack returns the reason, or `None`, so that the test can be skipped.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod callgrind;
mod eventually;
mod fake_device;
mod frozen_fs;
mod guest_memory;
mod guest_ring;
pub mod hostile_nbd;
mod loop_device;
mod losing_device;
mod network_namespace;
mod openmetrics;
mod packets;
mod pcapng;
mod random;
mod resources;
mod scoped_log;
mod sector_model;
mod test_frame;
mod tmpfs;

pub use callgrind::{CountedLoad, print_instructions};
pub use eventually::{LIMIT, eventually};
pub use fake_device::{Fake, FakeDevice};
pub use frozen_fs::{FileSystem, Frozen};
pub use guest_memory::{guest_memory, memfd};
pub use guest_ring::{GuestRing, vring_parts};
pub use loop_device::LoopDevice;
pub use losing_device::LosingDevice;
pub use network_namespace::{add_uplink, has_passt, in_network_namespace, ip, tc};
pub use openmetrics::{Sample, parse_openmetrics};
pub use packets::{dhcp_discover, tcp_segmentation};
pub use pcapng::{CaptureContents, CapturedFrame, parse_pcapng};
pub use random::{Random, pattern};
pub use resources::Resources;
pub use scoped_log::{logged, with_subscriber};
pub use sector_model::{SectorModel, Stamp};
pub use test_frame::parse_test_frame;
pub use tmpfs::Tmpfs;
