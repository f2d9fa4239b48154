//! Channels: the standard library's, or in a build with `--cfg loom`, channels that a model can use.

pub use std::sync::mpsc::RecvTimeoutError;

#[cfg(not(loom))]
pub use std::sync::mpsc::{Receiver, Sender, channel};

#[cfg(loom)]
pub use watched::{Receiver, Sender, channel};

/// Channels made of loom's locks. loom has channels too, but their receivers do not notice that the sender is
/// gone.
#[cfg(loom)]
mod watched {
    use crate::{Arc, Condvar, Mutex, lock};
    use std::collections::VecDeque;
    use std::sync::PoisonError;
    use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError};
    use std::time::Duration;

    struct Queue<T> {
        values: VecDeque<T>,
        is_closed: bool,
    }

    struct Channel<T> {
        queue: Mutex<Queue<T>>,
        changed: Condvar,
    }

    /// `std::sync::mpsc::Sender`, but without `Clone`: a channel has one sender.
    pub struct Sender<T>(Arc<Channel<T>>);

    /// `std::sync::mpsc::Receiver`.
    pub struct Receiver<T>(Arc<Channel<T>>);

    /// Makes a channel.
    pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let queue = Queue { values: VecDeque::new(), is_closed: false };
        let channel = Arc::new(Channel { queue: Mutex::new(queue), changed: Condvar::new() });
        (Sender(channel.clone()), Receiver(channel))
    }

    impl<T> Sender<T> {
        /// Sends a value.
        ///
        /// # Errors
        /// Never. Models do not need to know that the receiver is gone.
        pub fn send(&self, value: T) -> Result<(), SendError<T>> {
            lock(&self.0.queue).values.push_back(value);
            self.0.changed.notify_one();
            Ok(())
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            lock(&self.0.queue).is_closed = true;
            self.0.changed.notify_one();
        }
    }

    impl<T> Receiver<T> {
        /// Waits for a value. A model has no clock, so this wait has no limit.
        ///
        /// # Errors
        /// The sender is gone.
        pub fn recv_timeout(&self, _: Duration) -> Result<T, RecvTimeoutError> {
            self.recv().map_err(|RecvError| RecvTimeoutError::Disconnected)
        }

        /// Waits for a value.
        ///
        /// # Errors
        /// The sender is gone.
        pub fn recv(&self) -> Result<T, RecvError> {
            let mut queue = lock(&self.0.queue);
            loop {
                match queue.values.pop_front() {
                    Some(value) => return Ok(value),
                    None if queue.is_closed => return Err(RecvError),
                    None => queue = self.0.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            }
        }
    }
}
