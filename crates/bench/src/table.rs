//! Formats the results as text.

use super::description::{Description, Units};
use super::layout::{columns, rate, time};
use super::results::{Load, Results, Spread};
use super::turn::Turn;

/// Formats a table for each load.
pub(crate) fn text(results: &Results) -> String {
    let mut text = String::new();
    for load in &results.loads {
        text += &format!("{}\n{}\n", load.description.words, columns(&rows(results, load)));
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

/// Returns the headings of [`rows`], without the columns that only a comparison or failures need.
fn headings(units: Units) -> Vec<String> {
    let Units { rate, bytes, each, .. } = units;
    let mut headings: Vec<String> = ["", rate, bytes, "p50", "p99", "p99.9", "max"].map(str::to_owned).into();
    headings.extend([format!("kicks/{each}"), format!("calls/{each}"), format!("CPU/{each} driver")]);
    headings.extend(["back-end", "of a core"].map(str::to_owned));
    headings
}

/// Returns the headings and a row for each target.
pub(crate) fn rows(results: &Results, load: &Load) -> Vec<Vec<String>> {
    let compares = results.targets.len() > 1;
    let mut headings = headings(load.description.units);
    let losses = (0..results.targets.len()).any(|at| load.lost(at) > 0);
    let failures = (0..results.targets.len()).any(|at| load.failed(at).0 > 0);
    if compares {
        headings.push(format!("{} / this", results.targets.first().map(String::as_str).unwrap_or_default()));
    }
    if losses {
        headings.push("lost".into());
    }
    if failures {
        headings.push("failed".into());
    }
    let mut rows = vec![headings];
    for (at, name) in results.targets.iter().enumerate() {
        let mut row = vec![name.clone()];
        row.extend(figures(load, at));
        if compares {
            row.push(if at == 0 { String::new() } else { load.ratio(at).map_or("-".into(), ratio) });
        }
        if losses {
            row.push(load.lost(at).to_string());
        }
        if failures {
            row.push(load.failed(at).0.to_string());
        }
        rows.push(row);
    }
    rows
}

/// Formats a ratio with its spread.
pub(crate) fn ratio(Spread { median, least, most }: Spread) -> String {
    if least == most { format!("{median:.2}") } else { format!("{median:.2} ({least:.2} to {most:.2})") }
}

fn figures(load: &Load, at: usize) -> Vec<String> {
    let median = |figure: fn(&Turn) -> f64| load.spread(at, figure).map(|spread| spread.median);
    let none = || "-".to_owned();
    let latencies = load.latencies(at).filter(|all| !all.is_empty());
    let quantile =
        |at: f64| latencies.as_ref().map_or_else(none, |all| time(all.value_at_quantile(at) as f64));
    let iops = median(Turn::rate).unwrap_or_default();
    let each = |figure: fn(&Turn) -> f64| median(figure).map_or_else(none, |number| format!("{number:.4}"));
    let back_end = load.spread_of_some(at, Turn::back_end_cpu_per_request).map(|spread| spread.median);
    let cores = load.spread_of_some(at, Turn::back_end_cores).map(|spread| spread.median);
    let Description { bytes, units, .. } = &load.description;
    let bytes = iops * f64::from(*bytes) / units.bytes_unit;
    // A gigabit is a lot, so it gets more digits than a mebibyte.
    let bytes = if bytes < 100.0 { format!("{bytes:.2}") } else { format!("{bytes:.1}") };
    vec![
        rate(iops.round()),
        bytes,
        quantile(0.5),
        quantile(0.99),
        quantile(0.999),
        latencies.as_ref().map_or_else(none, |all| time(all.max() as f64)),
        each(Turn::kicks_per_request),
        each(Turn::calls_per_request),
        median(Turn::driver_cpu_per_request).map_or_else(none, |number| time(number.round())),
        back_end.map_or_else(none, |number| time(number.round())),
        cores.map_or_else(none, |share| format!("{:.1} %", share * 100.0)),
    ]
}
