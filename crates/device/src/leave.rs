//! The choice of what a stopping task leaves undone.

/// The requests that a stopping task may leave in its ring's in-flight buffer. The next task of the ring does
/// them. A task whose ring has no such buffer leaves none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// No requests. The next task may be one that does not get the buffer.
    Nothing,
    /// Failed requests that wait for an operator. The front-end keeps the buffer, and may connect again.
    Failed,
    /// All requests that the device does not complete soon. The front-end gives the buffer to the next task,
    /// here or on another host.
    Unfinished,
}
