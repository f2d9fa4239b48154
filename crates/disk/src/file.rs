//! A raw image or a block device.

mod bounce;
mod control;
mod disk;
mod extents;
mod handover;
mod magic;
mod missing_syscalls;
mod open;
mod operation;
mod request;
mod size;
mod state;
mod suspend;
mod topology;

pub use disk::FileDisk;
pub(crate) use request::Unchecked;
pub(crate) use size::ZeroParts;
pub(crate) use state::FileState;
