//! vhost-user sessions: from protocol messages to running virtqueues.
//!
//! A [`Server`] serves one device to one front-end after another. A session (`session.rs`) is one connection: it answers
//! messages (`session.rs`, `negotiation.rs`), keeps the guest's memory (`memory.rs`), the translations of a vIOMMU (`iotlb.rs`) and the set-up of each ring
//! (`setup.rs`, pure), and starts and stops rings when their set-up says so (`rings.rs`).
//!
//! # Threads
//! A session runs on the thread that calls [`Server::serve_connection`]. It touches no ring itself: what it wants of a
//! running one it asks of the worker, and waits for the answer where the front-end has to know that it is done. Such a
//! wait holds up this session only, and is logged every second. The session limits meanwhile how long requests of the
//! device wait for a remote server. A wait for memory or translations ends when its answer has become useless (`wait.rs`).
//!
//! # When a ring runs
//! When the front-end has said how long it is, where it lies and where its kicks come from, and has enabled it. It is then
//! looked at once, kick or no kick. GET_VRING_BASE stops it: everything in flight completes, and the answer is the
//! index that was not taken yet. Disabling it stops it too, and enabling it goes on from there. A device can have a ring
//! run while it is disabled, to discard what the driver offers
//! ([`Disabled::Drained`](kickless_device::Disabled::Drained)). Nothing else stops it:
//! SET_FEATURES, SET_VRING_ADDR, new descriptors and changes of memory are work items for its worker.
//!
//! # When a device moves to another process
//! Once all rings have stopped, a front-end can have the device's state ([`state`]) and give it to a device of another process, which
//! has yet to start its rings. It goes through a descriptor that the front-end sends (`transfer.rs`); for five seconds at most the session
//! does nothing else. Without that (QEMU has its own way of moving rings), a ring goes on where SET_VRING_BASE says.
//!
//! # When this process is killed
//! A front-end that has negotiated INFLIGHT_SHMFD gives us a buffer in which each ring's queue writes down what it has in flight
//! (`inflight.rs`), and gives the same to the process after us, which does that again.
//!
//! # When a front-end misbehaves
//! A message that cannot be carried out is answered with a negative reply where it has one, and ends the connection where
//! it has not; either way a line in the log names the message and what is wrong with it. The next front-end is served.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod channel;
mod error;
mod inflight;
mod iotlb;
mod memory;
mod negotiation;
mod others;
mod rings;
mod server;
mod session;
mod setup;
pub mod state;
mod statistics;
mod transfer;
mod wait;

pub use error::Ended;
pub use server::Server;
pub use statistics::Statistics;
