//! What the control path asks of a disk, whatever its kind.

use crate::Resized;
use crate::lock::LockError;
use kickless_io::Waker;
use std::fmt::Debug;
use std::fs::File;
use std::io;

/// Answers the control path: a disk's identity, its size, its files, its locks, and its way from one host to another.
///
/// An implementer must bear each call from any thread, also while requests are in flight. It may block; [`DiskControl::hurry`]
/// and [`DiskControl::identity`] must not. It may rely on one session at a time: locks, `hand_over` and `take_over` are
/// called by one thread at a time, and no request is started between `hand_over` and the next `take_over`.
///
/// The defaults are right for a disk that is neither in a file nor on another host, and keeps its size.
/// [`Disk`](crate::Disk) has a method for each, which says what callers may expect.
pub(crate) trait DiskControl: Debug + Send + Sync {
    /// Returns a name that tells this disk from others on the host: at most 20 printable ASCII characters.
    fn identity(&self) -> &str;

    /// Looks whether the disk has become longer, and becomes as long. Never makes it shorter.
    ///
    /// # Errors
    /// The size cannot be found out.
    fn look_at_size(&self) -> io::Result<Resized> {
        Ok(Resized::Same)
    }

    /// Returns what is signalled when it is worth looking at the size.
    fn resized(&self) -> Option<&Waker> {
        None
    }

    /// Returns the file that is to be locked.
    fn file(&self) -> Option<&File> {
        None
    }

    /// Returns the files that the disk reads only and others are not to write to.
    ///
    /// # Errors
    /// The process has no descriptors left.
    fn files_under(&self) -> io::Result<Vec<File>> {
        Ok(Vec::new())
    }

    /// Checks the lock that a cluster keeps of the disk. Waits a moment for others to let go.
    ///
    /// # Errors
    /// Another has it, or the cluster does not say.
    fn check_own_lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// Takes the lock that a cluster keeps of the disk. Waits within bounds.
    ///
    /// # Errors
    /// Another has it, or it cannot be had. Nothing is held then.
    fn acquire_own_lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// Gives that lock back. Waits within bounds, and logs a failure.
    fn release_own_lock(&self) {}

    /// Makes what was written visible to another host. Waits for it.
    ///
    /// # Errors
    /// Some of it could not be written. Later flushes must fail as well.
    fn hand_over(&self) -> io::Result<()> {
        Ok(())
    }

    /// Forgets what was read before: another host may have written since.
    ///
    /// # Errors
    /// What is there now is no disk that can be used.
    fn take_over(&self) -> io::Result<()> {
        Ok(())
    }

    /// Ends the requests that are in flight now within a bounded time, in failure if need be.
    fn hurry(&self) {}
}
