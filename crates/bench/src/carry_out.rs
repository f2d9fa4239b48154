//! The entry point of each benchmark.

use anyhow::Result;

use super::common_options::BackEnds;
use super::options::{Bench, Part};
use super::{net, parts, rounds, way};

/// Runs a benchmark and prints the results.
///
/// # Errors
/// A back-end cannot be reached, lacks a feature or dies, data are wrong, or requests failed.
pub fn carry_out(bench: &Bench, print: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    match bench {
        Bench::Blk(blk) => rounds::carry_out(&BackEnds::One(blk.as_ref()), print),
        Bench::Compare(compare) => rounds::carry_out(&BackEnds::Several(compare.as_ref()), print),
        Bench::Net(net) => net::carry_out(&BackEnds::One(net.as_ref()), print),
        Bench::CompareNet(compare) => net::carry_out(&BackEnds::Several(compare.as_ref()), print),
        Bench::Ring(options) => parts::carry_out(Part::Ring, options, print),
        Bench::Memory(options) => parts::carry_out(Part::Memory, options, print),
        Bench::Way(options) if !options.same.is_empty() => {
            let ways: Vec<_> = options.same.iter().map(|way| Some(way.as_nanos() as f64)).collect();
            print(if way::is_same(&ways) { "same\n" } else { "changed\n" })
        }
        Bench::Way(options) => way::carry_out(options, print),
    }
}
