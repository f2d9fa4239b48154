//! The kinds of devices, and the keys that describe a device in a file or a call.

use clap::Arg;

use super::blk::{BlkConfig, Requests};
use super::device::{DeviceConfig, DeviceKind};
use super::keys::{Key, Value, Values, keys, read};
use super::limits::{GROUP, LimitsConfig};
use super::net::{Frames, NetConfig};
use super::notation::Mistake;
use super::serve::{Identity, ServeConfig, Share};

/// The key that names the kind of a device. A device need not have it.
const KIND: &str = "kind";

/// A kind of device, for the keys of a device.
struct Kind {
    name: &'static str,
    /// The key that each device of this kind has, and no other one.
    key: &'static str,
    /// One device, and several, for sentences.
    one: &'static str,
    several: &'static str,
    keys: fn() -> Vec<Key>,
    /// The keys of its limits, which change while a device is served.
    limits: fn() -> Vec<Key>,
    /// Its other keys that `device.set` changes.
    set_keys: &'static [&'static str],
    read: fn(&Values) -> Result<DeviceKind, Mistake>,
}

const KINDS: [Kind; 2] = [
    Kind {
        name: "blk",
        key: "blk-file",
        one: "a disk",
        several: "disks",
        keys: keys::<BlkConfig>,
        limits: keys::<LimitsConfig<Requests>>,
        set_keys: &["discard"],
        read: |values| read::<BlkConfig>(values).map(DeviceKind::Blk),
    },
    Kind {
        name: "net",
        key: "port",
        one: "a network card",
        several: "network cards",
        keys: keys::<NetConfig>,
        limits: keys::<LimitsConfig<Frames>>,
        set_keys: &[],
        read: |values| read::<NetConfig>(values).map(DeviceKind::Net),
    },
];

impl DeviceConfig {
    /// Returns the keys that a device can have, those of all kinds.
    pub fn keys() -> Vec<Key> {
        let kind = Arg::new(KIND).long(KIND).value_parser(|text: &str| {
            let names = KINDS.map(|kind| kind.name);
            match names.contains(&text) {
                true => Ok(text.to_owned()),
                false => Err(format!("a kind of device is {}", names.join(" or "))),
            }
        });
        let mut all = vec![Key::new(kind)];
        let shared = [keys::<Identity>(), keys::<ServeConfig>(), keys::<Share>()];
        for key in KINDS.iter().map(|kind| (kind.keys)()).chain(shared).flatten() {
            // Several kinds can have a key of this name.
            if !all.iter().any(|known| known.name() == key.name()) {
                all.push(key);
            }
        }
        all
    }

    /// Returns the keys that change while a device is served, those of all kinds. The group of limits does
    /// not change.
    pub fn set_keys() -> Vec<Key> {
        let limits: Vec<Key> = KINDS.iter().flat_map(|kind| (kind.limits)()).collect();
        let is_limit =
            |key: &Key| key.name() != GROUP && limits.iter().any(|limit| limit.name() == key.name());
        let is_set = |key: &Key| KINDS.iter().any(|kind| kind.set_keys.contains(&key.name()));
        let is_share = |key: &Key| keys::<Share>().iter().any(|share| share.name() == key.name());
        Self::keys().into_iter().filter(|key| is_share(key) || is_set(key) || is_limit(key)).collect()
    }

    /// Returns the keys that devices of other kinds have, but no device with these keys.
    pub fn foreign_keys(has: impl Fn(&str) -> bool) -> Vec<String> {
        let kind = KINDS.iter().find(|kind| has(kind.key)).unwrap_or(&KINDS[0]);
        foreign(kind).map(|(key, _)| key).collect()
    }

    /// Reads a device from the values of its keys, each of which is valid by itself. Ignores keys that no
    /// device has.
    ///
    /// # Errors
    /// The keys cannot be combined.
    pub fn read(values: &Values) -> Result<Self, Mistake> {
        let kind = kind_of(values)?;
        if let Some((key, owner)) = foreign(kind).find(|(key, _)| values.contains_key(key)) {
            let why = format!("only {} have it, and this device is {}", owner.several, kind.one);
            return Err(Mistake::new(key, why));
        }
        Ok(Self {
            kind: (kind.read)(values)?,
            identity: read::<Identity>(values)?,
            serve: read::<ServeConfig>(values)?,
            share: read::<Share>(values)?,
        })
    }
}

/// Returns the keys that only other kinds have, and one of these kinds.
fn foreign(kind: &Kind) -> impl Iterator<Item = (String, &'static Kind)> {
    let own = (kind.keys)();
    let others = KINDS.iter().filter(|other| other.name != kind.name);
    let all = others.flat_map(|other| (other.keys)().into_iter().map(move |key| (key, other)));
    all.filter(move |(key, _)| !own.iter().any(|own| own.name() == key.name()))
        .map(|(key, other)| (key.name().to_owned(), other))
}

/// Returns the kind of a device with these keys.
fn kind_of(values: &Values) -> Result<&'static Kind, Mistake> {
    let named = match values.get(KIND) {
        Some(Value::Text(name)) => KINDS.iter().find(|kind| kind.name == name),
        _ => None,
    };
    let mut found = KINDS.iter().filter(|kind| values.contains_key(kind.key));
    match (found.next(), found.next(), named) {
        (Some(first), Some(second), _) => {
            let why = format!("a device is {} or {}: leave it or {} out", first.one, second.one, first.key);
            Err(Mistake::new(second.key, why))
        }
        (Some(kind), None, Some(named)) if kind.name != named.name => {
            Err(Mistake::new(kind.key, format!("it is for {}, and kind is {}", kind.several, named.name)))
        }
        (Some(kind), None, _) => Ok(kind),
        (None, _, Some(named)) => Err(Mistake::new(named.key, format!("{} needs one", named.one))),
        (None, _, None) => {
            let [first, others @ ..] = &KINDS;
            let others = others.iter().map(|kind| format!(", and {} needs a {}", kind.one, kind.key));
            Err(Mistake::new(first.key, format!("{} needs one{}", first.one, others.collect::<String>())))
        }
    }
}
