//! The order of the addresses that requests go to.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde::Serialize;

/// The order of the offsets of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pattern {
    /// Any block, each as likely as any other.
    Random,
    /// One block after the other; each thread has its own part of the disk.
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

impl ValueEnum for Pattern {
    fn value_variants<'a>() -> &'a [Self] {
        &[Pattern::Random, Pattern::Sequential]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}
