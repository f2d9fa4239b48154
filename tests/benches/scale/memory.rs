//! Measures resident memory and descriptors against devices, queues, and guest memory that is not touched.

use std::fs;

use anyhow::{Context, Result};
use kickless_tests::daemon::{DaemonConfig, Program};
use kickless_tests::frontend::machine::{Machine, Shape as MachineShape};

use crate::Bench;
use crate::common::resident_kib;
use crate::curve::{Curve, Group, Panel, Shape};
use crate::load;

const DEVICES: [u64; 4] = [1, 8, 64, 512];
const QUEUES: [u64; 4] = [1, 4, 16, 64];
const GIB: [u64; 3] = [1, 4, 16];
/// The memory of a guest with few queues, and what each further queue needs there.
const MEMORY: u64 = 2 << 20;
const MEMORY_OF_QUEUE: u64 = 1 << 20;

/// Measures memory and descriptors.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Group>> {
    let axis = bench.axis(&DEVICES);
    let shape = MachineShape { memory: MEMORY, ..MachineShape::LINUX };
    let [listening, connected, listening_fds, connected_fds] = bench.rounds(axis.len(), |at| {
        let (daemon, names) = load::serve(bench, axis[at], &[])?;
        let before = held(daemon.pid())?;
        let machines = names.iter().map(|name| Machine::start(&daemon.socket_of(name), &shape));
        let mut machines = machines.collect::<Result<Vec<_>>>()?;
        machines.iter_mut().try_for_each(read_on_each)?;
        let after = held(daemon.pid())?;
        Ok([before[0], after[0], before[1], after[1]])
    })?;
    let curves = |before, after| {
        vec![
            Curve::new("listening", Shape::Linear, &axis, before),
            Curve::new("after a request to each", Shape::Linear, &axis, after),
        ]
    };
    let devices = Group {
        axis: "devices",
        panels: vec![
            Panel { figure: "MiB", curves: curves(listening, connected) },
            Panel { figure: "descriptors", curves: curves(listening_fds, connected_fds) },
        ],
    };
    let axis = bench.axis(&QUEUES);
    let queues = of_one(bench, "queues", &axis, Shape::Linear, |queues| MachineShape {
        queues: queues as u16,
        memory: MEMORY + queues * MEMORY_OF_QUEUE,
        ..shape
    })?;
    let axis = bench.axis(&GIB);
    let memory = of_one(bench, "GiB of guest memory", &axis, Shape::Flat, |gib| MachineShape {
        memory: gib << 30,
        ..shape
    })?;
    Ok(vec![devices, queues, memory])
}

/// Measures a daemon with one device, whose guest has this shape at each value of the axis.
fn of_one(
    bench: &Bench,
    name: &'static str,
    axis: &[u64],
    expected: Shape,
    shape: impl Fn(u64) -> MachineShape,
) -> Result<Group> {
    let [memory, descriptors] = bench.rounds(axis.len(), |at| {
        let shape = shape(axis[at]);
        let config =
            DaemonConfig { program: Program::Kickless, queues: shape.queues, ..DaemonConfig::new("null:1G") };
        let daemon = bench.start(&config)?;
        let mut machine = Machine::start(daemon.socket(), &shape)?;
        read_on_each(&mut machine)?;
        held(daemon.pid())
    })?;
    let panel =
        |figure, figures| Panel { figure, curves: vec![Curve::new("one device", expected, axis, figures)] };
    Ok(Group { axis: name, panels: vec![panel("MiB", memory), panel("descriptors", descriptors)] })
}

/// Uses each queue of a guest.
fn read_on_each(machine: &mut Machine) -> Result<()> {
    (0..machine.shape().queues).try_for_each(|queue| machine.read(queue, 0, 4096).map(drop))
}

/// Returns the MiB that a process has without its guests' memory, with those of its page tables, and the
/// number of its descriptors.
fn held(pid: u32) -> Result<[f64; 2]> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let tables = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).context("no VmPTE")?;
    let tables: u64 = tables.split_whitespace().next().context("VmPTE without a number")?.parse()?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    Ok([(resident_kib(pid)? + tables) as f64 / 1024.0, descriptors as f64])
}
