//! The buffers of a queue pair, in shared memory.
//!
//! Each buffer begins at a cache line, and the distance of two buffers is an odd number of lines. So the
//! headers of all buffers spread over all sets of a cache. With a distance of 2 KiB, they would share a few
//! sets and evict one another.
//!
//! Links and lengths are in the driver's own memory, where the back-end cannot write.

use kickless_memory::Area;
use kickless_spec::net::Header;

use crate::error::Error;
use crate::memory::Region;
use crate::offload::Offload;

const LINE: u64 = 64;
/// The length of the header of each frame.
pub(crate) const HEADER_LEN: u32 = size_of::<Header>() as u32;
/// Ends a list of buffers.
const END: u32 = u32::MAX;

/// The number of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferId(u32);

impl BufferId {
    /// Stands for no buffer.
    pub(crate) const NONE: Self = Self(END);

    #[inline]
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// The buffers of a queue pair.
#[derive(Debug)]
pub(crate) struct FrameMemory {
    area: Area,
    /// The device's address of the first buffer.
    addr: u64,
    stride: u64,
    buffer_len: u32,
    /// For each buffer of a frame, the next one.
    next: Box<[BufferId]>,
    /// For each buffer of a frame, the number of its bytes that belong to the frame.
    lens: Box<[u32]>,
    /// The free buffers. The one that was used last comes first, because it is most likely in the cache.
    free: Vec<BufferId>,
}

/// Returns the distance between two buffers of this length.
fn stride(buffer_len: u32) -> u64 {
    let lines = u64::from(buffer_len).div_ceil(LINE);
    (lines | 1) * LINE
}

impl FrameMemory {
    /// Returns the number of bytes of `count` buffers.
    pub(crate) fn len(count: u32, buffer_len: u32) -> u64 {
        u64::from(count) * stride(buffer_len)
    }

    /// Makes `count` buffers at the device's address `addr`.
    pub(crate) fn new(region: &Region, addr: u64, count: u32, buffer_len: u32) -> Result<Self, Error> {
        let len = usize::try_from(Self::len(count, buffer_len));
        let area = region.area(addr, len.map_err(|_| Error::NoMemory { len: usize::MAX })?, LINE as usize)?;
        Ok(Self {
            area,
            addr,
            stride: stride(buffer_len),
            buffer_len,
            next: vec![BufferId::NONE; count as usize].into(),
            lens: vec![0; count as usize].into(),
            free: (0..count).rev().map(BufferId).collect(),
        })
    }

    /// Makes all buffers free.
    pub(crate) fn reset(&mut self) {
        self.free.clear();
        // Lossless: `new` got the count as a u32.
        self.free.extend((0..self.next.len() as u32).rev().map(BufferId));
    }

    #[inline]
    pub(crate) fn buffer_len(&self) -> u32 {
        self.buffer_len
    }

    #[inline]
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns the device's address of a buffer.
    #[inline]
    pub(crate) fn addr(&self, buffer: BufferId) -> u64 {
        self.addr + u64::from(buffer.0) * self.stride
    }

    #[inline]
    fn offset(&self, buffer: BufferId) -> usize {
        buffer.index() * self.stride as usize
    }

    /// Asks the processor for the first line of a buffer.
    #[inline]
    pub(crate) fn prefetch(&self, buffer: BufferId) {
        if buffer != BufferId::NONE {
            self.area.prefetch(self.offset(buffer));
        }
    }

    /// Takes one buffer.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<BufferId> {
        let buffer = self.free.pop()?;
        self.next[buffer.index()] = BufferId::NONE;
        Some(buffer)
    }

    /// Takes the buffers of a frame of `len` bytes, header included. Each is full except for the last one.
    #[inline]
    pub(crate) fn take_frame(&mut self, len: u32) -> Option<BufferId> {
        if len <= self.buffer_len {
            let buffer = self.take()?;
            self.lens[buffer.index()] = len;
            return Some(buffer);
        }
        self.take_chain(len)
    }

    fn take_chain(&mut self, len: u32) -> Option<BufferId> {
        let count = len.div_ceil(self.buffer_len) as usize;
        let rest = self.free.len().checked_sub(count)?;
        let (mut first, mut left) = (BufferId::NONE, len - (count as u32 - 1) * self.buffer_len);
        for buffer in self.free.drain(rest..) {
            self.next[buffer.index()] = first;
            self.lens[buffer.index()] = left;
            (first, left) = (buffer, self.buffer_len);
        }
        Some(first)
    }

    /// Gives all buffers of a frame back.
    #[inline]
    pub(crate) fn give_back(&mut self, first: BufferId) {
        let mut at = first;
        while at != BufferId::NONE {
            self.free.push(at);
            at = self.next[at.index()];
        }
    }

    /// Sets the number of bytes of a buffer, the last one of its frame.
    #[inline]
    pub(crate) fn set_len(&mut self, buffer: BufferId, len: u32) {
        self.lens[buffer.index()] = len;
    }

    /// Links two buffers of a frame.
    pub(crate) fn link(&mut self, buffer: BufferId, next: BufferId) {
        self.next[buffer.index()] = next;
    }

    /// Returns the buffers of a frame, each with its number of bytes.
    #[inline]
    pub(crate) fn parts(&self, first: BufferId) -> impl Iterator<Item = (BufferId, u32)> + '_ {
        let mut at = first;
        std::iter::from_fn(move || {
            let here = (at != BufferId::NONE).then_some(at)?;
            at = self.next[here.index()];
            Some((here, self.lens[here.index()]))
        })
    }

    /// Returns whether a frame has more than one buffer.
    #[inline]
    pub(crate) fn is_chain(&self, first: BufferId) -> bool {
        self.next[first.index()] != BufferId::NONE
    }

    /// Reads the header of a frame, once.
    #[inline]
    pub(crate) fn header(&self, first: BufferId) -> Header {
        self.area.read(self.offset(first))
    }

    #[inline]
    pub(crate) fn set_header(&self, first: BufferId, header: &Header) {
        self.area.write(self.offset(first), header);
    }

    /// Calls `copy` with each piece of a frame's bytes from `offset` on, up to `len` of them: its place in
    /// the area, its position among these bytes, and its length. Returns the number of bytes.
    #[inline]
    fn each_piece(
        &self,
        first: BufferId,
        offset: usize,
        len: usize,
        mut copy: impl FnMut(&Area, usize, usize, usize),
    ) -> usize {
        let start = offset.saturating_add(HEADER_LEN as usize);
        // The usual frame has one buffer.
        if start.saturating_add(len) <= self.lens[first.index()] as usize {
            copy(&self.area, self.offset(first) + start, 0, len);
            return len;
        }
        let (mut skip, mut done) = (start, 0);
        for (buffer, has) in self.parts(first) {
            let has = has as usize;
            if skip >= has {
                skip -= has;
                continue;
            }
            let now = (has - skip).min(len - done);
            copy(&self.area, self.offset(buffer) + skip, done, now);
            done += now;
            skip = 0;
            if done == len {
                break;
            }
        }
        done
    }
}

/// A frame in the shared memory of a queue pair, during a call of the driver.
///
/// The back-end can write to shared memory at any time, so there is no Rust reference to the bytes. They are
/// copied in and out.
#[derive(Debug)]
pub struct Frame<'a> {
    memory: &'a FrameMemory,
    first: BufferId,
    /// Without the header.
    len: usize,
    offload: Offload,
}

impl<'a> Frame<'a> {
    #[inline]
    pub(crate) fn new(memory: &'a FrameMemory, first: BufferId, len: usize, offload: Offload) -> Self {
        Self { memory, first, len, offload }
    }

    /// Returns the length of the frame in bytes, from the Ethernet header on.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the frame has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the work that the sender has left to do.
    #[inline]
    pub fn offload(&self) -> Offload {
        self.offload
    }

    /// Sets the work that is left to the card. For frames that are sent.
    #[inline]
    pub fn set_offload(&mut self, offload: Offload) {
        self.offload = offload;
    }

    /// Copies bytes from `offset` on out of the frame. Returns the number of bytes copied.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> usize {
        let len = into.len().min(self.len.saturating_sub(offset));
        self.memory.each_piece(self.first, offset, len, |area, at, done, now| {
            if let Some(place) = into.get_mut(done..done + now) {
                area.read_bytes(at, place);
            }
        })
    }

    /// Copies bytes into the frame from `offset` on, up to its length. Returns the number of bytes copied.
    #[inline]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> usize {
        let len = from.len().min(self.len.saturating_sub(offset));
        self.memory.each_piece(self.first, offset, len, |area, at, done, now| {
            if let Some(bytes) = from.get(done..done + now) {
                area.write_bytes(at, bytes);
            }
        })
    }

    /// Returns a copy of the bytes of the frame.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.read(0, &mut copy);
        copy
    }
}
