//! Puts messages together from the pieces that a stream returns.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::{self as wire, FDS_MAX, FLAG_VERSION_MASK, VERSION};
use zerocopy::FromBytes;

use crate::error::Error;
use crate::header::{HEADER_SIZE, Header, PAYLOAD_MAX};

/// A complete message that is not decoded yet.
#[derive(Debug)]
pub struct Frame {
    /// The head of the message.
    pub header: Header,
    /// The payload, of `header.size` bytes.
    pub payload: Vec<u8>,
    /// The file descriptors of the message, at most [`FDS_MAX`].
    pub fds: Vec<OwnedFd>,
}

impl Header {
    /// Reads a header. Checks version and size, and ignores reserved flags.
    pub fn parse(wire: &wire::Header) -> Result<Self, Error> {
        let header = Self { request: wire.request.get(), flags: wire.flags.get(), size: wire.size.get() };
        let version = header.flags & FLAG_VERSION_MASK;
        if version != VERSION {
            return Err(Error::Version { request: header.request, version });
        }
        if header.size as usize > PAYLOAD_MAX {
            return Err(Error::PayloadTooLarge { request: header.request, size: header.size });
        }
        Ok(header)
    }
}

/// The part of a message that has arrived.
#[derive(Debug)]
pub struct HalfMessage<'a> {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its file descriptors.
    pub fds: &'a [OwnedFd],
}

/// A message that is arriving.
///
/// It asks for exactly the bytes that are missing ([`space`](Self::space)). So it takes no bytes or file
/// descriptors of the next message. Reception can stop at any point and continue later.
///
/// After an error the received bytes and file descriptors are dropped, and the stream is out of step.
#[derive(Debug)]
pub struct Assembly {
    head: [u8; HEADER_SIZE],
    header: Option<Header>,
    payload: Vec<u8>,
    /// Bytes of head and payload that have arrived.
    received: usize,
    fds: Vec<OwnedFd>,
}

impl Assembly {
    /// Makes an assembly that has received nothing.
    pub fn new() -> Self {
        Self { head: [0; HEADER_SIZE], header: None, payload: Vec::new(), received: 0, fds: Vec::new() }
    }

    /// Returns the number of received bytes: zero between two messages.
    pub fn received(&self) -> usize {
        self.received
    }

    /// Returns the bytes and the descriptors that have arrived. `None` between two messages.
    pub fn half_message(&self) -> Option<HalfMessage<'_>> {
        let head = self.head.get(..self.received.min(HEADER_SIZE)).unwrap_or_default();
        let payload = self.payload.get(..self.received.saturating_sub(HEADER_SIZE)).unwrap_or_default();
        (self.received > 0).then(|| HalfMessage { bytes: [head, payload].concat(), fds: &self.fds })
    }

    /// Makes an assembly that has received this part of a message in another process.
    ///
    /// # Errors
    /// It is no part of a message.
    pub fn of_half_message(mut bytes: &[u8], mut fds: Vec<OwnedFd>) -> Result<Self, Error> {
        let mut assembly = Self::new();
        while !bytes.is_empty() {
            let space = assembly.space();
            let (piece, rest) = bytes.split_at(bytes.len().min(space.len()));
            space[..piece.len()].copy_from_slice(piece);
            if assembly.advance(piece.len(), std::mem::take(&mut fds))?.is_some() {
                return Err(Error::NotHalf);
            }
            bytes = rest;
        }
        // Descriptors come with the first byte.
        if fds.is_empty() { Ok(assembly) } else { Err(Error::NotHalf) }
    }

    /// Returns the space for the next bytes: the rest of the header, or of the payload. It is never empty.
    pub fn space(&mut self) -> &mut [u8] {
        match self.header {
            None => self.head.get_mut(self.received..).unwrap_or_default(),
            Some(_) => self.payload.get_mut(self.received - HEADER_SIZE..).unwrap_or_default(),
        }
    }

    /// Adds `n` bytes that were put into [`space`](Self::space), at most its length, and the `fds` that came
    /// with them. Returns the message if it is complete.
    pub fn advance(&mut self, n: usize, fds: Vec<OwnedFd>) -> Result<Option<Frame>, Error> {
        let advanced = self.try_advance(n, fds);
        if advanced.is_err() {
            *self = Self::new();
        }
        advanced
    }

    fn try_advance(&mut self, n: usize, mut fds: Vec<OwnedFd>) -> Result<Option<Frame>, Error> {
        if self.fds.len() + fds.len() > FDS_MAX {
            return Err(Error::TooManyFds);
        }
        self.fds.append(&mut fds);
        self.received += n.min(self.space().len());
        if self.header.is_none() && self.received == HEADER_SIZE {
            let (wire, _) = wire::Header::read_from_prefix(&self.head).unwrap_or_default();
            let header = Header::parse(&wire)?;
            self.payload = vec![0; header.size as usize];
            self.header = Some(header);
        }
        match self.header {
            Some(header) if self.received == HEADER_SIZE + self.payload.len() => {
                let whole = std::mem::take(self);
                Ok(Some(Frame { header, payload: whole.payload, fds: whole.fds }))
            }
            _ => Ok(None),
        }
    }
}

impl Default for Assembly {
    fn default() -> Self {
        Self::new()
    }
}
