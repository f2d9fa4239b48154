//! Measures SET_MEM_TABLE and the log of written pages against the size of guest memory.

use std::time::Instant;

use anyhow::{Result, ensure};
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::frontend::log::Bitmap;
use kickless_tests::frontend::machine::{Machine, Shape as MachineShape};

use crate::Bench;
use crate::curve::{Curve, Group, Panel, Shape};

/// No page of this memory is touched but those of a queue.
const GIB: [u64; 4] = [1, 4, 16, 64];
/// Messages and harvests of a turn.
const TIMES: u32 = 16;

/// Measures the messages and the harvest.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Group>> {
    let axis = bench.axis(&GIB);
    let guest = |gib: &u64| -> Result<(Daemon, Machine, Bitmap)> {
        let config = DaemonConfig { program: Program::Kickless, queues: 1, ..DaemonConfig::new("null:1G") };
        let daemon = bench.start(&config)?;
        let mut machine =
            Machine::start(daemon.socket(), &MachineShape { memory: gib << 30, ..MachineShape::LINUX })?;
        let bitmap = Bitmap::covering(&machine.ram)?;
        machine.frontend.set_log(&bitmap)?;
        machine.frontend.set_logging(true)?;
        machine.read(0, 0, 4096)?;
        ensure!(!bitmap.harvest().is_empty(), "a read marks no page");
        Ok((daemon, machine, bitmap))
    };
    let mut guests = axis.iter().map(guest).collect::<Result<Vec<_>>>()?;
    let [table, log, harvest] = bench.rounds(axis.len(), |at| {
        let (_, Machine { frontend, ram, .. }, bitmap) = &mut guests[at];
        Ok([
            micros(|| frontend.share(&[ram]))?,
            micros(|| frontend.set_log(bitmap))?,
            micros(|| {
                ensure!(bitmap.harvest().is_empty(), "a page is marked");
                Ok(())
            })?,
        ])
    })?;
    let curve = |name, shape, figures| Curve::new(name, shape, &axis, figures);
    let messages = vec![curve("SET_MEM_TABLE", Shape::Flat, table), curve("SET_LOG_BASE", Shape::Flat, log)];
    Ok(vec![Group {
        axis: "GiB of guest memory",
        panels: vec![
            Panel { figure: "us", curves: messages },
            Panel { figure: "us", curves: vec![curve("harvest of no page", Shape::Linear, harvest)] },
        ],
    }])
}

/// Returns the microseconds that an action takes, on average.
fn micros(mut act: impl FnMut() -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    (0..TIMES).try_for_each(|_| act())?;
    Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES))
}
