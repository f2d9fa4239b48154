//! The contract of an executor, which runs tasks.

use crate::{QueueTask, TaskHandle};
use std::io;

/// Runs tasks. A pool of workers is an executor.
pub trait Executor: Send + Sync {
    /// Hands a task to a worker. The worker polls it once without a kick, because QEMU sends none after a
    /// reconnection.
    ///
    /// # Errors
    /// The worker has ended.
    fn spawn(&self, task: Box<dyn QueueTask>) -> io::Result<Box<dyn TaskHandle>>;

    /// Changes the weight of the device beside other devices, which is at least 1. Does not wait until it is
    /// in force. The default is for an executor that knows no weights.
    fn set_weight(&self, _weight: u32) {}
}
