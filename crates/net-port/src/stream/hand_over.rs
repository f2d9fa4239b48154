//! Passes a connection to the next process of this host, with the bytes that are neither in its socket nor in
//! a ring.

use super::connection::Connection;
use super::framing::{Deframer, Framer};
use super::port::StreamPort;
use crate::user::is_pipe;
use kickless_handover::{Error, Given, Giving, Part, v1};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The reason for which a connection cannot be taken over. Each is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The descriptor is something else.
    #[error("the other process gives a descriptor that is no connection of a unix stream socket")]
    NoConnection,
    /// The descriptor is something else.
    #[error("the other process gives a descriptor that is no pipe")]
    NoPipe,
    /// The state of the other process is not valid.
    #[error("the connection of the port cannot be taken over: {0}")]
    Given(#[from] Error),
    /// The bytes of the other process are more than any port has.
    #[error("the other process gives {0} bytes of a stream, which are too many")]
    TooLong(usize),
    /// The kernel has no memory or descriptor to watch the socket.
    #[error("the connection of the port cannot be watched")]
    Watch(#[source] io::Error),
}

impl StreamPort {
    /// Returns the number of changes of the connection.
    pub fn changes(&self) -> u64 {
        self.connection.changes()
    }

    /// Returns the connection for the next process, with a duplicate of its socket.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn give(&self, to: &mut Giving) -> Result<Part, Error> {
        let Some((socket, errors)) = self.connection.give() else { return Part::new(&v1::Stream::default()) };
        let errors = errors.map(|errors| to.fd(&*errors)).transpose()?;
        Part::new(&v1::Stream { socket: Some(to.fd(&*socket)?), errors })
    }

    /// Returns the bytes for the next process. No task of the port runs.
    ///
    /// # Errors
    /// The record is too long.
    pub fn give_final(&self, to: &mut Giving) -> Result<Part, Error> {
        let Some((received, unsent)) = self.connection.unfinished() else {
            return Part::new(&v1::StreamFinal::default());
        };
        let (received, unsent) = (to.bytes(&received)?, to.bytes(&unsent)?);
        Part::new(&v1::StreamFinal { is_connected: true, received, unsent })
    }

    /// Takes the connection over that another process has given, before the port starts. Reads and sends
    /// nothing.
    ///
    /// # Errors
    /// The descriptor is no connection, or cannot be watched.
    pub fn take_over(&self, given: Part, from: &mut Given) -> Result<(), StreamError> {
        let v1::Stream { socket: Some(fd), errors } = given.read()? else { return Ok(()) };
        let (socket, errors) = (from.fd(fd)?, errors.map(|fd| from.fd(fd)).transpose()?);
        if !is_connection(&socket) {
            return Err(StreamError::NoConnection);
        }
        if errors.as_ref().is_some_and(|errors| !is_pipe(errors)) {
            return Err(StreamError::NoPipe);
        }
        self.connection.take_over(socket, errors).map_err(StreamError::Watch)
    }

    /// Goes on with the bytes that the other process had at last. Closes the connection if that process had
    /// none any more.
    ///
    /// # Errors
    /// These are no bytes of a stream that was given.
    pub fn go_on(&self, given: Part, from: &Given) -> Result<(), StreamError> {
        let given: v1::StreamFinal = given.read()?;
        let (received, unsent) = (from.bytes(given.received)?, from.bytes(given.unsent)?);
        let frames = (Deframer::with(received), Framer::with(unsent));
        let (Some(incoming), Some(outgoing)) = frames else {
            return Err(StreamError::TooLong(received.len().max(unsent.len())));
        };
        match (given.is_connected, self.connection.is_taken_over()) {
            (true, true) => self.connection.go_on(incoming, outgoing),
            (true, false) => return Err(StreamError::NoConnection),
            // A port without a connection connects when it starts.
            (false, _) => self.connection.set(None).map_err(StreamError::Watch)?,
        }
        Ok(())
    }
}

/// Returns whether this is a connection as each of this port's own.
fn is_connection(socket: &OwnedFd) -> bool {
    socket_domain(socket) == Ok(AddressFamily::UNIX)
        && socket_type(socket) == Ok(SocketType::STREAM)
        && socket_acceptconn(socket) == Ok(false)
        && getpeername(socket).is_ok()
}

impl Connection {
    /// Returns the socket, if both directions have it, and the standard error of the program. Takes note
    /// that the next process has them.
    fn give(&self) -> Option<(Arc<OwnedFd>, Option<Arc<OwnedFd>>)> {
        self.with_directions(|incoming, outgoing, state| {
            let socket = incoming.socket.clone().filter(|_| outgoing.socket.is_some());
            state.given = socket.is_some().then_some(state.changes);
            Some((socket?, state.errors.clone()))
        })
    }

    /// Returns the bytes that were received and not delivered, and those that were not sent. `None` if the
    /// connection is not the one that was given.
    fn unfinished(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        self.with_directions(|incoming, outgoing, state| {
            let is_given = state.given == Some(state.changes);
            is_given.then(|| (incoming.frames.rest(), outgoing.frames.rest().to_vec()))
        })
    }

    fn take_over(&self, socket: OwnedFd, errors: Option<OwnedFd>) -> io::Result<()> {
        self.set(Some(socket))?;
        self.with_directions(|_, _, state| {
            state.is_taken_over = true;
            state.errors = errors.map(Arc::new);
        });
        Ok(())
    }

    fn is_taken_over(&self) -> bool {
        self.with_directions(|_, _, state| state.is_taken_over)
    }

    fn go_on(&self, received: Deframer, unsent: Framer) {
        self.with_directions(|incoming, outgoing, _| {
            incoming.frames = received;
            outgoing.frames = unsent;
        });
    }
}
