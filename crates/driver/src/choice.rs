//! The use of features.

use crate::error::Error;

/// The use of a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Use it if it is offered.
    #[default]
    Auto,
    /// Require it.
    On,
    /// Do not use it.
    Off,
}

impl Choice {
    /// Returns whether to use a feature. `what` names it in the error.
    ///
    /// # Errors
    /// The feature is required and not offered.
    pub(crate) fn decide(self, offered: bool, what: &'static str) -> Result<bool, Error> {
        match (self, offered) {
            (Self::Auto | Self::On, true) => Ok(true),
            (Self::On, false) => Err(Error::NotOffered { what }),
            (Self::Auto, false) | (Self::Off, _) => Ok(false),
        }
    }
}
