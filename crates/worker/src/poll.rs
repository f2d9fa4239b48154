//! What an operator can say about polling.

use std::time::Duration;

/// When rings are looked at without kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poll {
    /// When it pays, as far as what waiting has cost lately tells.
    Auto {
        /// The delay of a request that is accepted in exchange for processor time.
        latency: Duration,
    },
    /// As long as there are rings, whatever it costs.
    Always,
    /// Never: a ring that was found empty asks for kicks.
    Never,
    /// From a rate of work on, and until there has been none for a while: the rule of the kernel's vhost polling patches of 2014.
    Rate {
        /// Visits that found work, for each second, at which polling starts; 0: never.
        start_per_sec: u32,
        /// How long a ring that yields nothing is looked at before it asks for kicks again.
        stop_idle: Duration,
    },
}

impl Poll {
    /// The delay that `auto` accepts if nothing is said.
    pub const LATENCY: Duration = Duration::from_micros(100);
    /// The rate of work at which polling starts if only [`Poll::Rate::stop_idle`] is given.
    pub const START_PER_SEC: u32 = 5000;
    /// How long an idle ring is looked at if only [`Poll::Rate::start_per_sec`] is given.
    pub const STOP_IDLE: Duration = Duration::from_secs(3);
}

impl Default for Poll {
    fn default() -> Self {
        Self::Auto { latency: Self::LATENCY }
    }
}
