//! The files that an engine may use, and the devices that own them.
//!
//! This module has everything that the engines share about the use of slots. Each operation belongs to a
//! file, and each file to an owner. An operation takes a place of its owner's share
//! ([`crate::files::shares`]) from [`Files::hold`] to [`Files::release`]. An owner whose operation ended in
//! `EAGAIN` pauses, and so does the engine when the kernel takes nothing ([`crate::files::eagain_pause`]).
//! Sources that found no room are told of new room ([`crate::files::starved`]).

pub(crate) mod eagain_pause;
pub(crate) mod route;
pub(crate) mod shares;
mod starved;

use crate::files::eagain_pause::EagainPause;
use crate::files::route::{Backoff, Facts, Route, Routes, SIZE_CLASSES};
use crate::files::shares::Shares;
use crate::files::starved::Starved;
use crate::op::{FileId, OpKind};
use rustix::io::Errno;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device as its engines see it: the unit that has a share of each engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(u64);

impl Owner {
    /// Returns an owner that differs from all others.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A file, with the properties that an engine needs.
///
/// [`BackingFile::new`] may wait for the file's file system, so call it on a thread that may wait. A worker
/// registers the result without waiting.
#[derive(Clone, Debug)]
pub struct BackingFile {
    pub(crate) file: Arc<File>,
    pub(crate) owner: Owner,
    pub(crate) facts: Facts,
}

impl BackingFile {
    /// Examines a file of this owner. The flags with which it is open must not change later.
    pub fn new(file: Arc<File>, owner: Owner) -> Self {
        Self { facts: Facts::of(&file), file, owner }
    }
}

#[derive(Debug)]
struct Entry {
    file: Option<Arc<File>>,
    generation: u32,
    in_flight: u32,
    /// The number of its owner.
    owner: u32,
    /// Unregistered. It is closed when nothing is in flight.
    closing: bool,
    /// The kernel knows it by this index too.
    fixed: bool,
    routes: Routes,
    /// The back-off of reads and of writes with `RWF_NOWAIT`, by size.
    backoff: [[Backoff; SIZE_CLASSES]; 2],
    /// Its transfers are merged.
    merge: bool,
}

impl Default for Entry {
    fn default() -> Self {
        let (file, routes) = (None, Routes::all(Route::Blocking));
        let backoff = Default::default();
        Self {
            file,
            generation: 0,
            in_flight: 0,
            owner: 0,
            closing: false,
            fixed: false,
            routes,
            backoff,
            merge: false,
        }
    }
}

/// A device with files here.
#[derive(Debug, Default)]
struct OwnerEntry {
    /// `None`: the number is free.
    owner: Option<Owner>,
    /// The number of its files in the table.
    files: u32,
    pause: EagainPause,
}

/// The file that an operation in flight keeps open, and the owner in whose share it has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldFile {
    index: u32,
    owner: u32,
}

impl HeldFile {
    /// Returns the number of the owner. It does not change while the operation is in flight.
    pub(crate) fn owner(self) -> u32 {
        self.owner
    }
}

/// A file that is closed, for the kernel.
pub(crate) struct ClosedFile {
    pub(crate) index: u32,
    pub(crate) fixed: bool,
}

/// A table of files. An index is free again when its file is unregistered and its last operation has ended.
#[derive(Debug)]
pub(crate) struct Files {
    entries: Vec<Entry>,
    owners: Vec<OwnerEntry>,
    shares: Shares,
    /// Operations on unregistered files, which failed and were not reaped.
    unregistered: usize,
    /// The kernel takes nothing at present.
    pause: EagainPause,
    /// The number of pauses, including the engine's.
    paused: u32,
    starved: Starved,
}

impl Files {
    /// Makes an empty table for owners with these shares.
    pub(crate) fn new(shares: Shares) -> Self {
        Self {
            entries: Vec::new(),
            owners: Vec::new(),
            shares,
            unregistered: 0,
            pause: EagainPause::default(),
            paused: 0,
            starved: Starved::default(),
        }
    }

    /// Adds a file. Returns its identity and its index.
    pub(crate) fn insert(&mut self, file: Arc<File>, owner: Owner) -> (FileId, u32) {
        let owner = self.add_owner(owner);
        let index = self.entries.iter().position(|e| e.file.is_none()).unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.entries.len() - 1
        });
        let entry = &mut self.entries[index];
        let generation = entry.generation.wrapping_add(1);
        *entry = Entry { file: Some(file), generation, owner, ..Entry::default() };
        let index = index as u32;
        (FileId { index, generation: entry.generation }, index)
    }

    /// Counts one more file of an owner. Returns the owner's number. Free numbers are given from the lowest
    /// on, because low ones have reserves.
    fn add_owner(&mut self, owner: Owner) -> u32 {
        let known = self.owners.iter().position(|entry| entry.owner == Some(owner));
        let index = known.or_else(|| self.owners.iter().position(|entry| entry.owner.is_none()));
        let index = index.unwrap_or_else(|| {
            self.owners.push(OwnerEntry::default());
            self.owners.len() - 1
        });
        let entry = &mut self.owners[index];
        entry.owner = Some(owner);
        entry.files += 1;
        index as u32
    }

    pub(crate) fn set_fixed(&mut self, index: u32) {
        self.entries[index as usize].fixed = true;
    }

    pub(crate) fn set_routes(&mut self, index: u32, routes: Routes) {
        self.entries[index as usize].routes = routes;
    }

    /// Merges transfers of this file from now on.
    pub(crate) fn merge(&mut self, id: FileId) {
        if let Some(entry) = self.find(id) {
            entry.merge = true;
        }
    }

    /// Returns whether transfers of an operation's file are merged.
    #[inline]
    pub(crate) fn merges(&self, held: HeldFile) -> bool {
        self.entries[held.index as usize].merge
    }

    /// Returns the number of operations that the owner of this one has in flight, this one included.
    #[inline]
    pub(crate) fn in_flight_of(&self, held: HeldFile) -> usize {
        self.shares.used_by(held.owner)
    }

    /// Returns the route of an operation of this many bytes on its file.
    #[inline]
    pub(crate) fn route(&mut self, held: HeldFile, kind: OpKind, bytes: u64) -> Route {
        let Entry { routes, backoff, .. } = &mut self.entries[held.index as usize];
        let (route, backoff) = match kind {
            OpKind::Read => (routes.read, &mut backoff[0]),
            OpKind::Write { durable: false } => (routes.write, &mut backoff[1]),
            OpKind::Write { durable: true } => (routes.durable, &mut backoff[1]),
            OpKind::Flush | OpKind::Range { .. } => return Route::Blocking,
        };
        if route == Route::NoWait && !Backoff::of(backoff, bytes).should_try() {
            Route::Blocking
        } else {
            route
        }
    }

    /// Notes the result of a transfer with `RWF_NOWAIT`. Returns whether a thread must do it now. Calls that
    /// do not know the flag report this in several ways. If the transfer fails for another reason, it fails
    /// again in the same way.
    #[inline]
    pub(crate) fn is_missed(
        &mut self,
        held: HeldFile,
        kind: OpKind,
        bytes: u64,
        result: Result<u32, Errno>,
    ) -> bool {
        let backoff = &mut self.entries[held.index as usize].backoff[usize::from(kind != OpKind::Read)];
        let backoff = Backoff::of(backoff, bytes);
        let missed = matches!(result, Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL));
        if missed {
            backoff.failed()
        } else {
            backoff.succeeded()
        }
        missed
    }

    #[inline]
    fn entry(&self, id: FileId) -> Option<&Entry> {
        self.entries.get(id.index as usize).filter(|e| e.generation == id.generation && !e.closing)
    }

    #[inline]
    fn find(&mut self, id: FileId) -> Option<&mut Entry> {
        self.entries.get_mut(id.index as usize).filter(|e| e.generation == id.generation && !e.closing)
    }

    /// Removes a file as soon as none of its operations is in flight. Returns the file if this is so at once.
    pub(crate) fn remove(&mut self, id: FileId) -> Option<ClosedFile> {
        self.find(id)?.closing = true;
        self.close_if_unused(id.index)
    }

    /// Returns the number of operations on this file that the engine takes now: none while its owner or the
    /// engine pauses.
    #[inline]
    pub(crate) fn room(&self, id: FileId) -> usize {
        let Some(entry) = self.entry(id) else {
            // Each operation fails with `EBADF`.
            return self.shares.total().saturating_sub(self.unregistered);
        };
        if self.paused > 0 && self.is_paused(entry.owner) { 0 } else { self.shares.room(entry.owner) }
    }

    #[cold]
    fn is_paused(&self, owner: u32) -> bool {
        self.pause.is_on() || self.owners[owner as usize].pause.is_on()
    }

    /// Returns whether an operation holds this file, which may have been unregistered since.
    pub(crate) fn is_held(&self, held: HeldFile, id: FileId) -> bool {
        held.index == id.index && self.entries[held.index as usize].generation == id.generation
    }

    /// Returns the number of operations in flight, without those on unregistered files.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.shares.used()
    }

    /// Counts one more operation in flight. Returns `None` if the file was unregistered; the operation fails
    /// then. The caller has checked that there is room.
    #[inline]
    pub(crate) fn hold(&mut self, id: FileId) -> Option<HeldFile> {
        let Some(entry) = self.find(id) else {
            self.unregistered += 1;
            return None;
        };
        entry.in_flight += 1;
        let owner = entry.owner;
        self.shares.take(owner);
        Some(HeldFile { index: id.index, owner })
    }

    /// Forgets the operations on unregistered files, which were reaped.
    pub(crate) fn forget_unregistered(&mut self) {
        self.unregistered = 0;
    }

    /// Counts one operation fewer. Returns the file if it was closed.
    #[inline]
    pub(crate) fn release(&mut self, held: HeldFile) -> Option<ClosedFile> {
        let is_common = self.shares.put_back(held.owner);
        self.starved.made_room(held.owner, is_common);
        if self.paused > 0 {
            self.end_pauses(held.owner);
        }
        let entry = &mut self.entries[held.index as usize];
        entry.in_flight -= 1;
        if entry.closing { self.close_if_unused(held.index) } else { None }
    }

    fn close_if_unused(&mut self, index: u32) -> Option<ClosedFile> {
        let entry = &mut self.entries[index as usize];
        if entry.in_flight > 0 {
            return None;
        }
        entry.file = None;
        let closed = ClosedFile { index, fixed: entry.fixed };
        let owner = entry.owner;
        self.owners[owner as usize].files -= 1;
        if self.owners[owner as usize].files == 0 {
            self.end_owner_pause(owner);
            self.owners[owner as usize] = OwnerEntry::default();
        }
        Some(closed)
    }

    /// Returns an operation's file, its index, and whether the kernel knows it by that.
    #[inline]
    pub(crate) fn get(&self, held: HeldFile) -> Option<(&Arc<File>, u32, bool)> {
        let entry = &self.entries[held.index as usize];
        entry.file.as_ref().map(|file| (file, held.index, entry.fixed))
    }
}

/// The pauses of owners and of the engine.
impl Files {
    /// Starts a pause of this file's owner. It ends when one of the owner's operations completes, or after a
    /// moment.
    pub(crate) fn pause_owner(&mut self, id: FileId) {
        if let Some(owner) = self.entry(id).map(|entry| entry.owner) {
            let pause = &mut self.owners[owner as usize].pause;
            self.paused += u32::from(!pause.is_on());
            pause.begin();
        }
    }

    /// Starts a pause of the engine. It ends when an operation completes, or after a moment. An existing
    /// pause is not extended.
    pub(crate) fn pause_all(&mut self) {
        if !self.pause.is_on() {
            self.paused += 1;
            self.pause.begin();
        }
    }

    /// Returns whether an owner or the engine pauses.
    #[inline]
    pub(crate) fn any_paused(&self) -> bool {
        self.paused > 0
    }

    /// Ends the pauses of the owner and of the engine, because an operation has completed.
    #[cold]
    fn end_pauses(&mut self, owner: u32) {
        self.end_owner_pause(owner);
        self.paused -= u32::from(self.pause.end());
        self.starved.ended_pause();
    }

    fn end_owner_pause(&mut self, owner: u32) {
        self.paused -= u32::from(self.owners[owner as usize].pause.end());
    }

    /// Ends the pauses that have been long enough.
    #[inline]
    pub(crate) fn check_pauses(&mut self) {
        if self.paused > 0 {
            self.end_old_pauses();
        }
    }

    #[cold]
    fn end_old_pauses(&mut self) {
        let pauses = self.owners.iter_mut().map(|entry| &mut entry.pause).chain([&mut self.pause]);
        let ended = pauses.filter_map(|pause| pause.end_if_over().then_some(())).count();
        self.paused -= ended as u32;
        if ended > 0 {
            self.starved.ended_pause();
        }
    }
}

/// The sources that wait for room.
impl Files {
    /// Notes that operations on this file, from this source, found no room.
    #[cold]
    pub(crate) fn wait_for_room(&mut self, id: FileId, source: u32) {
        // An unregistered file has room after the next reap.
        if let Some(owner) = self.entry(id).map(|entry| entry.owner) {
            self.starved.add(owner, source);
        }
    }

    /// Returns whether [`Files::take_sources_with_room`] may have something.
    #[inline]
    pub(crate) fn has_sources_with_room(&self) -> bool {
        self.starved.is_due()
    }

    /// Appends the sources that waited for room, as far as there is room now.
    #[cold]
    pub(crate) fn take_sources_with_room(&mut self, into: &mut Vec<u32>) {
        let Self { owners, shares, pause, starved, .. } = self;
        let is_paused =
            |owner: u32| pause.is_on() || owners.get(owner as usize).is_some_and(|entry| entry.pause.is_on());
        starved.take(shares, is_paused, into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_outlives_its_registration_while_in_flight() {
        let file = Arc::new(File::open("/dev/null").unwrap());
        let mut files = Files::new(Shares::new(8, 0, 0));
        let (id, _) = files.insert(file.clone(), Owner::unique());
        let held = files.hold(id).unwrap();
        assert!(files.remove(id).is_none());
        assert!(files.remove(id).is_none());
        assert!(files.get(held).is_some());
        assert!(files.hold(id).is_none());
        assert_eq!(Arc::strong_count(&file), 2);
        assert!(files.release(held).is_some());
        assert_eq!(Arc::strong_count(&file), 1);

        let (next, index) = files.insert(file, Owner::unique());
        assert_eq!(index, 0);
        assert_ne!(next, id);
        assert!(files.hold(id).is_none());
    }

    fn null(files: &mut Files, owner: Owner) -> FileId {
        files.insert(Arc::new(File::open("/dev/null").unwrap()), owner).0
    }

    /// A device splits large transfers, and answers `EAGAIN` to each of them.
    #[test]
    fn large_transfers_do_not_send_small_ones_to_threads() {
        const WRITE: OpKind = OpKind::Write { durable: false };
        const LARGE: u64 = 2 << 20;
        let mut files = Files::new(Shares::new(8, 0, 0));
        let id = null(&mut files, Owner::unique());
        files.set_routes(id.index, Routes::all(Route::NoWait));
        let held = files.hold(id).unwrap();
        let mut tried = 0;
        for _ in 0..800 {
            if files.route(held, WRITE, LARGE) == Route::NoWait {
                tried += 1;
                assert!(files.is_missed(held, WRITE, LARGE, Err(Errno::AGAIN)));
            }
            assert_eq!(files.route(held, WRITE, 4096), Route::NoWait);
            assert_eq!(files.route(held, WRITE, 1 << 20), Route::NoWait);
            assert_eq!(files.route(held, OpKind::Read, LARGE), Route::NoWait);
        }
        assert!(tried < 100, "{tried} useless calls");
        assert!(!files.is_missed(held, WRITE, 4096, Ok(4096)));
        assert_ne!(files.route(held, WRITE, LARGE), Route::NoWait, "a small one says nothing of it");
        files.release(held);
    }

    /// Files of one device have one share, and one that is forgotten with operations in flight keeps its
    /// number for as long.
    #[test]
    fn a_share_belongs_to_a_device() {
        let (a, b) = (Owner::unique(), Owner::unique());
        let mut files = Files::new(Shares::new(2, 1, 2));
        let (first, second, other) = (null(&mut files, a), null(&mut files, a), null(&mut files, b));
        let held = [first, second, first].map(|id| files.hold(id).unwrap());
        assert_eq!((files.room(first), files.room(second), files.room(other)), (0, 0, 1));
        files.remove(first);
        files.remove(second);
        let next = null(&mut files, Owner::unique());
        assert_eq!((files.room(next), files.in_flight()), (0, 3), "there is no third reserve");
        for held in held {
            files.release(held);
        }
        assert_eq!((files.room(next), files.room(other)), (2, 3));
        let again = null(&mut files, a);
        assert_eq!(files.room(again), 3);
    }

    #[test]
    fn an_owner_pauses_alone_and_an_engine_with_all() {
        let mut files = Files::new(Shares::new(8, 0, 0));
        let (a, b) = (null(&mut files, Owner::unique()), null(&mut files, Owner::unique()));
        let (of_a, of_b) = (files.hold(a).unwrap(), [b, b].map(|id| files.hold(id).unwrap()));
        files.pause_owner(a);
        files.pause_owner(a);
        assert_eq!((files.room(a), files.room(b), files.any_paused()), (0, 5, true));
        files.release(of_b[0]);
        assert_eq!((files.room(a), files.room(b)), (0, 6), "that of another says nothing");
        files.release(of_a);
        assert_eq!((files.room(a), files.room(b), files.any_paused()), (7, 7, false));
        files.pause_all();
        files.pause_owner(b);
        assert_eq!((files.room(a), files.room(b)), (0, 0));
        files.release(of_b[1]);
        assert_eq!((files.room(a), files.room(b), files.any_paused()), (8, 8, false));
        files.pause_owner(a);
        files.pause_all();
        files.wait_for_room(a, 7);
        let told = |files: &mut Files| {
            let mut told = Vec::new();
            files.take_sources_with_room(&mut told);
            told
        };
        // One of the pauses can end before the other.
        while files.any_paused() {
            assert!(told(&mut files).is_empty());
            files.check_pauses();
        }
        assert!(files.room(a) == 8 && files.has_sources_with_room());
        assert_eq!(told(&mut files), [7]);
        // A pause goes with its owner.
        files.pause_owner(a);
        files.remove(a);
        assert!(!files.any_paused());
    }
}
