//! The formats of log lines.
//!
//! Guests, front-ends and servers cause lines, and parts of lines are theirs: names, paths, error messages.
//! In each format a line stays one line, a value stays one value, and the first bytes are ours. So nobody
//! forges a line, a field or a priority. A long value is cut, because systemd's journal splits lines beyond
//! 48 KiB, and the second part would begin with bytes of the value.

use std::fmt::{self, Write};
use std::{env, io};

use clap::ValueEnum;
use rustix::fs::fstat;
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The most bytes of a value or a message. A line has fewer than 16 of them, so it is shorter than 48 KiB.
const VALUE_BYTES_MAX: usize = 2048;

/// The format of log lines, as an operator chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for the journal if standard error is connected to it, and text otherwise.
    Auto,
    /// The time, the level, the part of the program, the message, and fields.
    Text,
    /// A JSON object in each line.
    Json,
    /// The priority as systemd reads it, the message, and fields.
    Journal,
}

impl LogFormat {
    /// Returns the format of the lines.
    pub(super) fn lines(self) -> Lines {
        match self {
            Self::Auto if is_journal() => Lines::Journal,
            Self::Auto | Self::Text => Lines::Text,
            Self::Json => Lines::Json,
            Self::Journal => Lines::Journal,
        }
    }
}

/// Returns whether standard error is the stream to the journal that systemd has made for this process.
fn is_journal() -> bool {
    let stream = env::var("JOURNAL_STREAM").unwrap_or_default();
    let own = fstat(io::stderr()).map(|own| format!("{}:{}", own.st_dev, own.st_ino));
    own.is_ok_and(|own| own == stream)
}

/// A format of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Lines {
    #[default]
    Text,
    Json,
    Journal,
}

/// A message and fields.
#[derive(Default)]
pub(super) struct Said {
    message: String,
    fields: Vec<(String, Value)>,
}

/// A value of a field.
enum Value {
    /// A number or a truth value, which needs no quotes in any format.
    Plain(String),
    Text(String),
}

impl Said {
    /// Returns a message without fields.
    pub(super) fn message(message: &str) -> Self {
        Self { message: message.into(), fields: Vec::new() }
    }

    /// Adds a field.
    pub(super) fn add(&mut self, key: &str, value: &str) {
        self.fields.push((key.into(), Value::Text(value.into())));
    }

    /// Adds a number.
    pub(super) fn add_number(&mut self, key: &str, value: u64) {
        self.add_plain(key, &value);
    }

    fn add_plain(&mut self, key: &str, value: &dyn fmt::Display) {
        self.fields.push((key.into(), Value::Plain(value.to_string())));
    }
}

impl Visit for Said {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.add_plain(field.name(), &value),
            false => self.add(field.name(), &value.to_string()),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add_plain(field.name(), &value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add_plain(field.name(), &value);
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.add_plain(field.name(), &value);
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.add_plain(field.name(), &value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add_plain(field.name(), &value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.into(),
            name => self.add(name, value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

impl Lines {
    /// Writes a line about an event of `of`, with its end.
    pub(super) fn write(self, of: &Metadata<'_>, said: &Said, to: &mut Writer<'_>) -> fmt::Result {
        self.write_parts(*of.level(), of.target(), said, to)
    }

    /// Returns a line of this program itself.
    pub(super) fn line(self, level: Level, target: &str, said: &Said) -> String {
        let mut line = String::new();
        // A string takes all.
        let _ = self.write_parts(level, target, said, &mut Writer::new(&mut line));
        line
    }

    fn write_parts(self, level: Level, target: &str, said: &Said, to: &mut Writer<'_>) -> fmt::Result {
        match self {
            Self::Text => {
                write_time(to)?;
                write_level(level, to)?;
                write!(to, " {target}: ")?;
            }
            Self::Journal => write!(to, "<{}>", priority(level))?,
            Self::Json => {
                to.write_str("{\"time\":\"")?;
                write_time(to)?;
                write!(to, "\",\"level\":\"{level}\",\"target\":")?;
                write_json(target, to)?;
                to.write_str(",\"message\":")?;
                write_json(&said.message, to)?;
                to.write_str(",\"fields\":{")?;
                for (number, (key, value)) in said.fields.iter().enumerate() {
                    to.write_str(if number == 0 { "" } else { "," })?;
                    write_json(key, to)?;
                    to.write_char(':')?;
                    match value {
                        Value::Plain(value) => to.write_str(value)?,
                        Value::Text(value) => write_json(value, to)?,
                    }
                }
                return to.write_str("}}\n");
            }
        }
        write_escaped(&said.message, is_unsafe, to)?;
        for (key, value) in &said.fields {
            write!(to, " {key}=")?;
            match value {
                Value::Plain(value) => to.write_str(value)?,
                Value::Text(value) => write_value(value, to)?,
            }
        }
        to.write_char('\n')
    }

    /// Returns a line with the number of lines that were left out before it, if it is not 0.
    pub(super) fn with_count(self, mut line: String, suppressed: u64) -> String {
        if suppressed > 0 {
            let end = if self == Self::Json { "}}\n" } else { "\n" };
            line.truncate(line.len() - if line.ends_with(end) { end.len() } else { 0 });
            // Each line of JSON that is limited has a field, the device, or none.
            let comma = if line.ends_with('{') { "" } else { "," };
            let _ = match self {
                Self::Json => write!(line, "{comma}\"suppressed\":{suppressed}{end}"),
                Self::Text | Self::Journal => write!(line, " suppressed={suppressed}{end}"),
            };
        }
        line
    }

    /// Returns the line of a sentence that the program prints. Like a message, it can have parts that are not
    /// ours: the answer of a server, the name of a file.
    pub(super) fn sentence(self, sentence: &str) -> String {
        match self {
            Self::Text => {
                let mut line = String::from("kickless: ");
                // A string takes all.
                let _ = write_escaped(sentence, is_unsafe, &mut Writer::new(&mut line));
                line + "\n"
            }
            Self::Json | Self::Journal => self.line(Level::ERROR, "kickless", &Said::message(sentence)),
        }
    }

    /// Returns the lines of a text of this program itself, such as a backtrace.
    pub(super) fn text(self, text: &str) -> String {
        match self {
            Self::Text | Self::Journal => text.lines().map(|line| self.sentence(line)).collect(),
            Self::Json => self.sentence(text),
        }
    }
}

/// Returns the priority of a level, as `syslog` numbers them.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

fn write_time(to: &mut Writer<'_>) -> fmt::Result {
    // A time that cannot be formatted is left out.
    let _ = SystemTime.format_time(to);
    Ok(())
}

fn write_level(level: Level, to: &mut Writer<'_>) -> fmt::Result {
    let colour = match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    };
    match to.has_ansi_escapes() {
        true => write!(to, " \u{1b}[{colour}m{level:>5}\u{1b}[0m"),
        false => write!(to, " {level:>5}"),
    }
}

/// Returns whether a character controls a terminal, ends a line, or changes the order in which a line is
/// shown (the controls of Unicode's bidirectional algorithm).
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Writes a value, in quotes if it would not be one word without them.
fn write_value(value: &str, to: &mut Writer<'_>) -> fmt::Result {
    let is_special = |c: char| is_unsafe(c) || matches!(c, '"' | '\\');
    if !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c == '=' || is_special(c)) {
        return write_escaped(value, is_special, to);
    }
    to.write_char('"')?;
    write_escaped(value, is_special, to)?;
    to.write_char('"')
}

/// Writes text with escapes for special characters.
fn write_escaped(text: &str, is_special: impl Fn(char) -> bool, to: &mut Writer<'_>) -> fmt::Result {
    let mut bytes = 0;
    for c in text.chars() {
        let escaped = is_special(c).then(|| c.escape_default());
        bytes += escaped.as_ref().map_or(c.len_utf8(), ExactSizeIterator::len);
        if bytes > VALUE_BYTES_MAX {
            return to.write_str("...");
        }
        match escaped {
            Some(escaped) => write!(to, "{escaped}")?,
            None => to.write_char(c)?,
        }
    }
    Ok(())
}

/// Writes a string of JSON.
fn write_json(text: &str, to: &mut Writer<'_>) -> fmt::Result {
    let mut bytes = 0;
    let mut is_cut = |c: char| {
        bytes += match c {
            '"' | '\\' => 2,
            c if is_unsafe(c) => 6,
            c => c.len_utf8(),
        };
        bytes > VALUE_BYTES_MAX
    };
    let text = match text.char_indices().find(|(_, c)| is_cut(*c)) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    };
    // C1 controls, as a terminal may understand them.
    let json = serde_json::Value::String(text).to_string();
    json.chars().try_for_each(|c| match is_unsafe(c) {
        true => write!(to, "\\u{:04x}", u32::from(c)),
        false => to.write_char(c),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Lines; 3] = [Lines::Text, Lines::Json, Lines::Journal];

    fn line(lines: Lines, level: Level, message: &str, value: &str) -> String {
        let mut said = Said::message(message);
        said.add("key", value);
        said.add_number("count", 7);
        lines.line(level, "kickless", &said)
    }

    #[test]
    fn priorities() {
        for (level, priority) in [(Level::ERROR, 3), (Level::WARN, 4), (Level::INFO, 6), (Level::TRACE, 7)] {
            let line = line(Lines::Journal, level, "a message", "v");
            assert_eq!(line, format!("<{priority}>a message key=v count=7\n"));
        }
    }

    #[test]
    fn values_are_quoted_if_they_have_to_be() {
        for (value, shown) in [
            ("/srv/a.img", "/srv/a.img"),
            ("nbd://[::1]:10809/x?y", "nbd://[::1]:10809/x?y"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("a=b", "\"a=b\""),
            ("a\"b", "\"a\\\"b\""),
            ("a\\b", "\"a\\\\b\""),
            ("a\nb", "\"a\\nb\""),
            ("\u{1b}[2J", "\"\\u{1b}[2J\""),
            ("\u{a0}", "\"\u{a0}\""),
            ("\u{202e}gmi.ksid", "\"\\u{202e}gmi.ksid\""),
            ("a\u{2028}b", "\"a\\u{2028}b\""),
            ("\u{e4}", "\u{e4}"),
        ] {
            assert_eq!(line(Lines::Journal, Level::INFO, "m", value), format!("<6>m key={shown} count=7\n"));
        }
    }

    #[test]
    fn a_text_line_has_time_level_target_message_and_fields() {
        let line = line(Lines::Text, Level::WARN, "a message", "two words");
        let (time, rest) = line.split_once(' ').unwrap();
        assert!(time.ends_with('Z') && time.contains('T'), "{line}");
        assert_eq!(rest, " WARN kickless: a message key=\"two words\" count=7\n");
    }

    #[test]
    fn counts_are_in_the_line() {
        for lines in ALL {
            for fields in [false, true] {
                let mut said = Said::message("a message");
                if fields {
                    said.add("key", "}}");
                }
                let plain = lines.line(Level::INFO, "kickless", &said);
                assert_eq!(lines.with_count(plain.clone(), 0), plain);
                let counted = lines.with_count(plain, 9);
                assert!(counted.ends_with('\n') && counted.contains("suppressed"), "{counted}");
                if lines == Lines::Json {
                    let value: serde_json::Value = serde_json::from_str(&counted).unwrap();
                    assert_eq!(value["fields"]["suppressed"], 9, "{counted}");
                }
            }
        }
    }

    #[test]
    fn sentences() {
        assert_eq!(Lines::Text.sentence("one\ntwo"), "kickless: one\\ntwo\n");
        assert_eq!(Lines::Journal.sentence("one\ntwo"), "<3>one\\ntwo\n");
        assert_eq!(Lines::Text.text("one\ntwo"), "kickless: one\nkickless: two\n");
        assert_eq!(Lines::Journal.text("one\ntwo"), "<3>one\n<3>two\n");
        let json: serde_json::Value = serde_json::from_str(&Lines::Json.sentence("one\ntwo")).unwrap();
        assert_eq!((&json["level"], &json["message"]), (&"ERROR".into(), &"one\ntwo".into()));
    }

    #[test]
    fn a_line_is_shorter_than_the_journal_splits() {
        let long = "\u{1b}".repeat(100_000);
        let mut said = Said::message(&long);
        (0..15).for_each(|_| said.add("key", &long));
        for lines in ALL {
            let len = lines.line(Level::INFO, "kickless", &said).len();
            // JSON has up to six bytes for one, and the journal gets none of it.
            assert!(len < if lines == Lines::Json { (6 * 48) << 10 } else { 48 << 10 }, "{lines:?}: {len}");
        }
    }

    proptest! {
        #[test]
        fn a_line_is_one_line_with_our_first_bytes(message: String, value: String) {
            for lines in ALL {
                let sentence = lines.sentence(&message);
                let ours = if lines == Lines::Text { "kickless: " } else { "" };
                prop_assert!(sentence.starts_with(ours) && sentence.find('\n') == Some(sentence.len() - 1));
                let line = line(lines, Level::INFO, &message, &value);
                prop_assert!(line.ends_with('\n') && line.chars().filter(|c| c.is_control()).count() == 1);
                match lines {
                    Lines::Text => prop_assert!(line[27..].starts_with("  INFO kickless: ")),
                    Lines::Journal => prop_assert!(line.starts_with("<6>")),
                    Lines::Json => {
                        let read: serde_json::Value = serde_json::from_str(&line).unwrap();
                        prop_assert_eq!(read["message"].as_str().unwrap(), message.as_str());
                        prop_assert_eq!(read["fields"]["key"].as_str().unwrap(), value.as_str());
                        prop_assert_eq!(&read["fields"]["count"], 7);
                        let count = read.as_object().unwrap().len();
                        prop_assert_eq!(count, 5);
                    }
                }
            }
        }
    }
}
