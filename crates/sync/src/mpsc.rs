//! Channels.

#[cfg(not(loom))]
pub use std::sync::mpsc::{Receiver, Sender, channel};

#[cfg(loom)]
pub use watched::{Receiver, Sender, channel};

/// Channels that loom watches. (loom's own do not tell that the sender is gone.)
#[cfg(loom)]
mod watched {
    use crate::{Arc, Condvar, Mutex, lock};
    use std::collections::VecDeque;
    use std::sync::PoisonError;
    use std::sync::mpsc::{RecvError, SendError};

    struct State<T> {
        values: VecDeque<T>,
        is_closed: bool,
    }

    struct Channel<T> {
        state: Mutex<State<T>>,
        changed: Condvar,
    }

    /// `std::sync::mpsc::Sender`, of which there is one.
    pub struct Sender<T>(Arc<Channel<T>>);

    /// `std::sync::mpsc::Receiver`.
    pub struct Receiver<T>(Arc<Channel<T>>);

    /// Makes a channel.
    pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let state = State { values: VecDeque::new(), is_closed: false };
        let channel = Arc::new(Channel { state: Mutex::new(state), changed: Condvar::new() });
        (Sender(channel.clone()), Receiver(channel))
    }

    impl<T> Sender<T> {
        /// Sends a value.
        ///
        /// # Errors
        /// None. A model does not look whether the receiver is gone.
        pub fn send(&self, value: T) -> Result<(), SendError<T>> {
            lock(&self.0.state).values.push_back(value);
            self.0.changed.notify_one();
            Ok(())
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            lock(&self.0.state).is_closed = true;
            self.0.changed.notify_one();
        }
    }

    impl<T> Receiver<T> {
        /// Waits for a value.
        ///
        /// # Errors
        /// The sender is gone.
        pub fn recv(&self) -> Result<T, RecvError> {
            let mut state = lock(&self.0.state);
            loop {
                match state.values.pop_front() {
                    Some(value) => return Ok(value),
                    None if state.is_closed => return Err(RecvError),
                    None => state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            }
        }
    }
}
