//! The program around the tables of an image.

use std::fmt::Debug;
use std::ops::DerefMut;

/// The program around the tables of an image: it carries out their operations, and runs the requests that
/// wait for them.
///
/// The tables allocate buffers and wake requests through it. They never look into either.
pub trait Runtime: Debug {
    /// The bytes of an operation.
    type Buffer: DerefMut<Target = [u8]> + Debug;
    /// The means to wake the requests of one queue. Clones wake the same queue.
    type Waker: Clone + Debug;

    /// Allocates `len` bytes at a multiple of `align`, a power of two. `None`: there is no memory.
    fn allocate(len: usize, align: usize) -> Option<Self::Buffer>;

    /// Wakes the requests of a queue. The tables may be locked, so this returns at once.
    fn wake(waker: &Self::Waker);

    /// Returns whether two wakers wake the same queue.
    fn is_same(one: &Self::Waker, other: &Self::Waker) -> bool;
}
