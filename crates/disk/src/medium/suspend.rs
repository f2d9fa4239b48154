//! A medium that passes to another process of this host.
//!
//! In the old process, the medium keeps what it has while it is suspended: the lock of the image too. So
//! going on needs no lock. Nothing of a suspended medium unlocks the image, in either process: the one that
//! goes on owns the lock.

use super::{Medium, State, TakeError};
use crate::lock::ImageLock;
use crate::{Disk, Suspended};
use kickless_handover::{Giving, v1};
use kickless_sync::lock;
use std::io;
use std::sync::atomic::Ordering;

/// The state of a medium in the pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuspendedMedium {
    /// A guest uses the disk, so its images are locked.
    pub is_taken: bool,
    /// A front-end has connected since the disk was given up.
    pub is_new_guest: bool,
    /// The state of the disk.
    pub disk: Suspended,
}

impl Medium {
    /// Makes a medium of a disk that another process uses, and that this one is to take over. It is suspended
    /// until [`Medium::begin`].
    pub fn of_handed(disk: Disk, locks: bool) -> Self {
        let medium = Self::new(disk, locks);
        *lock(&medium.state) = State::Suspended(Box::new(State::Free { is_new_guest: true }));
        medium
    }

    /// Returns why the disk cannot be handed over now, as one sentence. Does not wait.
    pub fn refuses(&self) -> Option<&'static str> {
        match self.state.try_lock().as_deref() {
            Ok(State::Taken(_)) => self.disk().refuses(),
            Ok(State::Free { .. } | State::Suspended(_)) => None,
            Err(_) => Some("its disk is just taken, given up or looked at"),
        }
    }

    /// Returns the number of changes of the things that [`Medium::give`] gives.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed).wrapping_add(self.disk().changes())
    }

    /// Gives the disk ([`DiskHandOver::give`](crate::DiskHandOver::give)).
    ///
    /// # Errors
    /// There is no free descriptor, or too little memory.
    pub fn give(&self, to: &mut Giving) -> io::Result<v1::Medium> {
        // A change while it is given counts as one after it.
        self.given.store(self.changes(), Ordering::Relaxed);
        self.disk().give(to)
    }

    /// Writes the host's cache to the medium before the pause ([`DiskHandOver::settle`]), if a guest uses the
    /// disk. A free disk has nothing to write, and may have errors of its next owner.
    ///
    /// # Errors
    /// Some data could not be written.
    ///
    /// [`DiskHandOver::settle`]: crate::DiskHandOver::settle
    pub fn settle(&self) -> io::Result<()> {
        let is_taken = matches!(*lock(&self.state), State::Taken(_));
        if is_taken { self.disk().settle() } else { Ok(()) }
    }

    /// Suspends the disk, which stays locked, and returns its state. No request is in flight.
    ///
    /// # Errors
    /// Some data could not be written, something is in flight, or the disk has changed since it was given.
    /// The caller takes it back then.
    pub fn suspend(&self) -> io::Result<SuspendedMedium> {
        let mut state = lock(&self.state);
        let (is_taken, is_new_guest) = match *state {
            State::Free { is_new_guest } => (false, is_new_guest),
            State::Taken(ref mut image) => {
                image.iter_mut().for_each(|image| image.own(false));
                (true, false)
            }
            State::Suspended(_) => return Err(io::Error::other("the disk is suspended")),
        };
        let before = std::mem::replace(&mut *state, State::Free { is_new_guest });
        *state = State::Suspended(Box::new(before));
        // A guest may have come since the caller has asked.
        self.check_taken(is_taken)?;
        if self.changes() != self.given.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk has changed since it was given"));
        }
        let disk = self.disk().suspend(is_taken)?;
        // The connection to a server can end until then.
        if self.changes() != self.given.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk has changed since it was given"));
        }
        Ok(SuspendedMedium { is_taken, is_new_guest, disk })
    }

    /// Goes on after [`Medium::suspend`], also after one that failed.
    ///
    /// # Errors
    /// The disk cannot be used any more. It is free then.
    pub fn take_back(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        let State::Suspended(before) = &mut *state else { return Ok(()) };
        let mut before = std::mem::replace(&mut **before, State::Free { is_new_guest: false });
        if let State::Taken(Some(image)) = &mut before {
            image.own(true);
        }
        let taken_back = self.disk().take_back(matches!(before, State::Taken(_)));
        *state = if taken_back.is_ok() { before } else { State::Free { is_new_guest: false } };
        taken_back
    }

    /// Takes the state that the other process has returned from [`Medium::suspend`].
    ///
    /// # Errors
    /// It contradicts what was given, an image has no lock, or the disk cannot be used.
    pub fn receive(&self, suspended: &SuspendedMedium) -> Result<(), TakeError> {
        let SuspendedMedium { is_taken, is_new_guest, disk: ref received } = *suspended;
        let mut state = lock(&self.state);
        let disk = self.disk();
        self.check_taken(is_taken).map_err(TakeError::Reload)?;
        let to_lock = disk.file().filter(|_| self.locks && is_taken);
        let image = to_lock.map(|file| ImageLock::of_handed(file, disk.limits().read_only)).transpose()?;
        disk.receive(received, is_taken, self.locks).map_err(TakeError::Reload)?;
        let received = if is_taken { State::Taken(image) } else { State::Free { is_new_guest } };
        *state = State::Suspended(Box::new(received));
        Ok(())
    }

    /// Checks that a disk which a guest uses can pass.
    fn check_taken(&self, is_taken: bool) -> io::Result<()> {
        match self.disk().refuses().filter(|_| is_taken) {
            Some(why) => Err(io::Error::other(why)),
            None => Ok(()),
        }
    }

    /// Goes on in the new process. The old one has ended. Does not wait.
    pub fn begin(&self) {
        let mut state = lock(&self.state);
        let State::Suspended(received) = &mut *state else { return };
        let mut received = std::mem::replace(&mut **received, State::Free { is_new_guest: false });
        if let State::Taken(Some(image)) = &mut received {
            image.own(true);
        }
        self.disk().begin();
        *state = received;
    }
}
