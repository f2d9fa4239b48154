//! Builds the site in `target/site`: the pages of docs/ and of the root, in the order of docs/SUMMARY.md.
//!
//! The pages are written for a forge, with links relative to their files. So mdbook gets a copy of the tree
//! that has the same paths: the pages, and the files that they link to. The links of the finished pages are
//! checked, because mdbook makes the anchors of headings itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::pages::{SUMMARY, joined, links_of};
use crate::{cargo, tracked};

/// The options of mdbook, and a file that these name.
const OPTIONS: [&str; 2] = ["book.toml", "site.css"];

/// Builds the site with the program `mdbook`, and checks its links.
pub(crate) fn run(root: &Path, mdbook: &Path) -> Result<()> {
    let target = root.join("target");
    let (book, site) = (target.join("site-source"), target.join("site"));
    for directory in [&book, &site] {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
    }
    stage(root, &book)?;
    let mut command = Command::new(mdbook);
    command.arg("build").arg(&book).arg("--dest-dir").arg(&site);
    cargo::succeed(&mut command)?;
    let pages = check(&site)?;
    eprintln!("xtask: {pages} pages in {}", site.display());
    Ok(())
}

/// Copies the pages and the files that they link to.
fn stage(root: &Path, book: &Path) -> Result<()> {
    let pages: BTreeMap<PathBuf, String> = tracked::texts(root)?
        .filter(|(name, _)| name.ends_with(".md"))
        .map(|(name, text)| (PathBuf::from(name), text))
        .collect();
    let summary = pages.get(Path::new(SUMMARY)).with_context(|| format!("there is no {SUMMARY}"))?;
    let source = book.join("src");
    let mut files = BTreeSet::new();
    for (_, link) in links_of(summary) {
        let path = joined(Path::new(SUMMARY), link);
        let text = pages.get(&path).with_context(|| format!("{SUMMARY} names {}", path.display()))?;
        files.extend(
            links_of(text).map(|(_, link)| joined(&path, link.split('#').next().unwrap_or_default())),
        );
        copy(root, &source, &path)?;
    }
    // A link within a page leads to the directory of the page.
    for file in files.iter().filter(|file| root.join(file).is_file() && !pages.contains_key(*file)) {
        copy(root, &source, file)?;
    }
    fs::write(source.join("SUMMARY.md"), from_root(summary))?;
    for name in OPTIONS {
        fs::copy(root.join("docs").join(name), book.join(name)).context(name)?;
    }
    Ok(())
}

/// Returns the summary with links relative to the root of the tree.
fn from_root(summary: &str) -> String {
    let mut parts = summary.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (link, after) = part.split_once(')').unwrap_or((part, ""));
        text += &format!("]({}){after}", joined(Path::new(SUMMARY), link).display());
    }
    text
}

fn copy(root: &Path, to: &Path, file: &Path) -> Result<()> {
    let copy = to.join(file);
    fs::create_dir_all(copy.parent().unwrap_or(to))?;
    fs::copy(root.join(file), copy).with_context(|| file.display().to_string())?;
    Ok(())
}

/// Checks that each relative link of the site leads to a file and, if it has an anchor, to an element of it.
/// Returns the number of pages.
fn check(site: &Path) -> Result<usize> {
    let mut pages = BTreeMap::new();
    read_pages(site, &mut pages)?;
    let mut wrong = Vec::new();
    for (path, text) in &pages {
        for link in attributes(text, "href").chain(attributes(text, "src")) {
            // Links with a scheme, of which `data:` is one, lead to no file here.
            if link.split(['/', '#']).next().is_some_and(|start| start.contains(':')) {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { joined(path, file) };
            let has_anchor = |text: &String| attributes(text, "id").any(|id| id == anchor);
            let is_there = match pages.get(&target) {
                Some(text) => anchor.is_empty() || has_anchor(text),
                None => target.is_file(),
            };
            // The page for paths that do not exist has absolute links.
            if !is_there && !path.ends_with("404.html") {
                wrong.push(format!("{}: {link}", path.display()));
            }
        }
    }
    ensure!(wrong.is_empty(), "links of the site that lead to nothing:\n{}", wrong.join("\n"));
    Ok(pages.len())
}

fn read_pages(directory: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            read_pages(&path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "html") {
            pages.insert(path.clone(), fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Returns the values of an attribute of all elements.
fn attributes<'t>(html: &'t str, name: &str) -> impl Iterator<Item = &'t str> + use<'t> {
    let start = format!(" {name}=\"");
    let mut rest = html;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(&start)?;
        let (value, after) = after.split_once('"')?;
        rest = after;
        Some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_read_at_the_root() {
        let summary = "[r](../README.md)\n[d](README.md)\n\n- [a](adr/a.md)\n";
        assert_eq!(from_root(summary), "[r](README.md)\n[d](docs/README.md)\n\n- [a](docs/adr/a.md)\n");
    }

    #[test]
    fn links_of_a_site_are_checked() {
        let site = tempfile::tempdir().unwrap();
        let page = |name: &str, text: &str| fs::write(site.path().join(name), text).unwrap();
        page(
            "a.html",
            r#"<h1 id="a"> <a class="x" href="b.html#b">b</a> <a href="https://example.org/#x">x</a>"#,
        );
        page(
            "b.html",
            r##"<h1 id="b"> <a href="#b">b</a> <img src="c.svg"> <a href="mailto:a@example.org">m</a>"##,
        );
        page("c.svg", "");
        assert_eq!(check(site.path()).unwrap(), 2);
        for link in ["c.html", "a.html#b", "#c", "d.svg"] {
            page("b.html", &format!(r#"<h1 id="b"> <a href="{link}">b</a>"#));
            assert!(check(site.path()).unwrap_err().to_string().contains(link), "{link}");
        }
    }
}
