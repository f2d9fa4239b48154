//! The ways to poll against one another, with `kickless bench`: throughput, latency, kicks and the back-end's processor time,
//! under loads that polling is good for and under those that it is bad for.
//!
//! Those that are compared take turns at each load, the driver on the first CPU and all back-ends on the second. Each load says
//! what has to come of it, and whether it does; a figure that falls short fails nothing.
//!
//!     cargo bench -p kickless-tests --bench poll [-- [--quick] [--rounds=N] [SECTION...]]

#[path = "../common/mod.rs"]
mod common;
mod compare;
mod idle;
mod loads;
mod others;
mod report;
mod shared;

use anyhow::Result;
use common::zram::{self, Zram};

use compare::{Disk, Settings};
use report::Report;

/// A part of the list.
type Section = fn(&Settings, &[Disk], &mut Report) -> Result<()>;

const SECTIONS: [(&str, Section); 8] = [
    ("steady", loads::steady),
    ("open", loads::open),
    ("trickle", loads::trickle),
    ("idle", idle::idle),
    ("on-off", loads::on_off),
    ("contended", loads::contended),
    ("many", shared::many),
    ("unequal", shared::unequal),
];

fn main() -> Result<()> {
    let settings = Settings::from_arguments()?;
    let named: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let chosen = |name: &str| named.is_empty() || named.iter().any(|word| word == name);
    println!("{}", settings.about());
    // Dropped at the end, when no back-end has it open any more.
    let (zram, disks) = disks(&settings);
    let mut report = Report::new(settings.quick);
    let others = others::Clock::start()?;
    for (name, section) in SECTIONS {
        if chosen(name) {
            println!("\n=== {name}");
            section(&settings, &disks, &mut report)?;
        }
    }
    drop(zram);
    println!("\nother processes kept {:.2} CPUs busy meanwhile", others.cores()?);
    report.close();
    Ok(())
}

/// What the back-ends serve: nothing, and a block device if there is one to be had.
fn disks(settings: &Settings) -> (Option<Zram>, Vec<Disk>) {
    let size = if settings.quick { 16 << 20 } else { 512 << 20 };
    let mut disks = vec![Disk { name: "null:", file: "null:1G" }];
    match Zram::take(size) {
        Ok(zram) => {
            disks.push(Disk { name: zram::DEVICE, file: zram::DEVICE });
            (Some(zram), disks)
        }
        Err(error) => {
            println!("without {}: {error:#}", zram::DEVICE);
            (None, disks)
        }
    }
}
