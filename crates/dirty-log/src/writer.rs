//! A thread's access to guest memory.
#![expect(unsafe_code, reason = "island: copies to and from translated addresses")]

use crate::control::Mmu;
use crate::epoch::Member;
use crate::space::Space;
use crate::tlb::{Hit, Tlb};
use crate::tree::Tree;
use kickless_memory::{Iova, Unmapped, shared};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Reads and writes guest memory for one thread, with its own cache of translations. Logs the writes to slots
/// whose log is on.
///
/// Harvests, and threads that remove memory or mappings, wait for the writer's next quiescent point. So its
/// thread must call [`Writer::quiesce`] often (between two requests, between two blocks of guest code), at
/// least every few milliseconds. It must call [`Writer::offline`] before it sleeps. A quiescent point costs
/// one load of a word that rarely changes.
///
/// A new writer is online.
pub struct Writer {
    space: WriterSpace,
    member: Member,
    tlb: Tlb,
}

enum WriterSpace {
    Direct(Arc<Mmu>),
    Space(Arc<Space>),
}

impl WriterSpace {
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

// SAFETY: the host addresses in its cache are of memory that any thread may access by copies. No other thread
// uses the rest.
unsafe impl Send for Writer {}

impl Writer {
    /// Makes a writer for the direct space, in which an [`Iova`] is a guest-physical address of the same
    /// number.
    pub fn direct(mmu: &Arc<Mmu>) -> Self {
        Self::new(WriterSpace::Direct(mmu.clone()))
    }

    /// Makes a writer for a space.
    pub fn within(space: &Arc<Space>) -> Self {
        Self::new(WriterSpace::Space(space.clone()))
    }

    fn new(space: WriterSpace) -> Self {
        let mut member = Member::join(&space.mmu().epochs);
        member.online(&space.mmu().epochs);
        Self { space, member, tlb: Tlb::new() }
    }

    /// Passes a quiescent point: all writes so far are done. If something has changed, the writer drops its
    /// cached translations.
    #[inline]
    pub fn quiesce(&mut self) {
        if self.member.quiesce(&self.space.mmu().epochs) {
            self.tlb.flush();
        }
    }

    /// Goes offline until the guard is dropped. No thread waits for this writer meanwhile.
    ///
    /// A thread calls this before it sleeps, or before it requests a harvest or a change itself.
    pub fn offline(&mut self) -> Offline<'_> {
        // The guard can be leaked. Then the next lookup must miss in the cache, so that it finds the writer
        // offline.
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
            self.member.online(&self.space.mmu().epochs);
        }
        // SAFETY: the writer is online and so in a section. The cache is emptied when the section ends after
        // a removal.
        let extent = unsafe { self.space.mmu().resolve(self.space.tree(), addr, write) }?;
        self.tlb.fill(extent);
        extent.hit(addr)
    }

    /// Marks the written bytes, if they are logged by marks.
    #[inline]
    fn mark(hit: &Hit, len: u64) {
        if let Some(log) = hit.marks
            && len != 0
        {
            // SAFETY: the log is freed after a wait for this section.
            unsafe { log.as_ref() }.bits.mark_where_clear(hit.gpa, len);
        }
    }

    /// Calls `each` with the pieces of a range, up to the first that is not mapped.
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

    /// Copies guest bytes to `into`.
    ///
    /// # Errors
    /// A part of the range is not mapped; `into` then holds the bytes before it.
    pub fn read(&mut self, iova: Iova, into: &mut [u8]) -> Result<(), Unmapped> {
        self.pieces(iova, into.len() as u64, false, |hit, at, len| {
            // SAFETY: these bytes are in a slot, which stays mapped until this section ends.
            unsafe { shared::read(hit.host, &mut into[at..at + len]) }
        })
    }

    /// Copies `from` into guest memory.
    ///
    /// # Errors
    /// A part of the range is not mapped, or not writable; the bytes before it are written.
    pub fn write(&mut self, iova: Iova, from: &[u8]) -> Result<(), Unmapped> {
        self.pieces(iova, from.len() as u64, true, |hit, at, len| {
            // SAFETY: as in `read`.
            unsafe { shared::write(hit.host, &from[at..at + len]) };
            Self::mark(hit, len as u64);
        })
    }

    /// Reads one value. It is read once if it does not cross a page.
    ///
    /// # Errors
    /// A part of the value is not mapped.
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

    /// Logs a write of `len` bytes at `iova` that another agent made, such as an asynchronous read into guest
    /// memory that has completed.
    ///
    /// The write may be older than this writer's last quiescent point. The addresses are translated again
    /// here, because the translation at the submission may have been protected meanwhile.
    ///
    /// The submitter must keep the memory mapped ([`kickless_memory::Iov`] does). The write counts as made
    /// now. So wait for operations in flight, or cancel them, before the last harvest.
    ///
    /// # Errors
    /// A part of the range is not mapped any more, or not writable; the bytes before it are logged.
    pub fn log_external_write(&mut self, iova: Iova, len: u64) -> Result<(), Unmapped> {
        self.pieces(iova, len, true, |hit, _, len| Self::mark(hit, len as u64))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.member.leave(&self.space.mmu().epochs);
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

/// A guard of [`Writer::offline`]. No thread waits for the writer while it exists.
#[derive(Debug)]
pub struct Offline<'w>(&'w mut Writer);

impl Drop for Offline<'_> {
    fn drop(&mut self) {
        // The cache is empty.
        self.0.member.online(&self.0.space.mmu().epochs);
    }
}
