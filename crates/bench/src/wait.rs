//! The ways in which a thread waits for completions.

use std::time::Duration;

use clap::ValueEnum;
use kickless_driver::Waiting;
use serde::Serialize;

/// The way in which a thread waits for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wait {
    // Asks for a call and sleeps.
    Sleep,
    // Polls the ring.
    Poll,
}

impl Wait {
    /// Returns the word for it in results.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Wait::Sleep => "sleeping",
            Wait::Poll => "polling",
        }
    }

    /// Returns the driver's option.
    pub(crate) fn waiting(self) -> Waiting {
        match self {
            Wait::Sleep => Waiting::Sleep,
            Wait::Poll => Waiting::Spin(Duration::MAX),
        }
    }
}
