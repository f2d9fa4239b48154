//! Compares the ways to poll with `kickless bench`: throughput, latency, kicks and the back-end's processor
//! time, under loads for which polling is good and others for which it is bad.
//!
//! The contestants take turns at each load. The driver has the first CPU and all back-ends the second. Each
//! load prints its targets and whether they are met. A missed target is not a failure of the program.
//!
//!     cargo bench -p kickless-tests --bench poll [-- [--quick] [--rounds=N] [SECTION...]]
//!
//! `--disk=TEXT` and `--driver=TEXT` choose those whose name contains it, such as `zram` and `sleeping`.

mod cells;
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

/// A section of the report.
type Section = fn(&Settings, &[Disk], &mut Report) -> Result<()>;

const SECTIONS: [(&str, Section); 9] = [
    ("cells", cells::cells),
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
    // Dropped last, when no back-end has the device open any more.
    let (zram, mut disks) = disks(&settings);
    disks.retain(|disk| settings.takes_disk(disk.name));
    let mut report = Report::new(settings.quick);
    let others = others::OthersClock::start()?;
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

/// Returns the disks that the back-ends serve: a null disk, and a block device if there is a free one.
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
