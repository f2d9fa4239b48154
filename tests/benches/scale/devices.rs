//! Measures the start of a daemon, `device.add` and `device.remove` against the number of devices.

use std::time::Instant;

use anyhow::Result;
use kickless_control::Client;
use kickless_tests::daemon::Daemon;
use serde_json::json;

use crate::Bench;
use crate::curve::{Curve, Group, Panel, Shape};
use crate::load;

/// Devices of a file. An engine has room for 512.
const FILE: [u64; 4] = [1, 8, 64, 512];
/// Devices that are there when another one comes.
const THERE: [u64; 4] = [1, 8, 64, 511];
/// Devices that come and go in a turn.
const CALLS: u32 = 8;

/// Measures starts and calls.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Group>> {
    let axis = bench.axis(&FILE);
    let [start, stop] = bench.rounds(axis.len(), |at| {
        let begin = Instant::now();
        let (daemon, _) = load::serve(bench, axis[at], &[])?;
        let start = begin.elapsed();
        let begin = Instant::now();
        daemon.stop()?;
        Ok([start, begin.elapsed()].map(|time| time.as_secs_f64() * 1e3))
    })?;
    let linear = |name, figures| Curve::new(name, Shape::Linear, &axis, figures);
    let life = Panel { figure: "ms", curves: vec![linear("start", start), linear("end", stop)] };
    let axis = bench.axis(&THERE);
    let daemons = axis.iter().map(|devices| load::serve(bench, *devices, &["--control"]));
    let daemons = daemons.collect::<Result<Vec<_>>>()?;
    let [add, remove] = bench.rounds(axis.len(), |at| {
        let (daemon, _) = &daemons[at];
        calls(&mut Client::connect(&daemon.socket_of("control"))?, daemon, "null:1G", CALLS)
    })?;
    let flat = |name, figures| Curve::new(name, Shape::Flat, &axis, figures);
    let by_call =
        Panel { figure: "ms", curves: vec![flat("device.add", add), flat("device.remove", remove)] };
    Ok(vec![
        Group { axis: "devices of the file", panels: vec![life] },
        Group { axis: "devices before the call", panels: vec![by_call] },
    ])
}

/// Returns the milliseconds of a `device.add` of this disk and of its `device.remove`, on average.
pub(crate) fn calls(client: &mut Client, daemon: &Daemon, disk: &str, times: u32) -> Result<[f64; 2]> {
    let params = json!({ "name": "new", "blk-file": disk, "socket-path": daemon.socket_of("new") });
    let calls = [("device.add", params), ("device.remove", json!({ "name": "new" }))];
    let mut took = [0.0; 2];
    for _ in 0..times {
        for (took, (method, params)) in took.iter_mut().zip(&calls) {
            let params = params.as_object().cloned().unwrap_or_default();
            let begin = Instant::now();
            client.call(method, params)?;
            *took += begin.elapsed().as_secs_f64() * 1e3 / f64::from(times);
        }
    }
    Ok(took)
}
