//! Descriptor chains.

mod walk;

use kickless_memory::Gpa;

/// The most descriptors in a chain with an indirect table, if the queue itself is smaller.
///
/// The standard allows no chain longer than the queue size (virtio 1.3, section 2.7.5.3.1). But Linux' driver
/// only obeys the device's config space (`seg_max` of a disk), which the device must fix before it learns the
/// queue size. So, like QEMU, we accept the size of the largest queue of older devices.
pub const INDIRECT_CHAIN_MAX: u16 = 1024;

/// The largest number of buffers whose memory is kept for the next chain. The memory of further buffers is
/// freed.
pub(crate) const BUFFERS_KEPT: usize = 256;

/// One buffer of a chain as the driver described it, or a piece of one behind a vIOMMU. It need not be in
/// guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest-physical address.
    pub addr: Gpa,
    /// Length in bytes; never zero.
    pub len: u32,
}

/// Names a chain in flight. [`Queue::push`](crate::device::Queue::push) takes it to complete the chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
// One word instead of two fields: a load of four bytes would wait until two stores of two bytes have left the
// core's store buffer.
pub struct ChainId(u32);

impl ChainId {
    /// Makes the name of a chain, from its head and its position in the order of pops.
    pub(crate) fn new(head: u16, position: u16) -> Self {
        Self(u32::from(position) << 16 | u32::from(head))
    }

    /// The index of the first descriptor; in a packed ring, the buffer id.
    pub fn head(self) -> u16 {
        self.0 as u16
    }

    /// With IN_ORDER, the chain's position in the order of pops; otherwise 0.
    pub(crate) fn position(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

/// A popped chain. Reuse it for each pop, so that pops do not allocate.
///
/// Buffers of zero bytes are legal and left out.
#[derive(Debug, Default)]
pub struct Chain {
    /// The name of the chain.
    pub id: ChainId,
    /// The readable buffers, then the writable ones.
    buffers: Vec<Buffer>,
    readable: usize,
    readable_len: u64,
    writable_len: u64,
    descriptors: u16,
    ring_descriptors: u16,
}

impl Chain {
    /// Returns the buffers that the device reads, in order.
    pub fn readable(&self) -> &[Buffer] {
        // `readable` never exceeds the length. This form has no panic and costs the same.
        self.buffers.split_at_checked(self.readable).map_or(&[], |(readable, _)| readable)
    }

    /// Returns the buffers that the device writes, in order.
    pub fn writable(&self) -> &[Buffer] {
        self.buffers.get(self.readable..).unwrap_or(&[])
    }

    /// Returns the number of bytes in the readable buffers; with [`Chain::writable_len`] at most 2^32.
    pub fn readable_len(&self) -> u64 {
        self.readable_len
    }

    /// Returns the number of descriptors that were read, including those of empty buffers.
    pub fn descriptors(&self) -> u16 {
        self.descriptors
    }

    /// Returns the number of descriptors that the chain takes in the ring, without those of an indirect
    /// table.
    pub fn ring_descriptors(&self) -> u16 {
        self.ring_descriptors
    }

    /// Returns the number of bytes in the writable buffers.
    pub fn writable_len(&self) -> u64 {
        self.writable_len
    }

    /// Returns the number of buffers that the chain has memory for.
    pub fn capacity(&self) -> usize {
        self.buffers.capacity()
    }

    /// Keeps only the first writable buffers that together hold at least `bytes` bytes, or all if they hold
    /// fewer. Drops the readable buffers. Frees memory that is not needed: the chain keeps memory for at most
    /// twice its buffers, or for four buffers.
    pub fn keep_writable(&mut self, bytes: u64) {
        if self.readable > 0 || self.writable_len > bytes {
            self.drop_buffers_beyond(bytes);
        }
        // A vector grows to the next power of two, and to four at least. So this frees only the memory of
        // longer chains.
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

    /// Drops the buffers. Keeps memory for at most `kept` buffers.
    pub fn clear(&mut self, kept: usize) {
        self.buffers.clear();
        self.buffers.shrink_to(kept);
        *self = Self { buffers: std::mem::take(&mut self.buffers), ..Self::default() };
    }
}
