//! A thread's way to guest memory.
#![expect(unsafe_code, reason = "island: copies to and from what the tables lead to")]

use crate::control::Mmu;
use crate::epoch::Member;
use crate::space::Space;
use crate::tlb::{Hit, Tlb};
use crate::tree::Tree;
use kickless_memory::{Iova, Unmapped, shared};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Reads and writes guest memory for one thread, with a cache of translations of its own; what it writes is logged if its slot is.
///
/// Harvests, and whoever takes memory or mappings away, wait for its next quiescent point. So its thread calls
/// [`Writer::quiesce`] often (between two requests, between two blocks of guest code), at least each few
/// milliseconds, and [`Writer::offline`] before it sleeps. Quiescent points cost one load of a word that rarely changes.
///
/// It is online when it is made.
pub struct Writer {
    place: Place,
    member: Member,
    tlb: Tlb,
}

enum Place {
    Direct(Arc<Mmu>),
    Space(Arc<Space>),
}

impl Place {
    #[inline]
    fn mmu(&self) -> &Mmu {
        match self {
            Self::Direct(mmu) => mmu,
            Self::Space(space) => &space.mmu,
        }
    }

    fn tree(&self) -> &Tree {
        match self {
            Self::Direct(mmu) => &mmu.direct,
            Self::Space(space) => &space.tree,
        }
    }
}

// SAFETY: the host addresses in its cache are of memory that any thread may access by copies; everything else is its own.
unsafe impl Send for Writer {}

impl Writer {
    /// Where an [`Iova`] is a guest-physical address of the same number.
    pub fn direct(mmu: &Arc<Mmu>) -> Self {
        Self::new(Place::Direct(mmu.clone()))
    }

    /// In a space of its own.
    pub fn within(space: &Arc<Space>) -> Self {
        Self::new(Place::Space(space.clone()))
    }

    fn new(place: Place) -> Self {
        let mut member = Member::join(&place.mmu().epochs);
        member.online(&place.mmu().epochs);
        Self { place, member, tlb: Tlb::new() }
    }

    /// A quiescent point: all that this writer has written so far is done, and it looks everything up anew if something has changed.
    #[inline]
    pub fn quiesce(&mut self) {
        if self.member.quiesce(&self.place.mmu().epochs) {
            self.tlb.flush();
        }
    }

    /// Goes offline until the guard is dropped: nobody waits for this writer meanwhile. For whoever sleeps, or asks for a harvest or a
    /// change itself.
    pub fn offline(&mut self) -> Offline<'_> {
        // A guard can be leaked: what is looked up next must not be in the cache, but find that nobody waits for it.
        self.tlb.flush();
        self.member.offline();
        Offline(self)
    }

    #[inline]
    fn hit(&mut self, addr: u64, write: bool) -> Option<Hit> {
        match self.tlb.find(addr, write) {
            Some(hit) => Some(hit),
            None => self.miss(addr, write),
        }
    }

    #[cold]
    fn miss(&mut self, addr: u64, write: bool) -> Option<Hit> {
        if self.member.is_offline() {
            self.member.online(&self.place.mmu().epochs);
        }
        // SAFETY: online, so in a section. The cache is emptied when the section ends and something was taken away.
        let extent = unsafe { self.place.mmu().resolve(self.place.tree(), addr, write) }?;
        self.tlb.fill(extent);
        extent.hit(addr)
    }

    /// Marks what was written, where that is how it is logged.
    #[inline]
    fn mark(hit: &Hit, len: u64) {
        if let Some(log) = hit.marks
            && len != 0
        {
            // SAFETY: the log is freed after a wait for this section.
            unsafe { log.as_ref() }.bits.mark_where_clear(hit.gpa, len);
        }
    }

    /// Calls `each` with the pieces of a range, as far as they go.
    fn pieces(
        &mut self,
        iova: Iova,
        len: u64,
        write: bool,
        mut each: impl FnMut(&Hit, usize, usize),
    ) -> Result<(), Unmapped> {
        let unmapped = Unmapped { addr: iova.0, len };
        let mut done = 0;
        while done < len {
            let addr = iova.0.checked_add(done).ok_or(unmapped)?;
            let hit = self.hit(addr, write).ok_or(unmapped)?;
            let here = hit.room.min(len - done);
            each(&hit, done as usize, here as usize);
            done += here;
        }
        Ok(())
    }

    /// Copies guest bytes out.
    ///
    /// # Errors
    /// A part of the range is not mapped; `into` then holds what came before it.
    pub fn read(&mut self, iova: Iova, into: &mut [u8]) -> Result<(), Unmapped> {
        self.pieces(iova, into.len() as u64, false, |hit, at, len| {
            // SAFETY: so many bytes of a slot, which is not unmapped before this section ends.
            unsafe { shared::read(hit.host, &mut into[at..at + len]) }
        })
    }

    /// Copies bytes into guest memory.
    ///
    /// # Errors
    /// A part of the range is not mapped, or not writable; what came before it is written.
    pub fn write(&mut self, iova: Iova, from: &[u8]) -> Result<(), Unmapped> {
        self.pieces(iova, from.len() as u64, true, |hit, at, len| {
            // SAFETY: as in `read`.
            unsafe { shared::write(hit.host, &from[at..at + len]) };
            Self::mark(hit, len as u64);
        })
    }

    /// Reads one value, once if it does not cross a page.
    ///
    /// # Errors
    /// A part of it is not mapped.
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&mut self, iova: Iova) -> Result<T, Unmapped> {
        if let Some(hit) = self.hit(iova.0, false)
            && hit.room >= size_of::<T>() as u64
        {
            // SAFETY: as in `read`.
            return Ok(unsafe { shared::read_obj(hit.host) });
        }
        let mut value = T::new_zeroed();
        self.read(iova, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Writes one value.
    ///
    /// # Errors
    /// As [`Writer::write`].
    #[inline]
    pub fn write_obj<T: IntoBytes + Immutable>(&mut self, iova: Iova, value: &T) -> Result<(), Unmapped> {
        if let Some(hit) = self.hit(iova.0, true)
            && hit.room >= size_of::<T>() as u64
        {
            // SAFETY: as in `read`.
            unsafe { shared::write_obj(hit.host, value) };
            Self::mark(&hit, size_of::<T>() as u64);
            return Ok(());
        }
        self.write(iova, value.as_bytes())
    }

    /// Says that `len` bytes at `iova` were written by other means than this writer, since its last quiescent point or before: by an
    /// asynchronous read into guest memory that has completed. They are resolved again here, for the translation that the read was
    /// submitted with may have been protected meanwhile.
    ///
    /// What the read was submitted with must keep the memory mapped ([`kickless_memory::Iov`] does). It counts as written now; so before the
    /// last harvest, wait for what is in flight, or cancel it.
    ///
    /// # Errors
    /// A part of the range is not mapped any more, or not writable; what came before it is logged.
    pub fn landed(&mut self, iova: Iova, len: u64) -> Result<(), Unmapped> {
        self.pieces(iova, len, true, |hit, _, len| Self::mark(hit, len as u64))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.member.leave(&self.place.mmu().epochs);
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

/// While it exists, nobody waits for its writer.
#[derive(Debug)]
pub struct Offline<'w>(&'w mut Writer);

impl Drop for Offline<'_> {
    fn drop(&mut self) {
        // Its cache is empty.
        self.0.member.online(&self.0.place.mmu().epochs);
    }
}
