//! What a device sees of guest memory.

use crate::fault::Damaged;
use crate::{Gpa, Iova, Map, Span, Unmapped};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a device sees of guest memory at one moment. Never changes: a change makes a new view, which each worker takes when
/// it next looks. A request in flight keeps the view that it was submitted with.
///
/// A device reads and writes guest memory through a view and nothing else, at the addresses of the chains that it popped.
#[derive(Debug, Default)]
pub struct View {
    map: Map,
}

impl View {
    /// A view of this memory.
    pub fn new(map: Map) -> Self {
        Self { map }
    }

    /// The memory in view.
    #[inline]
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Memory in view that has lost pages, if there is some: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        self.map.damaged()
    }

    /// The guest-physical address that a driver's address stands for: the same number, where no IOMMU stands between.
    #[inline]
    pub fn direct(iova: Iova) -> Gpa {
        Gpa(iova.0)
    }

    /// As [`Map::contains`].
    #[inline]
    pub fn contains(&self, gpa: Gpa, len: u64) -> bool {
        self.map.contains(gpa, len)
    }

    /// As [`Map::span`].
    #[inline]
    pub fn span(&self, gpa: Gpa, len: u64) -> Option<Span<'_>> {
        self.map.span(gpa, len)
    }

    /// As [`Map::read`].
    ///
    /// # Errors
    /// A part of the range is not guest memory; `into` then holds what came before it.
    pub fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), Unmapped> {
        self.map.read(gpa, into)
    }

    /// As [`Map::write`].
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing was written then.
    pub fn write(&self, gpa: Gpa, from: &[u8]) -> Result<(), Unmapped> {
        self.map.write(gpa, from)
    }

    /// As [`Map::read_obj`].
    ///
    /// # Errors
    /// A part of the range is not guest memory.
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, gpa: Gpa) -> Result<T, Unmapped> {
        self.map.read_obj(gpa)
    }

    /// As [`Map::write_obj`].
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing was written then.
    #[inline]
    pub fn write_obj<T: IntoBytes + Immutable>(&self, gpa: Gpa, value: &T) -> Result<(), Unmapped> {
        self.map.write_obj(gpa, value)
    }
}
