//! Builds virtio-blk requests (virtio 1.3, section 5.2.6) and divides them into buffers in many ways that
//! the standard allows.

use std::fmt;

use anyhow::{Result, ensure};
use kickless_memory::{Gpa, Unmapped};
use kickless_spec::blk::{self, Header};
use zerocopy::IntoBytes;

use crate::driver::Buffer;
use crate::driver::memory::Ram;

const HEADER_LEN: u64 = size_of::<Header>() as u64;
/// Value of a status byte before the device writes it.
pub const UNANSWERED: u8 = 0xff;
/// Alignment of the data buffer. The header is in front of it.
const PAGE: u64 = 4096;
/// Largest number of buffers of a request with an indirect table.
const TABLE_ENTRIES: usize = 2048;

/// A request for the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// `T_*` of [`blk`].
    pub kind: u32,
    /// First sector.
    pub sector: u64,
    /// Data that the device reads.
    pub write: Vec<u8>,
    /// Number of bytes that the device writes.
    pub read_len: usize,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { kind, sector, write, read_len } = self;
        write!(f, "request of type {kind} at sector {sector}, {} bytes out, {read_len} in", write.len())
    }
}

impl Request {
    /// Creates a request that reads `len` bytes.
    pub fn read(sector: u64, len: usize) -> Request {
        Request { kind: blk::T_IN, sector, write: Vec::new(), read_len: len }
    }

    /// Creates a request that writes `data`.
    pub fn write(sector: u64, data: &[u8]) -> Request {
        Request { kind: blk::T_OUT, sector, write: data.to_vec(), read_len: 0 }
    }

    /// Creates a flush.
    pub fn flush() -> Request {
        Request { kind: blk::T_FLUSH, sector: 0, write: Vec::new(), read_len: 0 }
    }

    /// Creates a request for the identity string.
    pub fn get_id() -> Request {
        Request { kind: blk::T_GET_ID, sector: 0, write: Vec::new(), read_len: blk::ID_LEN }
    }
}

/// The way to divide a request into buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One buffer each for header, data and status.
    Usual,
    /// As few buffers as possible: one with header and data to write, one with data to read and status.
    Joined,
    /// Three buffers for the header.
    HeaderSplit,
    /// Buffers of this many bytes. Header, data and status may share one.
    Pieces(usize),
}

/// The layouts that tests use.
pub const LAYOUTS: [Layout; 6] = [
    Layout::Usual,
    Layout::Joined,
    Layout::HeaderSplit,
    Layout::Pieces(512),
    Layout::Pieces(100),
    Layout::Pieces(7),
];

/// Guest memory for one request at a time: header, data and status in this order. The data starts a page.
#[derive(Clone, Copy, Debug)]
pub struct RequestMemory {
    data: Gpa,
    data_len_max: usize,
    table: Gpa,
}

/// The device's answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// `S_*` of [`blk`], or [`UNANSWERED`].
    pub status: u8,
    /// The data that the device wrote.
    pub data: Vec<u8>,
    /// Number of bytes that the device reports as written.
    pub used_len: u32,
}

impl RequestMemory {
    /// Allocates memory for requests of at most `data_len_max` bytes of data.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn new(ram: &mut Ram, data_len_max: usize) -> Result<RequestMemory> {
        let start = ram.take(PAGE as usize + data_len_max + 1, PAGE)?;
        let table = ram.take(TABLE_ENTRIES * size_of::<kickless_spec::ring::Desc>(), 16)?;
        Ok(RequestMemory { data: Gpa(start.0 + PAGE), data_len_max, table })
    }

    /// Returns the address for an indirect table.
    pub fn table(&self) -> Gpa {
        self.table
    }

    /// Returns the address of the data.
    pub fn data(&self) -> Gpa {
        self.data
    }

    /// Writes a request to memory and divides it into buffers.
    ///
    /// # Errors
    /// The request is too large for this memory, or has too many pieces.
    pub fn lay_out(&self, ram: &Ram, request: &Request, layout: Layout) -> Result<Vec<Buffer>> {
        let (write_len, read_len) = (request.write.len(), request.read_len);
        ensure!(write_len + read_len <= self.data_len_max, "{} bytes of data at most", self.data_len_max);
        let header = Header { kind: request.kind.into(), reserved: 0.into(), sector: request.sector.into() };
        let start = self.data.0 - HEADER_LEN;
        ram.map().write(Gpa(start), header.as_bytes())?;
        ram.map().write(self.data, &request.write)?;
        let status = self.data.0 + (write_len + read_len) as u64;
        ram.map().write(Gpa(status), &[UNANSWERED])?;

        let readable = HEADER_LEN as usize + write_len;
        let cuts = |parts: &[usize]| parts.iter().copied().filter(|len| *len > 0).collect::<Vec<_>>();
        let (readable, writable) = match layout {
            Layout::Usual => (cuts(&[HEADER_LEN as usize, write_len]), cuts(&[read_len, 1])),
            Layout::Joined => (vec![readable], vec![read_len + 1]),
            Layout::HeaderSplit => (cuts(&[1, 7, 8, write_len]), cuts(&[read_len, 1])),
            Layout::Pieces(len) => (pieces(readable, len), pieces(read_len + 1, len)),
        };
        ensure!(readable.len() + writable.len() <= TABLE_ENTRIES, "too many pieces");
        let mut at = start;
        let mut buffers = Vec::new();
        for (lens, writable) in [(readable, false), (writable, true)] {
            for len in lens {
                buffers.push(Buffer { addr: Gpa(at), len: len as u32, writable });
                at += len as u64;
            }
        }
        Ok(buffers)
    }

    /// Returns the device's answer to a request that it has completed.
    ///
    /// # Errors
    /// The memory is not there any more.
    pub fn outcome(&self, ram: &Ram, request: &Request, used_len: u32) -> Result<Outcome, Unmapped> {
        let mut data = vec![0; request.read_len];
        ram.map().read(self.data, &mut data)?;
        let status = self.data.0 + (request.write.len() + request.read_len) as u64;
        Ok(Outcome { status: ram.map().read_obj(Gpa(status))?, data, used_len })
    }
}

fn pieces(len: usize, piece: usize) -> Vec<usize> {
    (0..len).step_by(piece).map(|at| piece.min(len - at)).collect()
}
