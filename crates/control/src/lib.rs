//! The control socket of a daemon.
//!
//! An operator changes and watches a daemon while it runs, by JSON-RPC 2.0 over a unix socket: one object on
//! each line. `docs/openrpc.json` describes the calls. [`Daemon`] executes them on a
//! [`Registry`](kickless_daemon::Registry), [`Server`] serves the sockets, and [`Client`] makes calls.
//!
//! # Authority
//! A client that can connect to the control socket has the authority of the daemon. Permissions of the socket
//! are the only check. The read-only socket serves calls that change nothing. Each call that changes
//! something is logged with the user and the process of its client.
//!
//! # Descriptors
//! A request can come with descriptors (`SCM_RIGHTS`), which it names in order in `fds`. [`Inbox`] says which
//! belong to which request. A call gets them as [`Descriptors`](kickless_opener::Descriptors), and those that
//! it does not use are closed at its end. All clients share a budget. The read-only socket refuses
//! descriptors.
//!
//! # Threads
//! One thread serves all clients. Each client has one that reads from it and closes its descriptors, and each
//! call that can wait for a disk or for requests has one while it is executed. No call waits for a worker.
//! [`server`] has the bounds.
//!
//! # Example
//! ```no_run
//! use kickless_control::Client;
//! use serde_json::{Map, json};
//!
//! let mut client = Client::connect("/run/kickless/control.sock".as_ref())?;
//! let name = Map::from_iter([("name".to_owned(), json!("web"))]);
//! println!("{}", client.call("device.remove", name)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods))]

mod call;
mod client;
mod daemon;
mod events;
mod exposition;
mod inbox;
mod lines;
mod openrpc;
mod rpc;
pub mod server;
mod stats;
mod upgrade;

pub use call::{Call, Capture, Drain, Effect, METHODS, Method, Remove, Resize};
pub use client::{Client, ClientError};
pub use daemon::{Daemon, Hooks, SandboxInfo, SetLog};
pub use exposition::{Exposition, exposition};
pub use inbox::{DESCRIPTORS_MAX, Inbox, LostDescriptors};
pub use lines::{LINE_BYTES_MAX, LineBuffer, LineTooLong};
pub use openrpc::OPENRPC;
pub use rpc::{Refused, Request, RpcError, answer};
pub use server::{Access, CALLS_TARGET, Server};
pub use stats::{DeviceStats, LatencyStats, OperationStats, QueueStats, Stats, WorkerStats};
pub use upgrade::{CHANNEL, Successor, Upgrade, check_drain};
