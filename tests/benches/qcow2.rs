//! Compares qcow2 images served by `kickless blk` with the same images in `qemu-storage-daemon`, through the
//! same driver.
//!
//! Each turn starts both daemons, one after the other, on images of their own. Cells that allocate get a new
//! image for each turn. Cells of first reads begin with empty caches. The others have a warm-up. The driver
//! polls on the first CPU, and the daemons are on the second. The storage daemon has `aio=io_uring`,
//! `cache.direct=on` and an iothread.
//!
//! A turn of copies is short, so that it copies no cluster twice. A turn of first reads is short, so that the
//! caches do not fill.
//!
//!     cargo bench -p kickless-tests --bench qcow2 -- [--dir=DIRECTORY] [--cell=NAME] [--depth=1]
//!         [--millis=1000] [--quick]
//!
//! The images are below /dev/shm, or below the directory that `--dir` names. They take up to 5 GiB there.
//! `--cell` selects the cells whose names contain this word, and `--depth` those with so many requests in
//! flight.

mod common;

use anyhow::{Result, ensure};
use common::{BLOCK, Contestant, Cpus, Plan, Spread, Turn, argument, head, ratios, row};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::{Kind, half_random, next_sectors, random_sectors};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::qcow2::Qcow2Image;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// The queue has room for 128 requests of three descriptors.
const SHAPE: Shape = Shape { size: 512, memory: 128 << 20, ..Shape::LINUX };
const CLUSTER: u64 = 64 << 10;
/// The bytes of the disk that an L2 table maps: a cluster of entries of 8 bytes.
const TABLE: u64 = CLUSTER / 8 * CLUSTER;
const SEQUENTIAL: u32 = 128 << 10;
/// The bytes of data in images that have some.
const DATA: u64 = 512 << 20;
const DATA_QUICK: u64 = 16 << 20;
/// The time of a turn of copies. The 8192 clusters of the data are enough for 80000 copies a second.
const COPIES: Duration = Duration::from_millis(100);
/// The time of a turn of first reads. The tables of an image of 100 GiB have 3200 blocks of 4 KiB.
const FIRST: Duration = Duration::from_millis(20);
/// The smaller cache of tables, for each image. The tables of an image of 100 GiB have 12.5 MiB.
const SMALL_CACHE: u64 = 1 << 20;
/// The size of large disks.
const LARGE: u64 = 100 << 30;
const LARGE_QUICK: u64 = 1 << 30;

/// The image of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// It has data everywhere.
    Full,
    /// It is large, and has tables for all its clusters.
    Large,
    /// It is large and empty.
    New,
    /// It is empty, over two others. The lowest one has data everywhere.
    Chain,
    /// It is large, over two others. All have tables everywhere, and the lowest one all clusters.
    LargeChain,
}

/// The cache of tables at the beginning of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tables {
    /// It has room for all tables. A warm-up has filled it, if the cell allocates nothing.
    Warm,
    /// It has room for all tables, and is empty.
    Empty,
    /// It has room for a small part of the tables.
    Small,
}

/// The order of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Random,
    Sequential,
    /// A random block in each cluster, one cluster after the other.
    EachCluster,
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
struct Cell {
    name: &'static str,
    image: Kept,
    order: Order,
    kind: Kind,
    tables: Tables,
}

fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (name, image, order, write, tables) in [
        ("reads", Kept::Full, Order::Random, false, Tables::Warm),
        ("writes", Kept::Full, Order::Random, true, Tables::Warm),
        ("writes of new clusters", Kept::New, Order::EachCluster, true, Tables::Warm),
        ("reads of 100 GiB", Kept::Large, Order::Random, false, Tables::Warm),
        ("writes of 100 GiB", Kept::Large, Order::Random, true, Tables::Warm),
        ("reads of a chain", Kept::Chain, Order::Random, false, Tables::Warm),
        ("copies of a chain", Kept::Chain, Order::EachCluster, true, Tables::Warm),
        ("first reads of 100 GiB", Kept::Large, Order::Random, false, Tables::Empty),
        ("first reads of a chain", Kept::LargeChain, Order::Random, false, Tables::Empty),
        ("reads of 100 GiB, small cache", Kept::Large, Order::Random, false, Tables::Small),
        ("reads of a chain, small cache", Kept::LargeChain, Order::Random, false, Tables::Small),
    ] {
        cells.extend([1, 32].map(|depth| Cell {
            name,
            image,
            order,
            kind: Kind { depth, block: BLOCK, write },
            tables,
        }));
    }
    for (name, image, write) in [
        ("sequential reads", Kept::Full, false),
        ("sequential writes", Kept::Full, true),
        ("sequential writes of new clusters", Kept::New, true),
    ] {
        let kind = Kind { depth: 8, block: SEQUENTIAL, write };
        cells.push(Cell { name, image, order: Order::Sequential, kind, tables: Tables::Warm });
    }
    let asked = argument("--cell=");
    cells.retain(|cell| asked.as_ref().is_none_or(|asked| cell.name.contains(asked.as_str())));
    let depth = argument("--depth=").and_then(|depth| depth.parse().ok());
    cells.retain(|cell| depth.is_none_or(|depth: u16| cell.kind.depth == depth));
    cells
}

impl Cell {
    /// Whether the cell allocates clusters, so that each turn needs a new image.
    fn allocates(&self) -> bool {
        self.kind.write && matches!(self.image, Kept::New | Kept::Chain)
    }

    /// Whether the cell copies clusters of another image.
    fn copies(&self) -> bool {
        self.kind.write && self.image == Kept::Chain
    }

    /// Returns the size of the disk.
    fn size(&self, quick: bool) -> u64 {
        match (self.image, quick) {
            (Kept::Full | Kept::Chain, false) => DATA,
            (Kept::Full | Kept::Chain, true) => DATA_QUICK,
            (Kept::Large | Kept::LargeChain | Kept::New, false) => LARGE,
            (Kept::Large | Kept::LargeChain | Kept::New, true) => LARGE_QUICK,
        }
    }

    /// Returns the sectors of the requests.
    fn sectors(&self, size: u64) -> Box<dyn FnMut() -> u64> {
        match self.order {
            Order::Random => Box::new(random_sectors(size, self.kind.block)),
            Order::Sequential => Box::new(next_sectors(size, self.kind.block)),
            Order::EachCluster => {
                let mut clusters = next_sectors(size, CLUSTER as u32);
                let mut blocks = random_sectors(CLUSTER, self.kind.block);
                Box::new(move || clusters() + blocks())
            }
        }
    }

    /// Returns the backing images of the cell's image, the topmost first.
    fn backing(&self) -> &'static [&'static str] {
        if matches!(self.image, Kept::Chain | Kept::LargeChain) { &["middle", "lowest"] } else { &[] }
    }

    /// Returns the time of a turn.
    fn time(&self, asked: Duration) -> Duration {
        let longest = match self.tables {
            Tables::Empty => FIRST,
            _ if self.copies() => COPIES,
            _ => asked,
        };
        asked.min(longest)
    }

    /// Makes an image in `dir`.
    fn image(&self, dir: &std::path::Path, quick: bool) -> Result<Qcow2Image> {
        let image = Qcow2Image::empty_in(dir)?;
        let size = self.size(quick).to_string();
        let create = ["create", "-q", "-f", "qcow2"];
        match self.image {
            Kept::New => image.img(&[&create[..], &["disk", &size]].concat())?,
            Kept::Large => {
                image.img(&[&create[..], &["-o", "preallocation=metadata", "disk", &size]].concat())?
            }
            Kept::Full => {
                fill(&image, "raw", self.size(quick))?;
                image.img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "disk"])?;
                std::fs::remove_file(image.dir().join("raw"))?;
                String::new()
            }
            Kept::Chain => {
                fill(&image, "raw", self.size(quick))?;
                image.img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "lowest"])?;
                std::fs::remove_file(image.dir().join("raw"))?;
                image.img(&[&create[..], &["-b", "lowest", "-F", "qcow2", "middle"]].concat())?;
                image.img(&[&create[..], &["-b", "middle", "-F", "qcow2", "disk"]].concat())?
            }
            Kept::LargeChain => {
                image.img(&[&create[..], &["-o", "preallocation=metadata", "lowest", &size]].concat())?;
                for (under, over) in [("lowest", "middle"), ("middle", "disk")] {
                    image.img(&[&create[..], &["-b", under, "-F", "qcow2", over]].concat())?;
                    // A cluster of each table, so that there is one.
                    let tables = (0..self.size(quick)).step_by(TABLE as usize);
                    let writes: Vec<_> = tables.map(|at| format!("write -q {at} {CLUSTER}")).collect();
                    image.io_on(over, &writes)?;
                }
                String::new()
            }
        };
        Ok(image)
    }
}

/// Makes a file with data.
fn fill(image: &Qcow2Image, name: &str, size: u64) -> Result<()> {
    let mut file = File::create_new(image.dir().join(name))?;
    let chunk = half_random(1 << 20);
    for _ in 0..size / chunk.len() as u64 {
        file.write_all(&chunk)?;
    }
    Ok(())
}

/// Starts a daemon on an image, and measures one turn.
fn turn(cell: &Cell, program: Program, image: &Qcow2Image, plan: &Plan, cpus: &Cpus) -> Result<Turn> {
    cpus.for_back_ends()?;
    let config = DaemonConfig {
        program,
        queues: 1,
        iothread: true,
        by_uring: true,
        cache_size: (cell.tables == Tables::Small).then_some(SMALL_CACHE),
        backing: cell.backing().iter().map(|name| image.dir().join(name)).collect(),
        ..image.config()
    };
    let daemon = Daemon::start(&config)?;
    let machine = Machine::start(daemon.socket(), &Shape { queues: 1, ..SHAPE })?;
    let mut contestant = Contestant::over(format!("{program:?}"), daemon, machine);
    cpus.for_driver()?;
    let mut sectors = cell.sectors(cell.size(plan.quick));
    if !cell.allocates() && cell.tables != Tables::Empty {
        contestant.turn_on(1, cell.kind, plan.time / 4, &mut sectors)?;
    }
    let turn = contestant.turn_on(1, cell.kind, cell.time(plan.time), &mut sectors)?;
    let clusters = cell.size(plan.quick) / CLUSTER;
    let is_over = cell.order == Order::EachCluster && turn.run.requests > clusters;
    ensure!(plan.quick || !is_over, "{} requests used {clusters} clusters again", turn.run.requests);
    cpus.for_others()?;
    Ok(turn)
}

fn main() -> Result<()> {
    let plan = Plan::from_arguments();
    let cpus = Cpus::get()?;
    let dir = argument("--dir=").map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    let programs = [Program::Kickless, Program::StorageDaemon];
    println!("{}: {} turns of {:?} each{}", dir.display(), plan.rounds, plan.time, plan.remark());
    for cell in cells() {
        cpus.for_others()?;
        let mut images = [cell.image(&dir, plan.quick)?, cell.image(&dir, plan.quick)?];
        let mut turns = [Vec::new(), Vec::new()];
        for round in 0..plan.rounds {
            for at in 0..programs.len() {
                // The order changes in each round, so that no daemon always comes second.
                let at = (at + round) % programs.len();
                if cell.allocates() && round > 0 {
                    images[at] = cell.image(&dir, plan.quick)?;
                }
                turns[at].push(turn(&cell, programs[at], &images[at], &plan, &cpus)?);
            }
        }
        println!("\n{} of {} KiB, {} in flight", cell.name, cell.kind.block >> 10, cell.kind.depth);
        head();
        let [ours, theirs] = &turns;
        row("kickless", ours);
        row("qemu-storage-daemon", theirs);
        let rate = ratios(ours, theirs);
        let cpu = |turns: &[Turn]| Spread::of(turns.iter().map(Turn::cpu_ns_per_request)).median;
        let median = |turns: &[Turn]| Spread::of(turns.iter().map(|turn| turn.run.rate())).median;
        println!(
            "  => of the storage daemon {:.2} (turns: {:.2} .. {:.2}), CPU/req {:.2}",
            median(ours) / median(theirs),
            rate.min,
            rate.max,
            cpu(ours) / cpu(theirs)
        );
    }
    Ok(())
}
