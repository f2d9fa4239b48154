//! The error of a wrong command line, which has an exit status of its own.

use std::fmt;

use anyhow::Error;

/// The command line is wrong, or a variable that stands for an option. The program has done nothing.
#[derive(Debug)]
pub(crate) struct WrongUse(String);

impl fmt::Display for WrongUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUse {}

impl WrongUse {
    /// Makes the error of a sentence, which names the option.
    pub(crate) fn of(sentence: impl Into<String>) -> Error {
        Self(sentence.into()).into()
    }

    /// Returns whether `error` is about the command line.
    pub(crate) fn is(error: &Error) -> bool {
        error.downcast_ref::<Self>().is_some()
    }
}
