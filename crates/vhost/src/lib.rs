//! vhost-user sessions: from protocol messages to running virtqueues.
//!
//! A [`Server`] serves one device to one front-end after another. A session is one connection. It answers
//! messages (`session.rs`, `negotiation.rs`). It keeps the guest's memory (`memory.rs`), the translations of
//! a vIOMMU (`iotlb.rs`) and the set-up of each ring (`setup.rs`, pure). It starts and stops rings as their
//! set-up says (`rings.rs`).
//!
//! # Threads
//! A session runs on the thread that calls [`Server::serve_connection`]. It never touches a running ring
//! itself: it asks the worker for each change, and waits for the answer if the front-end must know that the
//! change is done. Such a wait delays this session only, and is logged every second. Meanwhile the session
//! limits how long requests of the device wait for a remote server. A wait for memory or translations ends
//! early when its answer has become useless (`wait.rs`).
//!
//! # When a ring runs
//! A ring runs when the front-end has set its size, its addresses and its kick descriptor, and has enabled
//! it. It is then polled once, with or without a kick. GET_VRING_BASE stops it: everything in flight
//! completes, and the answer is the first index that was not taken. Disabling a ring stops it too, and
//! enabling it continues there. A device can choose that a disabled ring runs and discards the driver's
//! requests ([`Disabled::Drained`](kickless_device::Disabled::Drained)). SET_FEATURES, SET_VRING_ADDR, new
//! descriptors and changes of memory do not stop a ring. They are work items for its worker.
//!
//! # When a device moves to another process
//! When all rings have stopped, a front-end can fetch the device's state ([`state`]). It gives the state to a
//! device of another process before that one's rings start. The state goes through a descriptor that the
//! front-end sends (`transfer.rs`). The session does nothing else meanwhile, for five seconds at most.
//! Without a state (QEMU moves rings in its own way), a ring continues where SET_VRING_BASE says.
//!
//! # When this process is killed
//! A front-end that has negotiated INFLIGHT_SHMFD gives us a buffer in which each ring records its requests
//! in flight (`inflight.rs`). It gives the same buffer to the next process, which repeats these requests.
//!
//! # When the next process takes over
//! The next process of the same host can go on with all sessions, while their guests run. The *old* process
//! parks a server between two messages ([`Server::park`]): its thread leaves the session in a slot
//! (`slot.rs`) and waits. [`Parked`] gives the session as a record, with duplicates of its descriptors. Then
//! it parks the rings, and gives the place of each. If the next process does not take over, the session and
//! its rings go on, as if nothing had happened (`hand_over.rs`).
//!
//! The *new* process makes a session of the record ([`Server::restore`]), with mapped memory, and with tasks
//! that do not run yet. It checks each part as if a front-end had sent it. [`Restored`] touches neither rings
//! nor sockets before [`Restored::begin`] (`restore.rs`). Translations of a vIOMMU do not pass: rings ask for
//! them again. Replies to earlier misses are expected, and answer nothing.
//!
//! # What a ring leaves when it stops
//! GET_VRING_BASE and SET_VRING_ENABLE 0 complete all requests, because the buffer need not follow the rings:
//! a saved or migrated machine begins a new one. A front-end that has negotiated GET_VRING_BASE_INFLIGHT
//! gives the buffer to the next process, so the rings may leave requests there
//! ([`Leave`](kickless_device::Leave)). At the end of a connection a ring leaves only requests that wait for
//! an operator.
//!
//! # When a front-end misbehaves
//! A message that cannot be carried out gets a negative reply. If it has no reply, it ends the connection. In
//! both cases the log names the message and the reason. The next front-end is served.
//!
//! ```no_run
//! use kickless_device::{Device, Executor};
//! use kickless_vhost::Server;
//! use std::os::fd::BorrowedFd;
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! /// Serves a device until `stop` becomes readable.
//! fn serve(
//!     device: Arc<dyn Device>,
//!     workers: Arc<dyn Executor>,
//!     stop: BorrowedFd,
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     let listener = UnixListener::bind("/run/disk.sock")?;
//!     Ok(Server::new(device, workers).serve(&listener, stop)?)
//! }
//! ```
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod channel;
mod error;
mod half_message;
mod hand_over;
mod inflight;
mod iotlb;
mod memory;
mod negotiation;
mod restore;
mod rings;
mod server;
mod session;
mod setup;
mod slot;
pub mod state;
mod statistics;
mod transfer;
mod wait;
mod waiting_frontends;

pub use error::{Ended, HandOverError, RestoreError};
pub use hand_over::{ParkRequest, Parked};
pub use restore::Restored;
pub use server::Server;
pub use statistics::Statistics;
