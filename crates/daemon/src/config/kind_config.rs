//! The options of a device of any kind.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};

use indexmap::IndexMap;
use kickless_device::{Limits, Operate};
use kickless_opener::Grant;
use serde::ser::{Error, SerializeMap};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::capture::CaptureConfig;
use super::kind::{KIND, Kind, Served, Words};
use super::notation::{Mistake, Notation};

/// The kind of a device, with the options of this kind.
pub struct KindConfig(Box<dyn KindOptions>);

/// The options of one device, without their type. [`Kind`] documents the methods that have no documentation.
#[allow(missing_docs, reason = "the trait of a kind documents these methods")]
pub trait KindOptions: Any + Send + Sync {
    fn words(&self) -> &'static Words;
    fn copy(&self) -> Box<dyn KindOptions>;
    fn equals(&self, other: &dyn KindOptions) -> bool;
    fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    /// Returns the values by their keys, in the order of the options.
    fn entries(&self) -> serde_json::Result<IndexMap<String, Value>>;
    fn check(&self, notation: Notation) -> Result<(), Mistake>;
    fn descriptors(&self) -> Vec<(&'static str, &str)>;
    fn inherited(&self) -> Vec<(&'static str, i32)>;
    fn grants(&self) -> Vec<Grant>;
    fn log_served(&self, of: &Served);
    fn limits(&self) -> Limits;
    /// Returns the group that shares the limits.
    fn group(&self) -> Option<String>;
    /// Returns the limits by their keys, and the group.
    fn limit_entries(&self) -> Map<String, Value>;
    /// Takes the values that `device.set` changes from the options of another device of the same kind. Keeps
    /// the group.
    fn take_settable(&mut self, wanted: &dyn KindOptions);
    /// Makes a device use the values that `device.set` changes, except for the limits.
    fn apply(&self, device: &dyn Operate);
    fn size_min(&mut self) -> Option<&mut Option<u64>>;
    fn capture(&mut self) -> Option<&mut CaptureConfig>;
}

/// The options of a device of the kind `K`.
struct Of<K: Kind>(K::Options);

impl<K: Kind> Of<K> {
    fn downcast(options: &dyn KindOptions) -> Option<&K::Options> {
        (options as &dyn Any).downcast_ref::<Self>().map(|of| &of.0)
    }
}

impl<K: Kind> KindOptions for Of<K> {
    fn words(&self) -> &'static Words {
        &K::WORDS
    }

    fn copy(&self) -> Box<dyn KindOptions> {
        Box::new(Self(self.0.clone()))
    }

    fn equals(&self, other: &dyn KindOptions) -> bool {
        Self::downcast(other).is_some_and(|other| *other == self.0)
    }

    fn debug(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }

    /// A call can list many devices, so this does not ask clap for the order, which takes ten times as long.
    fn entries(&self) -> serde_json::Result<IndexMap<String, Value>> {
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

    fn grants(&self) -> Vec<Grant> {
        K::grants(&self.0)
    }

    fn log_served(&self, of: &Served) {
        K::log_served(&self.0, of);
    }

    fn limits(&self) -> Limits {
        K::limits(&mut self.0.clone()).limits()
    }

    fn group(&self) -> Option<String> {
        K::limits(&mut self.0.clone()).group.take()
    }

    fn limit_entries(&self) -> Map<String, Value> {
        match serde_json::to_value(K::limits(&mut self.0.clone())) {
            Ok(Value::Object(limits)) => limits,
            _ => Map::new(),
        }
    }

    fn take_settable(&mut self, wanted: &dyn KindOptions) {
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

    /// Returns these options with all values of `other` that change while the device is served.
    pub(crate) fn with_changeable(&self, other: &Self) -> Self {
        let (mut changed, mut other) = (self.clone(), other.clone());
        changed.take_settable(&*other);
        if let (Some(size), Some(other)) = (changed.size_min(), other.size_min()) {
            *size = *other;
        }
        if let (Some(capture), Some(other)) = (changed.capture(), other.capture()) {
            capture.clone_from(other);
        }
        changed
    }
}

impl Deref for KindConfig {
    type Target = dyn KindOptions;

    fn deref(&self) -> &dyn KindOptions {
        &*self.0
    }
}

impl DerefMut for KindConfig {
    fn deref_mut(&mut self) -> &mut dyn KindOptions {
        &mut *self.0
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
        for (key, value) in self.entries().map_err(S::Error::custom)? {
            to.serialize_entry(&key, &value)?;
        }
        to.end()
    }
}
