//! Takes rights from processes, so that code that a guest or a server has taken over can do little.
//!
//! This crate knows nothing of kickless. It makes a process from this one ([`fork()`]), and takes rights from
//! the calling process in two steps.
//!
//! | function | takes | belongs to |
//! | --- | --- | --- |
//! | [`restrict`] | core dumps, capabilities, new privileges, paths, TCP, signals to other processes | the thread that calls, and all that it makes |
//! | [`lock`] | system calls that are not in a [`Profile`] | all threads |
//!
//! A process calls [`restrict`] first, while it has one thread. Then it makes its threads and opens what only
//! its threads can open, such as io_uring instances. It calls [`lock`] last, and before it reads what a peer
//! sends. No right comes back.
//!
//! ```standalone_crate
//! use std::fs::File;
//!
//! use kickless_sandbox::{DATA, Ended, Ruleset, Tcp, fork, landlock_abi, lock, restrict};
//! use rustix::thread::CapabilitySet;
//!
//! let helper = fork(c"helper", &[], || {
//!     let rules = Ruleset::new(landlock_abi(), Tcp::Nothing).unwrap();
//!     restrict(CapabilitySet::empty(), rules).unwrap();
//!     let refusals = lock(&DATA).unwrap().unwrap();
//!     // Threads can still be made, but no file can be opened.
//!     std::thread::spawn(|| assert!(File::open("/dev/null").is_err())).join().unwrap();
//!     assert_eq!(refusals.take_new()[0].call, "openat");
//!     0
//! })?;
//! assert_eq!(helper.wait()?, Ended::Exited(0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Kernels
//! [`Mode::lacks`] says what this kernel lacks. Without landlock, [`Ruleset`] refuses nothing. Without
//! filters, [`lock`] fails.
//!
//! # System calls
//! `profile.rs` has a table for each kind of process, with the reason for each call. A call that is not in
//! the table of the data process fails with EPERM. A handler of SIGSYS counts it ([`Refusals`]), so that the
//! log can name it. A few calls, which only an attacker makes, end the process.
//!
//! # Threads
//! Any thread can ask [`Refusals`]. All other functions are for the thread that starts the process.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod attack;
mod calls;
mod capabilities;
mod error;
mod filter;
mod landlock;
mod lockdown;
mod mode;
mod process;
mod profile;
mod trap;

pub use calls::{Call, UNKNOWN_FROM};
pub use error::{Error, Lack};
pub use landlock::{Access, Ruleset, Tcp, abi as landlock_abi, place};
pub use lockdown::{lock, restrict};
pub use mode::{Mode, UnknownMode};
pub use process::{Child, Ended, Side, detach, fork};
pub use profile::{Condition, DATA, DATA_WITH_RBD, EXPORTER, OPENER, Profile, Row, Stray, Test};
pub use trap::{Refusal, Refusals};
