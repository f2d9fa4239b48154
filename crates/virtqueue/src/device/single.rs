//! Chains of a single descriptor, which a device reads and completes in batches.
//!
//! A network card carries a frame in a few nanoseconds, and nearly every frame of a driver is one descriptor.
//! [`Queue::peek`](super::Queue::peek) reads the descriptors of up to a batch of such chains, one after the
//! other, so that the lines of all of them are on their way from the driver's core at the same time. The
//! device copies the frames, and [`Queue::complete_peeked`](super::Queue::complete_peeked) pops and pushes
//! all of them.
//!
//! # Nothing is in flight in between
//! A peek changes nothing in the queue but its copy of the avail index. The chains stay in the ring until
//! they are completed. A device that cannot carry a chain of the batch completes those before it, and pops
//! that one as any other. So each chain that is not the usual one, whatever is wrong with it, is checked
//! and reported by [`Queue::pop`](super::Queue::pop).
//!
//! The descriptors are read once, into [`SingleChain`]. If the driver changes them afterwards, a later pop of
//! the same chain reads them again and decides anew.
//!
//! # When there is nothing to peek
//! A peek finds nothing in these cases, and the device pops:
//! * Chains are in flight, or credit. Then the order of completions, the duplicates among the ids of a packed
//!   ring, and the positions of IN_ORDER depend on them. With nothing in flight, a chain that is popped and
//!   pushed at once can be no duplicate, and is the oldest.
//! * The queue has an in-flight buffer, in which each chain has to be recorded.
//! * The driver is behind a vIOMMU, or an area of the ring is scattered.

use crate::Buffer;
use crate::descriptor::Descriptor;
use kickless_memory::View;
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// A chain of a single descriptor, which is still in the ring.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleChain {
    /// The head; in a packed ring, the buffer id.
    pub(super) id: u16,
    /// The buffer.
    pub buffer: Buffer,
    /// The number of bytes that the device has written, for [`Queue::complete_peeked`].
    ///
    /// [`Queue::complete_peeked`]: super::Queue::complete_peeked
    pub written: u32,
}

/// The direction of the buffers that a device looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The device reads them.
    Readable,
    /// The device writes them.
    Writable,
}

impl SingleChain {
    /// Takes the descriptor of a chain, and prefetches its buffer. Returns `false`, and changes nothing, if
    /// it is not a chain of one descriptor in this direction.
    #[inline(always)]
    pub(super) fn set(&mut self, id: u16, desc: Descriptor, direction: Direction, view: &View) -> bool {
        let is_writable = direction == Direction::Writable;
        let flags = if is_writable { DESC_F_WRITE } else { 0 };
        if desc.flags & (DESC_F_NEXT | DESC_F_WRITE | DESC_F_INDIRECT) != flags || desc.len == 0 {
            return false;
        }
        // Field by field, so that no copy of the chain is made first.
        self.id = id;
        self.buffer = Buffer { addr: View::direct(desc.addr), len: desc.len };
        self.written = 0;
        // For a write in both directions. A driver that passes on what it got has only read these lines, and
        // the device writes them again when the buffer is in a receive ring. Read here, they would be on both
        // processors until then, and the write would have to take them. Lines that the driver has written
        // move with the first read too, at least on processors of AMD.
        view.prefetch_lines(self.buffer.addr, self.buffer.len.into());
        true
    }
}
