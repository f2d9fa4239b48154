//! A record: its text, bytes that the text names, and descriptors.
//!
//! ```text
//!   "kickless"   format (4)   0 (4)   length of the text (8)   length of the bytes (8)   text   bytes
//! ```
//! Numbers are little-endian. The text is JSON, because configurations exist as JSON, and a person can read a
//! record that was refused. Bytes that arrived from a front-end or a network follow it.

use crate::error::Error;
use crate::format::FORMATS;
use crate::parts::{Checked, FD_KEY, Fd, Span};
use serde_json::Value;
use std::os::fd::{AsFd, OwnedFd};
use std::{io, mem};

const MAGIC: [u8; 8] = *b"kickless";
/// The length of the head.
pub(crate) const HEAD_LEN: usize = 32;
/// The longest text. A parsed text takes up to 16 times its length for a moment. A plan has 1 KiB for each
/// device.
const TEXT_MAX: u64 = 4 << 20;
/// The longest record. A stream has 260 KiB of frames, a front-end's half message has 4 KiB.
pub(crate) const LEN_MAX: u64 = 64 << 20;
/// The most descriptors of a record. 1024 rings have three each, and memory has 509 files at most.
pub(crate) const FDS_MAX: usize = 4096;

/// A record of any type, as it passes between two processes.
#[derive(Debug)]
pub struct Record {
    pub(crate) text: Vec<u8>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The descriptors and bytes of a record that is being written.
#[derive(Debug, Default)]
pub struct Giving {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// The descriptors and bytes of a record that was read. Descriptors that are not taken are closed when it is
/// dropped.
#[derive(Debug)]
pub struct Given {
    bytes: Vec<u8>,
    fds: Vec<Option<OwnedFd>>,
}

impl Giving {
    /// Adds a duplicate of a descriptor.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn fd(&mut self, fd: impl AsFd) -> io::Result<Fd> {
        let number = u16::try_from(self.fds.len()).map_err(|_| io::Error::other("too many descriptors"))?;
        self.fds.push(fd.as_fd().try_clone_to_owned()?);
        Ok(Fd { fd: number })
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// The record is too long.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<Span, Error> {
        check_len("contents", self.bytes.len() as u64 + bytes.len() as u64, LEN_MAX)?;
        // Both are below LEN_MAX.
        let span = Span { at: self.bytes.len() as u32, len: bytes.len() as u32 };
        self.bytes.extend_from_slice(bytes);
        Ok(span)
    }

    /// Returns the record of this state, which names all that was added.
    ///
    /// # Errors
    /// The state is too long.
    pub fn record(self, state: &impl Checked) -> Result<Record, Error> {
        let text = serde_json::to_vec(state)?;
        check_len("text", text.len() as u64, TEXT_MAX)?;
        check_len("contents", (HEAD_LEN + text.len() + self.bytes.len()) as u64, LEN_MAX)?;
        check_count(self.fds.len())?;
        Ok(Record { text, bytes: self.bytes, fds: self.fds })
    }
}

impl Given {
    /// Takes a descriptor.
    ///
    /// # Errors
    /// It was taken before, or the record has none of this number.
    pub fn fd(&mut self, fd: Fd) -> Result<OwnedFd, Error> {
        let taken = self.fds.get_mut(usize::from(fd.fd)).and_then(Option::take);
        taken.ok_or(Error::Descriptor(fd.fd.into()))
    }

    /// Returns bytes.
    ///
    /// # Errors
    /// The record has no such bytes.
    pub fn bytes(&self, span: Span) -> Result<&[u8], Error> {
        let (at, len) = (span.at as usize, span.len as usize);
        let bytes = self.bytes.get(at..).and_then(|from| from.get(..len));
        bytes.ok_or_else(|| Error::field("piece", format!("{len} bytes at {at}")))
    }
}

impl Record {
    /// Returns the record in these bytes, which come from another process.
    ///
    /// # Errors
    /// They are no record of a known format.
    pub fn from_bytes(mut bytes: Vec<u8>, fds: Vec<OwnedFd>) -> Result<Self, Error> {
        let head: [u8; HEAD_LEN] = *bytes.first_chunk().ok_or(Error::Length)?;
        let (magic, head) = split::<8>(&head);
        let (format, head) = split::<4>(head);
        let (zero, head) = split::<4>(head);
        let (text_len, head) = split::<8>(head);
        let (bytes_len, _) = split::<8>(head);
        if magic != MAGIC || !FORMATS.contains(&u32::from_le_bytes(format)) || zero != [0; 4] {
            return Err(Error::Foreign);
        }
        let (text_len, bytes_len) = (u64::from_le_bytes(text_len), u64::from_le_bytes(bytes_len));
        check_len("text", text_len, TEXT_MAX)?;
        check_len("contents", bytes_len, LEN_MAX)?;
        // Both are far below 2^64.
        if bytes.len() as u64 != HEAD_LEN as u64 + text_len + bytes_len {
            return Err(Error::Length);
        }
        let after = bytes.split_off(HEAD_LEN + text_len as usize);
        bytes.drain(..HEAD_LEN);
        Ok(Self { text: bytes, bytes: after, fds })
    }

    /// Returns the record as bytes, without its descriptors.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (text_len, bytes_len) = (self.text.len() as u64, self.bytes.len() as u64);
        let format = u64::from(*FORMATS.end());
        let numbers = [format, text_len, bytes_len].map(u64::to_le_bytes);
        [&MAGIC[..], numbers.as_flattened(), &self.text, &self.bytes].concat()
    }

    /// Returns the state, its descriptors and its bytes.
    ///
    /// # Errors
    /// The text is no state of this type, or names a descriptor that did not come, or does not name each
    /// descriptor once.
    pub fn read<T: Checked>(self) -> Result<(T, Given), Error> {
        check_count(self.fds.len())?;
        let value: Value = serde_json::from_slice(&self.text)?;
        let mut is_named = vec![false; self.fds.len()];
        name_fds(&value, &mut is_named)?;
        if let Some(unused) = is_named.iter().position(|is_named| !is_named) {
            return Err(Error::Descriptor(unused as u64));
        }
        let state: T = serde_json::from_value(value)?;
        state.check()?;
        Ok((state, Given { bytes: self.bytes, fds: self.fds.into_iter().map(Some).collect() }))
    }
}

/// Marks the descriptors that a text names, also those of parts that only other crates know. The parser
/// limits the depth.
fn name_fds(value: &Value, is_named: &mut [bool]) -> Result<(), Error> {
    match value {
        Value::Array(values) => values.iter().try_for_each(|value| name_fds(value, is_named)),
        Value::Object(object) if object.len() == 1 && object.contains_key(FD_KEY) => {
            let number = object[FD_KEY].as_u64().unwrap_or(u64::MAX);
            let named = usize::try_from(number).ok().and_then(|number| is_named.get_mut(number));
            match named.map(|is_named| mem::replace(is_named, true)) {
                Some(false) => Ok(()),
                Some(true) | None => Err(Error::Descriptor(number)),
            }
        }
        Value::Object(object) => object.values().try_for_each(|value| name_fds(value, is_named)),
        _ => Ok(()),
    }
}

/// Splits bytes that are at least `N` long.
fn split<const N: usize>(bytes: &[u8]) -> ([u8; N], &[u8]) {
    bytes.split_first_chunk().map_or(([0; N], &[]), |(first, rest)| (*first, rest))
}

fn check_len(part: &'static str, len: u64, max: u64) -> Result<(), Error> {
    if len <= max { Ok(()) } else { Err(Error::TooLong { part, len, max }) }
}

fn check_count(fds: usize) -> Result<(), Error> {
    if fds <= FDS_MAX { Ok(()) } else { Err(Error::TooManyDescriptors(fds)) }
}
