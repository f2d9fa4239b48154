//! The sentence about a line that is no TOML, or about a key in the wrong table.

use kickless_daemon::{Key, PoolConfig, Value, keys};
use kickless_kinds::kinds;

/// The length up to which a sentence shows a value.
const SHOWN_CHARS_MAX: usize = 60;

/// The name of the table of the workers, for sentences.
const POOL: &str = "[pool]";
/// The name of a table of a device, for sentences.
const DEVICE: &str = "[[device]]";

/// Returns a text, shortened to one line.
pub(super) fn shortened(text: &str) -> String {
    let mut shown: String = text.chars().take_while(|c| !c.is_control()).take(SHOWN_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push_str("...");
    }
    shown
}

/// The reason of the library for a key or a table that is there already.
const DUPLICATE: &str = "duplicate key";

/// Returns the sentence about a line that TOML refuses, for the reason `what`. A value in the wrong form gets
/// the right one, such as `100M` without quotes.
pub(super) fn cure(line: &str, what: &str) -> String {
    let shown = shortened(line);
    let refused = || match shown.trim_end_matches('.') {
        "" => format!("this is no TOML: {what}"),
        _ => format!("{shown:?} is no TOML: {what}"),
    };
    let parts = line.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
    if what == DUPLICATE {
        return format!("{} is there twice: leave one out", parts.map_or(&*shown, |(key, _)| key));
    }
    let Some((key, written)) = parts else { return refused() };
    let value = written.split('#').next().unwrap_or_default().trim();
    // A value in quotes, a list or a table has another fault.
    let is_plain = !value.is_empty() && !value.starts_with(['"', '\'', '[', '{']);
    let all = keys::<PoolConfig>().into_iter().chain(kinds().keys());
    match all.into_iter().find(|known| known.name() == key) {
        Some(known) if is_plain => format!("{key} = {}: {}", shortened(value), form(&known, value)),
        _ => refused(),
    }
}

/// Returns the right form of a value that is written as `value`, as the end of a sentence.
fn form(key: &Key, value: &str) -> String {
    match key.check(&Value::Text(value.to_owned())) {
        Ok(()) => format!("it must be text, in quotes: write {} = {value:?}", key.name()),
        Err(why) => why,
    }
}

/// Returns the table to which a key belongs that is not one of the table `title`.
pub(super) fn home(key: &str, title: &str) -> Option<&'static str> {
    let is_among = |keys: Vec<Key>| keys.iter().any(|known| known.name() == key);
    match title {
        POOL if is_among(kinds().keys()) => Some(DEVICE),
        POOL => None,
        _ if is_among(keys::<PoolConfig>()) => Some(POOL),
        DEVICE => None,
        _ if is_among(kinds().keys()) => Some(DEVICE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_quotes() {
        for (line, said) in [
            ("bps = 100M", "bps = 100M: it must be text, in quotes: write bps = \"100M\""),
            ("bps=100M # fast", "bps = 100M: it must be text, in quotes: write bps = \"100M\""),
            (
                "socket-mode = 0660",
                "socket-mode = 0660: it must be text, in quotes: write socket-mode = \"0660\"",
            ),
            ("bps = 100MB", "bps = 100MB: \"MB\" is not a unit: write 100M, in units of 1024"),
            ("read-only = yes", "read-only = yes: it must be true or false, without quotes"),
            (
                "iops = 5k",
                "iops = 5k: it must be a number from 1 to 4294967295, without a unit: write 5000 (without quotes)",
            ),
            ("poll = auto", "poll = auto: it must be text, in quotes: write poll = \"auto\""),
            ("colour = red", "\"colour = red\" is no TOML: a reason"),
            ("name = \"a", "\"name = \\\"a\" is no TOML: a reason"),
            ("[pool", "\"[pool\" is no TOML: a reason"),
        ] {
            assert_eq!(cure(line, "a reason"), said);
        }
        assert_eq!(cure("workers = 3", DUPLICATE), "workers is there twice: leave one out");
        assert_eq!(cure("[pool]", DUPLICATE), "[pool] is there twice: leave one out");
    }

    #[test]
    fn keys_of_other_tables() {
        assert_eq!(home("workers", DEVICE), Some(POOL));
        assert_eq!(home("workers", "[defaults]"), Some(POOL));
        assert_eq!(home("blk-file", POOL), Some(DEVICE));
        assert_eq!(home("blk-file", "the file"), Some(DEVICE));
        assert_eq!((home("blk-file", DEVICE), home("colour", POOL)), (None, None));
    }
}
