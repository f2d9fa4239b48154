//! The limits of a device's requests or frames.

use std::array;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::time::Duration;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use kickless_device::{Limit, Limits, Rate};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::notation::{Mistake, Notation};
use super::values::{parse_bps, parse_burst, parse_group, parse_iops};

/// The part of a second whose units a bucket without bursts holds. A worker that is late by less loses
/// nothing, and a guest that paused gains a tenth of a second at most.
const SLACK: u64 = 10;
/// The key of the limits of bytes.
const BYTES: &str = "bps";
/// The key of the group that shares limits.
pub(crate) const GROUP: &str = "group";

/// The words for the limits of one kind of device.
#[derive(Clone, Copy, Debug)]
pub struct LimitWords {
    /// The key of the limits of units, such as "iops".
    pub unit: &'static str,
    /// The name of several units, for the help.
    pub units: &'static str,
    /// The ends of the keys: for both directions, to the guest, from the guest.
    pub directions: [&'static str; 3],
    /// The help of the limits in these directions. `{}` stands for the units.
    pub rates: [&'static str; 3],
    /// The help of the limits during a burst.
    pub bursts: [&'static str; 3],
    /// The key of the number of bytes that count as one unit, and its help. `None` if each unit is one.
    pub unit_size: Option<(&'static str, &'static str)>,
    /// The devices that can share limits, for the help.
    pub sharing: &'static str,
}

/// A kind of device whose traffic has limits.
pub trait Limited: Clone + Debug + Default + PartialEq + Eq + Send + Sync + 'static {
    /// The words for the limits.
    const WORDS: LimitWords;
}

/// The limits of a device of the kind `K`: how many units, and how many bytes, each for both directions
/// together and for each direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitsConfig<K> {
    units: [LimitConfig; 3],
    bytes: [LimitConfig; 3],
    unit_size: Option<u64>,
    /// The group of devices that share the limits.
    pub group: Option<String>,
    kind: PhantomData<K>,
}

/// The options of one limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LimitConfig {
    /// Units or bytes in a second.
    rate: Option<u64>,
    /// The same during a burst.
    max: Option<u64>,
    max_length: Option<Duration>,
}

/// The keys of one limit.
struct LimitKeys {
    rate: String,
    max: String,
    max_length: String,
}

impl LimitKeys {
    fn new(base: &str, direction: &str) -> Self {
        let rate = format!("{base}{direction}");
        Self { max: format!("{rate}-max"), max_length: format!("{rate}-max-length"), rate }
    }

    /// Returns the keys of the limits of the units or of the bytes of a kind.
    fn all(words: &LimitWords, base: &str) -> [Self; 3] {
        words.directions.map(|direction| Self::new(base, direction))
    }
}

impl LimitConfig {
    fn read(matches: &ArgMatches, keys: &LimitKeys, rate: impl Fn(&str) -> Option<u64>) -> Self {
        let max_length = matches.get_one(&keys.max_length).copied();
        Self { rate: rate(&keys.rate), max: rate(&keys.max), max_length }
    }

    fn check(&self, keys: LimitKeys, notation: Notation) -> Result<(), Mistake> {
        let base = notation.option(&keys.rate);
        let why = match (self.rate, self.max, self.max_length) {
            (None, Some(_), _) => format!("{base}-max needs it: give both"),
            (_, None, Some(_)) => format!("{base}-max-length needs {base}-max"),
            (Some(rate), Some(max), _) if max < rate => {
                format!("{base}-max is for bursts, and must not be less")
            }
            _ => return Ok(()),
        };
        Err(Mistake::new(keys.rate, why))
    }

    fn limit(&self) -> Limit {
        let Some(per_second) = self.rate else { return Limit::default() };
        let slack = |per_second: u64| (per_second / SLACK).max(1);
        let Some(max) = self.max else {
            return Limit { sustained: Rate { per_second, burst: slack(per_second) }, peak: Rate::default() };
        };
        // During a burst, the sustained rate refills a part of what the burst takes.
        let millis = self.max_length.map_or(1000, |length| length.as_millis());
        let extra = u128::from(max.saturating_sub(per_second)) * millis / 1000;
        let burst = u64::try_from(extra).unwrap_or(u64::MAX).max(slack(per_second));
        Limit { sustained: Rate { per_second, burst }, peak: Rate { per_second: max, burst: slack(max) } }
    }
}

impl<K: Limited> LimitsConfig<K> {
    /// Checks that the options of each limit can be combined.
    ///
    /// # Errors
    /// Some cannot.
    pub fn check(&self, notation: Notation) -> Result<(), Mistake> {
        for (limits, base) in [(&self.units, K::WORDS.unit), (&self.bytes, BYTES)] {
            for (limit, keys) in limits.iter().zip(LimitKeys::all(&K::WORDS, base)) {
                limit.check(keys, notation)?;
            }
        }
        Ok(())
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        let [requests, bytes] =
            [&self.units, &self.bytes].map(|all| array::from_fn(|direction| all[direction].limit()));
        Limits { requests, bytes, request_size: self.unit_size.unwrap_or(0) }
    }

    /// Takes the limits of `wanted`, but not the group.
    pub(crate) fn take_limits(&mut self, wanted: &Self) {
        *self = Self { group: self.group.take(), ..wanted.clone() };
    }
}

impl<K: Limited> Args for LimitsConfig<K> {
    fn augment_args(command: Command) -> Command {
        let words = K::WORDS;
        let option = |key: &str, value: &'static str, help: String| {
            Arg::new(key.to_owned()).long(key.to_owned()).value_name(value).help(help)
        };
        let mut command = command.next_help_heading("Limits");
        for (base, units, value) in [(words.unit, words.units, "N"), (BYTES, "bytes", "SIZE")] {
            for (direction, LimitKeys { rate, max, max_length }) in
                LimitKeys::all(&words, base).into_iter().enumerate()
            {
                let sustained = words.rates[direction].replace("{}", units);
                let burst = words.bursts[direction].replace("{}", units);
                let number = |option: Arg| match base {
                    BYTES => option.value_parser(parse_bps),
                    _ => option.value_parser(parse_iops),
                };
                let burst = format!("Limit of {burst} during a burst above --{rate} [default: none]");
                command = command
                    .arg(number(option(&rate, value, format!("Limit of {sustained} [default: none]"))))
                    .arg(number(option(&max, value, burst)))
                    .arg(
                        option(&max_length, "DURATION", format!("Longest burst at --{max} [default: 1s]"))
                            .value_parser(parse_burst),
                    );
            }
        }
        if let Some((key, help)) = words.unit_size {
            command = command.arg(option(key, "SIZE", help.into()).value_parser(parse_bps));
        }
        let help = format!(
            "Share the limits with all {} that name this group. The last one that is opened or changed sets them",
            words.sharing
        );
        command.arg(option(GROUP, "NAME", help).value_parser(parse_group))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<K: Limited> FromArgMatches for LimitsConfig<K> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let words = K::WORDS;
        let unit = |key: &str| matches.get_one::<u32>(key).map(|rate| u64::from(*rate));
        let bytes = |key: &str| matches.get_one::<u64>(key).copied();
        Ok(Self {
            units: LimitKeys::all(&words, words.unit).map(|keys| LimitConfig::read(matches, &keys, unit)),
            bytes: LimitKeys::all(&words, BYTES).map(|keys| LimitConfig::read(matches, &keys, bytes)),
            unit_size: words.unit_size.and_then(|(key, _)| bytes(key)),
            group: matches.get_one::<String>(GROUP).cloned(),
            kind: PhantomData,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Writes the present values by their keys.
impl<K: Limited> Serialize for LimitsConfig<K> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let words = K::WORDS;
        let mut to = to.serialize_map(None)?;
        for (limits, base) in [(&self.units, words.unit), (&self.bytes, BYTES)] {
            for (limit, keys) in limits.iter().zip(LimitKeys::all(&words, base)) {
                for (key, rate) in [(keys.rate, limit.rate), (keys.max, limit.max)] {
                    match rate {
                        Some(rate) if base == BYTES => to.serialize_entry(&key, &rate.to_string())?,
                        Some(rate) => to.serialize_entry(&key, &rate)?,
                        None => {}
                    }
                }
                if let Some(length) = limit.max_length {
                    to.serialize_entry(&keys.max_length, &format!("{length:?}"))?;
                }
            }
        }
        if let (Some((key, _)), Some(size)) = (words.unit_size, self.unit_size) {
            to.serialize_entry(key, &size.to_string())?;
        }
        if let Some(group) = &self.group {
            to.serialize_entry(GROUP, group)?;
        }
        to.end()
    }
}
