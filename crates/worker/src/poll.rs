//! The polling rules from which an operator can choose.

use std::time::Duration;

/// A rule for polling rings without kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poll {
    /// Polls while that is cheaper than sleeping, judged by the recent waits.
    Auto {
        /// The delay of a request that is accepted to save processor time.
        latency: Duration,
        /// The processor time that a kick costs the driver.
        kick_price: Duration,
    },
    /// Always polls, as long as there are rings.
    Always,
    /// Never polls. An empty ring asks for kicks.
    Never,
    /// Polls from a rate of work on, until there has been none for a while. This is the rule of the kernel's
    /// vhost polling patches of 2014.
    Rate {
        /// The number of visits per second that find work at which polling starts. 0: never.
        start_per_sec: u32,
        /// The time for which an empty ring is polled before it asks for kicks again.
        stop_idle: Duration,
    },
}

impl Poll {
    /// The delay that `auto` accepts by default.
    pub const LATENCY: Duration = Duration::from_micros(100);
    /// The price of a kick for `auto` by default: a guest's exit, and the work of its host for it.
    pub const KICK_PRICE: Duration = Duration::from_micros(3);
    /// The rate of work at which polling starts if only [`Poll::Rate::stop_idle`] is given.
    pub const START_PER_SEC: u32 = 5000;
    /// The time for which an empty ring is polled if only [`Poll::Rate::start_per_sec`] is given.
    pub const STOP_IDLE: Duration = Duration::from_secs(3);
}

impl Default for Poll {
    fn default() -> Self {
        Self::Auto { latency: Self::LATENCY, kick_price: Self::KICK_PRICE }
    }
}
