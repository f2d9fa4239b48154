//! The contract of libraries that do the I/O of disks: qcow2, NBD, RBD.

use crate::control::DiskControl;
use crate::offload::OffloadOp;

/// Does the I/O of a disk that is no raw file: an image in another format, or a disk of another machine.
///
/// Dropping a library stops its threads. Operations that it still has then fail, within a bounded time.
pub(crate) trait Library: DiskControl {
    /// Returns what names of its disks begin with, such as `qcow2:`.
    fn scheme(&self) -> &'static str;

    /// Takes an operation, and never waits for anything but a short lock: the caller is a worker.
    ///
    /// The implementer must answer each operation exactly once ([`OffloadOp::answer`]), or drop it, which fails it. It may do so
    /// on any thread, in any order, and before this returns. Before the answer it must set [`OffloadOp::lost_writes`], if it can
    /// lose writes that it has acknowledged (see [`crate::lost_writes`]). A flush that succeeds covers every write that was
    /// answered before the flush was submitted. A durable operation covers itself. An answer may take as long as it likes until
    /// [`DiskControl::hurry`] is called.
    ///
    /// The implementer may rely on this: a request has one operation at a time. Offset and length are multiples of 512 and lie
    /// within the size that the disk had when the request began. The operation of a read or a write has a buffer of at least its
    /// length, which nothing else touches until the answer. An operation is durable only if the library said that it can
    /// make operations durable ([`Offload::new`](crate::offload::Offload::new)).
    fn submit(&self, op: OffloadOp);
}
