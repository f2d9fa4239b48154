//! Counts what a Linux guest does for each read of a disk: notifications, which are exits of its CPU, and
//! interrupts. Beside kickless, with two ways to poll: QEMU's storage daemon and QEMU's own virtio-blk, each
//! with a thread for its disk. Both poll for at most 32 us before they wait, which is their default.
//!
//! The counts are those of a guest on an emulated CPU, whose speed is not that of a real one. So the disks
//! see requests more slowly than with KVM.
//!
//!     cargo bench -p kickless-tests --bench guest_counts [-- --quick]

mod common;

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, Result};
use common::{Cpus, Plan, Spread};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig, Results};
use kickless_tests::guest::scratch::{Scratch, numbers};
use rustix::process::Pid;
use serde_json::json;

/// Reads in flight.
const DEPTHS: [u32; 3] = [1, 4, 32];
/// Reads of one disk with one depth: some 2 s on an emulated CPU.
const READS: u32 = 10_000;
/// The bytes of a disk that answers at once.
const NULL_SIZE: u64 = 64 << 20;
/// The disks of the guest, and their back-ends.
const DISKS: [&str; 4] = ["vda", "vdb", "vdc", "vdd"];
const NAMES: [&str; DISKS.len()] =
    ["kickless", "kickless, --poll=never", "qemu-storage-daemon", "QEMU's virtio-blk"];

/// Notifications and interrupts for each read, by depth and disk.
type Counts = [[(f64, f64); NAMES.len()]; DEPTHS.len()];

fn main() -> Result<()> {
    // Before a round limits this thread to one of them.
    let (plan, cpus) = (Plan::from_arguments(), Cpus::get()?);
    let scratch = Scratch::new()?;
    println!("notifications and interrupts of a guest for each read{}", plan.remark());
    for (medium, image) in [("a disk that answers at once", None), ("an image", Some(scratch.path()))] {
        let rounds = (0..plan.rounds).map(|_| round(image, &plan, &cpus)).collect::<Result<Vec<_>>>()?;
        print(medium, &rounds);
    }
    Ok(())
}

/// Reads the disks of all back-ends in one guest, one after the other.
fn round(image: Option<&Path>, plan: &Plan, cpus: &Cpus) -> Result<Counts> {
    cpus.for_back_ends()?;
    let of = |program, poll: &str| {
        let disk = image.map_or_else(|| format!("null:{NULL_SIZE}").into(), OsString::from);
        let kickless = program == Program::Kickless;
        // The four back-ends have the same image at the same time, and only read it.
        let arguments = [format!("--poll={poll}"), "--lock=off".into(), "--read-only".into()];
        let arguments = if kickless { arguments.to_vec() } else { Vec::new() };
        Daemon::start(&DaemonConfig {
            program,
            queues: 1,
            iothread: !kickless,
            arguments,
            ..DaemonConfig::new(disk)
        })
    };
    let daemons =
        [of(Program::Kickless, "auto")?, of(Program::Kickless, "never")?, of(Program::StorageDaemon, "")?];
    cpus.for_driver()?;
    let disks = daemons.iter().map(|daemon| DiskConfig::new(daemon.socket(), "num-queues=1")).collect();
    let reads = if plan.quick { 50 } else { READS };
    let depths = DEPTHS.map(|depth| depth.to_string()).join(",");
    let task = format!("kl.task=notify kl.disks={} kl.reads={reads} kl.depth={depths}", DISKS.join(","));
    let own = own_disk(image);
    let mut guest = Guest::start(&GuestConfig { more: own, ..GuestConfig::new(&task, disks) })?;
    // Not on the guest's CPU, whose requests would wait for the thread and come together.
    cpus.for_back_end(thread_of_own_disk(&mut guest)?)?;
    let results = guest.finish()?;
    for daemon in daemons {
        daemon.stop()?;
    }
    let mut counts = Counts::default();
    for (depth, counts) in DEPTHS.iter().zip(&mut counts) {
        for (disk, count) in DISKS.iter().zip(counts) {
            *count = of_disk(&results, &format!("{disk}.depth{depth}"))?;
        }
    }
    Ok(counts)
}

/// Returns the arguments of a disk that QEMU itself serves, in a thread as the other back-ends have it.
fn own_disk(image: Option<&Path>) -> Vec<String> {
    let node = image.map_or_else(
        || format!("driver=null-co,read-zeroes=off,size={NULL_SIZE}"),
        |path| format!("driver=file,cache.direct=on,read-only=on,locking=off,filename={}", path.display()),
    );
    let device = "virtio-blk-pci,drive=own,iothread=thread,num-queues=1";
    ["-object", "iothread,id=thread", "-blockdev", &format!("{node},node-name=own"), "-device", device]
        .map(str::to_owned)
        .to_vec()
}

fn thread_of_own_disk(guest: &mut Guest) -> Result<Pid> {
    let threads = guest.qmp().execute("query-iothreads", json!({}))?;
    let id = threads[0]["thread-id"].as_i64().context("QEMU names no thread")?;
    Pid::from_raw(id.try_into()?).context("no thread")
}

fn of_disk(results: &Results, key: &str) -> Result<(f64, f64)> {
    let number = |what: &str| -> Result<f64> {
        let all = numbers(results, &format!("{key}.{what}"))?;
        Ok(*all.first().with_context(|| format!("no {key}.{what}"))? as f64)
    };
    let reads = number("reads")?;
    Ok((number("notifications")? / reads, number("interrupts")? / reads))
}

fn print(medium: &str, rounds: &[Counts]) {
    println!("\n{medium}\n");
    println!("  {:<9} {:<23} {:>26} {:>26}", "in flight", "", "notifications", "interrupts");
    for (row, depth) in DEPTHS.iter().enumerate() {
        for (column, name) in NAMES.iter().enumerate() {
            let of = |count: fn(&(f64, f64)) -> f64| {
                let Spread { median, min, max } =
                    Spread::of(rounds.iter().map(|counts| count(&counts[row][column])));
                format!("{median:.3} ({min:.3} to {max:.3})")
            };
            println!("  {depth:<9} {name:<23} {:>26} {:>26}", of(|count| count.0), of(|count| count.1));
        }
    }
}
