//! A buffer of this process, as the memory of a transfer.

use crate::Extent;
use crate::buffers::TransferBuffers;
use kickless_io::{AlignedBuf, Buffers};
use kickless_memory::Marks;
use std::ops::Range;

/// A buffer of this process, and the part of it to transfer.
#[derive(Debug, Default)]
pub(super) struct LocalBuffers {
    /// `None` while an engine, or the front that was split off, has the buffer.
    buffer: Option<AlignedBuf>,
    left: Range<usize>,
    extents: Vec<Extent>,
}

impl LocalBuffers {
    /// Makes a transfer of the buffer's window.
    pub(super) fn new(buffer: AlignedBuf) -> Self {
        let left = buffer.window();
        Self { buffer: Some(buffer), left, extents: Vec::new() }
    }

    /// Makes a transfer of a range of the buffer.
    pub(super) fn of_range(buffer: AlignedBuf, range: Range<usize>) -> Self {
        Self { buffer: Some(buffer), left: range, extents: Vec::new() }
    }

    /// Makes a request on an extent, without memory.
    pub(super) fn of_extent(extent: Extent) -> Self {
        Self { buffer: None, left: 0..0, extents: vec![extent] }
    }

    /// Takes the buffer out.
    pub(super) fn take(&mut self) -> Option<AlignedBuf> {
        self.left = 0..0;
        self.buffer.take()
    }
}

impl TransferBuffers for LocalBuffers {
    fn left(&self) -> u64 {
        self.left.len() as u64
    }

    fn is_aligned(&self, address: usize, len: usize) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| {
            (buffer.as_ptr().addr() + self.left.start).is_multiple_of(address)
                && self.left.len().is_multiple_of(len)
        })
    }

    fn is_damaged(&self) -> bool {
        false
    }

    fn give(&mut self) -> Buffers {
        match self.buffer.take() {
            Some(mut buffer) => {
                buffer.set_window(self.left.clone());
                Buffers::Owned(buffer)
            }
            None => Buffers::None,
        }
    }

    fn take_back(&mut self, buffers: Buffers) {
        if let Buffers::Owned(buffer) = buffers {
            self.buffer = Some(buffer);
        }
    }

    fn advance(&mut self, bytes: u64, _marks: &mut Marks) {
        self.left.start += bytes.min(self.left()) as usize;
    }

    fn read(&self, into: &mut [u8]) {
        if let Some(buffer) = &self.buffer {
            let from = &buffer[self.left.clone()];
            let len = from.len().min(into.len());
            into[..len].copy_from_slice(&from[..len]);
        }
    }

    fn write(&mut self, from: &[u8], _marks: &mut Marks) {
        if let Some(buffer) = &mut self.buffer {
            let into = &mut buffer[self.left.clone()];
            let len = from.len().min(into.len());
            into[..len].copy_from_slice(&from[..len]);
        }
    }

    fn zero(&mut self, bytes: u64, _marks: &mut Marks) {
        let end = self.left.start + bytes.min(self.left()) as usize;
        if let Some(buffer) = &mut self.buffer {
            buffer[self.left.start..end].fill(0);
        }
    }

    fn split_to(&mut self, len: u64, front: &mut Self, _marks: &mut Marks) {
        let end = self.left.start + len.min(self.left()) as usize;
        front.left = self.left.start..end;
        front.buffer = self.buffer.take();
        self.left.start = end;
    }

    fn join(&mut self, front: &mut Self, _marks: &mut Marks) {
        self.buffer = front.take();
    }

    fn extents(&mut self) -> &mut Vec<Extent> {
        &mut self.extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_and_joined() {
        let (mut front, marks) = (LocalBuffers::default(), &mut Marks::off());
        let mut local = LocalBuffers::of_range(AlignedBuf::new(4096, 4096).unwrap(), 512..2048);
        assert!(local.is_aligned(512, 512) && !local.is_aligned(1024, 512) && !local.is_aligned(512, 1024));
        local.write(&[1; 4096], marks);
        local.split_to(512, &mut front, marks);
        assert_eq!((front.left(), local.left()), (512, 1024));
        front.zero(u64::MAX, marks);
        let Buffers::Owned(buffer) = front.give() else { panic!("there is a buffer") };
        assert_eq!(buffer.window(), 512..1024);
        front.take_back(Buffers::Owned(buffer));
        front.advance(512, marks);
        local.join(&mut front, marks);
        let mut bytes = [9; 1025];
        local.read(&mut bytes);
        assert_eq!((bytes[0], bytes[1023], bytes[1024]), (1, 1, 9));
        let buffer = local.take().unwrap();
        assert_eq!((buffer[511], buffer[512], buffer[1024], buffer[2048]), (0, 0, 1, 0));
    }
}
