//! Reads values through serde with the parsers of the command line.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserializer, Error, Visitor};
use serde::ser::Serializer;

/// Writes a value as the text that [`deserialize`] reads.
pub(crate) fn serialize<S: Serializer, T: Display>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Reads a value from text.
pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    from: D,
) -> Result<T, D::Error> {
    text(from, |text| text.parse().map_err(|error: T::Err| error.to_string()))
}

/// Reads and writes values that may be absent.
pub(crate) mod optional {
    use super::{Deserializer, Display, FromStr, Serializer};

    /// Writes a value, if it is present, as the text that [`deserialize`] reads.
    pub(crate) fn serialize<S: Serializer, T: Display>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_none(),
        }
    }

    /// Reads a value from text.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
        from: D,
    ) -> Result<Option<T>, D::Error> {
        super::deserialize(from).map(Some)
    }
}

/// Reads a value with `parse` from text.
pub(crate) fn text<'de, D: Deserializer<'de>, T>(
    from: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    from.deserialize_str(Parsed { parse, expected: "text", value: PhantomData })
}

/// Reads a value with `parse` from the digits of a whole number.
pub(crate) fn number<'de, D: Deserializer<'de>, T>(
    from: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    from.deserialize_u64(Number(Parsed { parse, expected: "a whole number", value: PhantomData }))
}

/// Writes a duration as `parse_duration` reads it.
pub(crate) fn serialize_duration<S: Serializer>(value: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => to.collect_str(&format_args!("{value:?}")),
        None => to.serialize_none(),
    }
}

/// Passes text to a parser.
struct Parsed<P, T> {
    parse: P,
    expected: &'static str,
    value: PhantomData<T>,
}

impl<T, P: FnOnce(&str) -> Result<T, String>> Visitor<'_> for Parsed<P, T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.parse)(text).map_err(E::custom)
    }
}

/// Passes the digits of a number to a parser.
struct Number<P, T>(Parsed<P, T>);

impl<T, P: FnOnce(&str) -> Result<T, String>> Visitor<'_> for Number<P, T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        self.0.visit_str(&number.to_string())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        self.0.visit_str(&number.to_string())
    }

    fn visit_i128<E: Error>(self, number: i128) -> Result<T, E> {
        self.0.visit_str(&number.to_string())
    }
}
