//! A table of a configuration file. A reader takes the keys one by one. Keys that are left at the end are
//! unknown.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use anyhow::{Error, Result, anyhow};
use kickless_daemon::{Key, Mistake, Value, Values, removed_option, unknown_key};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::syntax;

/// The text of a file, and the name of the file for sentences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Text<'t> {
    /// The file.
    pub(super) path: &'t Path,
    /// The contents of the file.
    pub(super) text: &'t str,
}

impl Text<'_> {
    /// Returns a sentence about the text at byte `start`, or about the whole file.
    pub(super) fn mistake(&self, start: Option<usize>, what: impl Display) -> Error {
        match start {
            Some(start) => self.at(self.line(start), what),
            None => anyhow!("{}: {what}", self.path.display()),
        }
    }

    /// Returns a sentence about a line.
    pub(super) fn at(&self, line: usize, what: impl Display) -> Error {
        anyhow!("{}:{line}: {what}", self.path.display())
    }

    /// Returns the text of the line with byte `start`, without the spaces around it.
    fn line_of(&self, start: usize) -> Option<&str> {
        let (before, after) = (self.text.get(..start)?, self.text.get(start..)?);
        let from = before.rfind('\n').map_or(0, |end| end + 1);
        let to = after.find('\n').map_or(self.text.len(), |end| start + end);
        self.text.get(from..to).map(str::trim)
    }

    fn line(&self, start: usize) -> usize {
        1 + self.text.bytes().take(start).filter(|byte| *byte == b'\n').count()
    }

    /// Returns the text of `span`, shortened to one line.
    fn shown(&self, span: Range<usize>) -> String {
        syntax::shortened(self.text.get(span).unwrap_or_default())
    }
}

/// A value, and the positions of its key and itself.
#[derive(Clone, Debug)]
pub(super) struct Entry<'t> {
    start: usize,
    span: Range<usize>,
    value: DeValue<'t>,
}

impl Entry<'_> {
    /// Returns the value as a key takes it.
    fn value(&self) -> Value {
        match &self.value {
            DeValue::String(text) => Value::Text(text.clone().into_owned()),
            DeValue::Integer(number) => {
                let number = i128::from_str_radix(number.as_str(), number.radix());
                // No option accepts a number that does not fit into an i128, so the maximum is refused as
                // well.
                Value::Number(number.unwrap_or(i128::MAX).to_string())
            }
            DeValue::Boolean(flag) => Value::Flag(*flag),
            DeValue::Float(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => Value::Other,
        }
    }
}

/// A table.
#[derive(Clone, Debug)]
pub(super) struct Section<'t> {
    text: &'t Text<'t>,
    title: &'static str,
    start: Option<usize>,
    entries: BTreeMap<String, Entry<'t>>,
    /// The keys that a reader has asked for, with the positions of those that are present.
    known: Vec<(String, Option<usize>)>,
}

impl<'t> Section<'t> {
    /// Returns the whole file as a table of its tables.
    ///
    /// # Errors
    /// The file is not valid TOML.
    pub(super) fn whole(text: &'t Text<'t>) -> Result<Self> {
        let table = DeTable::parse(text.text).map_err(|error| {
            let what = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
            let start = error.span().map(|span| span.start);
            match start.and_then(|start| text.line_of(start)) {
                Some(line) => text.mistake(start, syntax::cure(line, &what)),
                None => text.mistake(start, what),
            }
        })?;
        Ok(Self::of(text, "the file", None, table.into_inner()))
    }

    /// Returns an empty table in place of an absent one.
    pub(super) fn absent(text: &'t Text<'t>, title: &'static str) -> Self {
        Self::of(text, title, None, DeTable::default())
    }

    fn of(text: &'t Text<'t>, title: &'static str, start: Option<usize>, table: DeTable<'t>) -> Self {
        let entries = table.into_iter().map(|(key, value)| {
            let (start, span) = (key.span().start, value.span());
            (key.into_inner().into_owned(), Entry { start, span, value: value.into_inner() })
        });
        Self { text, title, start, entries: entries.collect(), known: Vec::new() }
    }

    /// Takes the table `key`. Sentences call it `title`.
    ///
    /// # Errors
    /// The value is not a table.
    pub(super) fn table(&mut self, key: &'static str, title: &'static str) -> Result<Option<Self>> {
        match self.take(key) {
            None => Ok(None),
            Some(Entry { start, value: DeValue::Table(table), .. }) => {
                Ok(Some(Self::of(self.text, title, Some(start), table)))
            }
            Some(entry) => {
                Err(self.text.mistake(Some(entry.start), format!("{key}: it must be a table: write {title}")))
            }
        }
    }

    /// Takes the tables `key`, in the order of the file. Sentences call each of them `title`.
    ///
    /// # Errors
    /// The value is not an array of tables.
    pub(super) fn tables(&mut self, key: &'static str, title: &'static str) -> Result<Vec<Self>> {
        let Some(Entry { start, value, .. }) = self.take(key) else { return Ok(Vec::new()) };
        let wrong = |start| self.text.mistake(Some(start), format!("{key}: begin each with {title}"));
        let DeValue::Array(array) = value else { return Err(wrong(start)) };
        let each = array.into_iter().map(|item: Spanned<DeValue<'t>>| {
            let start = item.span().start;
            match item.into_inner() {
                DeValue::Table(table) => Ok(Self::of(self.text, title, Some(start), table)),
                _ => Err(wrong(start)),
            }
        });
        each.collect()
    }

    /// Takes the value of `key`.
    fn take(&mut self, key: &str) -> Option<Entry<'t>> {
        let entry = self.entries.remove(key);
        self.known.push((key.to_owned(), entry.as_ref().map(|entry| entry.start)));
        entry
    }

    /// Takes the values of all keys. The table has no others than `keys`.
    ///
    /// # Errors
    /// A value is wrong, or a key is unknown.
    pub(super) fn read(&mut self, keys: &[Key]) -> Result<Values> {
        self.read_without(keys, &[])
    }

    /// Takes the values of all keys, as [`Section::read`] does. The sentence about an unknown key does not
    /// suggest the keys in `own`.
    ///
    /// # Errors
    /// A value is wrong, or a key is unknown.
    pub(super) fn read_without(&mut self, keys: &[Key], own: &[&str]) -> Result<Values> {
        let mut values = Values::new();
        for key in keys {
            if let Some(entry) = self.take(key.name()) {
                let value = entry.value();
                key.check(&value).map_err(|why| self.refuse(key.name(), &entry, &why))?;
                values.insert(key.name().to_owned(), value);
            }
        }
        let known: Vec<&str> = keys.iter().map(Key::name).filter(|key| !own.contains(key)).collect();
        self.end_of(&known)?;
        Ok(values)
    }

    /// Returns the keys that were taken, and their lines.
    pub(super) fn keys(&self) -> impl Iterator<Item = (&str, usize)> {
        self.known.iter().filter_map(|(key, start)| Some((key.as_str(), self.text.line((*start)?))))
    }

    /// Returns whether `key` was taken with a value.
    pub(super) fn has_value(&self, key: &str) -> bool {
        self.keys().any(|(taken, _)| taken == key)
    }

    /// Adds the keys of `defaults` that are absent here, except those in `foreign`.
    pub(super) fn add_absent(&mut self, defaults: &Self, foreign: &[String]) {
        let added = defaults.entries.iter().filter(|(key, _)| !foreign.contains(key));
        for (key, entry) in added {
            self.entries.entry(key.clone()).or_insert_with(|| entry.clone());
        }
    }

    /// Returns the sentence about the value of `key`.
    fn refuse(&self, key: &str, entry: &Entry<'_>, why: &str) -> Error {
        let shown = self.text.shown(entry.span.clone());
        self.text.mistake(Some(entry.start), format!("{key} = {shown}: {why}"))
    }

    /// Returns the sentence about the absent key `key`.
    pub(super) fn needs(&self, key: &str) -> Error {
        self.text.mistake(self.start, format!("{key}: this {} needs one", self.title))
    }

    /// Returns whether `key` is present and not taken yet.
    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Returns a sentence about `key`, with its line if it is present.
    pub(super) fn wrong(&self, key: &str, why: impl Display) -> Error {
        self.text.mistake(self.start_of(key), format!("{key}: {why}"))
    }

    /// Returns the sentence about keys that cannot be combined.
    pub(super) fn mistake(&self, mistake: &Mistake) -> Error {
        self.wrong(&mistake.option, &mistake.why)
    }

    /// Returns the line of `key`, or that of the section if `key` is absent.
    pub(super) fn line(&self, key: &str) -> usize {
        self.start_of(key).map_or(1, |start| self.text.line(start))
    }

    fn start_of(&self, key: &str) -> Option<usize> {
        let taken = self.known.iter().find(|(known, _)| known == key).and_then(|(_, start)| *start);
        taken.or_else(|| self.entries.get(key).map(|entry| entry.start)).or(self.start)
    }

    /// Checks that all keys are taken.
    ///
    /// # Errors
    /// A key is left.
    pub(super) fn end(&self) -> Result<()> {
        let known: Vec<&str> = self.known.iter().map(|(key, _)| key.as_str()).collect();
        self.end_of(&known)
    }

    /// Checks that all keys are taken. The sentence about a key that is left suggests the `known` ones.
    ///
    /// # Errors
    /// A key is left.
    fn end_of(&self, known: &[&str]) -> Result<()> {
        let Some((key, entry)) = self.entries.iter().min_by_key(|(_, entry)| entry.start) else {
            return Ok(());
        };
        let what = match removed_option(key) {
            Some(mistake) => mistake.to_string(),
            None => match syntax::home(key, self.title) {
                Some(home) => format!("{key:?} is no key of {}: it belongs to {home}", self.title),
                None => unknown_key(key, self.title, known.iter().copied()),
            },
        };
        Err(self.text.mistake(Some(entry.start), what))
    }
}
