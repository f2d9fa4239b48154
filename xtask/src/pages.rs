//! Checks the pages of the repository: their tables and their links.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};

use crate::tracked;

/// The most rows of a table, without its head. A longer table must be divided, or belongs to
/// `docs/measurements/`.
const ROWS_MAX: usize = 6;
/// The most columns of figures of a table. A wider table belongs to `docs/measurements/`.
const FIGURES_MAX: usize = 3;
/// The pages whose tables may be wide: they explain the figures of the others.
const MEASUREMENTS: &str = "docs/measurements/";
/// The page with a table of all crates.
const CRATES: &str = "docs/architecture.md";

/// The list of the pages of the site, in its order.
pub(crate) const SUMMARY: &str = "docs/SUMMARY.md";

/// Checks each Markdown file that git knows.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut pages = BTreeMap::new();
    let mut files = BTreeSet::new();
    for (name, text) in tracked::texts(root)? {
        let path = PathBuf::from(&name);
        files.insert(path.clone());
        if name.ends_with(".md") {
            pages.insert(path, text);
        }
    }
    let mut wrong = Vec::new();
    offences(&pages, &files, &mut wrong);
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

fn offences(pages: &BTreeMap<PathBuf, String>, files: &BTreeSet<PathBuf>, wrong: &mut Vec<String>) {
    for (path, text) in pages {
        if !path.starts_with(MEASUREMENTS) {
            tables(path, text, wrong);
        }
        links(path, pages, files, wrong);
    }
    if let Some(summary) = pages.get(Path::new(SUMMARY)) {
        let listed: Vec<PathBuf> =
            links_of(summary).map(|(_, link)| joined(Path::new(SUMMARY), link)).collect();
        let is_page = |path: &&PathBuf| path.starts_with("docs") && *path != Path::new(SUMMARY);
        for path in pages.keys().filter(is_page) {
            match listed.iter().filter(|listed| *listed == path).count() {
                1 => {}
                count => wrong.push(format!("{SUMMARY} has {} {count} times", path.display())),
            }
        }
    }
}

/// Returns the lines of a page with their numbers, without blocks of code.
pub(crate) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

fn tables(path: &Path, text: &str, wrong: &mut Vec<String>) {
    let mut rows: Vec<Vec<&str>> = Vec::new();
    let mut first = 0;
    // An empty line ends the last table.
    for (number, line) in prose(text).chain([(0, "")]) {
        if let Some(row) = line.strip_prefix('|') {
            if rows.is_empty() {
                first = number;
            }
            rows.push(row.trim_end().trim_end_matches('|').split(" | ").map(str::trim).collect());
            continue;
        }
        // The first two lines are the head and the rule below it.
        let body = rows.get(2..).unwrap_or_default();
        if body.len() > ROWS_MAX && path != Path::new(CRATES) {
            wrong.push(format!(
                "{}:{first}: a table of {} rows, {ROWS_MAX} are the most",
                path.display(),
                body.len()
            ));
        }
        let figures =
            (1..body.first().map_or(0, Vec::len)).filter(|&column| is_of_figures(body, column)).count();
        if figures > FIGURES_MAX {
            wrong.push(format!(
                "{}:{first}: a table with {figures} columns of figures, {FIGURES_MAX} are the most",
                path.display()
            ));
        }
        rows.clear();
    }
}

/// Returns whether more than half of the cells of a column begin with a digit.
fn is_of_figures(body: &[Vec<&str>], column: usize) -> bool {
    let cells = body.iter().filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty());
    let (figures, others): (Vec<&str>, Vec<&str>) =
        cells.partition(|cell| cell.trim_start_matches('*').starts_with(|c: char| c.is_ascii_digit()));
    figures.len() > others.len()
}

/// Checks that each relative link leads to a file and, if the link has an anchor, to a heading of that file.
fn links(path: &Path, pages: &BTreeMap<PathBuf, String>, files: &BTreeSet<PathBuf>, wrong: &mut Vec<String>) {
    for (number, link) in links_of(&pages[path]) {
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() { path.to_owned() } else { joined(path, file) };
        if !files.contains(&target) {
            wrong.push(format!("{}:{number}: there is no file {}", path.display(), target.display()));
        } else if !anchor.is_empty()
            && !pages.get(&target).is_some_and(|text| headings(text).any(|heading| heading == anchor))
        {
            wrong.push(format!(
                "{}:{number}: no heading of {} is #{anchor}",
                path.display(),
                target.display()
            ));
        }
    }
}

/// Returns the relative links of a page, with the numbers of their lines.
pub(crate) fn links_of(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(number, line)| {
        let links = line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
        links.filter(|link| !link.contains("://")).map(move |link| (number, link))
    })
}

/// Returns the path of a file that is named relative to a page.
pub(crate) fn joined(page: &Path, file: &str) -> PathBuf {
    let mut path = page.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(file).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    path
}

/// Returns the anchors of a page's headings, as GitHub and similar sites make them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    prose(text).filter(|(_, line)| line.starts_with('#')).map(|(_, line)| {
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        heading.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pages: &[(&str, &str)]) -> Vec<String> {
        let pages: BTreeMap<PathBuf, String> =
            pages.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        let files = pages.keys().cloned().collect();
        let mut wrong = Vec::new();
        offences(&pages, &files, &mut wrong);
        wrong
    }

    #[test]
    fn long_and_wide_tables_are_found() {
        let table =
            |row: &str, rows: usize| format!("| a |\n| - |\n{}\ntext\n", format!("{row}\n").repeat(rows));
        assert_eq!(found(&[("README.md", &table("| a | 1 |", 6))]), [""; 0]);
        assert_eq!(found(&[("README.md", &table("| a | 1 |", 7))]).len(), 1);
        assert_eq!(found(&[("docs/measurements/a.md", &table("| a | 1 |", 7))]), [""; 0]);
        assert_eq!(found(&[("docs/a.md", &table("| 1 | 1 | 2 (1 to 3) | **3** |", 1))]), [""; 0]);
        let wide = table("| a | 1 | 2 (1 to 3) | **3** | 4 | a |", 1);
        assert_eq!(found(&[("docs/a.md", &wide)]).len(), 1);
        assert_eq!(found(&[("docs/measurements/a.md", &wide)]), [""; 0]);
        // No text behind the table, and a table in a block of code.
        assert_eq!(found(&[("docs/a.md", wide.trim_end_matches("\ntext\n"))]).len(), 1);
        assert_eq!(found(&[("docs/a.md", &format!("```\n{wide}```\n"))]), [""; 0]);
    }

    #[test]
    fn links_to_nothing_are_found() {
        let b = "# B\n## `--sqpoll`, and *more*\n";
        for (text, count) in [
            ("[b](b.md) [b](./b.md#b) [up](../README.md)", 0),
            ("[docs](../docs)", 1),
            ("[b](b.md#--sqpoll-and-more) [x](https://example.org/#x)", 0),
            ("## Here\n[here](#here)", 0),
            ("[b](c.md)", 1),
            ("[b](b.md#c) [b](#b)", 2),
            ("```\n[b](c.md)\n```", 0),
        ] {
            let wrong = found(&[("README.md", ""), ("docs/a.md", text), ("docs/b.md", b)]);
            assert_eq!(wrong.len(), count, "{text}: {wrong:?}");
        }
    }

    #[test]
    fn each_page_is_in_the_summary_once() {
        for (summary, count) in [
            ("- [a](a.md)\n- [b](b/b.md)\n- [r](../README.md)", 0),
            ("- [a](a.md)", 1),
            ("- [a](a.md)\n- [b](b/b.md)\n- [a](a.md)", 1),
        ] {
            let wrong =
                found(&[("README.md", ""), ("docs/a.md", ""), ("docs/b/b.md", ""), (SUMMARY, summary)]);
            assert_eq!(wrong.len(), count, "{summary}: {wrong:?}");
        }
    }
}
