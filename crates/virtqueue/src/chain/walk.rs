//! Walks along a chain's descriptors: in the table, a packed ring, copies of it, or an indirect table.

use super::{BUFFERS_KEPT, Buffer, Chain, ChainId, INDIRECT_CHAIN_MAX};
use crate::RingError;
use crate::access::Access;
use crate::address_space::AddressSpace;
use crate::descriptor::Descriptor;
use crate::device::{Areas, Options};
use crate::packed::RingPosition;
use kickless_memory::Iova;
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};
use zerocopy::IntoBytes;

/// Largest number of bytes in a chain (virtio 1.3, section 2.7.5.2).
const CHAIN_BYTES_MAX: u64 = 1 << 32;

impl Chain {
    /// Reads the chain that starts at descriptor `head`. Each descriptor is read once. After an error, or if
    /// `space` is missing a translation, only the head is valid.
    #[inline(always)]
    pub(crate) fn walk<'v, S: AddressSpace<'v>, A: Access>(
        &mut self,
        space: &mut S,
        ring: &Areas<A>,
        head: u16,
    ) -> Result<(), RingError> {
        let size = ring.options().size();
        self.begin(head);
        if head >= size {
            return Err(RingError::Head { head, size });
        }
        let mut walk = Walk::new(head, size);
        let table = walk
            .table(&mut self.buffers, space, head, u32::from(size), |_, index| Ok(ring.descriptor(index)))?;
        self.ring_descriptors = walk.count();
        if let Some(table) = table {
            walk = walk.indirect(&mut self.buffers, space, &table, ring.options())?;
        }
        self.end(space, walk)
    }

    /// Reads the chain that starts at `position` of a packed ring, in which at most `room` descriptors can be
    /// available. Returns their number. Errors name the index instead of the head.
    #[inline]
    pub(crate) fn walk_packed<'v, S: AddressSpace<'v>, A: Access>(
        &mut self,
        space: &mut S,
        ring: &Areas<A>,
        position: RingPosition,
        room: u16,
    ) -> Result<u16, RingError> {
        let size = ring.options().size();
        let mut next = position;
        self.walk_ring(space, ring.options(), position.index, room, |_| {
            let at = next;
            next = next.after(1, size);
            ring.packed_descriptor(at)
        })
    }

    /// Reads a chain from copies of its descriptors in a packed ring. The last one of them ends the chain.
    pub(crate) fn walk_copies<'v, S: AddressSpace<'v>>(
        &mut self,
        space: &mut S,
        options: &Options,
        copies: &[[u64; 2]],
    ) -> Result<u16, RingError> {
        self.walk_ring(space, options, 0, options.size(), |nth| {
            let words = copies.get(usize::from(nth)).copied().unwrap_or_default();
            Descriptor::from_packed(words)
        })
    }

    /// Walks a chain of a packed ring. `read` gets 0, 1, 2 and so on, each once.
    #[inline(always)]
    fn walk_ring<'v, S: AddressSpace<'v>>(
        &mut self,
        space: &mut S,
        options: &Options,
        first: u16,
        room: u16,
        mut read: impl FnMut(u16) -> Descriptor,
    ) -> Result<u16, RingError> {
        self.begin(first);
        let (mut count, mut id) = (0, 0);
        let mut walk = Walk::new(first, room);
        let entries = u32::from(options.size()) + 1;
        let table = walk.table(&mut self.buffers, space, 0, entries, |_, nth| {
            let desc = read(nth);
            (count, id) = (nth + 1, desc.next);
            Ok(Descriptor { next: nth + 1, ..desc })
        })?;
        self.ring_descriptors = walk.count();
        if let Some(table) = table {
            walk = walk.indirect(&mut self.buffers, space, &table, options)?;
        }
        self.id = ChainId::new(id, 0);
        self.end(space, walk)?;
        Ok(count)
    }

    #[inline]
    fn begin(&mut self, head: u16) {
        self.id = ChainId::new(head, 0);
        self.buffers.clear();
        if self.buffers.capacity() > BUFFERS_KEPT {
            self.buffers.shrink_to(BUFFERS_KEPT);
        }
    }

    #[inline]
    fn end<'v, S: AddressSpace<'v>>(&mut self, space: &mut S, mut walk: Walk) -> Result<(), RingError> {
        if !walk.writable {
            walk.end_readable(&self.buffers);
        }
        // At most 2^16 descriptors of less than 2^32 bytes each, so the sum has not overflowed.
        if walk.len > CHAIN_BYTES_MAX {
            return Err(RingError::TooManyBytes { head: walk.head, len: walk.len });
        }
        space.finish(&mut self.buffers, &mut walk.readable, walk.len);
        self.descriptors = walk.count();
        self.readable = walk.readable;
        self.readable_len = walk.readable_len;
        self.writable_len = walk.len - walk.readable_len;
        Ok(())
    }
}

/// A walk in progress. The methods on the usual path are inlined, so that the fields stay in registers.
struct Walk {
    head: u16,
    /// The number of descriptors that may still follow.
    left: u16,
    /// The first value of `left`.
    max: u16,
    /// Bytes of all buffers.
    len: u64,
    /// Whether a writable buffer was seen.
    writable: bool,
    /// Number of readable buffers and their bytes, once a writable one was seen.
    readable: usize,
    readable_len: u64,
}

impl Walk {
    #[inline]
    fn new(head: u16, max: u16) -> Self {
        Self { head, left: max, max, len: 0, writable: false, readable: 0, readable_len: 0 }
    }

    /// Notes that the buffers so far are the readable ones.
    #[inline]
    fn end_readable(&mut self, buffers: &[Buffer]) {
        (self.readable, self.readable_len) = (buffers.len(), self.len);
    }

    /// Returns the number of descriptors that were read.
    #[inline]
    fn count(&self) -> u16 {
        self.max - self.left
    }

    /// Follows the chain from `index` in a table of `entries` descriptors. Returns the descriptor of an
    /// indirect table, or `None` at the end of the chain.
    #[inline(always)]
    fn table<'v, S: AddressSpace<'v>>(
        &mut self,
        buffers: &mut Vec<Buffer>,
        space: &mut S,
        mut index: u16,
        entries: u32,
        mut read: impl FnMut(&mut S, u16) -> Result<Descriptor, RingError>,
    ) -> Result<Option<Descriptor>, RingError> {
        let head = self.head;
        loop {
            // A chain with a loop has no end. The count ends the walk.
            self.left = self.left.checked_sub(1).ok_or(RingError::TooLong { head, max: self.max })?;
            let desc = read(space, index)?;
            if desc.flags & DESC_F_INDIRECT != 0 {
                return Ok(Some(desc));
            }
            let writable = desc.flags & DESC_F_WRITE != 0;
            if writable && !self.writable {
                self.end_readable(buffers);
                self.writable = true;
            } else if self.writable && !writable {
                return Err(RingError::Order { head });
            }
            self.len += u64::from(desc.len);
            if desc.len != 0 {
                space.add_buffer(buffers, desc.addr, desc.len, writable);
            }
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(None);
            }
            index = desc.next;
            if u32::from(index) >= entries {
                return Err(RingError::Next { head, next: index, entries });
            }
        }
    }

    /// Continues in the indirect table that `desc` describes, which ends the chain. Its WRITE flag has no
    /// meaning (virtio 1.3, section 2.7.5.3.2).
    #[inline(never)]
    fn indirect<'v, S: AddressSpace<'v>>(
        mut self,
        buffers: &mut Vec<Buffer>,
        space: &mut S,
        desc: &Descriptor,
        options: &Options,
    ) -> Result<Self, RingError> {
        const DESC: u32 = size_of::<Desc>() as u32;
        let (head, addr, len) = (self.head, desc.addr, desc.len);
        let packed = options.is_packed();
        if !options.indirect() {
            return Err(RingError::IndirectNotNegotiated { head });
        }
        if desc.flags & DESC_F_NEXT != 0 {
            return Err(RingError::IndirectNext { head, next: desc.next });
        }
        if len == 0 || !len.is_multiple_of(DESC) {
            return Err(RingError::IndirectLen { head, len });
        }
        // The descriptor of the table itself does not count.
        self.left += 1;
        if self.max < INDIRECT_CHAIN_MAX {
            self.left += INDIRECT_CHAIN_MAX - self.max;
            self.max = INDIRECT_CHAIN_MAX;
        }
        let entries = len / DESC;
        // The bytes that a 16-bit index can reach. The driver may describe a longer table.
        let reach = len.min(DESC << 16);
        let nested = match space.table(addr, reach) {
            Some(span) => self.table(buffers, space, 0, entries, |_, index| {
                let words = span.read(DESC as usize * usize::from(index));
                Ok(Descriptor::in_table(words, packed, index, entries))
            })?,
            None => self.scattered(buffers, space, addr, len, packed)?,
        };
        match nested {
            None => Ok(self),
            Some(_) => Err(RingError::IndirectNested { head }),
        }
    }

    /// Walks an indirect table that crosses from one slot to another, or is partly outside of them.
    #[cold]
    fn scattered<'v, S: AddressSpace<'v>>(
        &mut self,
        buffers: &mut Vec<Buffer>,
        space: &mut S,
        addr: Iova,
        len: u32,
        packed: bool,
    ) -> Result<Option<Descriptor>, RingError> {
        let (head, entries) = (self.head, len / size_of::<Desc>() as u32);
        self.table(buffers, space, 0, entries, |space, index| {
            let mut words = [0u64; 2];
            addr.checked_add(size_of::<Desc>() as u64 * u64::from(index))
                .filter(|at| space.read(*at, words.as_mut_bytes()))
                .map(|_| Descriptor::in_table(words, packed, index, entries))
                .ok_or(RingError::IndirectUnmapped { head, addr: addr.0, len })
        })
    }
}
