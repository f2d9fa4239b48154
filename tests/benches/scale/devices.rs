//! Measures the start of a daemon, `device.add` and `device.remove` against the number of devices.

use std::time::Instant;

use anyhow::Result;
use kickless_control::Client;
use serde_json::{Map, json};

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
        let (daemon, _) = load::serve(axis[at], &bench.cpus, &[])?;
        let start = begin.elapsed();
        let begin = Instant::now();
        daemon.stop()?;
        Ok([start, begin.elapsed()].map(|time| time.as_secs_f64() * 1e3))
    })?;
    let linear = |name, figures| Curve::new(name, Shape::Linear, &axis, figures);
    let life = Panel { figure: "ms", curves: vec![linear("start", start), linear("end", stop)] };
    let axis = bench.axis(&THERE);
    let daemons = axis.iter().map(|devices| load::serve(*devices, &bench.cpus, &["--control"]));
    let daemons = daemons.collect::<Result<Vec<_>>>()?;
    let [add, remove] = bench.rounds(axis.len(), |at| {
        let (daemon, _) = &daemons[at];
        let mut client = Client::connect(&daemon.socket_of("control"))?;
        let params = json!({ "name": "new", "blk-file": "null:1G", "socket-path": daemon.socket_of("new") });
        let (add, remove) = (object(params), object(json!({ "name": "new" })));
        let mut times = [0.0; 2];
        for _ in 0..CALLS {
            for (time, (method, params)) in
                times.iter_mut().zip([("device.add", &add), ("device.remove", &remove)])
            {
                let begin = Instant::now();
                client.call(method, params.clone())?;
                *time += begin.elapsed().as_secs_f64() * 1e3 / f64::from(CALLS);
            }
        }
        Ok(times)
    })?;
    let flat = |name, figures| Curve::new(name, Shape::Flat, &axis, figures);
    let calls = Panel { figure: "ms", curves: vec![flat("device.add", add), flat("device.remove", remove)] };
    Ok(vec![
        Group { axis: "devices of the file", panels: vec![life] },
        Group { axis: "devices before the call", panels: vec![calls] },
    ])
}

/// Returns the parameters of a call.
pub(crate) fn object(value: serde_json::Value) -> Map<String, serde_json::Value> {
    match value {
        serde_json::Value::Object(map) => map,
        _ => Map::new(),
    }
}
