//! The memory that requests read from and write to: pieces of shared memory, owned by one side at a time.

use std::fmt;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use kickless_memory::Gpa;

use crate::memory::Region;
use crate::page_pool::PagePool;

/// The disk's own memory, and the pool that allocates buffers from it.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    pub(crate) region: Arc<Region>,
    pub(crate) pool: PagePool,
}

/// A piece of memory that the device reads and writes without a copy.
///
/// It is a piece of the disk's own shared memory ([`Disk::buffer`](crate::Disk::buffer)) or of registered
/// memory ([`Registered::buffer`]).
///
/// A request owns its buffers until the device is done, even if its caller stops waiting. Its
/// [`Completion`](crate::Completion) returns them. The back-end can write to shared memory at any time, so
/// there is no Rust reference to these bytes. They are copied in and out, or accessed through the pointer.
pub struct Buffer {
    owner: Owner,
    addr: u64,
    /// The number of bytes that a request transfers.
    len: u32,
    /// The number of bytes in the buffer.
    capacity: u32,
}

enum Owner {
    PagePool(Arc<OwnMemory>),
    Region(Arc<Region>),
    /// A part of a shared buffer.
    Whole(Arc<Buffer>),
}

impl Buffer {
    /// Allocates `len` bytes of the disk's own memory.
    pub(crate) fn take(memory: &Arc<OwnMemory>, len: u32) -> Option<Self> {
        let addr = memory.pool.take(len.into())?;
        Some(Self { owner: Owner::PagePool(memory.clone()), addr, len, capacity: len })
    }

    /// Makes a buffer of memory that was allocated already.
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

    /// Lets several requests use parts of the buffer at once.
    pub fn share(self) -> SharedBuffer {
        SharedBuffer(Arc::new(self))
    }

    /// Returns the number of bytes that a request transfers: all bytes, or the value of [`Buffer::set_len`].
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether a request transfers no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes in the buffer.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Limits the transfer of a request to the first `len` bytes, at most [`Buffer::capacity`].
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        self.len = u32::try_from(len).unwrap_or(u32::MAX).min(self.capacity);
    }

    /// Copies bytes from `offset` on out of the buffer, up to its capacity. Returns the number of bytes
    /// copied.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> usize {
        let len = into.len().min(self.capacity().saturating_sub(offset));
        let into = into.get_mut(..len).unwrap_or_default();
        // The constructors ensure that the buffer is in the region.
        let copied = self.region().map().read(Gpa(self.addr + offset as u64), into);
        debug_assert!(len == 0 || copied.is_ok());
        len
    }

    /// Copies bytes into the buffer from `offset` on, up to its capacity. Returns the number of bytes copied.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> usize {
        let len = from.len().min(self.capacity().saturating_sub(offset));
        let from = from.get(..len).unwrap_or_default();
        let copied = self.region().map().write(Gpa(self.addr + offset as u64), from);
        debug_assert!(len == 0 || copied.is_ok());
        len
    }

    /// Returns a copy of the bytes that a request transfers.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len()];
        self.read(0, &mut copy);
        copy
    }

    /// Returns a pointer to the [`Buffer::capacity`] bytes in this process.
    ///
    /// It is valid while the buffer lives or a request owns it. The back-end can write there at any time.
    pub fn as_ptr(&self) -> NonNull<u8> {
        let at = self.region().map().contiguous(Gpa(self.addr), self.capacity.into());
        at.unwrap_or(NonNull::dangling())
    }

    #[inline]
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns whether this is a piece of the disk's own memory, or of memory registered with the same disk.
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

/// A buffer whose parts several requests use at once ([`Buffer::share`]).
///
/// The memory is freed when this and all parts are dropped.
#[derive(Debug)]
pub struct SharedBuffer(Arc<Buffer>);

impl SharedBuffer {
    /// Returns the number of bytes in the buffer.
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Returns a buffer of `len` bytes from `offset` on, or `None` if the range is too long.
    ///
    /// Buffers may overlap; nothing prevents that.
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

    /// Returns a pointer to the bytes, as [`Buffer::as_ptr`].
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.0.as_ptr()
    }
}

/// The caller's own memory, registered with a disk ([`Disk::register`](crate::Disk::register)).
///
/// After this and all its buffers are dropped, the next registration tells the back-end that the memory is
/// gone. [`Disk::unregister`](crate::Disk::unregister) does it at once.
#[derive(Debug)]
pub struct Registered(pub(crate) Arc<Region>);

impl Registered {
    /// Returns the number of registered bytes.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Returns `false`: registered memory is never empty.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns a buffer of `len` bytes from `offset` on, or `None` if the range is too long.
    ///
    /// Buffers may overlap; nothing prevents that.
    pub fn buffer(&self, offset: u64, len: u32) -> Option<Buffer> {
        let end = offset.checked_add(len.into())?;
        let owner = Owner::Region(self.0.clone());
        (end <= self.0.len()).then(|| Buffer { owner, addr: self.0.gpa() + offset, len, capacity: len })
    }

    /// Returns a pointer to the [`Registered::len`] bytes in this process.
    ///
    /// The driver chooses the address. It is valid while this or a buffer of it lives. The back-end can write
    /// there at any time.
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
    /// No memory.
    #[default]
    None,
    /// One piece.
    One(Buffer),
    /// Several pieces, one after the other.
    Many(Vec<Buffer>),
}

impl Data {
    /// Returns the pieces in their order.
    #[inline]
    pub fn pieces(&self) -> &[Buffer] {
        match self {
            Self::None => &[],
            Self::One(buffer) => std::slice::from_ref(buffer),
            Self::Many(buffers) => buffers,
        }
    }

    /// Returns the buffer, if the data are one piece.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::One(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Returns the number of bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::One(buffer) => buffer.len.into(),
            Self::Many(buffers) => buffers.iter().map(|buffer| u64::from(buffer.len)).sum(),
        }
    }

    /// Returns whether there are no bytes.
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
