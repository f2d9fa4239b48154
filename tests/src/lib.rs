//! What the end-to-end tests and the benchmarks share.

pub mod daemon;
pub mod guest;
pub mod qemu;
pub mod qmp;
pub mod scratch;
pub mod transcript;
