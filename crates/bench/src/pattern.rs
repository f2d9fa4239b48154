//! The order of the addresses that requests go to.

use clap::ValueEnum;
use serde::Serialize;

/// The order of the offsets of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pattern {
    // Any block, each as likely as any other.
    Random,
    // One block after the other; each thread has its own part of the disk.
    Sequential,
}

impl Pattern {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Pattern::Random => "random",
            Pattern::Sequential => "sequential",
        }
    }
}
