//! What workers and those who ask them wait for.

use kickless_io::Waker;
use kickless_sync::Latch;

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

/// Flags beside that of the mailbox.
const KICK: u32 = 2;
const EVENT: u32 = 4;

/// An epoll instance with the mailbox's eventfd (level-triggered), a kick descriptor and a far side (edge-triggered).
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

    /// What has happened by now.
    pub(crate) fn look(&self) -> Happened {
        self.0.latch().with(Happened::take)
    }

    /// Waits until something has.
    pub(crate) fn sleep(&self) -> Happened {
        self.0.latch().wait_for(|flags| (*flags != 0).then(|| Happened::take(flags)))
    }
}

impl Happened {
    /// What a wait reports: an edge once, the level each time.
    fn take(flags: &mut u32) -> Self {
        let is_set = |flag| *flags & flag != 0;
        let happened = Self { mailbox: is_set(Latch::SET), kick: is_set(KICK), event: is_set(EVENT) };
        *flags &= Latch::SET;
        happened
    }
}
