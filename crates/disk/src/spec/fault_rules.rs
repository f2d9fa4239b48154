//! The rules of injected faults, as text.

use kickless_io::Errno;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// The longest delay. Longer ones are useless in a test.
const DELAY_MAX: Duration = Duration::from_secs(60);

/// The faults of a disk. `docs/disks.md` describes the format.
#[derive(Clone, Debug)]
pub struct FaultRules {
    pub(crate) seed: u64,
    pub(crate) rules: Vec<Rule>,
    text: String,
}

impl PartialEq for FaultRules {
    /// Compares the meaning of the rules, not their text.
    fn eq(&self, other: &Self) -> bool {
        (self.seed, &self.rules) == (other.seed, &other.rules)
    }
}

impl Eq for FaultRules {}

impl fmt::Display for FaultRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One fault, and its conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) effect: Effect,
    /// The kinds of operations; empty for all.
    pub(crate) kinds: Vec<OperationKind>,
    /// The sectors. An operation must touch one of them.
    pub(crate) sectors: Option<RangeInclusive<u64>>,
    pub(crate) when: When,
}

/// The effect of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The operation fails without any effect.
    Error(Errno),
    /// The operation transfers only a part.
    Short,
    /// The operation begins later, after a time in this range.
    Delay(RangeInclusive<Duration>),
}

impl Effect {
    /// Returns the name of the effect if it can affect only an operation, and not a request.
    pub(crate) fn of_operations(&self) -> Option<&'static str> {
        match self {
            Self::Error(Errno::AGAIN) => Some("eagain"),
            Self::Short => Some("short"),
            Self::Error(_) | Self::Delay(_) => None,
        }
    }
}

/// The kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperationKind {
    Read,
    Write,
    Flush,
    Discard,
    Zeroes,
}

impl OperationKind {
    /// Returns whether the operation can be done in part.
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// The selection among the operations that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    Always,
    /// This many in a million, at random.
    Rate(u32),
    /// Only this one, counted from 1.
    Nth(u64),
    /// Each multiple of this number.
    Every(u64),
}

/// The error in a rule. Each is one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRule {
    /// There are no rules.
    #[error("fault: needs rules, as in fault:eio@1%:DISK")]
    Empty,
    /// The fault is unknown.
    #[error("{0:?} is not a fault; there are eio, enospc, eagain, short and delay=TIME, and seed=NUMBER")]
    Fault(String),
    /// The condition is unknown.
    #[error(
        "{0:?} is not a condition of a fault; there are read, write, flush, discard, zeroes, FIRST-LAST (sectors), \
         N%, nth=N and every=N"
    )]
    Condition(String),
    /// Two conditions contradict one another.
    #[error("{0:?} has more than one of the conditions N%, nth=N and every=N, or of sector ranges")]
    Twice(String),
    /// The percentage is not above 0 and at most 100.
    #[error("{0:?} is not a percentage of the operations; write 0.0001% to 100%")]
    Rate(String),
    /// The number is zero or missing.
    #[error("{0:?} has no number above 0 after its =")]
    Number(String),
    /// The sectors are not two numbers in order.
    #[error("{0:?} is not a range of sectors; write FIRST-LAST")]
    Sectors(String),
    /// The delay is not a time.
    #[error("{0:?} is not a delay; write 500us, 2ms or 1ms-5ms, at most 60s")]
    Delay(String),
}

impl FromStr for FaultRules {
    type Err = BadRule;

    fn from_str(text: &str) -> Result<Self, BadRule> {
        let mut all = Self { seed: 1, rules: Vec::new(), text: text.to_owned() };
        for word in text.split(',') {
            match word.split_once('=') {
                _ if text.is_empty() => return Err(BadRule::Empty),
                Some(("seed", number)) => {
                    all.seed = number.parse().map_err(|_| BadRule::Number(word.into()))?
                }
                _ => all.rules.push(word.parse()?),
            }
        }
        if all.rules.is_empty() { Err(BadRule::Empty) } else { Ok(all) }
    }
}

impl FromStr for Rule {
    type Err = BadRule;

    fn from_str(text: &str) -> Result<Self, BadRule> {
        let (effect, conditions) = match text.split_once('@') {
            Some((effect, conditions)) => (effect, Some(conditions)),
            None => (text, None),
        };
        let mut rule =
            Self { effect: parse_effect(effect)?, kinds: vec![], sectors: None, when: When::Always };
        for condition in conditions.into_iter().flat_map(|all| all.split('+')) {
            if let Some(kind) = parse_kind(condition) {
                rule.kinds.push(kind);
            } else if let Some(when) = parse_when(condition)? {
                if std::mem::replace(&mut rule.when, when) != When::Always {
                    return Err(BadRule::Twice(text.into()));
                }
            } else if rule.sectors.replace(parse_sectors(condition)?).is_some() {
                return Err(BadRule::Twice(text.into()));
            }
        }
        Ok(rule)
    }
}

fn parse_effect(text: &str) -> Result<Effect, BadRule> {
    Ok(match text {
        "eio" => Effect::Error(Errno::IO),
        "enospc" => Effect::Error(Errno::NOSPC),
        "eagain" => Effect::Error(Errno::AGAIN),
        "short" => Effect::Short,
        _ => match text.strip_prefix("delay=") {
            Some(time) => Effect::Delay(parse_delay(time).ok_or_else(|| BadRule::Delay(time.into()))?),
            None => return Err(BadRule::Fault(text.into())),
        },
    })
}

fn parse_delay(text: &str) -> Option<RangeInclusive<Duration>> {
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let (least, most) = (parse_time(least)?, parse_time(most)?);
    (least <= most && most <= DELAY_MAX).then_some(least..=most)
}

fn parse_time(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let number: u64 = number.parse().ok()?;
    match unit {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}

fn parse_kind(text: &str) -> Option<OperationKind> {
    match text {
        "read" => Some(OperationKind::Read),
        "write" => Some(OperationKind::Write),
        "flush" => Some(OperationKind::Flush),
        "discard" => Some(OperationKind::Discard),
        "zeroes" => Some(OperationKind::Zeroes),
        _ => None,
    }
}

fn parse_when(text: &str) -> Result<Option<When>, BadRule> {
    let number = |digits: &str| match digits.parse() {
        Ok(number @ 1..) => Ok(number),
        _ => Err(BadRule::Number(text.into())),
    };
    if let Some(digits) = text.strip_prefix("nth=") {
        return Ok(Some(When::Nth(number(digits)?)));
    }
    if let Some(digits) = text.strip_prefix("every=") {
        return Ok(Some(When::Every(number(digits)?)));
    }
    let Some(share) = text.strip_suffix('%') else { return Ok(None) };
    let (whole, fraction) = share.split_once('.').unwrap_or((share, ""));
    let bad = || BadRule::Rate(text.into());
    if fraction.len() > 4 {
        return Err(bad());
    }
    match format!("{whole}{fraction:0<4}").parse() {
        Ok(millionths @ 1..=1_000_000) => Ok(Some(When::Rate(millionths))),
        _ => Err(bad()),
    }
}

fn parse_sectors(text: &str) -> Result<RangeInclusive<u64>, BadRule> {
    let begins_with_digit = text.starts_with(|c: char| c.is_ascii_digit());
    let Some((first, last)) = text.split_once('-').filter(|_| begins_with_digit) else {
        return Err(BadRule::Condition(text.into()));
    };
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if first <= last => Ok(first..=last),
        _ => Err(BadRule::Sectors(text.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Result<FaultRules, BadRule> {
        text.parse()
    }

    #[test]
    fn refuses_other_rules() {
        assert_eq!(rules(""), Err(BadRule::Empty));
        assert_eq!(rules("seed=3"), Err(BadRule::Empty));
        for (text, error) in [
            ("seed=x", BadRule::Number("seed=x".into())),
            ("fire", BadRule::Fault("fire".into())),
            ("eio,,short", BadRule::Fault(String::new())),
            ("eio@", BadRule::Condition(String::new())),
            ("eio@often", BadRule::Condition("often".into())),
            ("eio@-5", BadRule::Condition("-5".into())),
            ("eio@5-4", BadRule::Sectors("5-4".into())),
            ("eio@5-x", BadRule::Sectors("5-x".into())),
            ("eio@1-2+3-4", BadRule::Twice("eio@1-2+3-4".into())),
            ("eio@1%+nth=2", BadRule::Twice("eio@1%+nth=2".into())),
            ("eio@nth=0", BadRule::Number("nth=0".into())),
            ("eio@every=", BadRule::Number("every=".into())),
            ("eio@0%", BadRule::Rate("0%".into())),
            ("eio@101%", BadRule::Rate("101%".into())),
            ("eio@0.00001%", BadRule::Rate("0.00001%".into())),
            ("eio@.%", BadRule::Rate(".%".into())),
            ("lifetime=1/2/3", BadRule::Fault("lifetime=1/2/3".into())),
            ("delay=", BadRule::Delay(String::new())),
            ("delay=5", BadRule::Delay("5".into())),
            ("delay=2ms-1ms", BadRule::Delay("2ms-1ms".into())),
            ("delay=61s", BadRule::Delay("61s".into())),
        ] {
            assert_eq!(rules(text), Err(error), "{text}");
        }
        let delay = Effect::Delay(Duration::from_micros(500)..=Duration::from_millis(2));
        assert_eq!(rules("delay=500us-2ms").unwrap().rules[0].effect, delay);
        assert_eq!(rules("delay=60s"), rules("delay=60000ms"));
    }
}
