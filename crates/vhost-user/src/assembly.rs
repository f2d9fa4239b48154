//! Putting messages together from whatever pieces the stream hands out.

use std::os::fd::OwnedFd;

use kickless_spec::vhost_user::{self as wire, FDS_MAX, FLAG_VERSION_MASK, VERSION};
use zerocopy::FromBytes;

use crate::error::Error;
use crate::header::{HEADER_SIZE, Header, PAYLOAD_MAX};

/// A whole message, not yet decoded.
#[derive(Debug)]
pub struct Frame {
    /// Its head.
    pub header: Header,
    /// `header.size` bytes.
    pub payload: Vec<u8>,
    /// The file descriptors that came with any of its bytes, at most [`FDS_MAX`].
    pub fds: Vec<OwnedFd>,
}

impl Header {
    /// Reads a header. Version and size are checked; reserved flags are left alone.
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

/// A message that is arriving.
///
/// It asks for exactly the bytes that it lacks ([`space`](Self::space)), so that nothing of the next message, nor of its
/// file descriptors, is taken with it. It can be left at any point and taken up again.
///
/// After an error the pieces and file descriptors that it held are dropped; the stream is out of step.
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
    /// Nothing has arrived yet.
    pub fn new() -> Self {
        Self { head: [0; HEADER_SIZE], header: None, payload: Vec::new(), received: 0, fds: Vec::new() }
    }

    /// Bytes that have arrived: zero at the boundary between messages.
    pub fn received(&self) -> usize {
        self.received
    }

    /// Where the next bytes go. Never empty: the rest of the header, or of the payload.
    pub fn space(&mut self) -> &mut [u8] {
        match self.header {
            None => self.head.get_mut(self.received..).unwrap_or_default(),
            Some(_) => self.payload.get_mut(self.received - HEADER_SIZE..).unwrap_or_default(),
        }
    }

    /// `n` bytes were put into [`space`](Self::space), at most its length, and `fds` came with them. Returns the message if
    /// that was the last of it.
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
