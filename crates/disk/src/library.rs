//! The contract of the libraries that do the I/O of disks: NBD, RBD.

use crate::control::DiskControl;
use crate::offload::OffloadOp;

/// Does the I/O of a disk of another machine.
///
/// Dropping a library stops its threads. Its unfinished operations then fail within a limited time.
pub(crate) trait Library: DiskControl {
    /// Returns the beginning of the names of its disks, such as `rbd:`.
    fn scheme(&self) -> &'static str;

    /// Starts an operation. Must not wait for anything but a short lock, because the caller is a worker.
    ///
    /// The implementer must answer each operation exactly once ([`OffloadOp::answer`]), or drop it, which
    /// fails it. It may do so on any thread, in any order, and before this returns. If it can lose writes
    /// that it has acknowledged, it must set [`OffloadOp::lost_writes`] before the answer (see
    /// [`crate::lost_writes`]). A flush that succeeds covers every write that was answered before the flush
    /// was submitted. A durable operation covers itself. An answer may take any time until
    /// [`DiskControl::limit_remote_waits`] is called.
    ///
    /// The implementer may rely on this: a request has one operation at a time. Offset and length are
    /// multiples of its block and within the size that the disk had when the request began. The operation of
    /// a read or a write has a buffer of at least its length, and nothing else accesses it until the answer.
    /// An operation is durable only if the library has said that it supports that
    /// ([`Offload::with_sizes`](crate::offload::Offload::with_sizes)).
    fn submit(&self, op: OffloadOp);
}
