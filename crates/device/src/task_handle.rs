//! The contract of a running task's handle, which its owner holds.

use crate::{Leave, Position, Stopped, Update};
use kickless_sync::mpsc::Receiver;

/// Asks a running task for changes, parks it, and stops it. Dropping it stops the task without waiting. If
/// the task is parked, dropping the handle drops it, and its ring stays as it is.
pub trait TaskHandle: Send {
    /// Asks the worker for a change. The receiver gets a message once the change is in force. It is
    /// disconnected if the worker has ended.
    fn update(&self, update: Update) -> Receiver<()>;

    /// Asks the worker to stop the task, which pops no more heads from then on. The answer comes when
    /// everything in flight has been completed and pushed, or left in the in-flight buffer, and all credit is
    /// back in the ring. Nothing uses guest memory, the ring or the device for this task any more. A task
    /// that is stopping already ignores `leave`.
    fn stop_leaving(&self, leave: Leave) -> Receiver<Stopped>;

    /// Asks the worker to stop the task, and to leave nothing.
    fn stop(&self) -> Receiver<Stopped> {
        self.stop_leaving(Leave::Nothing)
    }

    /// Asks the worker to park the task, which pops no more heads from then on. The answer comes when
    /// everything in flight has been completed and pushed, except requests that the task keeps
    /// ([`QueueTask::kept`](crate::QueueTask::kept)), and all credit is back in the ring. Then the handle has
    /// the task, and nothing uses guest memory, the ring or the device for it.
    ///
    /// Nothing fails sooner because of this: a request that waits for a remote server goes on waiting. The
    /// answer can take as long, and [`TaskHandle::unpark`] does not wait for it.
    ///
    /// Changes and stops that are asked for before the answer are carried out before it. Those that are asked
    /// for afterwards wait until the task goes on. The receiver is disconnected if the task stops or goes on
    /// instead, or if the worker has ended.
    fn park(&self) -> Receiver<Position>;

    /// Lets the task go on, whether it is parked or not yet. A worker polls it once without a kick. Nothing
    /// happens if no park was asked for.
    fn unpark(&self);
}
