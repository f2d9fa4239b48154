//! Reads options as keys of a file or of a call, with the parsers of the command line.
//!
//! A key is an option of the command line without its dashes. clap's description of the options is the only
//! one: it says which keys exist, what their values are, and which values are valid.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::error::Error;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Args, Command};
use kickless_values::nearest;

use super::notation::Mistake;
use super::removed::removed_option;

/// The value of a key, as a file or a call has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Text.
    Text(String),
    /// A whole number, in decimal digits.
    Number(String),
    /// `true` or `false`.
    Flag(bool),
    /// A value that no option takes, such as a list.
    Other,
}

impl From<&serde_json::Value> for Value {
    fn from(value: &serde_json::Value) -> Self {
        match value {
            serde_json::Value::String(text) => Self::Text(text.clone()),
            serde_json::Value::Number(number) if !number.is_f64() => Self::Number(number.to_string()),
            serde_json::Value::Bool(flag) => Self::Flag(*flag),
            _ => Self::Other,
        }
    }
}

/// The values of keys.
pub type Values = BTreeMap<String, Value>;

/// Returns the values of the keys of a JSON object.
pub fn values(object: &serde_json::Map<String, serde_json::Value>) -> Values {
    object.iter().map(|(key, value)| (key.clone(), value.into())).collect()
}

/// A key that a table of a file, or a call, can have.
#[derive(Clone, Debug)]
pub struct Key(Arg);

impl Key {
    /// Makes the key of an option. The option has a long name.
    pub(crate) fn new(option: Arg) -> Self {
        Self(option)
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        self.0.get_long().unwrap_or_default()
    }

    /// Checks that an option of this name accepts the value.
    ///
    /// # Errors
    /// It does not. The error is the end of a sentence.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        self.argument(value)?.map_or(Ok(()), |argument| self.parse(&argument))
    }

    /// Returns whether the value is a number of bytes, which may have a unit.
    pub(crate) fn is_size(&self) -> bool {
        self.0.get_value_parser().type_id() == TypeId::of::<u64>()
    }

    /// Returns the argument of a command line that sets the option to this value. `None` for a flag that is
    /// not set.
    fn argument(&self, value: &Value) -> Result<Option<String>, String> {
        let name = self.name();
        let value_type = self.0.get_value_parser().type_id();
        if matches!(self.0.get_action(), ArgAction::SetTrue) {
            match value {
                Value::Flag(is_set) => Ok(is_set.then(|| format!("--{name}"))),
                _ => Err("it must be true or false, without quotes".into()),
            }
        // Sizes are text, because they have units, and are 64 bits wide.
        } else if value_type == TypeId::of::<u16>() || value_type == TypeId::of::<u32>() {
            match value {
                Value::Number(digits) => Ok(Some(format!("--{name}={digits}"))),
                Value::Text(text) => {
                    // The text may be the number, or a number with a unit, which has a sentence of its own.
                    Err(match self.parse(&format!("--{name}={text}")) {
                        Ok(()) => format!("it must be a whole number, without quotes: write {text}"),
                        Err(why) => format!("{why} (without quotes)"),
                    })
                }
                Value::Flag(_) | Value::Other => Err("it must be a whole number, without quotes".into()),
            }
        } else {
            match value {
                Value::Text(text) => Ok(Some(format!("--{name}={text}"))),
                _ => Err(match self.example(value) {
                    Some(example) => format!("it must be text, in quotes, such as {example:?}"),
                    None => "it must be text, in quotes".into(),
                }),
            }
        }
    }

    /// Parses an argument of a command line with this option alone. Other options are not needed for it.
    fn parse(&self, argument: &str) -> Result<(), String> {
        let alone = bare_command().arg(self.0.clone().required(false));
        alone.try_get_matches_from([argument]).map(|_| ()).map_err(|error| why(&error))
    }

    /// Returns a text that this key takes, as an example for somebody who wrote another value.
    fn example(&self, instead_of: &Value) -> Option<String> {
        let of_kind = self.0.get_value_names().and_then(<[_]>::first).and_then(|kind| match kind.as_str() {
            "SIZE" => Some("100M"),
            "DURATION" => Some("500us"),
            "OCTAL" => Some("0660"),
            "LIST" => Some("0-3"),
            "MAC" => Some("52:54:00:12:34:56"),
            _ => None,
        });
        let named: Vec<_> = self.0.get_possible_values();
        let named =
            |name: &str| named.iter().any(|value| value.get_name() == name).then_some(name.to_owned());
        let written = match instead_of {
            Value::Flag(true) => named("on"),
            Value::Flag(false) => named("off"),
            Value::Number(digits) => Some(digits.clone()),
            Value::Text(_) | Value::Other => None,
        };
        let is_valid = |text: &String| self.parse(&format!("--{}={text}", self.name())).is_ok();
        let first = || self.0.get_possible_values().first().map(|value| value.get_name().to_owned());
        of_kind.map(str::to_owned).or_else(|| written.filter(is_valid)).or_else(first)
    }
}

/// The error of keys that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// There is no such key.
    #[error("{}", unknown_key(key, "this call", known.iter().map(String::as_str)))]
    Unknown {
        /// The key.
        key: String,
        /// The keys that exist.
        known: Vec<String>,
    },
    /// A value is invalid, or keys cannot be combined.
    #[error(transparent)]
    Mistake(#[from] Mistake),
}

/// The most keys that a sentence lists.
const LISTED_MAX: usize = 10;

/// Returns the sentence about a key that a table or a call does not have. It has the one that is probably
/// meant, or all that are `known` if they are few.
pub fn unknown_key<'k>(key: &str, of: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let cure = match nearest(key, known.iter().copied()) {
        Some(nearest) => format!("did you mean {nearest}?"),
        None if known.len() <= LISTED_MAX => format!("write {}", alternatives(&known)),
        None => "kickless ctl help device.add shows the keys of devices".into(),
    };
    format!("{key:?} is no key of {of}: {cure}")
}

/// Returns words as one of them is chosen: `a, b or c`.
pub fn alternatives(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [word] => (*word).to_owned(),
        [words @ .., last] => format!("{} or {last}", words.join(", ")),
    }
}

/// Returns the keys of a group of options, in the order of its fields.
pub fn keys<A: Args>() -> Vec<Key> {
    command::<A>().get_arguments().cloned().map(Key::new).collect()
}

/// Checks that each value is valid for a key of `keys`, whether they can be combined or not.
///
/// # Errors
/// A key is unknown, or its value is invalid.
pub fn check(keys: &[Key], values: &Values) -> Result<(), KeyError> {
    for (name, value) in values {
        let unknown = || match removed_option(name) {
            Some(mistake) => mistake.into(),
            None => KeyError::Unknown {
                key: name.clone(),
                known: keys.iter().map(|key| key.name().to_owned()).collect(),
            },
        };
        let key = keys.iter().find(|key| key.name() == name).ok_or_else(unknown)?;
        key.check(value).map_err(|why| Mistake::new(name.clone(), why))?;
    }
    Ok(())
}

/// Reads a group of options from the values of its keys. Absent keys have their defaults. Ignores keys that
/// the group does not have.
///
/// # Errors
/// A value is invalid, or a required key is absent.
pub fn read<A: Args>(values: &Values) -> Result<A, Mistake> {
    let mut arguments = Vec::new();
    for key in keys::<A>() {
        if let Some(value) = values.get(key.name()) {
            let argument = key.argument(value);
            arguments.extend(argument.map_err(|why| Mistake::new(key.name().to_owned(), why))?);
        }
    }
    let matches = command::<A>().try_get_matches_from(arguments);
    matches.and_then(|matches| A::from_arg_matches(&matches)).map_err(|error| {
        let option = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(option)) => option.as_str(),
            Some(ContextValue::Strings(options)) => options.first().map_or("", String::as_str),
            _ => "",
        };
        // It is written with its value, as in "--mtu <N>".
        let option = option.trim_start_matches('-').split([' ', '=']).next().unwrap_or_default();
        Mistake::new(option.to_owned(), why(&error))
    })
}

fn command<A: Args>() -> Command {
    A::augment_args(bare_command())
}

fn bare_command() -> Command {
    Command::new("keys").no_binary_name(true).disable_help_flag(true)
}

/// Returns the reason of an error of clap, as the end of a sentence.
fn why(error: &clap::Error) -> String {
    match (error.source(), error.get(ContextKind::ValidValue), error.get(ContextKind::InvalidValue)) {
        (Some(source), ..) => source.to_string(),
        (None, Some(ContextValue::Strings(valid)), _) if !valid.is_empty() => {
            format!("it must be {}", alternatives(&valid.iter().map(String::as_str).collect::<Vec<_>>()))
        }
        (None, _, Some(ContextValue::String(value))) if value.is_empty() => {
            "it is empty: give it a value or leave it out".into()
        }
        _ => error.kind().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq, Args)]
    struct Colours {
        /// A number
        #[arg(long, value_name = "N", default_value_t = 7)]
        red_max: u16,
        /// Text
        #[arg(long, value_name = "TEXT")]
        green: Option<String>,
        /// A flag
        #[arg(long)]
        blue: bool,
        /// A size, which has a unit
        #[arg(long, value_name = "SIZE")]
        length: Option<u64>,
    }

    fn of(values: &[(&str, Value)]) -> Values {
        values.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
    }

    fn text(text: &str) -> Value {
        Value::Text(text.into())
    }

    #[test]
    fn the_options_are_the_keys() {
        let names: Vec<String> = keys::<Colours>().iter().map(|key| key.name().to_owned()).collect();
        assert_eq!(names, ["red-max", "green", "blue", "length"]);
        let none = Colours { red_max: 7, green: None, blue: false, length: None };
        assert_eq!(read::<Colours>(&of(&[("pink", text("a"))])), Ok(none));
        let all = of(&[
            ("red-max", Value::Number("9".into())),
            ("green", text("--a=b c")),
            ("blue", Value::Flag(true)),
            ("length", text("5")),
        ]);
        assert_eq!(check(&keys::<Colours>(), &all), Ok(()));
        let read = read::<Colours>(&all).unwrap();
        assert_eq!(read, Colours { red_max: 9, green: Some("--a=b c".into()), blue: true, length: Some(5) });
    }

    #[test]
    fn a_wrong_value_is_refused_by_the_name_of_its_key() {
        for (key, value, said) in [
            ("red-max", text("9"), "red-max: it must be a whole number, without quotes: write 9"),
            ("red-max", Value::Number("-1".into()), "red-max: -1 is not in"),
            ("red-max", Value::Other, "red-max: it must be a whole number"),
            ("green", Value::Number("9".into()), "green: it must be text, in quotes, such as \"9\""),
            ("blue", text("true"), "blue: it must be true or false"),
            ("length", Value::Number("5".into()), "length: it must be text, in quotes, such as \"100M\""),
            ("pink", Value::Other, "\"pink\" is no key of this call: write red-max, green, blue or length"),
            ("grean", Value::Other, "\"grean\" is no key of this call: did you mean green?"),
        ] {
            let values = of(&[(key, value)]);
            let refused = check(&keys::<Colours>(), &values).unwrap_err().to_string();
            assert!(refused.starts_with(said), "{refused}");
            assert_eq!(["pink", "grean"].contains(&key), read::<Colours>(&values).is_ok(), "{key}");
        }
    }
}
