//! Messages to the service manager (`sd_notify`).
//!
//! Commands that end soon send theirs themselves ([`Notify`]). The process that serves guests does not have
//! the socket: it could send to any socket of the host with it, because a filter of system calls does not
//! see the address in a `sendmsg`. So it writes to a pair of sockets without addresses ([`ServiceState`]),
//! and a [`Relay`] on a thread of the process that opens files passes on what a daemon may say. It never
//! passes on which process is the main one, nor descriptors for the store.
//!
//! ```text
//! ServiceState --(pair)--> Relay --(datagrams)--> service manager
//! ```
//! The daemon never waits: the pair takes more messages than a daemon sends in an hour, and a service
//! manager that does not read holds only the thread of the relay.

mod manager;
mod relay;
mod state;
mod watchdog;

pub(crate) use manager::Notify;
pub(crate) use relay::{Relay, messages};
pub(crate) use state::ServiceState;
pub(crate) use watchdog::{Asked, Watchdog, interval_of_environment};
