//! Formats the results as text.

use super::core_latency;
use super::description::{Description, Units};
use super::layout::{columns, rate, time};
use super::results::{Load, Results, Spread};
use super::turn::Turn;

/// Formats a table for each load.
pub(crate) fn text(results: &Results) -> String {
    let mut text = String::new();
    for load in &results.loads {
        text += &format!("{}\n{}", load.description.words, columns(&rows(results, load)));
        text.extend(core_latencies(results, load).into_iter().map(|line| line + "\n"));
        text.push('\n');
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

/// Returns sentences about the core-to-core latency in each round, and about the ratios at each latency if
/// there are several. Empty if it was not measured.
pub(crate) fn core_latencies(results: &Results, load: &Load) -> Vec<String> {
    let each: Vec<String> =
        load.core_latencies.iter().filter_map(|latencies| latency_of_round(latencies)).collect();
    if each.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![format!("core-to-core latency in each round: {}", each.join(", "))];
    if load.repeats > 0 {
        lines.push(format!("rounds repeated because it changed: {}", load.repeats));
    }
    let groups = core_latency::groups(&load.core_latencies);
    for group in if groups.len() > 1 { groups } else { Vec::new() } {
        let latencies = group.iter().filter_map(|round| load.core_latencies.get(*round)).flatten();
        let Some(Spread { median, .. }) = Spread::of(latencies.copied().flatten()) else { continue };
        let ratios: Vec<String> = (1..results.targets.len())
            .filter_map(|at| {
                let ratio = ratio(load.ratio_in(at, |round| group.contains(&round))?);
                Some(format!("{} / {} {ratio}", results.targets.first()?, results.targets.get(at)?))
            })
            .collect();
        let (latency, rounds, all) = (time(median.round()), group.len(), load.core_latencies.len());
        lines.push(format!("with {latency}, {rounds} of {all} rounds: {}", ratios.join(", ")));
    }
    lines
}

/// Formats the core-to-core latency in a round.
fn latency_of_round(latencies: &[Option<f64>]) -> Option<String> {
    let Spread { median, least, most } = Spread::of(latencies.iter().copied().flatten())?;
    Some(match core_latency::is_same(latencies) {
        true => time(median.round()),
        false => format!("{} to {} (changed)", time(least.round()), time(most.round())),
    })
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::description::REQUESTS;

    #[test]
    fn the_latency_of_each_round_and_the_ratios_at_each_latency_are_shown() {
        let description = Description {
            words: "reads".into(),
            rate: None,
            time: Duration::from_secs(1),
            bytes: 4096,
            units: REQUESTS,
            json: serde_json::Value::Null,
        };
        let turns = [[300, 150, 100], [200, 100, 100]].map(|rates| rates.map(Turn::fake).to_vec()).to_vec();
        let mut load = Load {
            description,
            turns,
            core_latencies: [
                &[Some(80.0), Some(81.2)] as &[_],
                &[Some(79.0), None],
                &[Some(80.0), Some(400.0)],
            ]
            .map(<[_]>::to_vec)
            .to_vec(),
            repeats: 2,
        };
        let mut results = Results { targets: vec!["a".into(), "b".into()], loads: Vec::new() };
        let first = "core-to-core latency in each round: 81 ns, 79 ns, 80 ns to 400 ns (changed)";
        assert_eq!(core_latencies(&results, &load), [first, "rounds repeated because it changed: 2"]);
        load.core_latencies[1] = vec![Some(400.0)];
        assert_eq!(
            core_latencies(&results, &load)[2..],
            ["with 81 ns, 1 of 3 rounds: a / b 1.50", "with 400 ns, 1 of 3 rounds: a / b 1.50"]
        );
        load.core_latencies = vec![vec![]; 3];
        assert!(core_latencies(&results, &load).is_empty());
        results.loads.push(load);
        assert!(text(&results).starts_with("reads\n") && !text(&results).contains("latency in each"));
    }
}
