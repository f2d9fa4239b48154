//! Events that model workers and their clients wait for.

use kickless_io::Waker;
use kickless_sync::Latch;

/// The result of a worker's wait.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Happened {
    /// The mailbox's eventfd is set and not cleared yet.
    pub(crate) mailbox: bool,
    /// A kick, or several, came since the last wait.
    pub(crate) kick: bool,
    /// An event of the far side, or several, came since the last wait.
    pub(crate) event: bool,
}

/// Flags beside that of the mailbox.
const KICK: u32 = 2;
const EVENT: u32 = 4;

/// An epoll instance with the mailbox's eventfd (level-triggered), a kick descriptor and a far side
/// (edge-triggered).
pub(crate) struct Events(Waker);

impl Default for Events {
    fn default() -> Self {
        Self(Waker::new().unwrap())
    }
}

impl Events {
    pub(crate) fn waker(&self) -> Waker {
        self.0.clone()
    }

    pub(crate) fn set_kick(&self, kick: bool) {
        match kick {
            true => self.0.latch().set_flag(KICK),
            false => self.0.latch().with(|flags| *flags &= !KICK),
        }
    }

    pub(crate) fn set_event(&self) {
        self.0.latch().set_flag(EVENT);
    }

    /// Returns the present events.
    pub(crate) fn look(&self) -> Happened {
        self.0.latch().with(Happened::take)
    }

    /// Waits for an event.
    pub(crate) fn sleep(&self) -> Happened {
        self.0.latch().wait_for(|flags| (*flags != 0).then(|| Happened::take(flags)))
    }
}

impl Happened {
    /// Takes the events that a wait reports: an edge once, the level each time.
    fn take(flags: &mut u32) -> Self {
        let is_set = |flag| *flags & flag != 0;
        let happened = Self { mailbox: is_set(Latch::SET), kick: is_set(KICK), event: is_set(EVENT) };
        *flags &= Latch::SET;
        happened
    }
}
