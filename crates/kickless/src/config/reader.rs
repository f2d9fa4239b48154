//! Reads a table as a struct.
//!
//! The struct defines the keys and the types of their values (`serde`). An error is one sentence with the
//! file, the line, the key, and the value as it is written.

use std::fmt::{self, Display};
use std::slice;

use anyhow::{Error, Result};
use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, forward_to_deserialize_any};
use toml::de::DeValue;

use super::section::{Entry, Section};

impl Section<'_> {
    /// Reads the whole table. Its keys are the fields of `T`, in that order.
    ///
    /// # Errors
    /// A value is wrong, a required key is absent, or a key is unknown.
    pub(super) fn read<T: for<'de> Deserialize<'de>>(&mut self) -> Result<T> {
        T::deserialize(Reader { section: self, own: &[] }).map_err(|refused| match refused {
            ReadError::Missing(key) => self.needs(key),
            ReadError::Why(why) => self.wrong_table(why),
            ReadError::Located(error) => error,
        })
    }

    /// Checks the present values as [`Section::read`] does. Required keys may be absent. A sentence about an
    /// unknown key does not suggest the keys in `own`.
    ///
    /// # Errors
    /// A value is wrong, or a key is unknown.
    pub(super) fn check<T: for<'de> Deserialize<'de>>(&self, own: &[&str]) -> Result<()> {
        let mut section = self.clone();
        match T::deserialize(Reader { section: &mut section, own }) {
            Ok(_) | Err(ReadError::Missing(_)) => Ok(()),
            Err(ReadError::Why(why)) => Err(self.wrong_table(why)),
            Err(ReadError::Located(error)) => Err(error),
        }
    }
}

/// The error of a table that cannot be read.
#[derive(Debug)]
enum ReadError {
    /// The reason, as the end of a sentence.
    Why(String),
    /// This required key is absent.
    Missing(&'static str),
    /// The whole sentence, with the file and the line.
    Located(Error),
}

impl Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Why(why) => why.fmt(f),
            ReadError::Missing(key) => write!(f, "{key} is absent"),
            ReadError::Located(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ReadError {}

impl de::Error for ReadError {
    fn custom<T: Display>(why: T) -> Self {
        ReadError::Why(why.to_string())
    }

    fn missing_field(key: &'static str) -> Self {
        ReadError::Missing(key)
    }
}

/// Reads a section as a struct.
struct Reader<'s, 't> {
    section: &'s mut Section<'t>,
    /// Keys that a sentence about an unknown key does not suggest.
    own: &'s [&'s str],
}

impl<'de> Deserializer<'de> for Reader<'_, '_> {
    type Error = ReadError;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        visitor.visit_map(Keys { reader: self, all: keys, left: keys.iter(), next: None })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ReadError> {
        Err(ReadError::Why("a table is read as a struct".into()))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The present keys of a section, in the order of the fields of the struct.
struct Keys<'s, 't> {
    reader: Reader<'s, 't>,
    all: &'static [&'static str],
    left: slice::Iter<'static, &'static str>,
    next: Option<(&'static str, Entry<'t>)>,
}

impl<'de> MapAccess<'de> for Keys<'_, '_> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        for &key in self.left.by_ref() {
            if let Some(entry) = self.reader.section.take(key) {
                self.next = Some((key, entry));
                return seed.deserialize(key.into_deserializer()).map(Some);
            }
        }
        let known: Vec<_> = self.all.iter().filter(|key| !self.reader.own.contains(key)).copied().collect();
        self.reader.section.end_of(&known).map_err(ReadError::Located)?;
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, ReadError> {
        let Some((key, entry)) = self.next.take() else {
            return Err(ReadError::Why("a value was read before its key".into()));
        };
        let section = &self.reader.section;
        seed.deserialize(Value(&entry.value)).map_err(|refused| match refused {
            ReadError::Why(why) => ReadError::Located(section.refuse(key, &entry, &why)),
            other => other,
        })
    }
}

/// Reads a value as the type of its field.
struct Value<'v, 't>(&'v DeValue<'t>);

impl<'de> Deserializer<'de> for Value<'_, '_> {
    type Error = ReadError;

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.0 {
            DeValue::String(text) => visitor.visit_str(text),
            _ => Err(ReadError::Why("it must be text, in quotes".into())),
        }
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.0 {
            DeValue::Integer(number) => {
                let digits = i128::from_str_radix(number.as_str(), number.radix());
                // No option accepts a number that does not fit into an i128, so the maximum is refused as
                // well.
                visitor.visit_i128(digits.unwrap_or(i128::MAX))
            }
            _ => Err(ReadError::Why("it must be a whole number, without quotes".into())),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.0 {
            DeValue::Boolean(flag) => visitor.visit_bool(*flag),
            _ => Err(ReadError::Why("it must be true or false, without quotes".into())),
        }
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_str(visitor)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 f64 char string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}
