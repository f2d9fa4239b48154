//! What a device sees of guest memory.

use crate::fault::Damaged;
use crate::{Gpa, Iova, Log, LogError, Map, Marks, Span, Unmapped};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a device sees of guest memory at one moment. Never changes: a change makes a new view, which each worker takes when
/// it next looks. A request in flight keeps the view that it was submitted with.
///
/// A device reads and writes guest memory through a view and nothing else, at the addresses of the chains that it popped.
#[derive(Debug, Default)]
pub struct View {
    map: Map,
    log: Option<Arc<Log>>,
}

impl View {
    /// A view of this memory.
    pub fn new(map: Map) -> Self {
        Self { map, log: None }
    }

    /// The same, and what devices write is marked in this log, if there is one. A queue takes it from its current view
    /// ([`Marks::set_view`]), also for a request that was submitted with an older one.
    ///
    /// # Errors
    /// The log has not a bit for each page of this memory.
    pub fn with_log(self, log: Option<Arc<Log>>) -> Result<Self, LogError> {
        if let Some(log) = &log {
            log.covers(&self.map)?;
        }
        Ok(Self { log, ..self })
    }

    /// Lets go of a view that a request had, unless that is `current`. Who waits for memory that was removed finds all marks of
    /// what was written there in the log.
    #[inline]
    pub fn unpin_unless(pin: &mut Option<Arc<Self>>, current: &Arc<Self>, marks: &mut Marks) {
        if pin.as_ref().is_some_and(|pin| !Arc::ptr_eq(pin, current)) {
            marks.commit();
            *pin = None;
        }
    }

    /// Where writes are marked; it has a bit for each page of the memory in view.
    #[inline]
    pub fn log(&self) -> Option<&Arc<Log>> {
        self.log.as_ref()
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

    /// As [`Map::write`], and marked.
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing was written then.
    pub fn write(&self, gpa: Gpa, from: &[u8], marks: &mut Marks) -> Result<(), Unmapped> {
        self.map.write(gpa, from)?;
        marks.wrote_in(&self.map, gpa, from.len() as u64);
        Ok(())
    }

    /// As [`Map::read_obj`].
    ///
    /// # Errors
    /// A part of the range is not guest memory.
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, gpa: Gpa) -> Result<T, Unmapped> {
        self.map.read_obj(gpa)
    }

    /// As [`Map::write_obj`], and marked.
    ///
    /// # Errors
    /// A part of the range is not guest memory; nothing was written then.
    #[inline]
    pub fn write_obj<T: IntoBytes + Immutable>(
        &self,
        gpa: Gpa,
        value: &T,
        marks: &mut Marks,
    ) -> Result<(), Unmapped> {
        self.map.write_obj(gpa, value)?;
        marks.wrote_in(&self.map, gpa, size_of::<T>() as u64);
        Ok(())
    }
}

impl Marks {
    /// Sends marks to the log of this view from now on, if it has one, by the addresses that memory has in the view. Commits
    /// what was gathered to the log before.
    pub fn set_view(&mut self, view: &View) {
        self.set_log(view.log(), view.map().hosts());
    }
}
