//! Helpers that the tests of several crates share.
//!
//! Only tests depend on this crate, and crates that it depends on use it as well. The unit tests of such a
//! crate are compiled with a second copy of the crate's own types, so they use what names none of these; its
//! integration tests use all.
//!
//! Each helper panics where a test would: the test that calls it fails.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod eventually;
mod fake_device;
mod frozen_fs;
mod guest_memory;
mod guest_ring;
pub mod hostile_nbd;
mod loop_device;
mod random;
mod scoped_log;

pub use eventually::{LIMIT, eventually};
pub use fake_device::{Fake, FakeDevice};
pub use frozen_fs::{FileSystem, Frozen};
pub use guest_memory::{guest_memory, memfd};
pub use guest_ring::{GuestRing, vring_parts};
pub use loop_device::LoopDevice;
pub use random::Random;
pub use scoped_log::with_subscriber;
