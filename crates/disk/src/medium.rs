//! The medium of a device: a disk that the device takes and gives up.
//!
//! Between two guests a disk belongs to no device. Another program, or another host, may write to it, replace
//! it or make it anew. So nothing that was known of it before holds when the next guest starts.
//!
//! # Taking
//! [`Medium::take`] does this, in this order, when the first ring starts:
//! 1. It opens the file that the path names now, if that is another one and a front-end has connected since
//!    the disk was given up. A guest that was only paused keeps its file, because it knows its contents.
//! 2. It locks the image.
//! 3. It compares the file with the path again, because another file may have got the name before the lock.
//! 4. It drops the host's cache of the image and reads its size and tables. It does the same with each image
//!    under it, and locks that one first.
//!
//! # Giving up
//! [`Medium::give_up`] writes everything back and unlocks the images, when the last ring has stopped. If the
//! write-back fails, the disk is not given up. The locks stay, so no other program reads data that lack
//! writes of the guest. The guest's next flush has to fail, which is the device's duty. A later call tries
//! again.
//!
//! # Passing
//! The next process of the host gets the disk as it is, taken or free (`suspend.rs`). It does not take it:
//! nothing is opened, locked or dropped anew, because the guest goes on.

mod suspend;

use crate::lock::{ImageLock, LockError, REPLACED_MAX};
use crate::{Disk, Error, Resized};
use kickless_io::Waker;
use kickless_sync::lock;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

pub use suspend::SuspendedMedium;

/// The disk of one device, which takes it for each guest and gives it up afterwards.
///
/// Any thread may make any call. Calls that take, give up or look at the disk wait for one another, and can
/// wait for the file system or a server.
#[derive(Debug)]
pub struct Medium {
    /// Replaced only while the disk is not taken.
    disk: RwLock<Arc<Disk>>,
    /// Lock the image while it is taken.
    locks: bool,
    /// Space of the disk's file stays allocated.
    keeps_space: AtomicBool,
    state: Mutex<State>,
    /// The number of times that the disk was taken, given up, replaced, or has grown.
    changes: AtomicU64,
    /// This number when the disk was last given to another process.
    given: AtomicU64,
}

#[derive(Debug)]
enum State {
    /// Others may use the disk. `is_new_guest`: a front-end has connected since it was given up.
    Free { is_new_guest: bool },
    /// The device uses the disk. `None`: there is no image to lock.
    Taken(Option<ImageLock>),
    /// The device does not use the disk, in the state before or after this, because another process takes it
    /// over, or it comes from another process.
    Suspended(Box<State>),
}

/// The reason why a device cannot take its disk. Nothing is locked then.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// Another process, host or device has the lock.
    #[error("the image cannot be locked: {0}")]
    Lock(#[from] LockError),
    /// The file that the path names now cannot be used.
    #[error(transparent)]
    Replacement(#[from] Error),
    /// The disk, or an image under it, cannot be used.
    #[error("the image cannot be used: {0}")]
    Reload(#[source] io::Error),
    /// Another process of this host takes the disk over.
    #[error("the disk is suspended")]
    Suspended,
    /// The path names another file each time.
    #[error("the image is replaced by other files all the time")]
    Replaced,
}

impl Medium {
    /// Makes a medium of a disk that is not taken. `locks`: lock the image while it is.
    pub fn new(disk: Disk, locks: bool) -> Self {
        let (keeps_space, state) = (AtomicBool::new(false), Mutex::new(State::Free { is_new_guest: true }));
        let (changes, given) = Default::default();
        Self { disk: RwLock::new(Arc::new(disk)), locks, keeps_space, state, changes, given }
    }

    /// Returns the disk. A caller that keeps it beyond the present guest has the disk of that guest.
    pub fn disk(&self) -> Arc<Disk> {
        self.disk.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes the disk, if it is not taken.
    ///
    /// # Errors
    /// Another device has the disk, or it cannot be used.
    pub fn take(&self) -> Result<(), TakeError> {
        let mut state = lock(&self.state);
        let is_new_guest = match *state {
            State::Free { is_new_guest } => is_new_guest,
            State::Taken(_) => {
                // The wait for a server that was away before is over.
                self.disk().restart_remote_waits();
                return Ok(());
            }
            State::Suspended(_) => return Err(TakeError::Suspended),
        };
        for _ in 0..REPLACED_MAX {
            self.replace(is_new_guest)?;
            let disk = self.disk();
            let lock = match disk.file().filter(|_| self.locks) {
                Some(file) => Some(ImageLock::wait_for(file, disk.limits().read_only)?),
                None => None,
            };
            if self.replace(is_new_guest)? {
                continue;
            }
            if self.locks {
                disk.acquire_own_lock()?;
            }
            if let Err(error) = disk.reload(self.locks) {
                disk.release_own_lock();
                return Err(TakeError::Reload(error));
            }
            *state = State::Taken(lock);
            self.count_change();
            return Ok(());
        }
        Err(TakeError::Replaced)
    }

    /// Gives the disk up, if it is taken.
    ///
    /// # Errors
    /// Some data could not be written. The disk stays taken, and can be used as before.
    pub fn give_up(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        if let State::Taken(_) = *state {
            let disk = self.disk();
            disk.write_back()?;
            disk.release_own_lock();
            *state = State::Free { is_new_guest: false };
            self.count_change();
        }
        Ok(())
    }

    /// Looks at the disk for a front-end that has connected, and reads its size and features before its guest
    /// starts. Does nothing if the disk is taken.
    ///
    /// # Errors
    /// The disk cannot be used now. Another program may be making it.
    pub fn look(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        let State::Free { is_new_guest } = &mut *state else { return Ok(()) };
        *is_new_guest = true;
        self.replace(true).map_err(io::Error::other)?;
        let from = self.disk().size();
        self.disk().look()?;
        self.count_resize(from);
        Ok(())
    }

    /// Reads the size of the medium. Makes the disk grow to `size_min` bytes if it is smaller, unless others
    /// may use it.
    ///
    /// # Errors
    /// The size cannot be read, or the disk cannot grow.
    pub fn refresh(&self, size_min: u64) -> io::Result<Resized> {
        let state = lock(&self.state);
        match *state {
            State::Free { is_new_guest } => {
                let from = self.disk().size();
                self.replace(is_new_guest).map_err(io::Error::other)?;
                self.disk().look()?;
                let to = self.disk().size();
                self.count_resize(from);
                return Ok(if to > from { Resized::Grown { from, to } } else { Resized::Same });
            }
            State::Taken(_) => {}
            State::Suspended(_) => return Ok(Resized::Same),
        }
        // A guest that ends does not wait for this. A disk that is given up meanwhile does not grow.
        drop(state);
        let disk = self.disk();
        let from = disk.size();
        if disk.is_replaced() {
            tracing::warn!(
                "the path of the image names another file now: the guest goes on with the one that it has, and the next \
                 guest gets the other"
            );
        }
        let resized = disk.refresh_size()?;
        // Only an image in a format can grow to a size, and its disk never grows by itself.
        let resized = if size_min > disk.size() { disk.grow(size_min) } else { Ok(resized) };
        self.count_resize(from);
        resized
    }

    /// Counts a change of the disk if it had another size before.
    fn count_resize(&self, from: u64) {
        if self.disk().size() != from {
            self.count_change();
        }
    }

    /// Counts a change of the disk.
    fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Opens the disk again if it is another one ([`Disk::replacement`]). Returns whether it is.
    fn replace(&self, by_name: bool) -> Result<bool, Error> {
        let replacement = self.disk().replacement(by_name)?;
        let is_other = replacement.is_some();
        if let Some(disk) = replacement {
            tracing::info!(
                from = self.disk().size(),
                to = disk.size(),
                "the image was replaced by another one, which is used from now on"
            );
            let mut current = self.disk.write().unwrap_or_else(PoisonError::into_inner);
            let old = std::mem::replace(&mut *current, Arc::new(disk));
            drop(current);
            self.count_change();
            // Closing a file can wait, and callers that only want the disk do not wait for that.
            drop(old);
            // Relaxed: a change that has reached the old disk only is before this, by the lock.
            self.disk().set_keeps_space(self.keeps_space.load(Ordering::Relaxed));
        }
        Ok(is_other)
    }

    /// Sets whether space that the disk's file has stays allocated
    /// ([`set_keeps_space`](crate::DiskControl::set_keeps_space)), for this and all later files.
    pub fn set_keeps_space(&self, keeps: bool) {
        self.keeps_space.store(keeps, Ordering::Relaxed);
        self.disk().set_keeps_space(keeps);
    }

    /// Returns a waker that is signalled when the size may have changed. `None`: this kind does not report
    /// changes.
    pub fn resized(&self) -> Option<Waker> {
        self.disk().resized().cloned()
    }
}
