//! The contract of what the owner of a running task holds.

use crate::{Stopped, Update};
use std::sync::mpsc::Receiver;

/// A running task, as the transport holds it. Dropping it stops the task without waiting.
pub trait TaskHandle: Send {
    /// Asks the worker for a change. The receiver gets a message once the change is in force; it is disconnected when the
    /// worker has ended.
    fn update(&self, update: Update) -> Receiver<()>;

    /// Asks the worker to stop. From the moment it runs this, no head is popped; the answer comes when everything in
    /// flight has been completed and pushed.
    fn stop(&self) -> Receiver<Stopped>;
}
