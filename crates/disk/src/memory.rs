//! A RAM disk.
//!
//! A worker does the work itself, and serves nothing else meanwhile. So a request of more than [`STEP_BYTES`]
//! runs in steps, between which the worker serves other requests: see [`Step::More`]. A step takes some tens
//! of microseconds.

use crate::buffers::{IoBuffers, TransferBuffers};
use crate::control::DiskControl;
use crate::hand_over::DiskHandOver;
use crate::{Error, Extent, IoContext, IoError, Limits, RangeLimits, Request, SECTOR, Step};
use kickless_handover::Giving;
use kickless_handover::v1::Medium;
use kickless_memory::Ram;
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;

/// The bytes to copy or zero in one step.
pub(crate) const STEP_BYTES: u64 = 128 << 10;
/// The number of bytes that can be freed in the time to copy one: 4 MiB in a step, if a page of 4 KiB takes
/// some 30 nanoseconds.
const RELEASED_PER_COPIED: u64 = 32;
/// The fixed cost of a range, in bytes: a system call, and a page at each end.
const EXTENT_BYTES: u64 = 4096;

/// The largest range in bytes, to zero and to free.
const ZEROED_MAX: u64 = 4 << 20;
const RELEASED_MAX: u64 = 256 << 20;

/// A disk in RAM. It is zero at first, and ends with the process unless another process gets its memory.
///
/// A page uses memory from its first write on. Requests that overlap in time and place may mix, as on any
/// disk.
#[derive(Debug)]
pub struct MemoryDisk {
    ram: Ram,
    limits: Limits,
}

/// The progress of a request that runs in steps.
#[derive(Debug, Default)]
pub(crate) struct MemoryState {
    /// The request. `None` if no request runs in steps.
    steps: Option<Request>,
    /// The next byte on the disk.
    at: u64,
}

impl MemoryState {
    pub(crate) fn is_active(&self) -> bool {
        self.steps.is_some()
    }

    /// Ends the request.
    fn finish(&mut self, buffers: &mut IoBuffers, result: Result<(), IoError>) -> Step {
        self.steps = None;
        buffers.drop_extents();
        Step::Done(result)
    }
}

impl DiskControl for MemoryDisk {
    fn identity(&self) -> &str {
        "kickless-mem"
    }
}

/// The memory passes as a file. A disk of anonymous memory is copied into one, which takes long.
impl DiskHandOver for MemoryDisk {
    fn give(&self, to: &mut Giving) -> io::Result<Medium> {
        Ok(Medium::Memory { file: to.fd(self.share()?)?, len: self.size() })
    }

    fn gives_slowly(&self) -> bool {
        !self.ram.is_of_file()
    }
}

impl MemoryDisk {
    /// Makes a disk of `size` bytes.
    ///
    /// # Errors
    /// The size is not a positive multiple of 512, or there is not enough address space.
    pub fn new(size: u64, read_only: bool) -> Result<Self, Error> {
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(Error::Size(size));
        }
        let ram = Ram::new(size).map_err(|source| Error::Memory { size, source })?;
        Ok(Self::of_ram(ram, read_only))
    }

    /// Makes a disk of the memory that another process has shared by [`MemoryDisk::share`], which has to have
    /// `size` bytes.
    ///
    /// # Errors
    /// The file has another size or is not of this kind, or it cannot be mapped.
    pub fn of_file(file: OwnedFd, size: u64, read_only: bool) -> Result<Self, Error> {
        let ram = Ram::of_file(file).map_err(|source| Error::Memory { size, source })?;
        if ram.len() != size || !size.is_multiple_of(SECTOR) {
            return Err(Error::Size(ram.len()));
        }
        Ok(Self::of_ram(ram, read_only))
    }

    /// Returns a file with the bytes of the disk, for another process: see [`Ram::share`]. No request runs
    /// meanwhile.
    ///
    /// # Errors
    /// There is no free descriptor, or too little memory.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.ram.share()
    }

    fn of_ram(ram: Ram, read_only: bool) -> Self {
        let ranges = |bytes_max, alignment| (!read_only).then(|| RangeLimits::bytes(bytes_max, alignment));
        let page = rustix::param::page_size() as u64;
        let limits = Limits {
            discard: ranges(RELEASED_MAX, page),
            write_zeroes: ranges(ZEROED_MAX, SECTOR),
            zeroes_may_unmap: !read_only,
            ..Limits::plain(read_only)
        };
        Self { ram, limits }
    }

    /// Returns the error if pages of the guest or of the disk were missing in the copy before.
    #[inline]
    fn check_pages(&self, buffers: &IoBuffers) -> Result<(), IoError> {
        if buffers.guest.is_damaged() {
            return Err(IoError::Damaged);
        }
        if self.ram.is_damaged() {
            return Err(IoError::Os(Errno::IO));
        }
        Ok(())
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn size(&self) -> u64 {
        self.ram.len()
    }

    /// Prefetches data of a request that starts soon.
    #[inline]
    pub(crate) fn prepare(&self, request: Request) {
        if let Request::Read { offset } | Request::Write { offset, .. } = request {
            self.ram.prefetch(offset);
        }
    }

    #[inline]
    pub(crate) fn start(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut MemoryState,
        request: Request,
    ) -> Step {
        let offset = match buffers.check(request, self.size(), self.limits.read_only) {
            Ok(offset) => offset,
            Err(e) => return state.finish(buffers, Err(e)),
        };
        let len = buffers.guest.len();
        if len > STEP_BYTES {
            return self.start_steps(context, buffers, state, request, offset);
        }
        let copied = match request {
            Request::Read { .. } => self.ram.copy_to(offset, &mut buffers.guest, context.marks),
            Request::Write { .. } => self.ram.copy_from(offset, &buffers.guest),
            Request::Flush => len,
            _ => return self.start_steps(context, buffers, state, request, offset),
        };
        if let Err(error) = self.check_pages(buffers) {
            return Step::Done(Err(error));
        }
        Step::Done(if copied == len { Ok(()) } else { Err(IoError::Range) })
    }

    #[cold]
    fn start_steps(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut MemoryState,
        request: Request,
        offset: u64,
    ) -> Step {
        (state.at, state.steps) = (offset, Some(request));
        self.step(context, buffers, state)
    }

    /// Does one step of a request.
    pub(crate) fn step(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut MemoryState,
    ) -> Step {
        let Some(request) = state.steps else { return Step::Busy };
        let len = buffers.guest.len().min(STEP_BYTES);
        let copied = match request {
            Request::Read { .. } => self.ram.copy_some_to(state.at, len, &mut buffers.guest, context.marks),
            Request::Write { .. } => self.ram.copy_some_from(state.at, len, &buffers.guest),
            Request::Flush => return state.finish(buffers, Ok(())),
            Request::Discard { .. } => return self.step_on_extents(buffers, state, true),
            Request::WriteZeroes { .. } => return self.step_on_extents(buffers, state, false),
        };
        if let Err(error) = self.check_pages(buffers) {
            return state.finish(buffers, Err(error));
        }
        if copied != len {
            return state.finish(buffers, Err(IoError::Range));
        }
        state.at += len;
        buffers.guest.advance(len, context.marks);
        if buffers.guest.is_empty() { state.finish(buffers, Ok(())) } else { Step::More }
    }

    fn step_on_extents(&self, buffers: &mut IoBuffers, state: &mut MemoryState, discard: bool) -> Step {
        let mut left = STEP_BYTES;
        while let Some(&Extent { offset, len, unmap }) = buffers.extents.last() {
            if left == 0 {
                return Step::More;
            }
            let release = unmap || discard;
            let per_copied = if release { RELEASED_PER_COPIED } else { 1 };
            // The step ends at a multiple of its size, so that whole pages stay whole. It may do up to twice
            // the work of a step.
            let end = (offset - offset % STEP_BYTES).saturating_add(STEP_BYTES * per_copied);
            let here = (end - offset).min(len);
            self.ram.zero(offset, here, release);
            buffers.advance_extent(here);
            left = left.saturating_sub(here / per_copied + EXTENT_BYTES);
        }
        let result = self.check_pages(buffers);
        state.finish(buffers, result)
    }
}
