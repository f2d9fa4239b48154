//! Measures the memory of a back-end without its guest's memory: one device with 4 queues of 256, before
//! and after load on all of them. Also computes the memory that each queue of 256 adds: a front-end uses all
//! queues of a device with 65 queues, another one uses only one of them.
//!
//! The figure is the sum of the resident pages (Rss) in /proc/PID/smaps of all mappings except the guest's
//! memory, which the name of its memfd identifies. Pages of shared libraries count in full.
//!
//!     cargo bench -p kickless-tests --bench memory [-- --quick]

mod common;

use std::fs::File;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use common::{Plan, resident_kib};
use kickless_spec::blk;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::request::{Layout, Request, RequestMemory};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::image_dir;

const SHAPE: Shape = Shape { queues: 4, indirect: true, memory: 1 << 30, ..Shape::LINUX };
const IMAGE_SIZE: u64 = 256 << 20;
/// Bytes of a request under load.
const BLOCK: usize = 64 << 10;
const TARGET_KIB: u64 = 16 << 10;
/// Largest memory that a queue may add.
const TARGET_QUEUE_KIB: u64 = 64;
/// Queues of the device with 65 queues, without the first one.
const MORE: u16 = 64;

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    println!("resident KiB without the guest's memory, 4 queues of 256{}\n", plan.remark());
    println!("  {:<44} {:>8} {:>12}", "", "started", "after load");
    let dir = image_dir()?;
    let image = dir.path().join("disk.img");
    File::create_new(&image)?.set_len(IMAGE_SIZE)?;
    let image = image.to_str().context("no text")?.to_owned();
    let mut most = 0;
    for (name, program, disk, engine) in [
        ("kickless, image, io_uring", Program::Kickless, image.as_str(), Some("io_uring")),
        ("kickless, image, threads", Program::Kickless, image.as_str(), Some("threads")),
        ("kickless, null:1G", Program::Kickless, "null:1G", None),
        ("qemu-storage-daemon, image, for information", Program::StorageDaemon, image.as_str(), None),
    ] {
        let engine = engine.map(str::to_owned);
        let config = DaemonConfig { program, queues: SHAPE.queues, engine, ..DaemonConfig::new(disk) };
        let (started, loaded) = measure(&config, &SHAPE, BLOCK).with_context(|| name.to_owned())?;
        println!("  {name:<44} {started:>8} {loaded:>12}");
        if program == Program::Kickless {
            most = most.max(started).max(loaded);
        }
    }
    println!(
        "\nkickless takes at most {:.1} MiB, {:.2} of the target (under {} MiB){}",
        most as f64 / 1024.0,
        most as f64 / TARGET_KIB as f64,
        TARGET_KIB >> 10,
        plan.remark()
    );
    println!("\nresident KiB that a queue of {} adds after load", SHAPE.size);
    for (name, disk) in [("image, io_uring", image.as_str()), ("null:1G", "null:1G")] {
        let of = |queues| {
            let config =
                DaemonConfig { program: Program::Kickless, queues: 1 + MORE, ..DaemonConfig::new(disk) };
            // Requests are short, because only their number matters.
            measure(&config, &Shape { queues, ..SHAPE }, 4096).map(|(_, loaded)| loaded)
        };
        let each = of(1 + MORE)?.saturating_sub(of(1)?) as f64 / f64::from(MORE);
        println!(
            "  {name:<44} {each:>8.1}  {:.2} of the target ({TARGET_QUEUE_KIB} KiB)",
            each / TARGET_QUEUE_KIB as f64
        );
    }
    Ok(())
}

/// Returns the memory before and after load.
fn measure(config: &DaemonConfig, shape: &Shape, block: usize) -> Result<(u64, u64)> {
    let daemon = Daemon::start(config)?;
    let mut machine = Machine::start(daemon.socket(), shape)?;
    let started = resident_kib(daemon.pid())?;
    load(&mut machine, shape, block)?;
    Ok((started, resident_kib(daemon.pid())?))
}

/// Fills every queue twice, with reads and with writes, up to its number of descriptors.
fn load(machine: &mut Machine, shape: &Shape, block: usize) -> Result<()> {
    let all = usize::from(shape.queues) * usize::from(shape.size);
    let request_memory =
        (0..all).map(|_| RequestMemory::new(&mut machine.ram, block)).collect::<Result<Vec<_>>>()?;
    let data = vec![0x5a; block];
    for request in [Request::write(0, &data), Request::read(0, block)] {
        for (i, place) in request_memory.iter().enumerate() {
            let sector = (i * block) as u64 / blk::SECTOR_SIZE;
            let request = Request { sector, ..request.clone() };
            let buffers = place.lay_out(&machine.ram, &request, Layout::Usual)?;
            let queue = &mut machine.queues[i / usize::from(shape.size)];
            queue.submit(&machine.ram, &buffers, Some(place.table()))?;
        }
        machine.queues.iter_mut().for_each(|queue| queue.flush());
        for queue in &mut machine.queues {
            for _ in 0..shape.size {
                queue.wait_used(Instant::now() + LIMIT)?;
            }
        }
        for place in &request_memory {
            let status = place.outcome(&machine.ram, &request, 0)?.status;
            ensure!(status == blk::S_OK, "status {status}");
        }
    }
    Ok(())
}
