//! A RAM disk.

use crate::spec::SECTOR;
use crate::{Error, Extent, Io, IoError, Lane, Limits, RangeLimits, Request, Step};
use kickless_memory::Ram;

/// Bytes of one range: a worker does nothing else meanwhile.
const ZEROED_MAX: u64 = 4 << 20;
const RELEASED_MAX: u64 = 256 << 20;

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
        let ranges = |bytes_max, alignment| (!read_only).then(|| RangeLimits::bytes(bytes_max, alignment));
        let page = rustix::param::page_size() as u64;
        let limits = Limits {
            discard: ranges(RELEASED_MAX, page),
            write_zeroes: ranges(ZEROED_MAX, SECTOR),
            zeroes_may_unmap: !read_only,
            secure_erase: ranges(ZEROED_MAX, SECTOR),
            ..Limits::plain(read_only)
        };
        Ok(Self { ram, limits })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn size(&self) -> u64 {
        self.ram.len()
    }

    /// This request will be started soon.
    #[inline]
    pub(crate) fn prepare(&self, request: Request) {
        if let Request::Read { offset } | Request::Write { offset, .. } = request {
            self.ram.prefetch(offset);
        }
    }

    #[inline]
    pub(crate) fn start(&self, lane: &mut Lane<'_>, io: &mut Io, request: Request) -> Step {
        let offset = match io.check(request, self.size(), self.limits.read_only) {
            Ok(offset) => offset,
            Err(e) => return io.finish(Err(e)),
        };
        let len = io.buffers.len();
        let copied = match request {
            Request::Read { .. } => self.ram.copy_to(offset, &mut io.buffers, lane.marks),
            Request::Write { .. } => self.ram.copy_from(offset, &io.buffers),
            Request::Flush => len,
            _ => return self.on_extents(io, request),
        };
        if io.buffers.is_damaged() {
            return Step::Done(Err(IoError::Damaged));
        }
        Step::Done(if copied == len { Ok(()) } else { Err(IoError::Range) })
    }

    fn on_extents(&self, io: &mut Io, request: Request) -> Step {
        for &Extent { offset, len, unmap } in io.work.iter().flat_map(|work| &work.extents) {
            match request {
                Request::WriteZeroes { .. } => self.ram.zero(offset, len, unmap),
                // A page that was given back would keep its bytes until somebody else gets it.
                Request::SecureErase => self.ram.zero(offset, len, false),
                _ => self.ram.zero(offset, len, true),
            };
        }
        io.finish(Ok(()))
    }
}
