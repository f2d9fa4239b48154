//! The table of the attacks, from `docs/security-attacks.md`.
//!
//! Its blocks of text have a line for each answer with the names of the tries, or a line for each lie to the
//! opener with an answer for each setting.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::daemon::repository;

/// The page.
pub const PAGE: &str = "docs/security-attacks.md";
/// The answer of calls that end the process.
pub const KILLED: &str = "SIGSYS";
/// The answer of messages that end the opener, and so the process.
pub const ENDS: &str = "ends";

/// A setting in which the attacks are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// There is no control socket, and no image can name another.
    Alone,
    /// There is a control socket, and an image that can name others.
    Calls,
    /// The same, in a strict sandbox.
    StrictCalls,
}

/// The answers to a try, in the order of the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row([String; 3]);

/// The table.
#[derive(Debug)]
pub struct Table(BTreeMap<String, Row>);

impl Table {
    /// Reads the page.
    ///
    /// # Errors
    /// It is missing, or has a line that is none of a table.
    pub fn read() -> Result<Self> {
        Self::parse(&fs::read_to_string(repository().join(PAGE)).context(PAGE)?)
    }

    fn parse(page: &str) -> Result<Self> {
        let mut rows = BTreeMap::new();
        let mut is_in_block = false;
        for line in page.lines() {
            if line.starts_with("```") {
                is_in_block = line == "```text";
                continue;
            }
            if !is_in_block || line.trim().is_empty() {
                continue;
            }
            for (name, row) in tries(line).with_context(|| line.to_owned())? {
                ensure!(rows.insert(name.clone(), row).is_none(), "{PAGE}: {name} is there twice");
            }
        }
        Ok(Self(rows))
    }

    /// Returns the names of all tries.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns the answer that is expected.
    pub fn answer(&self, name: &str, setting: Setting) -> Option<&str> {
        let Row(answers) = self.0.get(name)?;
        Some(&answers[setting as usize])
    }

    /// Returns the names of tries after which the process goes on, or does not.
    pub fn names_that(&self, end: bool) -> Vec<&str> {
        let ends = |name: &&str| {
            self.answer(name, Setting::Alone).is_some_and(|answer| [KILLED, ENDS].contains(&answer)) == end
        };
        self.names().filter(ends).collect()
    }
}

/// Parses a line.
fn tries(line: &str) -> Result<Vec<(String, Row)>> {
    if let Some((answer, names)) = line.split_once(": ").filter(|(answer, _)| !answer.contains(' ')) {
        let row = Row([answer, answer, answer].map(str::to_owned));
        return Ok(names.split_whitespace().map(|name| (name.to_owned(), row.clone())).collect());
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    ensure!(words.len() > 4, "a lie has a name, three answers, and a sentence");
    Ok(vec![(words[0].into(), Row([words[1], words[2], words[3]].map(str::to_owned)))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_tries() {
        let page = "a: b\n```text\nEPERM: open stat\n\nimage:link EPERM outside done  a link: bad\n```\nc: d\n```sh\ne: f\n```\n";
        let table = Table::parse(page).unwrap();
        assert_eq!(table.names().collect::<Vec<_>>(), ["image:link", "open", "stat"]);
        assert_eq!(table.answer("open", Setting::Calls), Some("EPERM"));
        assert_eq!(table.answer("image:link", Setting::StrictCalls), Some("done"));
        assert_eq!(table.answer("link", Setting::Alone), None);
        assert!(Table::parse("```text\nopen EPERM\n```\n").is_err());
        assert!(Table::parse("```text\nEPERM: a a\n```\n").is_err());
    }
}
