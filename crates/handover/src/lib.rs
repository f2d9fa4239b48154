//! Passes the devices of a daemon to the next process: the format of the state, and the channel between the
//! two processes.
//!
//! The *old* process serves. The *new* one is to take over. They have a pair of sockets (SOCK_SEQPACKET).
//! ```text
//!   old   plan          device i         (gone i)   final i   last           read to the end
//!   new         ready            made i                             taken
//! ```
//! A message has a head, a record and descriptors. A record is JSON of the types in [`v1`], with bytes and
//! descriptors that the JSON names by their numbers. A long record passes in sealed memory.
//!
//! # Which process serves
//! The new process serves after [`NewEnd::take`] has returned a [`Taken`], and only then. The old one goes on
//! unless [`OldEnd::offer`] has returned [`Decision::Taken`]. `arbitration.rs` says why they never disagree.
//!
//! # What is believed
//! The new process believes nothing that it reads: the old one parses what guests send, and may be in their
//! hands. Lengths, counts, orders, ranges and each descriptor's number are checked here. What a descriptor
//! is, and what an address or a path means, is checked by the crates that use it, as if a front-end or a call
//! had sent it. The old process believes nothing but `taken`.
//!
//! # Ownership and threads
//! All is plain data. One thread of each process uses its end, and no call waits beyond its deadline.
//! [`Giving`] duplicates descriptors, so the old process keeps its own. [`Given`] owns those that came, and
//! closes what was not taken.
//!
//! ```
//! use kickless_handover::v1::Plan;
//! use kickless_handover::{Decision, FromOld, Giving, NewEnd, OldEnd};
//! use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
//! use std::time::{Duration, Instant};
//!
//! let (old, new) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let taker = std::thread::spawn(move || {
//!     let mut new = NewEnd::new(new);
//!     let FromOld::Plan(record) = new.receive(deadline)? else { unreachable!() };
//!     let (plan, _given) = record.read::<Plan>()?;
//!     assert_eq!(plan.served(), 0);
//!     new.confirm(deadline)?;
//!     assert!(matches!(new.receive(deadline)?, FromOld::Last));
//!     new.take(deadline)
//! });
//! let mut old = OldEnd::new(old);
//! old.plan(0, Giving::default().record(&Plan::default())?, deadline)?;
//! assert!(matches!(old.offer(deadline), Decision::Taken(_)));
//! assert!(taker.join().unwrap().is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod arbitration;
mod error;
mod format;
mod memory;
mod message;
mod new_end;
mod old_end;
mod order;
mod parcel;
mod parts;
mod record;
mod shelf;
mod socket;

pub use arbitration::{Decision, HandedOver, Taken};
pub use error::Error;
pub use format::{FORMATS, common, v1};
pub use new_end::{FromOld, NewEnd};
pub use old_end::OldEnd;
pub use parts::{Amounts, Checked, Fd, Part, Span};
pub use record::{Given, Giving, Record};
pub use shelf::{Shelf, Shelved};
