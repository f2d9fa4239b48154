//! Load on the back-ends of network cards: `kickless bench net` and `kickless bench compare-net`.

mod load;
pub(crate) mod options;
mod packet;
mod run;
mod scenario;

use anyhow::Result;

use crate::rounds::{run_loads, several, single};
use options::Cards;

/// Runs the benchmark, writes the requested files, and prints the results.
///
/// # Errors
/// A target cannot be reached, lacks a feature or dies.
pub(crate) fn carry_out(bench: Cards<'_>, print: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let targets = match bench {
        Cards::Net(net) => single(&net.socket_path, net.pid),
        Cards::Compare(compare) => {
            several(&compare.targets, compare.target_cpu.as_ref(), compare.load.rings.cpu.as_ref())?
        }
    };
    let load = bench.load();
    let loads = scenario::scenarios(bench);
    let loads = loads.into_iter().map(|scenario| (scenario.describe(), scenario)).collect();
    // A back-end of DPDK polls without a client too, and would take the CPU that the targets share.
    let stops_others = true;
    run_loads(
        targets,
        loads,
        bench.rounds(),
        stops_others,
        &load.output,
        print,
        |scenario, target, stop, progress| run::turn(scenario, target, load, stop, progress),
    )
}
