//! Checks the prose of the sources: the width and the openings of comments.
//!
//! The help of a command-line option is the doc comment of its field, so the same rules hold for it.

use std::path::Path;

use anyhow::{Result, ensure};

use crate::tracked;

/// The most columns of a line with a comment.
const COLUMNS_MAX: usize = 110;
/// Words with which a comment must not begin. The first sentence of a doc is a verb and its object, or names
/// the thing.
const OPENINGS: [&str; 13] = [
    "What", "Whatever", "Who", "Whoever", "Whose", "Where", "Wherever", "That", "Those", "One that",
    "Nobody", "Somebody", "Anybody",
];

/// Checks the comments of each Rust file that git knows.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut wrong = Vec::new();
    for (name, text) in tracked::texts(root)? {
        if name.ends_with(".rs") {
            offences(&name, &text, &mut wrong);
        }
    }
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

fn offences(name: &str, text: &str, wrong: &mut Vec<String>) {
    // The marker of the comment that the previous line belongs to.
    let mut within = None;
    for (number, line) in (1..).zip(text.lines()) {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX && has_prose(line) {
            wrong
                .push(format!("{name}:{number}: a comment of {columns} columns; the limit is {COLUMNS_MAX}"));
        }
        let marker = comment_marker(line);
        if let Some(marker) = marker
            && within != Some(marker)
            && let Some(opening) = opening(&line.trim_start()[marker.len()..])
        {
            wrong.push(format!("{name}:{number}: a comment must not begin with \"{opening}\""));
        }
        within = marker;
    }
}

/// Returns whether `line` has a comment that can be broken: neither a row of a table nor only an address.
fn has_prose(line: &str) -> bool {
    // A comment after code follows an even number of quotes. Otherwise `//` is within a string.
    let start = line.match_indices("//").find(|(at, _)| {
        let before = &line[..*at];
        before.matches('"').count().is_multiple_of(2) && (before.is_empty() || before.ends_with(' '))
    });
    let Some((at, _)) = start else { return false };
    let comment = line[at..].trim_start_matches(['/', '!']).trim();
    !comment.starts_with('|') && comment.contains(' ')
}

/// Returns the marker of a line that is a comment.
fn comment_marker(line: &str) -> Option<&'static str> {
    let line = line.trim_start();
    // Four slashes are an ordinary comment.
    let is_doc = !line.starts_with("////");
    ["//!", "///", "//"].into_iter().find(|marker| line.starts_with(marker) && (is_doc || *marker == "//"))
}

/// Returns the refused opening of a comment's first line.
fn opening(first: &str) -> Option<&'static str> {
    let words: Vec<&str> =
        first.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    OPENINGS.into_iter().find(|opening| {
        let opening: Vec<&str> = opening.split(' ').collect();
        words.len() >= opening.len() && opening.iter().zip(&words).all(|(a, b)| a.eq_ignore_ascii_case(b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        let mut wrong = Vec::new();
        offences("a.rs", text, &mut wrong);
        wrong.len()
    }

    /// Returns `start`, filled up with words to the full width, and `more` columns.
    fn wide(start: &str, more: usize) -> String {
        let mut line = start.to_owned();
        while line.chars().count() < COLUMNS_MAX + more {
            line.push_str(if line.ends_with('ö') { " " } else { "ö" });
        }
        line
    }

    #[test]
    fn comments_that_are_too_wide() {
        for start in ["// ", "    /// ", "//! ", "let a = 1; // ", "let a = \"b\"; // "] {
            assert_eq!(found(&wide(start, 0)), 0, "{start}");
            assert_eq!(found(&wide(start, 1)), 1, "{start}");
        }
    }

    #[test]
    fn wide_lines_that_cannot_be_broken() {
        let address = format!("https://example.org/{}", "a".repeat(COLUMNS_MAX));
        for start in ["/// | ", "let a = \"// ", "let a = \"", &format!("// {address}")] {
            assert_eq!(found(&wide(start, 1)), 0, "{start}");
        }
        assert_eq!(found(&format!("// See {address}")), 1);
    }

    #[test]
    fn comments_that_begin_with_a_refused_word() {
        for opening in OPENINGS {
            assert_eq!(found(&format!("/// {opening} is there.\nstruct A;")), 1, "{opening}");
            assert_eq!(found(&format!("//! {opening} is there.\n")), 1, "{opening}");
            assert_eq!(found(&format!("a();\n    // {opening} is there.\n    b();")), 1, "{opening}");
            assert_eq!(found(&format!("#[a]\n/// {opening} is there.")), 1, "{opening}");
            assert_eq!(found(&format!("// A thing.\n// {opening} is there.")), 0, "{opening}");
            assert_eq!(found(&format!("/// A thing.\n/// {opening} is there.")), 0, "{opening}");
        }
        assert_eq!(found("/// what's there."), 1);
        assert_eq!(found("struct A;\n/// A thing.\n//! What?"), 1);
        assert_eq!(found("#[arg(long)]\n/// Where to write it\nfile: PathBuf,"), 1);
        assert_eq!(found("/// One of these."), 0);
        assert_eq!(found("/// Whether it is there."), 0);
        assert_eq!(found("/// A thing.\n//// What"), 1);
        assert_eq!(found("/// Thus."), 0);
    }
}
