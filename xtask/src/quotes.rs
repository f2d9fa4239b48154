//! Checks that each line of the log that a page explains is one that the program can write.
//!
//! A table whose first column is called [`COLUMN`] has the lines there, as spans of code. `...` and words in
//! capitals stand for anything, and fields follow the message as `key=value`.

use std::path::Path;

use anyhow::{Result, ensure};

use crate::pages::prose;
use crate::tracked;

/// The title of a column with lines of the log.
const COLUMN: &str = "line of the log";
/// The least length of a part that is looked for. Shorter ones are found anywhere.
const PART_MIN: usize = 4;

/// Checks each Markdown file that git knows.
pub(crate) fn check(root: &Path) -> Result<()> {
    let (mut pages, mut sources) = (Vec::new(), Vec::new());
    for (name, text) in tracked::texts(root)? {
        if name.ends_with(".md") {
            pages.push((name, text));
        } else if name.starts_with("crates/") && name.ends_with(".rs") {
            sources.push(joined_lines(&text));
        }
    }
    let mut wrong = Vec::new();
    for (name, text) in &pages {
        for (number, quote) in quotes(text) {
            for part in parts(quote).filter(|part| !sources.iter().any(|source| source.contains(part))) {
                wrong.push(format!("{name}:{number}: no line of the log has `{part}`"));
            }
        }
    }
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

/// Returns a source with each string literal on one line.
fn joined_lines(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\\\n") {
        joined.push_str(before);
        rest = after.trim_start();
    }
    joined + rest
}

/// Returns the spans of code in the columns with lines of the log.
fn quotes(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_log = false;
    let cells = prose(text).filter_map(move |(number, line)| {
        let Some(row) = line.strip_prefix('|') else {
            is_log = false;
            return None;
        };
        let cell = row.split(" | ").next().unwrap_or_default();
        if cell.trim() == COLUMN {
            is_log = true;
        }
        is_log.then_some((number, cell))
    });
    cells.flat_map(|(number, cell)| cell.split('`').skip(1).step_by(2).map(move |quote| (number, quote)))
}

/// Returns the parts of a line that are the same each time.
fn parts(quote: &str) -> impl Iterator<Item = &str> {
    let is_placeholder = |word: &str| word.len() > 1 && word.chars().all(|c| c.is_ascii_uppercase());
    let mut fields = false;
    let mut parts = Vec::new();
    for part in quote.split("...") {
        let mut start = None;
        for word in part.split(' ') {
            let at = word.as_ptr().addr() - part.as_ptr().addr();
            fields |= word.contains('=');
            if fields || is_placeholder(word.trim_matches(|c: char| !c.is_alphanumeric())) {
                parts.extend(start.take().map(|start: usize| &part[start..at]));
            } else {
                start.get_or_insert(at);
            }
        }
        parts.extend(start.map(|start| &part[start..]));
    }
    parts.into_iter().map(str::trim).filter(|part| part.len() >= PART_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_found() {
        let page = "| line of the log | cause |\n| --- | --- |\n| no `a b`, `c d` | `e` |\n\n| error | cause |\n| `f` | g |\n";
        assert_eq!(quotes(page).map(|(_, quote)| quote).collect::<Vec<_>>(), ["a b", "c d"]);
    }

    #[test]
    fn placeholders_and_fields_are_no_parts() {
        let of = |quote| parts(quote).collect::<Vec<_>>();
        assert_eq!(of("took over devices=2 stall_ms=1.1"), ["took over"]);
        assert_eq!(of("upgrade to VERSION failed: ..."), ["upgrade to", "failed:"]);
        // The first part is too short.
        assert_eq!(of("the TAP was deleted"), ["was deleted"]);
        assert_eq!(of("device="), [""; 0]);
    }

    #[test]
    fn a_literal_over_several_lines_is_one() {
        assert_eq!(joined_lines("\"a \\\n     b\\\n  c\" d\n"), "\"a bc\" d\n");
    }
}
