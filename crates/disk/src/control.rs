//! The control path of a disk, for all kinds.

use crate::Resized;
use crate::hand_over::DiskHandOver;
use crate::lock::LockError;
use kickless_io::Waker;
use std::fs::File;
use std::io;

/// Serves the control path: a disk's identity, its size, its files, its locks, and its move to another host.
///
/// Any thread may make any call, also while requests are in flight. A call may block, except
/// [`DiskControl::limit_remote_waits`], [`DiskControl::restart_remote_waits`],
/// [`DiskControl::set_keeps_space`] and [`DiskControl::identity`].
///
/// The implementer may rely on one session at a time: one thread at a time uses the locks, `write_back`,
/// `reload` and `look`. No request starts between `write_back` and the next `reload`.
///
/// The defaults suit a disk that is neither in a file nor on another host, and keeps its size.
pub trait DiskControl: DiskHandOver {
    /// Returns a name that identifies this disk on the host: at most 20 printable ASCII characters. It is the
    /// answer to GET_ID if the operator has chosen none.
    fn identity(&self) -> &str;

    /// Reads the size of the medium while a guest uses the disk. If it has grown, the disk grows too. Never
    /// makes the disk smaller. Reads how much room the medium of an image has.
    ///
    /// # Errors
    /// The size cannot be read.
    fn refresh_size(&self) -> io::Result<Resized> {
        Ok(Resized::Same)
    }

    /// Makes the disk at least `size` bytes long. Waits for that. Leaves the disk as it is before the first
    /// [`DiskControl::reload`] and after [`DiskControl::write_back`], because another host may use it then.
    ///
    /// # Errors
    /// This kind of disk cannot grow by itself, the disk is read-only, the size is not a multiple of 512, or
    /// the image cannot be written.
    fn grow(&self, _size: u64) -> io::Result<Resized> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sets whether the disk keeps space that it frees by itself, such as clusters of an image without a
    /// reference. Otherwise it gives this space back to the host, which is the default. Does not wait.
    ///
    /// Requests are carried out as they say, so a caller that wants to keep all space sends no discards, and
    /// no zeroes with `unmap`.
    fn set_keeps_space(&self, _keeps: bool) {}

    /// Returns a waker that is signalled when the size may have changed. `None`: this kind does not report
    /// changes.
    fn resized(&self) -> Option<&Waker> {
        None
    }

    /// Returns the file of the disk, for locking it.
    fn file(&self) -> Option<&File> {
        None
    }

    /// Returns whether the path of the disk names another file now.
    fn is_replaced(&self) -> bool {
        false
    }

    /// Checks that no other client has the disk's own lock, which a cluster keeps. Waits a moment for others
    /// to release it.
    ///
    /// # Errors
    /// Another client has the lock, or the cluster does not reply.
    fn check_own_lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// Takes the disk's own lock, if it has one.
    ///
    /// An owner that does not reply may be dead. This waits until it certainly cannot write any more, which
    /// takes up to a minute.
    ///
    /// # Errors
    /// Another client has the lock, or it cannot be taken. Then nothing is locked.
    fn acquire_own_lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    /// Releases the disk's own lock. Waits for a limited time, and logs a failure.
    fn release_own_lock(&self) {}

    /// Makes all writes visible to another host that opens the same file next. Waits for that. Unlocks the
    /// backing images.
    ///
    /// Without this, data may be only in this host's cache (`Cache::Writeback`).
    ///
    /// # Errors
    /// Some data could not be written. Nothing else has changed: requests may start, and a caller may try it
    /// again.
    fn write_back(&self) -> io::Result<()> {
        Ok(())
    }

    /// Discards all cached data, because another program or host may have written since. Reads the size,
    /// which can be smaller than before. `locks`: locks each backing image before it is read, until
    /// [`DiskControl::write_back`], the counterpart of this.
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
    /// asks for it before its guest starts. Another program may be changing the disk.
    ///
    /// # Errors
    /// The size cannot be read. It is as before then.
    fn look(&self) -> io::Result<()> {
        Ok(())
    }

    /// Ends requests in flight within a limited time, as failed if necessary, because a caller waits for
    /// them.
    ///
    /// This matters for requests at a remote server that does not answer. It does not apply to later
    /// requests. A caller that submits more must call it again.
    fn limit_remote_waits(&self) {}

    /// Gives a remote server that is away its whole time again, for later requests. Tries to reach it at
    /// once.
    fn restart_remote_waits(&self) {}
}
