//! Measures qcow2 images against the size of the disk and the length of the chain: the time to open one, and
//! reads.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kickless_control::Client;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::load::{Kind, Load};
use kickless_tests::frontend::machine::{Machine, Shape as MachineShape};
use kickless_tests::qcow2::Qcow2Image;

use crate::common::{BLOCK, Spread};
use crate::curve::{Curve, Group, Panel, Shape};
use crate::{Bench, devices, load};

/// GiB of a disk. 4 TiB have 8192 entries in their table of tables.
const GIB: [u64; 3] = [1, 64, 4096];
/// Images of a chain. The topmost one may have 64 below it.
const IMAGES: [u64; 4] = [1, 4, 16, 64];
/// The directory of the images: a file system that answers from memory.
const IMAGES_DIR: &str = "/dev/shm";
const CLUSTER: u64 = 64 << 10;
const SECTOR: u64 = 512;
/// Clusters with data.
const CLUSTERS: u64 = 256;
const DEPTH: u16 = 32;
const TURN: Duration = Duration::from_millis(300);
/// Times that a turn opens an image.
const OPENS: u32 = 4;

/// Makes a chain of images whose lowest one has clusters with data: one beside the other at the beginning of
/// the disk, and others that are spread over all of it.
fn image(gib: u64, images: u64) -> Result<Qcow2Image> {
    let image = Qcow2Image::empty_in(Path::new(IMAGES_DIR))?;
    let size = format!("{gib}G");
    let name = |at: u64| if at == 1 { "disk".to_owned() } else { format!("below{at}") };
    image.img(&["create", "-q", "-f", "qcow2", &name(images), &size])?;
    let mut clusters: Vec<u64> = (0..CLUSTERS).map(|at| at * CLUSTER).collect();
    clusters.extend((1..CLUSTERS).map(|at| spread(gib, at)));
    let writes: Vec<String> = clusters.iter().map(|at| format!("write -q {at} {CLUSTER}")).collect();
    image.io_on(&name(images), &writes)?;
    for at in (1..images).rev() {
        image.img(&["create", "-q", "-f", "qcow2", "-b", &name(at + 1), "-F", "qcow2", &name(at)])?;
    }
    Ok(image)
}

/// Returns the offset of a cluster with data among those that are spread over the disk.
fn spread(gib: u64, at: u64) -> u64 {
    at * ((gib << 30) / CLUSTERS)
}

/// An image that is served.
struct Served {
    machine: Machine,
    daemon: Daemon,
    _image: Qcow2Image,
}

impl Served {
    fn start(bench: &Bench, image: Qcow2Image) -> Result<Served> {
        let config = DaemonConfig { program: Program::Kickless, queues: 1, ..image.config() };
        let daemon = bench.start(&config)?;
        let shape = MachineShape { memory: 128 << 20, ..MachineShape::LINUX };
        let machine = Machine::start(daemon.socket(), &shape)?;
        Ok(Served { machine, daemon, _image: image })
    }

    /// Reads for a turn, after another one to warm up. Returns the back-end's processor microseconds for each
    /// request.
    fn turn(&mut self, time: Duration, mut offset: impl FnMut() -> u64) -> Result<f64> {
        let Machine { queues, ram, .. } = &mut self.machine;
        let kind = Kind { depth: DEPTH, block: BLOCK, write: false };
        let mut load = Load::prepare(queues.first_mut().context("no queue")?, ram, kind)?;
        load.run(time / 4, || offset() / SECTOR)?;
        let run = || load.run(time, || offset() / SECTOR);
        let (run, cpu) = load::turn(|| load::cpu_seconds(self.daemon.pid()), run)?;
        Ok(cpu / run.requests as f64 * 1e6)
    }
}

/// Measures images.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Group>> {
    let time = TURN.min(bench.plan.time);
    let axis = bench.axis(&GIB);
    let images = axis.iter().map(|gib| image(*gib, 1)).collect::<Result<Vec<_>>>()?;
    let open = opens(bench, &images)?;
    let mut served = start(bench, images)?;
    let [allocated, everywhere, holes] = bench.rounds(axis.len(), |at| {
        let (gib, image) = (axis[at], &mut served[at]);
        let block = |cluster: u64| cluster + fastrand::u64(..CLUSTER / u64::from(BLOCK)) * u64::from(BLOCK);
        Ok([
            image.turn(time, || block(fastrand::u64(..CLUSTERS) * CLUSTER))?,
            image.turn(time, || block(spread(gib, fastrand::u64(1..CLUSTERS))))?,
            // The cluster behind those of the beginning, and those between the others.
            image.turn(time, || block(spread(gib, fastrand::u64(1..CLUSTERS)) + CLUSTER))?,
        ])
    })?;
    drop(served);
    let curve = |name, figures| Curve::new(name, Shape::Flat, &axis, figures);
    let reads = vec![
        curve("reads of 16 MiB", allocated),
        curve("reads of data everywhere", everywhere),
        curve("reads of holes everywhere", holes),
    ];
    let opening = Panel { figure: "ms", curves: vec![curve("open", open)] };
    let sizes = Group { axis: "GiB", panels: vec![opening, Panel { figure: "back-end us", curves: reads }] };
    let axis = bench.axis(&IMAGES);
    let images = axis.iter().map(|images| image(1, *images)).collect::<Result<Vec<_>>>()?;
    let open = opens(bench, &images)?;
    let mut served = start(bench, images)?;
    let [through] = bench.rounds(axis.len(), |at| {
        let block = || fastrand::u64(..CLUSTERS * CLUSTER / u64::from(BLOCK)) * u64::from(BLOCK);
        Ok([served[at].turn(time, block)?])
    })?;
    let curve = |name, figures| Curve::new(name, Shape::Linear, &axis, figures);
    let opening = Panel { figure: "ms", curves: vec![curve("open", open)] };
    let reads = Panel { figure: "back-end us", curves: vec![curve("reads from the lowest image", through)] };
    Ok(vec![sizes, Group { axis: "images of the chain", panels: vec![opening, reads] }])
}

fn start(bench: &Bench, images: Vec<Qcow2Image>) -> Result<Vec<Served>> {
    images.into_iter().map(|image| Served::start(bench, image)).collect()
}

/// Returns the milliseconds that `device.add` takes with each image.
fn opens(bench: &Bench, images: &[Qcow2Image]) -> Result<Vec<Spread>> {
    let (daemon, _) = load::serve(bench, 1, &["--control", &format!("--allow-root={IMAGES_DIR}")])?;
    let mut client = Client::connect(&daemon.socket_of("control"))?;
    let [add, _] = bench.rounds(images.len(), |at| {
        let disk = format!("qcow2:{}", images[at].path().display());
        devices::calls(&mut client, &daemon, &disk, OPENS)
    })?;
    Ok(add)
}
