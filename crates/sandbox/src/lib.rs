//! Takes rights from processes, so that code that a guest or a server has taken over can do little.
//!
//! This crate knows nothing of kickless. [`fork()`] makes a process from this one, and [`restrict`] takes
//! rights from the calling process. A process calls it while it has one thread. No right comes back.
//!
//! ```standalone_crate
//! use std::fs::File;
//!
//! use kickless_sandbox::{Ended, Ruleset, Tcp, fork, landlock_abi, restrict};
//! use rustix::thread::CapabilitySet;
//!
//! let helper = fork(c"helper", &[], || {
//!     let rules = Ruleset::new(landlock_abi(), Tcp::Nothing).unwrap();
//!     restrict(CapabilitySet::empty(), rules).unwrap();
//!     i32::from(File::open("/dev/null").is_ok() && landlock_abi() > 0)
//! })?;
//! assert_eq!(helper.wait()?, Ended::Exited(0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Without landlock in the kernel, [`Ruleset`] refuses nothing.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod capabilities;
mod error;
mod landlock;
mod lockdown;
mod process;

pub use error::Error;
pub use landlock::{Access, Ruleset, Tcp, abi as landlock_abi, place};
pub use lockdown::restrict;
pub use process::{Child, Ended, fork};
