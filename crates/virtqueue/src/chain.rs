//! Descriptor chains.

mod walk;

use kickless_memory::Gpa;

/// The most descriptors in a chain with an indirect table, where the queue itself is smaller.
///
/// The standard allows no chain longer than the queue size (virtio 1.3, section 2.7.5.3.1), but Linux' driver
/// heeds only what the device's config space says (`seg_max` of a disk), which the device must fix before it
/// learns the queue size. So, like QEMU, we take what the largest queue of that age would have allowed.
pub const INDIRECT_CHAIN_MAX: u16 = 1024;

/// Spare capacity that is kept for the next chain; after a longer one it is given back.
pub(crate) const BUFFERS_KEPT: usize = 256;

/// One buffer of a chain, as the driver described it, or, behind a vIOMMU, a piece of one: nothing says yet that there is
/// memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Its guest-physical address.
    pub addr: Gpa,
    /// Its length in bytes; never zero.
    pub len: u32,
}

/// Names a chain in flight: what completes it ([`Queue::push`](crate::device::Queue::push)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
// Aligned, so that it moves as one word.
#[repr(align(4))]
pub struct ChainId {
    /// The index of the first descriptor; in a packed ring, the buffer id.
    pub head: u16,
    /// With IN_ORDER, the chain's place among those that were popped; otherwise it means nothing.
    pub(crate) position: u16,
}

/// One popped chain. Made once and used again for each pop, so that popping allocates nothing.
///
/// Buffers of zero bytes are legal and left out.
#[derive(Debug, Default)]
pub struct Chain {
    /// Completes it.
    pub id: ChainId,
    /// First the readable ones, then the writable ones.
    buffers: Vec<Buffer>,
    readable: usize,
    readable_len: u64,
    writable_len: u64,
    descriptors: u16,
    places: u16,
}

impl Chain {
    /// The buffers that the device reads, in order.
    #[inline]
    pub fn readable(&self) -> &[Buffer] {
        // `readable` never exceeds the length; the form without a panic costs the same.
        self.buffers.split_at_checked(self.readable).map_or(&[], |(readable, _)| readable)
    }

    /// The buffers that the device writes, in order.
    #[inline]
    pub fn writable(&self) -> &[Buffer] {
        self.buffers.get(self.readable..).unwrap_or(&[])
    }

    /// Bytes in the readable buffers; with [`Chain::writable_len`] at most 2^32.
    #[inline]
    pub fn readable_len(&self) -> u64 {
        self.readable_len
    }

    /// Descriptors that were read, those of buffers without bytes among them.
    #[inline]
    pub fn descriptors(&self) -> u16 {
        self.descriptors
    }

    /// Returns the number of descriptors that it takes in the ring, those in an indirect table left out.
    #[inline]
    pub fn places(&self) -> u16 {
        self.places
    }

    /// Bytes in the writable buffers.
    #[inline]
    pub fn writable_len(&self) -> u64 {
        self.writable_len
    }

    /// Returns the number of buffers that it has memory for.
    pub fn capacity(&self) -> usize {
        self.buffers.capacity()
    }

    /// Keeps only the first writable buffers that together hold at least `bytes` bytes, or all if they hold fewer.
    /// Drops the readable buffers and gives their memory back: the chain keeps memory for at most twice its
    /// buffers, or for four.
    #[inline]
    pub fn keep_writable(&mut self, bytes: u64) {
        if self.readable > 0 || self.writable_len > bytes {
            self.drop_buffers_beyond(bytes);
        }
        // A vector grows to the next power of two, and to four at least: only memory of longer chains is given back.
        if self.buffers.capacity() > 2 * self.buffers.len().max(2) {
            self.buffers.shrink_to_fit();
        }
    }

    fn drop_buffers_beyond(&mut self, bytes: u64) {
        self.buffers.drain(..self.readable);
        (self.readable, self.readable_len) = (0, 0);
        let mut kept = 0;
        let count = self.buffers.iter().take_while(|buffer| {
            let is_needed = kept < bytes;
            kept += if is_needed { u64::from(buffer.len) } else { 0 };
            is_needed
        });
        let count = count.count();
        self.buffers.truncate(count);
        self.writable_len = kept;
    }

    /// Forgets the buffers, and keeps memory for at most this many.
    pub fn clear(&mut self, kept: usize) {
        self.buffers.clear();
        self.buffers.shrink_to(kept);
        *self = Self { buffers: std::mem::take(&mut self.buffers), ..Self::default() };
    }
}
