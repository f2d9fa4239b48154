//! What requests read from and write to: pieces of shared memory, owned by one side at a time.

use std::fmt;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use kickless_memory::Gpa;

use crate::memory::Region;
use crate::page_pool::PagePool;

/// Where buffers of the disk's own memory come from and return to.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    pub(crate) region: Arc<Region>,
    pub(crate) pool: PagePool,
}

/// Bytes that the device reads and writes without a copy: a piece of the disk's own shared memory
/// ([`Disk::buffer`](crate::Disk::buffer)) or of memory that was registered ([`Registered::buffer`]).
///
/// A request owns its buffers until the device is done, also if nobody waits for it any more, and its
/// [`Completion`](crate::Completion) brings them back. The back-end can write to shared memory whenever it likes, so no Rust
/// reference to these bytes is given out: they are copied in and out, or reached by the pointer.
pub struct Buffer {
    owner: Owner,
    addr: u64,
    /// What a request transfers.
    len: u32,
    /// What there is.
    capacity: u32,
}

enum Owner {
    PagePool(Arc<OwnMemory>),
    Region(Arc<Region>),
    /// A part of a buffer that several requests use.
    Whole(Arc<Buffer>),
}

impl Buffer {
    /// Takes `len` bytes of the disk's own memory.
    pub(crate) fn take(memory: &Arc<OwnMemory>, len: u32) -> Option<Self> {
        let addr = memory.pool.take(len.into())?;
        Some(Self { owner: Owner::PagePool(memory.clone()), addr, len, capacity: len })
    }

    /// The same for memory that the pool gave out already.
    pub(crate) fn from_taken(memory: &Arc<OwnMemory>, addr: u64, len: u32) -> Self {
        Self { owner: Owner::PagePool(memory.clone()), addr, len, capacity: len }
    }

    #[inline]
    fn region(&self) -> &Arc<Region> {
        match &self.owner {
            Owner::PagePool(memory) => &memory.region,
            Owner::Region(region) => region,
            Owner::Whole(whole) => whole.region(),
        }
    }

    /// Lets several requests use parts of it at once.
    pub fn share(self) -> SharedBuffer {
        SharedBuffer(Arc::new(self))
    }

    /// How many bytes a request transfers; all of them, unless [`Buffer::set_len`] said otherwise.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether a request transfers no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes there are.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Lets requests transfer the first `len` bytes, at most [`Buffer::capacity`].
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        self.len = u32::try_from(len).unwrap_or(u32::MAX).min(self.capacity);
    }

    /// Copies from the buffer, from `offset` on; how many bytes there were up to its capacity.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> usize {
        let len = into.len().min(self.capacity().saturating_sub(offset));
        let into = into.get_mut(..len).unwrap_or_default();
        // In the region by its construction.
        let copied = self.region().map().read(Gpa(self.addr + offset as u64), into);
        debug_assert!(len == 0 || copied.is_ok());
        len
    }

    /// Copies into the buffer, from `offset` on; how many bytes there was room for.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> usize {
        let len = from.len().min(self.capacity().saturating_sub(offset));
        let from = from.get(..len).unwrap_or_default();
        let copied = self.region().map().write(Gpa(self.addr + offset as u64), from);
        debug_assert!(len == 0 || copied.is_ok());
        len
    }

    /// A copy of the bytes that a request transfers.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len()];
        self.read(0, &mut copy);
        copy
    }

    /// Its bytes in this process, [`Buffer::capacity`] of them, valid while the buffer lives or a request has it. The
    /// back-end can write there at any time.
    pub fn as_ptr(&self) -> NonNull<u8> {
        let at = self.region().map().contiguous(Gpa(self.addr), self.capacity.into());
        at.unwrap_or(NonNull::dangling())
    }

    #[inline]
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Whether it belongs to the disk whose own memory this is, or to memory registered there.
    #[inline]
    pub(crate) fn is_of(&self, memory: &Arc<OwnMemory>) -> bool {
        match &self.owner {
            Owner::PagePool(other) => Arc::ptr_eq(memory, other),
            Owner::Region(region) => !region.is_removed() && region.is_same_disk(&memory.region),
            Owner::Whole(whole) => whole.is_of(memory),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Owner::PagePool(memory) = &self.owner {
            memory.pool.give_back(self.addr, self.capacity.into());
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} of {} bytes at {:#x})", self.len, self.capacity, self.addr)
    }
}

/// A buffer of which several requests use parts at once ([`Buffer::share`]). The memory stays until this and all parts are
/// gone.
#[derive(Debug)]
pub struct SharedBuffer(Arc<Buffer>);

impl SharedBuffer {
    /// How many bytes there are.
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// `len` bytes from `offset` on, for one request at a time; `None` where there are none. Nothing keeps two of them from
    /// overlapping.
    #[inline]
    pub fn buffer(&self, offset: u64, len: u32) -> Option<Buffer> {
        let end = offset.checked_add(len.into())?;
        let owner = Owner::Whole(self.0.clone());
        (end <= self.0.capacity.into()).then(|| Buffer {
            owner,
            addr: self.0.addr + offset,
            len,
            capacity: len,
        })
    }

    /// As [`Buffer::as_ptr`].
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.0.as_ptr()
    }
}

/// The caller's own memory, registered with a disk ([`Disk::register`](crate::Disk::register)).
///
/// When the last handle was dropped and nothing is in flight, the back-end is told with the next registration, or by
/// [`Disk::unregister`](crate::Disk::unregister) at once.
#[derive(Debug)]
pub struct Registered(pub(crate) Arc<Region>);

impl Registered {
    /// How many bytes were registered.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Never: nothing can be registered that has no bytes.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// `len` bytes from `offset` on, for one request at a time; `None` where there are none. Nothing keeps two of them from
    /// overlapping.
    pub fn buffer(&self, offset: u64, len: u32) -> Option<Buffer> {
        let end = offset.checked_add(len.into())?;
        let owner = Owner::Region(self.0.clone());
        (end <= self.0.len()).then(|| Buffer { owner, addr: self.0.gpa() + offset, len, capacity: len })
    }

    /// Its bytes in this process, [`Registered::len`] of them, at an address of the driver's own, valid while this or a
    /// buffer of it lives. The back-end can write there at any time.
    pub fn as_ptr(&self) -> NonNull<u8> {
        let at = self.0.map().contiguous(Gpa(self.0.gpa()), self.0.len());
        at.unwrap_or(NonNull::dangling())
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// The memory of one request.
#[derive(Debug, Default)]
pub enum Data {
    /// None.
    #[default]
    None,
    /// In one piece.
    One(Buffer),
    /// In several, one after the other.
    Many(Vec<Buffer>),
}

impl Data {
    /// The pieces in their order.
    #[inline]
    pub fn pieces(&self) -> &[Buffer] {
        match self {
            Self::None => &[],
            Self::One(buffer) => std::slice::from_ref(buffer),
            Self::Many(buffers) => buffers,
        }
    }

    /// The one piece, if it is one.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::One(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// How many bytes it has.
    #[inline]
    pub fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::One(buffer) => buffer.len.into(),
            Self::Many(buffers) => buffers.iter().map(|buffer| u64::from(buffer.len)).sum(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<Buffer> for Data {
    fn from(buffer: Buffer) -> Self {
        Self::One(buffer)
    }
}

impl From<Vec<Buffer>> for Data {
    fn from(buffers: Vec<Buffer>) -> Self {
        Self::Many(buffers)
    }
}

const _: () = assert!(mem::size_of::<Data>() <= 40);
