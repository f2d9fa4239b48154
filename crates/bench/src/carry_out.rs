//! The entry point of each benchmark.

use anyhow::{Result, bail};

use super::common_options::BackEnds;
use super::options::{Bench, PARTS_WERE_REMOVED};
use super::{core_latency, net, rounds};

/// Runs a benchmark and prints the results, those of each load as it ends.
///
/// # Errors
/// A back-end cannot be reached, lacks a feature or dies, data are wrong, requests failed, or no frame was
/// counted. If a signal ended the benchmark, the error is [`Interrupted`](crate::Interrupted).
pub fn carry_out(bench: &Bench, print: impl Fn(&str) -> Result<()>) -> Result<()> {
    match bench {
        Bench::Blk(blk) => rounds::carry_out(&BackEnds::One(blk.as_ref()), print),
        Bench::Compare(compare) => rounds::carry_out(&BackEnds::Several(compare.as_ref()), print),
        Bench::Net(net) => net::carry_out(&BackEnds::One(net.as_ref()), print),
        Bench::CompareNet(compare) => net::carry_out(&BackEnds::Several(compare.as_ref()), print),
        Bench::CoreLatency(options) if !options.same.is_empty() => {
            let latencies: Vec<_> = options.same.iter().map(|time| Some(time.as_nanos() as f64)).collect();
            print(if core_latency::is_same(&latencies) { "same\n" } else { "changed\n" })
        }
        Bench::CoreLatency(options) => core_latency::carry_out(options, print),
        Bench::Ring { .. } => bail!(PARTS_WERE_REMOVED),
    }
}
