//! The table of the kinds of devices that a program serves.

use std::fmt;
use std::sync::Arc;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use kickless_device::Operate;

use super::device::DeviceConfig;
use super::keys::{Key, Value, Values, keys, read};
use super::kind::{KIND, Kind, Words};
use super::kind_config::KindConfig;
use super::limits::{GROUP, LimitsConfig};
use super::making::{MakeError, Making};
use super::notation::Mistake;
use super::serve::{Identity, ServeConfig, Share};

/// The kinds of devices that a program serves. The first is the usual one, for sentences.
pub struct Kinds(Vec<Box<dyn KindEntry>>);

/// A kind of the table, without its type. [`Kind`] documents the methods that have no documentation.
#[allow(missing_docs, reason = "the trait of a kind documents these methods")]
pub trait KindEntry: Send + Sync {
    fn words(&self) -> &'static Words;
    fn keys(&self) -> Vec<Key>;
    fn limit_keys(&self) -> Vec<Key>;
    fn own_keys(&self) -> &'static [&'static str];
    fn set_keys(&self) -> Vec<&'static str>;
    fn capabilities(&self) -> serde_json::Value;
    fn augment(&self, command: Command) -> Command;
    fn of_matches(&self, matches: &ArgMatches) -> Result<KindConfig, clap::Error>;
    fn read(&self, values: &Values) -> Result<KindConfig, Mistake>;
    fn make(&self, of: &KindConfig, making: &Making<'_>) -> Option<Result<Arc<dyn Operate>, MakeError>>;
}

impl<K: Kind> KindEntry for K {
    fn words(&self) -> &'static Words {
        &K::WORDS
    }

    fn keys(&self) -> Vec<Key> {
        keys::<K::Options>()
    }

    fn limit_keys(&self) -> Vec<Key> {
        keys::<LimitsConfig<K::Limited>>()
    }

    fn own_keys(&self) -> &'static [&'static str] {
        K::OWN_KEYS
    }

    fn set_keys(&self) -> Vec<&'static str> {
        K::SETTABLE.iter().map(|option| option.key).collect()
    }

    fn capabilities(&self) -> serde_json::Value {
        K::capabilities()
    }

    fn augment(&self, command: Command) -> Command {
        K::Options::augment_args(command).next_help_heading(None::<&str>)
    }

    fn of_matches(&self, matches: &ArgMatches) -> Result<KindConfig, clap::Error> {
        K::Options::from_arg_matches(matches).map(KindConfig::new::<K>)
    }

    fn read(&self, values: &Values) -> Result<KindConfig, Mistake> {
        read::<K::Options>(values).map(KindConfig::new::<K>)
    }

    fn make(&self, of: &KindConfig, making: &Making<'_>) -> Option<Result<Arc<dyn Operate>, MakeError>> {
        of.options::<K>().map(|options| Kind::make(self, options, making))
    }
}

impl fmt::Debug for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|kind| kind.words().name)).finish()
    }
}

impl Kinds {
    /// Makes a table with one kind.
    pub fn new(kind: impl Kind) -> Self {
        Self(vec![Box::new(kind)])
    }

    /// Adds a kind.
    #[must_use]
    pub fn with(mut self, kind: impl Kind) -> Self {
        self.0.push(Box::new(kind));
        self
    }

    /// Returns the kinds, for the command line.
    pub fn commands(&self) -> impl Iterator<Item = &dyn KindEntry> {
        self.0.iter().map(|kind| &**kind)
    }

    /// Returns whether devices of the kind with this name measure latencies. Another program can have kinds
    /// that this one does not know.
    pub fn has_latencies(&self, name: &str) -> bool {
        self.commands().any(|kind| kind.words().name == name && kind.words().has_latencies)
    }

    /// Returns the keys that a device can have, those of all kinds.
    pub fn keys(&self) -> Vec<Key> {
        let names: Vec<&str> = self.commands().map(|kind| kind.words().name).collect();
        let kind = Arg::new(KIND).long(KIND).value_parser(move |text: &str| match names.contains(&text) {
            true => Ok(text.to_owned()),
            false => Err(format!("a kind of device is {}", names.join(" or "))),
        });
        let mut all = vec![Key::new(kind)];
        let shared = [keys::<Identity>(), keys::<ServeConfig>(), keys::<Share>()];
        for key in self.0.iter().map(|kind| kind.keys()).chain(shared).flatten() {
            // Several kinds can have a key of this name.
            if !all.iter().any(|known| known.name() == key.name()) {
                all.push(key);
            }
        }
        all
    }

    /// Returns the keys that are a device's own, so that no default for several can be right.
    pub fn own_keys(&self) -> Vec<&'static str> {
        let of_all = ["name", "socket-path"];
        of_all.into_iter().chain(self.0.iter().flat_map(|kind| kind.own_keys().iter().copied())).collect()
    }

    /// Returns the keys that change while a device is served, those of all kinds. The group of limits does
    /// not change.
    pub fn set_keys(&self) -> Vec<Key> {
        let limits: Vec<Key> = self.0.iter().flat_map(|kind| kind.limit_keys()).collect();
        let is_limit =
            |key: &Key| key.name() != GROUP && limits.iter().any(|limit| limit.name() == key.name());
        let is_set = |key: &Key| self.0.iter().any(|kind| kind.set_keys().contains(&key.name()));
        let is_share = |key: &Key| keys::<Share>().iter().any(|share| share.name() == key.name());
        self.keys().into_iter().filter(|key| is_share(key) || is_set(key) || is_limit(key)).collect()
    }

    /// Returns the keys that devices of other kinds have, but no device with these keys.
    pub fn foreign_keys(&self, has: impl Fn(&str) -> bool) -> Vec<String> {
        let kind = self.0.iter().find(|kind| has(kind.words().key)).or(self.0.first());
        kind.map_or_else(Vec::new, |kind| self.foreign(&**kind).into_iter().map(|(key, _)| key).collect())
    }

    /// Reads a device from the values of its keys, each of which is valid by itself. Ignores keys that no
    /// device has.
    ///
    /// # Errors
    /// The keys cannot be combined.
    pub fn read(&self, values: &Values) -> Result<DeviceConfig, Mistake> {
        let kind = self.kind_of(values)?;
        if let Some((key, owner)) = self.foreign(kind).into_iter().find(|(key, _)| values.contains_key(key)) {
            let why = format!("only {} have it, and this device is {}", owner.several, kind.words().one);
            return Err(Mistake::new(key, why));
        }
        Ok(DeviceConfig {
            kind: kind.read(values)?,
            identity: read::<Identity>(values)?,
            serve: read::<ServeConfig>(values)?,
            share: read::<Share>(values)?,
        })
    }

    /// Makes a device.
    ///
    /// # Errors
    /// The host or a server refuses it, or the table does not have its kind.
    pub(crate) fn make(&self, of: &KindConfig, making: &Making<'_>) -> Result<Arc<dyn Operate>, MakeError> {
        let made = self.0.iter().find_map(|kind| kind.make(of, making));
        let made = made.map(|made| made.inspect(|device| of.apply(&**device)));
        let unknown = || MakeError { option: KIND, source: "this program has no such kind of device".into() };
        made.unwrap_or_else(|| Err(unknown()))
    }

    /// Returns the keys that only other kinds have, and one of these kinds.
    fn foreign(&self, kind: &dyn KindEntry) -> Vec<(String, &'static Words)> {
        let own = kind.keys();
        let others = self.0.iter().filter(|other| other.words() != kind.words());
        let all = others.flat_map(|other| other.keys().into_iter().map(|key| (key, other.words())));
        let foreign = all.filter(|(key, _)| !own.iter().any(|own| own.name() == key.name()));
        foreign.map(|(key, words)| (key.name().to_owned(), words)).collect()
    }

    /// Returns the kind of a device with these keys.
    fn kind_of(&self, values: &Values) -> Result<&dyn KindEntry, Mistake> {
        let named = match values.get(KIND) {
            Some(Value::Text(name)) => self.0.iter().find(|kind| kind.words().name == name),
            _ => None,
        };
        let mut found = self.0.iter().filter(|kind| values.contains_key(kind.words().key));
        match (found.next(), found.next(), named.map(|kind| kind.words())) {
            (Some(first), Some(second), _) => {
                let (first, second) = (first.words(), second.words());
                let why =
                    format!("a device is {} or {}: leave it or {} out", first.one, second.one, first.key);
                Err(Mistake::new(second.key, why))
            }
            (Some(kind), None, Some(named)) if kind.words() != named => {
                let words = kind.words();
                let why = format!("it is for {}, and kind is {}", words.several, named.name);
                Err(Mistake::new(words.key, why))
            }
            (Some(kind), None, _) => Ok(&**kind),
            (None, _, Some(named)) => Err(Mistake::new(named.key, format!("{} needs one", named.one))),
            (None, _, None) => {
                let mut all = self.commands().map(KindEntry::words);
                let Some(first) = all.next() else { return Err(Mistake::new(KIND, "there is none")) };
                let others = all.map(|kind| format!(", and {} needs a {}", kind.one, kind.key));
                let others: String = others.collect();
                Err(Mistake::new(first.key, format!("{} needs one{others}", first.one)))
            }
        }
    }
}
