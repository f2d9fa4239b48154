//! Writes values through serde as the parsers of the command line read them.

use std::fmt::Display;
use std::time::Duration;

use serde::ser::Serializer;

/// Writes a value as text.
pub fn serialize<S: Serializer, T: Display>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Writes a value, if it is present, as text.
pub fn optional<S: Serializer, T: Display>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(value),
        None => to.serialize_none(),
    }
}

/// Writes a duration, if it is present, with its unit.
pub fn duration<S: Serializer>(value: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(&format_args!("{value:?}")),
        None => to.serialize_none(),
    }
}
