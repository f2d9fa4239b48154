//! Runs the real requests of qcow2 disks on engines of tests, which hold operations until a test ends them.
//!
//! - [`whole`]: cuts a disk at any operation, by a kill and by a power cut. A recorder ([`recorder`]) is its
//!   engine: queues stop by force, transfers are short, and the engine is without room. It has the images and
//!   the judge of the simulator of the tables, which is beside the crate `kickless_qcow2`.
//!   `KICKLESS_CUTS=100000 cargo test -p kickless-disk --lib sim::whole` takes that many cuts.
//! - [`hostile`]: images whose bytes are hostile, for a fuzz target and a test.
//!
//! These modules are a part of the crate in its tests and fuzz targets, because the parts of a disk are
//! private.

mod held;
pub(super) mod hostile;
#[cfg(test)]
#[path = "../../../qcow2/tests/images/mod.rs"]
mod images;
#[cfg(test)]
mod recorder;
#[cfg(test)]
mod whole;
#[cfg(test)]
mod whole_cuts;
