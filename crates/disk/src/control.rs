//! The control path of a disk, for all kinds.

use crate::Resized;
use crate::lock::LockError;
use kickless_io::Waker;
use std::fmt::Debug;
use std::fs::File;
use std::io;

/// Serves the control path: a disk's identity, its size, its files, its locks, and its move to another host.
///
/// Any thread may make any call, also while requests are in flight. A call may block, except
/// [`DiskControl::limit_remote_waits`], [`DiskControl::restart_remote_waits`] and [`DiskControl::identity`].
///
/// The implementer may rely on one session at a time: one thread at a time uses the locks, `write_back`,
/// `reload` and `look`. No request starts between `write_back` and the next `reload`.
///
/// The defaults suit a disk that is neither in a file nor on another host, and keeps its size.
/// [`Disk`](crate::Disk) has a method for each, which says what callers may expect.
pub(crate) trait DiskControl: Debug + Send + Sync {
    /// Returns a name that identifies this disk on the host: at most 20 printable ASCII characters.
    fn identity(&self) -> &str;

    /// Reads the size while a guest uses the disk, and takes a larger one as the size of the disk. Never
    /// makes the disk smaller. Reads how much room the medium of an image has.
    ///
    /// # Errors
    /// The size cannot be read.
    fn refresh_size(&self) -> io::Result<Resized> {
        Ok(Resized::Same)
    }

    /// Makes the disk at least `size` bytes long. Leaves it as it is between [`DiskControl::write_back`] and
    /// [`DiskControl::reload`], because another host may use it then.
    ///
    /// # Errors
    /// This kind of disk cannot grow by itself, the disk is read-only, the size is not a multiple of 512, or
    /// the image cannot be written.
    fn grow(&self, _size: u64) -> io::Result<Resized> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sets whether the disk keeps space that it frees by itself, without a request of the driver. Does not
    /// wait. The default is for a disk that frees none.
    fn set_keeps_space(&self, _keeps: bool) {}

    /// Returns a waker that is signalled when the size may have changed.
    fn resized(&self) -> Option<&Waker> {
        None
    }

    /// Returns the file to lock.
    fn file(&self) -> Option<&File> {
        None
    }

    /// Returns whether the disk's path names another file now.
    fn is_replaced(&self) -> bool {
        false
    }

    /// Checks that no other client has the cluster's lock of the disk. Waits a moment for others to release
    /// it.
    ///
    /// # Errors
    /// Another client has the lock, or the cluster does not reply.
    fn check_own_lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// Takes the cluster's lock of the disk. Waits for a limited time.
    ///
    /// # Errors
    /// Another client has the lock, or it cannot be taken. Then nothing is locked.
    fn acquire_own_lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// Releases that lock. Waits for a limited time, and logs a failure.
    fn release_own_lock(&self) {}

    /// Makes all writes visible to another host, and waits for that. Unlocks the backing images.
    ///
    /// # Errors
    /// Some data could not be written. Nothing else has changed: requests may start, and a caller may try it
    /// again.
    fn write_back(&self) -> io::Result<()> {
        Ok(())
    }

    /// Discards all cached data, because another program or host may have written since. Reads the size,
    /// which can be smaller than before. `locks`: locks each backing image before it is read.
    ///
    /// # Errors
    /// The disk cannot be used any more, or a backing image cannot be locked. Nothing is locked then.
    fn reload(&self, _locks: bool) -> io::Result<()> {
        Ok(())
    }

    /// Returns whether a flush of each queue fails after a write-back that failed, and
    /// [`DiskControl::write_back`] as well until then. The device needs no report of its own.
    fn reports_losses(&self) -> bool {
        false
    }

    /// Reads the size between [`DiskControl::write_back`] and [`DiskControl::reload`], for a front-end that
    /// reads it before its guest starts. Another program may be changing the disk.
    ///
    /// # Errors
    /// The size cannot be read. It is as before then.
    fn look(&self) -> io::Result<()> {
        Ok(())
    }

    /// Ends the requests in flight within a limited time, as failed if necessary.
    fn limit_remote_waits(&self) {}

    /// Gives a remote server that is away its whole time again, for later requests.
    fn restart_remote_waits(&self) {}
}
