//! Load on the back-ends of network cards: `kickless bench net` and `kickless bench compare-net`.

mod load;
pub(crate) mod options;
mod packet;
mod run;
mod scenario;

use anyhow::Result;

use crate::common_options::BackEnds;
use crate::rounds::run_loads;
use crate::target::name_in;
use options::NetLoadOptions;

/// Runs the benchmark, writes the requested files, and prints the results.
///
/// # Errors
/// A target cannot be reached, lacks a feature or dies, or no frame was counted.
pub(crate) fn carry_out(
    bench: &BackEnds<'_, NetLoadOptions>,
    print: impl Fn(&str) -> Result<()>,
) -> Result<()> {
    let loads = scenario::scenarios(bench);
    let loads = loads.into_iter().map(|scenario| (scenario.describe(), scenario)).collect();
    // A back-end of DPDK polls without a client too, and would take the CPU that the targets share.
    let stops_others = true;
    run_loads(bench, loads, stops_others, print, |scenario, target, stop, progress| {
        let turn = run::turn(scenario, target, bench.load(), stop, progress);
        turn.map_err(|error| name_in(error, target.name()))
    })
}
