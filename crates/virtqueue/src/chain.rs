//! Descriptor chains.

use crate::RingError;
use kickless_memory::{Area, Gpa, Map};
use kickless_spec::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};

/// The most descriptors in a chain with an indirect table, where the queue itself is smaller.
///
/// The standard allows no chain longer than the queue size (virtio 1.3, section 2.7.5.3.1), but Linux' driver heeds only
/// what the device's config space says (`seg_max` of a disk), which the device must fix before it learns the queue
/// size. So, like QEMU, we take what the largest queue of that age would have allowed.
pub const INDIRECT_CHAIN_MAX: u16 = 1024;

/// Bytes in a chain, at most (virtio 1.3, section 2.7.5.2).
const CHAIN_BYTES_MAX: u64 = 1 << 32;

/// Spare capacity that is kept for the next chain; after a longer one it is given back.
const BUFFERS_KEPT: usize = 256;

/// One buffer of a chain, as the driver described it: nothing says yet that there is memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Its guest-physical address.
    pub addr: Gpa,
    /// Its length in bytes; never zero.
    pub len: u32,
}

/// One popped chain. Made once and used again for each pop, so that popping allocates nothing.
///
/// Buffers of zero bytes are legal and left out.
#[derive(Debug, Default)]
pub struct Chain {
    /// The id of the chain: what is pushed when it was used.
    pub head: u16,
    /// First the readable ones, then the writable ones.
    buffers: Vec<Buffer>,
    readable: usize,
    readable_len: u64,
    writable_len: u64,
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

    /// Bytes in the writable buffers.
    #[inline]
    pub fn writable_len(&self) -> u64 {
        self.writable_len
    }

    #[inline]
    fn clear(&mut self, head: u16) {
        self.head = head;
        self.buffers.clear();
        if self.buffers.capacity() > BUFFERS_KEPT {
            self.buffers.shrink_to(BUFFERS_KEPT);
        }
        self.readable = 0;
        self.readable_len = 0;
        self.writable_len = 0;
    }

    /// Takes the chain that starts at `head` of the descriptor table `table` of `size` entries. Each descriptor is read
    /// once. After an error the content is unspecified, but for `head`.
    #[inline]
    pub(crate) fn walk(
        &mut self,
        map: &Map,
        table: &Area,
        size: u16,
        indirect: bool,
        head: u16,
    ) -> Result<(), RingError> {
        self.clear(head);
        if head >= size {
            return Err(RingError::Head { head, size });
        }
        let mut walk = Walk { chain: self, left: size, max: size, writable: false };
        let read = |index: u16| Ok(table.read::<Desc>(size_of::<Desc>() * usize::from(index)));
        if let Some(desc) = walk.table(head, u32::from(size), read)? {
            walk.indirect(map, &desc, indirect)?;
        }
        let len = self.readable_len + self.writable_len;
        if len > CHAIN_BYTES_MAX {
            return Err(RingError::TooManyBytes { head, len });
        }
        Ok(())
    }
}

/// A walk under way.
struct Walk<'a> {
    chain: &'a mut Chain,
    /// Descriptors that may still come.
    left: u16,
    /// What `left` started from.
    max: u16,
    /// Whether a writable buffer was seen.
    writable: bool,
}

impl Walk<'_> {
    /// Follows the chain from `index` in a table of `entries` descriptors. Ends with the descriptor of an indirect
    /// table, or with none at the end of the chain.
    #[inline]
    fn table(
        &mut self,
        mut index: u16,
        entries: u32,
        read: impl Fn(u16) -> Result<Desc, RingError>,
    ) -> Result<Option<Desc>, RingError> {
        loop {
            // A loop has no end, but the count has.
            let head = self.chain.head;
            self.left = self.left.checked_sub(1).ok_or(RingError::TooLong { head, max: self.max })?;
            let desc = read(index)?;
            let flags = desc.flags.get();
            if flags & DESC_F_INDIRECT != 0 {
                return Ok(Some(desc));
            }
            self.add(&desc, flags)?;
            if flags & DESC_F_NEXT == 0 {
                return Ok(None);
            }
            index = desc.next.get();
            if u32::from(index) >= entries {
                return Err(RingError::Next { head, next: index, entries });
            }
        }
    }

    #[inline]
    fn add(&mut self, desc: &Desc, flags: u16) -> Result<(), RingError> {
        let buffer = Buffer { addr: Gpa(desc.addr.get()), len: desc.len.get() };
        let writable = flags & DESC_F_WRITE != 0;
        if writable {
            self.writable = true;
            self.chain.writable_len += u64::from(buffer.len);
        } else if self.writable {
            return Err(RingError::Order { head: self.chain.head });
        } else {
            self.chain.readable_len += u64::from(buffer.len);
        }
        if buffer.len != 0 {
            self.chain.buffers.push(buffer);
            self.chain.readable += usize::from(!writable);
        }
        Ok(())
    }

    /// Goes on in the indirect table that `desc` describes, which ends the chain. Whether it says WRITE means nothing
    /// (virtio 1.3, section 2.7.5.3.2).
    fn indirect(&mut self, map: &Map, desc: &Desc, negotiated: bool) -> Result<(), RingError> {
        let (head, addr, len) = (self.chain.head, Gpa(desc.addr.get()), desc.len.get());
        if !negotiated {
            return Err(RingError::IndirectNotNegotiated { head });
        }
        if desc.flags.get() & DESC_F_NEXT != 0 {
            return Err(RingError::IndirectNext { head, next: desc.next.get() });
        }
        if len == 0 || !len.is_multiple_of(size_of::<Desc>() as u32) {
            return Err(RingError::IndirectLen { head, len });
        }
        let entries = len / size_of::<Desc>() as u32;
        // The descriptor of the table itself is no part of the sum.
        self.left += 1;
        if self.max < INDIRECT_CHAIN_MAX {
            self.left += INDIRECT_CHAIN_MAX - self.max;
            self.max = INDIRECT_CHAIN_MAX;
        }
        let nested = match map.span(addr, u64::from(len)) {
            Some(span) => {
                self.table(0, entries, |index| Ok(span.read(size_of::<Desc>() * usize::from(index))))?
            }
            // The table goes over the seam of two slots, or partly outside them.
            None => self.table(0, entries, |index| {
                addr.checked_add(size_of::<Desc>() as u64 * u64::from(index))
                    .and_then(|at| map.read_obj(at).ok())
                    .ok_or(RingError::IndirectUnmapped { head, addr: addr.0, len })
            })?,
        };
        nested.map_or(Ok(()), |_| Err(RingError::IndirectNested { head }))
    }
}
