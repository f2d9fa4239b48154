//! Compares the instructions of hot paths with their bounds.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo;

/// The benchmarks that count instructions: package and name.
const BENCHES: [[&str; 2]; 3] =
    [["kickless-virtqueue", "driver"], ["kickless-blk", "poll"], ["kickless-net", "frames"]];
/// The file of bounds.
const BOUNDS: &str = "xtask/instructions.txt";
/// The part of a bound by which a count may differ.
const TOLERANCE: f64 = 0.01;
/// The head of the file, before the compiler.
const HEAD: &str = "# Instructions of a request or a frame, without those of the C library, by callgrind.\n\
    # Written by `cargo xtask bench-instructions --bless`, with ";

/// Instructions by the name of the load.
type Counts = BTreeMap<String, f64>;

/// Counts instructions. Fails if they differ from the bounds, or writes these anew.
pub(crate) fn run(root: &Path, blesses: bool) -> Result<()> {
    let compiler = compiler(root)?;
    let path = root.join(BOUNDS);
    let text = fs::read_to_string(&path).unwrap_or_default();
    if !blesses && !text.starts_with(&format!("{HEAD}{compiler}.\n")) {
        // Another compiler makes other instructions.
        eprintln!("xtask: not compared, because {BOUNDS} was not written with {compiler}");
        return Ok(());
    }
    let mut counts = Counts::new();
    for bench in BENCHES {
        counts.extend(parse(&output(root, bench)?)?);
    }
    if blesses {
        return Ok(fs::write(path, format(&compiler, &counts)?)?);
    }
    let wrong = differences(&parse(&text)?, &counts);
    ensure!(
        wrong.is_empty(),
        "instructions differ from {BOUNDS} by more than {} %:\n{}\nCONTRIBUTING.md, \"When a bound fails\", says what \
         to do",
        TOLERANCE * 100.0,
        wrong.join("\n")
    );
    eprintln!("xtask: {} counts of instructions are within {} %", counts.len(), TOLERANCE * 100.0);
    Ok(())
}

/// Returns the compiler and the processor that it compiles for.
fn compiler(root: &Path) -> Result<String> {
    let output =
        Command::new("rustc").arg("-vV").current_dir(root).output().context("rustc cannot be started")?;
    let text = String::from_utf8(output.stdout)?;
    let version = text.lines().next().context("rustc has no version")?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc has no host")?;
    Ok(format!("{version} for {host}"))
}

/// Runs a benchmark. Returns what it prints.
fn output(root: &Path, [package, bench]: [&str; 2]) -> Result<String> {
    let mut command = Command::new(cargo::program());
    command.args(["bench", "--quiet", "--locked", "--package", package, "--bench", bench]);
    let output =
        command.args(["--", "--instructions"]).current_dir(root).stderr(std::process::Stdio::inherit());
    let output = output.output().with_context(|| format!("{command:?} cannot be started"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// Parses lines of a name and a count each.
fn parse(text: &str) -> Result<Counts> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let parts = line.split_once(' ').filter(|(name, _)| name.contains('/'));
            let (name, count) = parts.with_context(|| line.to_owned())?;
            Ok((name.to_owned(), count.trim().parse().with_context(|| line.to_owned())?))
        })
        .collect()
}

fn format(compiler: &str, counts: &Counts) -> Result<String> {
    let mut text = format!("{HEAD}{compiler}.\n");
    for (name, count) in counts {
        writeln!(text, "{name} {count:.1}")?;
    }
    Ok(text)
}

/// Returns a line for each load whose count is not within the tolerance of its bound, or that has only one of
/// the two.
fn differences(bounds: &Counts, counts: &Counts) -> Vec<String> {
    let missing = bounds.keys().filter(|name| !counts.contains_key(*name));
    let mut wrong: Vec<String> = missing.map(|name| format!("{name}: not counted")).collect();
    for (name, count) in counts {
        match bounds.get(name) {
            None => wrong.push(format!("{name}: {count:.1}, without a bound")),
            Some(bound) if (count - bound).abs() > bound * TOLERANCE => {
                let change = (count / bound - 1.0) * 100.0;
                wrong.push(format!("{name}: {count:.1}, bound {bound:.1} ({change:+.1} %)"));
            }
            Some(_) => {}
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::{Counts, differences, format, parse};

    fn counts(all: &[(&str, f64)]) -> Counts {
        all.iter().map(|&(name, count)| (name.to_owned(), count)).collect()
    }

    #[test]
    fn what_is_written_is_read_again() {
        let counts = counts(&[("loop/split/64", 100.5), ("read/null/1", 3.0)]);
        assert_eq!(parse(&format("a compiler", &counts).unwrap()).unwrap(), counts);
        assert!(parse("valgrind cannot count instructions here").is_err());
    }

    #[test]
    fn one_percent_is_within_the_bounds_and_more_is_not() {
        let bounds = counts(&[("a/1", 200.0), ("b/1", 200.0), ("c/1", 200.0), ("d/1", 200.0), ("e/1", 1.0)]);
        let now = counts(&[("a/1", 202.0), ("b/1", 198.0), ("c/1", 204.0), ("d/1", 196.0), ("f/1", 1.0)]);
        let expected = [
            "e/1: not counted",
            "c/1: 204.0, bound 200.0 (+2.0 %)",
            "d/1: 196.0, bound 200.0 (-2.0 %)",
            "f/1: 1.0, without a bound",
        ];
        assert_eq!(differences(&bounds, &now), expected);
    }
}
