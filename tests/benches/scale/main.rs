//! Measures how costs grow with the number of devices, ports and images, and with sizes. Each curve should be
//! flat or linear, and its table says whether it is.
//!
//!     cargo bench -p kickless-tests --bench scale [-- [--docs] [--quick] [PART...]]
//!
//! `--docs` writes the pictures to docs/scale and the tables into docs/scale.md. The driver has the first CPU
//! and the daemons the second.

#[path = "../common/mod.rs"]
mod common;
mod curve;
mod devices;
mod guest_memory;
mod load;
mod memory;
mod picture;
mod planning;
mod qcow2;
mod switch;

use std::fs;

use anyhow::{Context, Result, ensure};
use common::{Cpus, Plan, Spread};
use curve::Group;
use kickless_tests::daemon::{Daemon, DaemonConfig, repository};

/// A part of the report, which returns its curves.
type Part = fn(&Bench) -> Result<Vec<Group>>;

const PARTS: [(&str, Part); 6] = [
    ("load", load::measure),
    ("memory", memory::measure),
    ("devices", devices::measure),
    ("guest-memory", guest_memory::measure),
    ("switch", switch::measure),
    ("qcow2", qcow2::measure),
];

/// The extent of the measurement, and the CPUs for it.
pub(crate) struct Bench {
    plan: Plan,
    cpus: Cpus,
}

impl Bench {
    /// Starts a daemon with one disk on the back-ends' CPU.
    fn start(&self, config: &DaemonConfig) -> Result<Daemon> {
        self.cpus.for_back_ends()?;
        let daemon = Daemon::start(config)?;
        self.cpus.for_driver()?;
        Ok(daemon)
    }

    /// Starts a daemon with one worker and so many devices, which have these lines in its file, on the
    /// back-ends' CPU. Returns the names of the devices too.
    fn serve(&self, devices: u64, lines: &str, arguments: &[&str]) -> Result<(Daemon, Vec<String>)> {
        let names: Vec<String> = (0..devices).map(|at| format!("device{at}")).collect();
        let devices: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), lines)).collect();
        self.cpus.for_back_ends()?;
        let daemon = Daemon::serve_with(arguments, "workers = 1", &devices)?;
        self.cpus.for_driver()?;
        Ok((daemon, names))
    }

    /// Returns the values of an axis. The short form has only the first two.
    fn axis(&self, all: &[u64]) -> Vec<u64> {
        all.iter().copied().take(if self.plan.quick { 2 } else { all.len() }).collect()
    }

    /// Calls `turn` for each value of an axis, by its index, in each round. Another one begins each round, so
    /// that a change of the machine hits all of them. Returns the spreads of each figure.
    fn rounds<const N: usize>(
        &self,
        values: usize,
        mut turn: impl FnMut(usize) -> Result<[f64; N]>,
    ) -> Result<[Vec<Spread>; N]> {
        let mut figures: Vec<Vec<[f64; N]>> = vec![Vec::new(); values];
        for round in 0..self.plan.rounds {
            for at in (0..values).map(|at| (at + round) % values) {
                figures[at].push(turn(at)?);
            }
        }
        Ok(std::array::from_fn(|figure| {
            figures.iter().map(|turns| Spread::of(turns.iter().map(|turn| turn[figure]))).collect()
        }))
    }
}

fn main() -> Result<()> {
    let bench = Bench { plan: Plan::from_arguments(), cpus: Cpus::get()? };
    let (options, named): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with('-'));
    let for_docs = options.iter().any(|option| option == "--docs");
    ensure!(!(for_docs && bench.plan.quick), "the figures of the short form are not for docs");
    // With it, a daemon loads its symbols at the start, which takes 60 MiB.
    let is_set = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    ensure!(bench.plan.quick || !is_set, "unset RUST_BACKTRACE, which changes the daemons");
    for name in &named {
        ensure!(PARTS.iter().any(|(part, _)| part == name), "there is no part {name}");
    }
    for (name, part) in PARTS {
        if !named.is_empty() && !named.iter().any(|word| word == name) {
            continue;
        }
        println!("=== {name}, {} rounds{}\n", bench.plan.rounds, bench.plan.remark());
        let groups = part(&bench).context(name)?;
        let tables: String = groups.iter().map(Group::tables).collect::<Vec<_>>().join("\n");
        println!("{tables}");
        let picture = picture::draw(&groups)?;
        let planning = if name == "load" { Some(planning::table(&groups)?) } else { None };
        planning.iter().for_each(|table| println!("{table}"));
        if for_docs {
            fs::write(repository().join(format!("docs/scale/{name}.svg")), picture)?;
            write_table(name, &tables)?;
            planning.iter().try_for_each(|table| write_table("planning", table))?;
        }
    }
    Ok(())
}

/// Replaces the tables of a part in the page.
fn write_table(name: &str, tables: &str) -> Result<()> {
    let path = repository().join("docs/scale.md");
    let page = fs::read_to_string(&path)?;
    let (begin, end) = (format!("<!-- tables of {name} -->\n"), format!("<!-- end of {name} -->\n"));
    let (before, rest) = page.split_once(&begin).with_context(|| format!("no {begin}"))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("no {end}"))?;
    Ok(fs::write(path, format!("{before}{begin}{tables}{end}{after}"))?)
}
