//! The contract of a running task's handle, which its owner holds.

use crate::{Leave, Stopped, Update};
use kickless_sync::mpsc::Receiver;

/// Asks a running task for changes, and stops it. Dropping it stops the task without waiting.
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
}
