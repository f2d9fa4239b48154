//! The options of a device of any kind.

use std::any::Any;
use std::fmt;

use kickless_device::{Limits, Operate};
use serde::de::{MapAccess, Visitor};
use serde::ser::{Error, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::capture::CaptureConfig;
use super::kind::{KIND, Kind, Words};
use super::notation::{Mistake, Notation};

/// The kind of a device, with the options of this kind.
pub struct KindConfig(Box<dyn Options>);

/// The options of one device, without their type. [`Kind`] documents the methods.
trait Options: Any + Send + Sync {
    fn words(&self) -> &'static Words;
    fn copy(&self) -> Box<dyn Options>;
    fn equals(&self, other: &dyn Options) -> bool;
    fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    fn entries(&self) -> serde_json::Result<Entries>;
    fn check(&self, notation: Notation) -> Result<(), Mistake>;
    fn descriptors(&self) -> Vec<(&'static str, &str)>;
    fn inherited(&self) -> Vec<(&'static str, i32)>;
    fn log_served(&self, version: &str);
    fn limits(&self) -> (Limits, Option<String>);
    fn limit_entries(&self) -> serde_json::Result<Value>;
    fn take_settable(&mut self, wanted: &dyn Options);
    fn apply(&self, device: &dyn Operate);
    fn size_min(&mut self) -> Option<&mut Option<u64>>;
    fn capture(&mut self) -> Option<&mut CaptureConfig>;
}

/// The entries of a JSON object, in their order.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Entries, A::Error> {
                std::iter::from_fn(|| from.next_entry().transpose()).collect::<Result<_, _>>().map(Entries)
            }
        }

        from.deserialize_map(InOrder)
    }
}

/// The options of a device of the kind `K`.
struct Of<K: Kind>(K::Options);

impl<K: Kind> Of<K> {
    fn downcast(options: &dyn Options) -> Option<&K::Options> {
        (options as &dyn Any).downcast_ref::<Self>().map(|of| &of.0)
    }
}

impl<K: Kind> Options for Of<K> {
    fn words(&self) -> &'static Words {
        &K::WORDS
    }

    fn copy(&self) -> Box<dyn Options> {
        Box::new(Self(self.0.clone()))
    }

    fn equals(&self, other: &dyn Options) -> bool {
        Self::downcast(other).is_some_and(|other| *other == self.0)
    }

    fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }

    /// Returns the values by their keys, in the order of the options. A call can list many devices, so this
    /// does not ask clap for the order, which takes ten times as long.
    fn entries(&self) -> serde_json::Result<Entries> {
        serde_json::from_str(&serde_json::to_string(&self.0)?)
    }

    fn check(&self, notation: Notation) -> Result<(), Mistake> {
        K::check(&self.0, notation)
    }

    fn descriptors(&self) -> Vec<(&'static str, &str)> {
        K::descriptors(&self.0)
    }

    fn inherited(&self) -> Vec<(&'static str, i32)> {
        K::inherited(&self.0)
    }

    fn log_served(&self, version: &str) {
        K::log_served(&self.0, version);
    }

    fn limits(&self) -> (Limits, Option<String>) {
        let mut options = self.0.clone();
        let limits = K::limits(&mut options);
        (limits.limits(), limits.group.take())
    }

    fn limit_entries(&self) -> serde_json::Result<Value> {
        serde_json::to_value(K::limits(&mut self.0.clone()))
    }

    fn take_settable(&mut self, wanted: &dyn Options) {
        let Some(wanted) = Self::downcast(wanted) else { return };
        K::limits(&mut self.0).take_limits(K::limits(&mut wanted.clone()));
        K::SETTABLE.iter().for_each(|option| (option.take)(&mut self.0, wanted));
    }

    fn apply(&self, device: &dyn Operate) {
        K::SETTABLE.iter().for_each(|option| (option.apply)(&self.0, device));
    }

    fn size_min(&mut self) -> Option<&mut Option<u64>> {
        K::size_min(&mut self.0)
    }

    fn capture(&mut self) -> Option<&mut CaptureConfig> {
        K::capture(&mut self.0)
    }
}

impl KindConfig {
    /// Makes the options of a device of the kind `K`.
    pub fn new<K: Kind>(options: K::Options) -> Self {
        Self(Box::new(Of::<K>(options)))
    }

    /// Returns the options of a device of the kind `K`. `None` for another kind.
    pub fn options<K: Kind>(&self) -> Option<&K::Options> {
        Of::<K>::downcast(&*self.0)
    }

    /// Returns the words for the kind.
    pub fn words(&self) -> &'static Words {
        self.0.words()
    }

    /// Checks that the options can be combined.
    ///
    /// # Errors
    /// Some cannot.
    pub fn check(&self, notation: Notation) -> Result<(), Mistake> {
        self.0.check(notation)
    }

    /// Returns the names of the descriptors that the device needs ([`Kind::descriptors`]).
    pub fn descriptors(&self) -> Vec<(&'static str, &str)> {
        self.0.descriptors()
    }

    /// Returns the numbers of the descriptors that the device needs ([`Kind::inherited`]).
    pub fn inherited(&self) -> Vec<(&'static str, i32)> {
        self.0.inherited()
    }

    /// Logs that the device is served.
    pub(crate) fn log_served(&self, version: &str) {
        self.0.log_served(version);
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        self.0.limits().0
    }

    /// Returns the group that shares the limits.
    pub fn group(&self) -> Option<String> {
        self.0.limits().1
    }

    /// Returns the limits by their keys, and the group.
    pub fn limit_entries(&self) -> Map<String, Value> {
        match self.0.limit_entries() {
            Ok(Value::Object(limits)) => limits,
            _ => Map::new(),
        }
    }

    /// Takes the values that `device.set` changes from the options of another device of the same kind. Keeps
    /// the group.
    pub(crate) fn take_settable(&mut self, wanted: &Self) {
        self.0.take_settable(&*wanted.0);
    }

    /// Returns these options with all values of `other` that change while the device is served.
    pub(crate) fn with_changeable(&self, other: &Self) -> Self {
        let (mut changed, mut other) = (self.clone(), other.clone());
        changed.take_settable(&other);
        if let (Some(size), Some(other)) = (changed.size_min(), other.size_min()) {
            *size = *other;
        }
        if let (Some(capture), Some(other)) = (changed.capture(), other.capture()) {
            capture.clone_from(other);
        }
        changed
    }

    /// Makes a device use the values that `device.set` changes, except for the limits.
    pub(crate) fn apply(&self, device: &dyn Operate) {
        self.0.apply(device);
    }

    /// Returns the size that the medium has at least ([`Kind::size_min`]).
    pub(crate) fn size_min(&mut self) -> Option<&mut Option<u64>> {
        self.0.size_min()
    }

    /// Returns the file for the frames ([`Kind::capture`]).
    pub(crate) fn capture(&mut self) -> Option<&mut CaptureConfig> {
        self.0.capture()
    }
}

impl Clone for KindConfig {
    fn clone(&self) -> Self {
        Self(self.0.copy())
    }
}

impl PartialEq for KindConfig {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(&*other.0)
    }
}

impl fmt::Debug for KindConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug(f)
    }
}

/// Writes the name of the kind, and the options by their keys.
impl Serialize for KindConfig {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut to = to.serialize_map(None)?;
        to.serialize_entry(KIND, self.words().name)?;
        for (key, value) in self.0.entries().map_err(S::Error::custom)?.0 {
            to.serialize_entry(&key, &value)?;
        }
        to.end()
    }
}
