//! A record as messages: the first has the text, or sealed memory with the record, and each has some
//! descriptors.

use crate::error::Error;
use crate::memory;
use crate::message::{BODY_MAX, Head, IN_MEMORY, Kind};
use crate::record::{FDS_MAX, Record};
use crate::socket::{FDS_IN_MESSAGE, Message};
use std::os::fd::{AsFd, OwnedFd};

const MISCOUNTED: Error = Error::Message("other descriptors than it says");

/// A record that is to be sent.
pub(crate) struct Parcel {
    text: Vec<u8>,
    len: u32,
    fds: Vec<OwnedFd>,
}

/// A message of a [`Parcel`].
pub(crate) struct Outgoing<'p> {
    pub(crate) head: Head,
    pub(crate) body: &'p [u8],
    pub(crate) fds: &'p [OwnedFd],
}

impl Parcel {
    /// Prepares a record.
    ///
    /// # Errors
    /// The host has no memory for a long one.
    pub(crate) fn of(record: Record) -> Result<Self, Error> {
        let is_short = record.bytes.is_empty() && record.text.len() <= BODY_MAX;
        let memory = if is_short { None } else { Some(memory::seal(&record.to_bytes())?) };
        let (text, len) = match record.text {
            text if is_short => {
                let len = text.len() as u32;
                (text, len)
            }
            _ => (Vec::new(), IN_MEMORY),
        };
        Ok(Self { text, len, fds: memory.into_iter().chain(record.fds).collect() })
    }

    /// Returns its messages. The first one has this kind, and each has this number.
    pub(crate) fn messages(&self, kind: Kind, number: u32) -> impl Iterator<Item = Outgoing<'_>> {
        let Self { text, len, fds } = self;
        let mut chunks = fds.chunks(FDS_IN_MESSAGE);
        let first = chunks.next().unwrap_or_default();
        // A record has at most `record::FDS_MAX` descriptors.
        let head = Head { kind, fds: fds.len() as u16, number, len: *len };
        let more = chunks.map(move |fds| {
            let head = Head { fds: fds.len() as u16, ..Head::new(Kind::More, number) };
            Outgoing { head, body: &[], fds }
        });
        std::iter::once(Outgoing { head, body: text, fds: first }).chain(more)
    }
}

/// A record of which some messages have come.
pub(crate) struct Arriving {
    first: Message,
    expected: usize,
}

impl Arriving {
    /// Begins with the first message.
    ///
    /// # Errors
    /// It has other descriptors than it says.
    pub(crate) fn new(first: Message) -> Result<Self, Error> {
        let expected = usize::from(first.head.fds);
        // The first one may be the memory of the record.
        if expected > FDS_MAX + 1 {
            return Err(Error::TooManyDescriptors(expected));
        }
        match first.fds.len() == expected.min(FDS_IN_MESSAGE) {
            true => Ok(Self { first, expected }),
            false => Err(MISCOUNTED),
        }
    }

    /// Returns whether all messages have come.
    pub(crate) fn is_complete(&self) -> bool {
        self.first.fds.len() >= self.expected
    }

    /// Adds the next message.
    ///
    /// # Errors
    /// It is another one.
    pub(crate) fn add(&mut self, more: Message) -> Result<(), Error> {
        if more.head.kind != Kind::More || more.head.number != self.first.head.number {
            return Err(more.head.kind.out_of_order());
        }
        if more.fds.len() != FDS_IN_MESSAGE.min(self.expected - self.first.fds.len()) {
            return Err(MISCOUNTED);
        }
        self.first.fds.extend(more.fds);
        Ok(())
    }

    /// Returns the record.
    ///
    /// # Errors
    /// It is no record, or is not sealed.
    pub(crate) fn record(self) -> Result<Record, Error> {
        let Message { head, body, mut fds } = self.first;
        if head.len != IN_MEMORY {
            return Ok(Record { text: body, bytes: Vec::new(), fds });
        }
        let bytes = memory::read(fds.first().ok_or(MISCOUNTED)?.as_fd())?;
        fds.remove(0);
        Record::from_bytes(bytes, fds)
    }
}
