//! How much of the sandbox a kernel must have.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Lack};
use crate::{filter, landlock};

/// A choice of the operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Takes all rights that this kernel can take.
    #[default]
    On,
    /// Takes all rights, or refuses to start.
    Strict,
    /// Takes no rights.
    Off,
}

impl Mode {
    /// Returns the parts that are missing, for the log.
    ///
    /// # Errors
    /// Something is missing, and this mode is [`Mode::Strict`].
    pub fn lacks(self) -> Result<Vec<Lack>, Error> {
        if self == Self::Off {
            return Ok(Vec::new());
        }
        let has = [(Lack::Landlock, landlock::abi() > 0), (Lack::Filters, filter::is_available())];
        let lacks: Vec<_> = has.into_iter().filter(|(_, has)| !has).map(|(lack, _)| lack).collect();
        match lacks.first() {
            Some(&lack) if self == Self::Strict => Err(Error::Strict(lack)),
            _ => Ok(lacks),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::On => "on",
            Self::Strict => "strict",
            Self::Off => "off",
        })
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        [Self::On, Self::Strict, Self::Off]
            .into_iter()
            .find(|mode| mode.to_string() == text)
            .ok_or(UnknownMode)
    }
}

/// A text that names no mode.
#[derive(Debug, thiserror::Error)]
#[error("it is on, strict or off")]
pub struct UnknownMode;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_texts() {
        for text in ["on", "strict", "off"] {
            assert_eq!(text.parse::<Mode>().unwrap().to_string(), text);
        }
        assert_eq!("On".parse::<Mode>().unwrap_err().to_string(), "it is on, strict or off");
        assert_eq!(Mode::default(), Mode::On);
    }
}
