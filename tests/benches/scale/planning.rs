//! Computes the cores that guests need, from the curves of the part `load`.

use anyhow::{Context, Result};

use crate::curve::{Curve, Group, digits};
use crate::load::BUSY;

/// Guests with a disk each, and thousands of requests a second of each.
const GUESTS: [u64; 3] = [10, 100, 1000];
const RATES: [u64; 3] = [1, 10, 50];

/// Returns the table. A worker gets at most the largest rate that was measured, so there are as many workers
/// as that takes. The load is divided among them evenly.
pub(crate) fn table(groups: &[Group]) -> Result<String> {
    let panel = groups.iter().flat_map(|group| &group.panels).find(|panel| panel.figure == BUSY);
    let curves = &panel.context("no curve at rates")?.curves;
    let most = curves.iter().flat_map(|curve| &curve.points).map(|(x, _)| *x).fold(0.0, f64::max);
    let mut table = "| guests |".to_owned();
    table.extend(RATES.map(|rate| format!(" {rate} 000 a second each |")));
    table += "\n| --- | --- | --- | --- |\n";
    for guests in GUESTS {
        table += &format!("| {guests} |");
        table.extend(RATES.map(|rate| {
            let total = (guests * rate) as f64;
            let workers = (total / most).ceil();
            let busy = curves.iter().map(|curve| busy(curve, total / workers)).fold(0.0, f64::max);
            format!(" {} of {workers} |", digits(workers * busy / 100.0))
        }));
        table.push('\n');
    }
    Ok(table)
}

/// Returns the percents of a core that a worker is busy at this rate. Between two rates that were measured,
/// the curve is a straight line on logarithmic axes. A lower rate costs the same for each request.
fn busy(curve: &Curve, rate: f64) -> f64 {
    let mut pairs = curve.points.iter().zip(curve.points.iter().skip(1));
    let of = pairs.clone().find(|(_, (upper, _))| rate <= *upper).or(pairs.next_back());
    let Some(((x0, y0), (x1, y1))) = of else { return f64::NAN };
    let power = (y1.median / y0.median).ln() / (x1 / x0).ln();
    y0.median * (rate / x0).powf(if rate < *x0 { 1.0 } else { power })
}
