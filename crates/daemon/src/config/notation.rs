//! The spelling of options in sentences about them.

use std::borrow::Cow;
use std::fmt;

/// The place where an operator writes options. It determines how a sentence names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    /// On a command line: `--weight=2`.
    CommandLine,
    /// As keys of a file or of a call: `weight = 2`.
    Keys,
}

impl Notation {
    /// Returns the name of `option` as it is written.
    pub fn option(self, option: &str) -> String {
        match self {
            Notation::CommandLine => format!("--{option}"),
            Notation::Keys => option.into(),
        }
    }

    /// Returns `option` with a value as it is written.
    pub fn with_value(self, option: &str, value: impl fmt::Display) -> String {
        match self {
            Notation::CommandLine => format!("--{option}={value}"),
            Notation::Keys => format!("{option} = \"{value}\""),
        }
    }
}

/// The error of options that cannot be combined, or of a value of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {why}")]
pub struct Mistake {
    /// The option to change.
    pub option: Cow<'static, str>,
    /// The reason, as the end of a sentence.
    pub why: String,
}

impl Mistake {
    /// Makes the error of an option. `why` is the end of a sentence.
    pub fn new(option: impl Into<Cow<'static, str>>, why: impl Into<String>) -> Self {
        Self { option: option.into(), why: why.into() }
    }
}
