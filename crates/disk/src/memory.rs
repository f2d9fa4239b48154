//! A RAM disk.

use crate::spec::SECTOR;
use crate::{Error, Io, IoError, Lane, Limits, Request, Step};
use kickless_memory::Ram;

/// A disk in RAM, zero to begin with and gone with the process. A page costs memory from the first write to
/// it on. Every request is answered at once. Requests that overlap in time and place may mix, as on any disk.
#[derive(Debug)]
pub struct MemoryDisk {
    ram: Ram,
    limits: Limits,
}

impl MemoryDisk {
    /// A disk of `size` bytes.
    ///
    /// # Errors
    /// The size is no positive multiple of 512, or there is not that much address space.
    pub fn new(size: u64, read_only: bool) -> Result<Self, Error> {
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(Error::Size(size));
        }
        let ram = Ram::new(size).map_err(|source| Error::Memory { size, source })?;
        Ok(Self { ram, limits: Limits::plain(size, read_only) })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    pub(crate) fn start(&self, lane: &mut Lane<'_>, io: &mut Io, request: Request) -> Step {
        let offset = match io.check(request, &self.limits) {
            Ok(offset) => offset,
            Err(e) => return Step::Done(Err(e)),
        };
        let len = io.buffers.len();
        let copied = match request {
            Request::Read { .. } => self.ram.copy_to(offset, &mut io.buffers, lane.marks),
            Request::Write { .. } => self.ram.copy_from(offset, &io.buffers),
            Request::Flush => len,
        };
        if io.buffers.is_damaged() {
            return Step::Done(Err(IoError::Damaged));
        }
        Step::Done(if copied == len { Ok(()) } else { Err(IoError::Range) })
    }
}
