//! virtio-blk requests (virtio 1.3, section 5.2.6), cut into buffers in every way that the standard allows.

use std::fmt;

use anyhow::{Result, ensure};
use kickless_memory::{Gpa, Unmapped};
use kickless_spec::blk::{self, Header};
use zerocopy::IntoBytes;

use crate::driver::Buffer;
use crate::driver::memory::Ram;

const HEADER_LEN: u64 = size_of::<Header>() as u64;
/// What a status byte is before the device writes it.
pub const UNANSWERED: u8 = 0xff;
/// Data buffers are aligned to this, their header lies before it.
const PAGE: u64 = 4096;
/// The most buffers of a request by an indirect table.
const TABLE_ENTRIES: usize = 2048;

/// What is asked of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// `T_*` of [`blk`].
    pub kind: u32,
    /// First sector.
    pub sector: u64,
    /// Data for the device.
    pub write: Vec<u8>,
    /// Bytes of data from the device.
    pub read_len: usize,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { kind, sector, write, read_len } = self;
        write!(f, "request of type {kind} at sector {sector}, {} bytes out, {read_len} in", write.len())
    }
}

impl Request {
    /// Reads `len` bytes.
    pub fn read(sector: u64, len: usize) -> Request {
        Request { kind: blk::T_IN, sector, write: Vec::new(), read_len: len }
    }

    /// Writes bytes.
    pub fn write(sector: u64, data: &[u8]) -> Request {
        Request { kind: blk::T_OUT, sector, write: data.to_vec(), read_len: 0 }
    }

    /// Flushes.
    pub fn flush() -> Request {
        Request { kind: blk::T_FLUSH, sector: 0, write: Vec::new(), read_len: 0 }
    }

    /// Asks for the identity string.
    pub fn get_id() -> Request {
        Request { kind: blk::T_GET_ID, sector: 0, write: Vec::new(), read_len: blk::ID_LEN }
    }
}

/// How a request is cut into buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Header, data and status each in one.
    Usual,
    /// As few as possible: header and data to write in one, data to read and status in one.
    Joined,
    /// The header in three.
    HeaderSplit,
    /// Everything in pieces of so many bytes, whatever is in them.
    Pieces(usize),
}

/// All layouts that a test goes through.
pub const LAYOUTS: [Layout; 6] = [
    Layout::Usual,
    Layout::Joined,
    Layout::HeaderSplit,
    Layout::Pieces(512),
    Layout::Pieces(100),
    Layout::Pieces(7),
];

/// Guest memory for one request at a time: header, data and status, one after the other, the data at the start of a page.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    data: Gpa,
    data_len_max: usize,
    table: Gpa,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// `S_*` of [`blk`], or [`UNANSWERED`].
    pub status: u8,
    /// What was read.
    pub data: Vec<u8>,
    /// Bytes that the device says it wrote.
    pub used_len: u32,
}

impl Place {
    /// A place for requests of at most `data_len_max` bytes of data.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn new(ram: &mut Ram, data_len_max: usize) -> Result<Place> {
        let start = ram.take(PAGE as usize + data_len_max + 1, PAGE)?;
        let table = ram.take(TABLE_ENTRIES * size_of::<kickless_spec::ring::Desc>(), 16)?;
        Ok(Place { data: Gpa(start.0 + PAGE), data_len_max, table })
    }

    /// Where an indirect table may be.
    pub fn table(&self) -> Gpa {
        self.table
    }

    /// Where the data is.
    pub fn data(&self) -> Gpa {
        self.data
    }

    /// Writes a request to memory and cuts it into buffers.
    ///
    /// # Errors
    /// It is larger than this place, or has too many pieces.
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

    /// What came of a request that the device gave back.
    ///
    /// # Errors
    /// The memory is gone.
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

/// Bytes that differ from seed to seed and from sector to sector.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}
