//! The export of an NBD server.
//!
//! There is at most one connection, and a thread that uses it. Up to 256 requests are in flight at a time.
//! The server may answer them in any order. It is not trusted: it can return wrong data or none, but nothing
//! worse.
//!
//! Opening the disk makes a connection, to learn what the export is like. Each owner of the disk gets a new
//! one (`hand_over.rs`). A disk that was given up has none. The next process of the host gets the connection
//! itself (`suspend.rs`).

mod block_sizes;
mod client;
mod connection;
mod ending;
#[cfg(fuzzing)]
pub mod fuzzing;
mod hand_over;
mod handshake;
mod in_flight;
mod inbox;
mod job;
mod replies;
mod socket;
mod suspend;
mod wire;

use crate::control::DiskControl;
use crate::library::Library;
use crate::offload::{Offload, OffloadOp};
use crate::spec::nbd_uri::Server;
use crate::{Error, NbdUri, Options, Resized};
use client::{CONNECT_WITHIN, Client, stop_within};
use connection::Connection;
use handshake::Export;
use inbox::{Inbox, Resume};
use job::Job;
use kickless_spec::hash::fnv1a;
use socket::Address;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use tracing::Span;
use wire::Problem;

/// The longest time to open a disk.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

/// The connection to a server. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Nbd {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    identity: String,
    offload: Arc<Offload>,
    /// A job takes no longer than this: a flush, the end of a connection, and the next connection.
    job_within: Duration,
    /// The last state of the process that gives the connection.
    received: Mutex<Resume>,
}

impl Nbd {
    /// Connects to the server and selects its export.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(uri: &NbdUri, options: &Options) -> Result<(Self, Arc<Offload>), Error> {
        let failed = |source: io::Error| Error::Library { disk: uri.to_string(), source };
        let address = Address::of(&uri.server).map_err(|error| failed(not_found(&uri.server, error)))?;
        let (socket, export) = address
            .connect(&uri.export, Instant::now() + OPEN_WITHIN, &Inbox::new().map_err(failed)?)
            .map_err(|problem| failed(not_reached(&uri.server, problem)))?;
        let size = export.accessible_size();
        if size < export.size {
            let block = export.sizes.of_ops().block();
            tracing::warn!(server = %uri, bytes = export.size, size, block, "the size of the export is not a multiple of its block; the guest cannot reach the part of a block at its end");
        }
        if !export.has(wire::FLAG_FLUSH) && !options.read_only {
            tracing::warn!(server = %uri, "the server does not support flushes; the guest cannot know which writes are durable");
        }
        let connection = Connection::new(socket, export, 0, false);
        Self::of_export(uri, options, address, (export, Some(connection)), false)
    }

    /// Makes the disk of an export, with a connection to it. `is_suspended`: another process has the
    /// connection.
    fn of_export(
        uri: &NbdUri,
        options: &Options,
        address: Address,
        (export, connection): (Export, Option<Connection>),
        is_suspended: bool,
    ) -> Result<(Self, Arc<Offload>), Error> {
        let failed = |source: io::Error| Error::Library { disk: uri.to_string(), source };
        let inbox = Arc::new(Inbox::new().map_err(failed)?);
        if export.has(wire::FLAG_READ_ONLY) && !options.read_only {
            return Err(failed(io::Error::other("the export is read-only: use --read-only")));
        }
        let size = export.accessible_size();
        if size == 0 || export.size > i64::MAX as u64 {
            return Err(Error::Size(export.size));
        }
        let [trim, zeroes] = [wire::FLAG_TRIM, wire::FLAG_WRITE_ZEROES].map(|flag| export.has(flag));
        let limits = export.sizes.limits(options.read_only, trim, zeroes);
        // A server without flushes has no durable operations to offer either.
        let durable = export.has(wire::FLAG_FUA);
        let offload = Offload::with_sizes(limits, size, durable, export.sizes.of_ops());
        inbox.set_export_size(size);
        let connected = (export, connection);
        let client =
            Client::new(inbox.clone(), address, uri.clone(), offload.clone(), connected, is_suspended);
        let span = Span::current();
        let run = move || span.in_scope(|| client.run());
        let thread = Builder::new().name("nbd".into()).spawn(run).map_err(failed)?;
        let (thread, identity, job_within) =
            (Some(thread), identity(uri), stop_within(uri) + 3 * CONNECT_WITHIN);
        let received = Mutex::default();
        Ok((Self { inbox, thread, identity, offload: offload.clone(), job_within, received }, offload))
    }
}

/// Returns the error of a host whose address is not known.
fn not_found(server: &Server, error: io::Error) -> io::Error {
    match server {
        Server::Tcp { host, .. } => io::Error::other(format!(
            "the host {host} cannot be looked up ({error}): correct its name, or give its address"
        )),
        Server::Unix(_) => error,
    }
}

/// Returns the error of a server that does not give its export. Says what to do about a server that does not
/// listen or answer.
fn not_reached(server: &Server, problem: Problem) -> io::Error {
    match (server, problem) {
        (Server::Tcp { host, port }, Problem::Io(error))
            if error.kind() == io::ErrorKind::ConnectionRefused =>
        {
            io::Error::other(format!(
                "no NBD server listens on port {port} of {host}: start it, or correct the address"
            ))
        }
        (Server::Tcp { host, port }, Problem::Slow) => io::Error::other(format!(
            "{host} does not answer on port {port}: correct the address, or let the firewall pass it"
        )),
        (_, problem) => io::Error::other(problem),
    }
}

impl DiskControl for Nbd {
    fn identity(&self) -> &str {
        &self.identity
    }

    /// Takes the size that the export had when the disk was last taken over.
    fn refresh_size(&self) -> io::Result<Resized> {
        let to = self.inbox.export_size();
        let from = self.offload.grow(to);
        Ok(if to > from { Resized::Grown { from, to } } else { Resized::Same })
    }

    fn reports_losses(&self) -> bool {
        true
    }

    fn write_back(&self) -> io::Result<()> {
        self.inbox.request(Job::GiveUp, self.job_within).map(drop)
    }

    fn reload(&self, _locks: bool) -> io::Result<()> {
        self.inbox.request(Job::TakeOver, self.job_within).map(drop)
    }

    fn limit_remote_waits(&self) {
        self.inbox.limit_remote_waits();
    }

    fn restart_remote_waits(&self) {
        self.inbox.restart_wait();
    }
}

impl Library for Nbd {
    fn scheme(&self) -> &'static str {
        "nbd:"
    }

    fn submit(&self, op: OffloadOp) {
        self.inbox.submit(op);
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        self.inbox.stop();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Returns the same name for the same export of the same server: the 64-bit hash FNV-1a.
fn identity(uri: &NbdUri) -> String {
    let text = format!("{:?} {}", uri.server, uri.export);
    let hash = fnv1a(text.as_bytes());
    format!("nbd-{hash:016x}")
}
