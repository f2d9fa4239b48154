//! The parts of which all states are made: descriptors, bytes, and the records of crates above.

use crate::error::Error;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The key of a descriptor's object. A state has no other object with this key alone.
pub(crate) const FD_KEY: &str = "fd";

/// Named numbers, such as counters. The reader skips names that it does not know.
pub type Amounts = BTreeMap<String, u64>;

/// A descriptor of a record, by its number in the messages of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fd {
    pub(crate) fd: u16,
}

/// A piece of the bytes that follow the text of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    pub(crate) at: u32,
    pub(crate) len: u32,
}

/// The contents of a record, or of a part of one, with the checks that need nothing else.
pub trait Checked: Serialize + DeserializeOwned {
    /// Checks values that the types admit and that no process writes. The crates that use the state check it
    /// against what they know: features, limits, files.
    ///
    /// # Errors
    /// The first field that is wrong.
    fn check(&self) -> Result<(), Error>;
}

/// The part of a record that belongs to a kind of device or of port. Only its crate knows the type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Part(pub(crate) Value);

impl Part {
    /// Makes a part.
    ///
    /// # Errors
    /// The type has no JSON, which is a mistake of its crate.
    pub fn new(state: &impl Checked) -> Result<Self, Error> {
        Ok(Self(serde_json::to_value(state)?))
    }

    /// Returns the part as its type.
    ///
    /// # Errors
    /// It is not of this type, or its check fails.
    pub fn read<T: Checked>(self) -> Result<T, Error> {
        let state: T = serde_json::from_value(self.0)?;
        state.check()?;
        Ok(state)
    }
}
