//! What workers and those who ask them wait for.

use loom::sync::{Condvar, Mutex};
use std::sync::Arc;

/// What a worker's wait tells it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Happened {
    /// For as long as the eventfd has not been cleared.
    pub(crate) mailbox: bool,
    /// Once for each kick, or for several.
    pub(crate) kick: bool,
    /// Once for each event of the far side, or for several.
    pub(crate) event: bool,
}

/// An epoll instance with the mailbox's eventfd (level-triggered), a kick descriptor and a far side (edge-triggered).
#[derive(Default)]
pub(crate) struct Events {
    happened: Mutex<Happened>,
    told: Condvar,
}

impl Events {
    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker(self.clone())
    }

    pub(crate) fn set_kick(&self, kick: bool) {
        self.happened.lock().unwrap().kick = kick;
        if kick {
            self.told.notify_one();
        }
    }

    pub(crate) fn set_event(&self) {
        self.happened.lock().unwrap().event = true;
        self.told.notify_one();
    }

    /// What has happened by now.
    pub(crate) fn look(&self) -> Happened {
        self.happened.lock().unwrap().take()
    }

    /// Waits until something has.
    pub(crate) fn sleep(&self) -> Happened {
        let mut happened = self.happened.lock().unwrap();
        while !happened.mailbox && !happened.kick && !happened.event {
            happened = self.told.wait(happened).unwrap();
        }
        happened.take()
    }
}

impl Happened {
    /// What a wait reports: an edge once, the level each time.
    fn take(&mut self) -> Self {
        let happened = *self;
        (self.kick, self.event) = (false, false);
        happened
    }
}

/// The mailbox's eventfd.
pub(crate) struct Waker(Arc<Events>);

impl Waker {
    pub(crate) fn wake(&self) {
        self.0.happened.lock().unwrap().mailbox = true;
        self.0.told.notify_one();
    }

    pub(crate) fn clear(&self) -> bool {
        std::mem::take(&mut self.0.happened.lock().unwrap().mailbox)
    }
}

/// A channel for one answer, for loom's does not tell that the sender is gone.
struct Channel<T> {
    /// The answer, and whether nobody will give one any more.
    state: Mutex<(Option<T>, bool)>,
    told: Condvar,
}

pub(crate) struct Sender<T>(Arc<Channel<T>>);
pub(crate) struct Receiver<T>(Arc<Channel<T>>);

pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let channel = Arc::new(Channel { state: Mutex::new((None, false)), told: Condvar::new() });
    (Sender(channel.clone()), Receiver(channel))
}

impl<T> Sender<T> {
    /// The answer comes back if there has been one.
    pub(crate) fn send(&self, answer: T) -> Result<(), T> {
        let mut state = self.0.state.lock().unwrap();
        if state.0.is_some() {
            return Err(answer);
        }
        state.0 = Some(answer);
        self.0.told.notify_one();
        Ok(())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().1 = true;
        self.0.told.notify_one();
    }
}

impl<T> Receiver<T> {
    /// The answer, or that there will be none.
    pub(crate) fn recv(self) -> Option<T> {
        let mut state = self.0.state.lock().unwrap();
        while state.0.is_none() && !state.1 {
            state = self.0.told.wait(state).unwrap();
        }
        state.0.take()
    }
}
