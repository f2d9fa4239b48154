//! The export of an NBD server.
//!
//! There is one connection, and a thread that uses it. Up to 256 requests are in flight at a time. The server
//! may answer them in any order. It is not trusted: it can return wrong data or none, but nothing worse.

mod client;
mod connection;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handshake;
mod in_flight;
mod inbox;
mod replies;
mod socket;
mod wire;

use crate::control::DiskControl;
use crate::library::Library;
use crate::offload::{Offload, OffloadOp};
use crate::{Error, Limits, NbdUri, Options, RangeLimits, SECTOR};
use client::Client;
use connection::Connection;
use handshake::Export;
use inbox::Inbox;
use socket::Address;
use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use tracing::Span;

/// The longest time to open a disk.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

/// The largest discard or write-zeroes request in bytes. A command has 32 bits for the length.
const RANGE_MAX: u64 = 1 << 30;

/// The connection to a server. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Nbd {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
    identity: String,
}

impl Nbd {
    /// Connects to the server and selects its export.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(uri: &NbdUri, options: &Options) -> Result<(Self, Arc<Offload>), Error> {
        let failed = |source: io::Error| Error::Library { disk: uri.to_string(), source };
        let inbox = Arc::new(Inbox::new().map_err(failed)?);
        let address = Address::of(&uri.server).map_err(failed)?;
        let (socket, export) = address
            .connect(&uri.export, Instant::now() + OPEN_WITHIN, &inbox)
            .map_err(|problem| failed(io::Error::other(problem)))?;
        if export.has(wire::FLAG_READ_ONLY) && !options.read_only {
            return Err(failed(io::Error::other("the export is read-only: use --read-only")));
        }
        let size = export.size - export.size % SECTOR;
        if size == 0 || export.size > i64::MAX as u64 {
            return Err(Error::Size(export.size));
        }
        if size < export.size {
            tracing::warn!(server = %uri, bytes = export.size, size, "the size of the export is not a multiple of 512; the guest cannot reach the part of a sector at its end");
        }
        if !export.has(wire::FLAG_FLUSH) && !options.read_only {
            tracing::warn!(server = %uri, "the server does not support flushes; the guest cannot know which writes are durable");
        }
        let client = Client::new(inbox.clone(), address, uri.clone(), Connection::new(socket, export, 0));
        let span = Span::current();
        let run = move || span.in_scope(|| client.run());
        let thread = Builder::new().name("nbd".into()).spawn(run).map_err(failed)?;
        // A server without flushes has no durable operations to offer either.
        let durable = export.has(wire::FLAG_FUA);
        let offload = Offload::new(limits(export, options.read_only), size, durable);
        Ok((Self { inbox, thread: Some(thread), identity: identity(uri) }, offload))
    }
}

impl DiskControl for Nbd {
    fn identity(&self) -> &str {
        &self.identity
    }

    /// Restarts the time to wait for a lost server, for the next user of the disk.
    fn reload(&self, _locks: bool) -> io::Result<()> {
        self.inbox.restart_wait();
        Ok(())
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

fn limits(export: Export, read_only: bool) -> Limits {
    let ranges = |flag| (export.has(flag) && !read_only).then(|| RangeLimits::bytes(RANGE_MAX, SECTOR));
    let write_zeroes = ranges(wire::FLAG_WRITE_ZEROES);
    Limits {
        discard: ranges(wire::FLAG_TRIM),
        write_zeroes,
        zeroes_may_unmap: write_zeroes.is_some(),
        ..Limits::plain(read_only)
    }
}

/// Returns the same name for the same export of the same server: the 64-bit hash FNV-1a.
fn identity(uri: &NbdUri) -> String {
    let text = format!("{:?} {}", uri.server, uri.export);
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("nbd-{hash:016x}")
}
