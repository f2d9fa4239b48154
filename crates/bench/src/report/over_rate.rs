//! Draws latency and the processor time of the back-end against the requested rate, as SVG.

use anyhow::Result;
use plotters::prelude::*;

use super::canvas::{Area, BOLD, FONT, LIGHT, colour, svg};
use super::legend;
use super::over_time::percent;
use super::plot::{Chart, Line, around, chart, draw_lines};
use crate::layout::{rate_mark, time_mark};
use crate::results::{Results, Spread};
use crate::turn::Turn;

const SIZE: (u32, u32) = (760, 520);
const UPPER: u32 = 270;
/// The room for the marks and the name of the vertical axes.
const LEFT: u32 = 76;

/// Draws the median latency of each target above its processor time, at each rate.
///
/// Dots are medians of the turns; whiskers reach from the least to the most.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn draw(results: &Results) -> Result<String> {
    let rates = || results.loads.iter().filter_map(|load| load.description.rate.map(f64::from));
    // The margin keeps dots off the frame.
    let least = rates().fold(f64::INFINITY, f64::min) / 1.3;
    let xs = least..rates().fold(1.0, f64::max) * 1.3;
    let lines = |figure: fn(&Turn) -> Option<f64>| -> Vec<Vec<(f64, Spread)>> {
        (0..results.targets.len())
            .map(|at| {
                let point = |load: &crate::results::Load| {
                    Some((f64::from(load.description.rate?), load.spread_of_some(at, figure)?))
                };
                results.loads.iter().filter_map(point).collect()
            })
            .collect()
    };
    let latencies = lines(|turn| (!turn.latencies.is_empty()).then(|| turn.latency(0.5)));
    let cores = lines(Turn::back_end_cores);
    let right = legend::width(results.targets.iter().map(String::as_str));
    svg(SIZE, |area| {
        let (upper, lower) = area.split_vertically(UPPER);
        let ys = around(latencies.iter().flatten().flat_map(|(_, spread)| [spread.least, spread.most]));
        let mut above = chart(&upper, (0, LEFT, right), (xs.clone().log_scale(), ys.log_scale()))?;
        above
            .configure_mesh()
            .label_style(FONT)
            .bold_line_style(BLACK.mix(BOLD))
            .light_line_style(BLACK.mix(LIGHT))
            .y_desc("median latency")
            .y_label_formatter(&|y| time_mark(*y))
            .draw()?;
        series(&upper, &mut above, results, &latencies)?;
        let most = cores.iter().flatten().map(|(_, spread)| spread.most).fold(1.0, f64::max);
        let mut below = chart(&lower, (44, LEFT, right), (xs.log_scale(), 0.0..most * 1.05))?;
        below
            .configure_mesh()
            .label_style(FONT)
            .bold_line_style(BLACK.mix(BOLD))
            .light_line_style(BLACK.mix(LIGHT))
            .x_desc(format!("{} a second", results.units().plural))
            .x_label_formatter(&|x| rate_mark(*x))
            .y_labels(6)
            .y_max_light_lines(2)
            .y_desc("back-end CPU")
            .y_label_formatter(&|y| percent(*y))
            .draw()?;
        series(&lower, &mut below, results, &cores)
    })
}

/// Draws a line for each target, with a dot and whiskers at each rate.
fn series<'a, X, Y>(
    area: &Area<'a>,
    chart: &mut Chart<'a, X, Y>,
    results: &Results,
    lines: &[Vec<(f64, Spread)>],
) -> Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    for (at, line) in lines.iter().enumerate() {
        let (colour, medians) = (colour(at), || line.iter().map(|(x, spread)| (*x, spread.median)));
        chart.draw_series(medians().map(|point| Circle::new(point, 3, colour.filled())))?;
        chart.draw_series(line.iter().map(|(x, Spread { least, most, .. })| {
            PathElement::new(vec![(*x, *least), (*x, *most)], colour.stroke_width(1))
        }))?;
    }
    let lines = results.targets.iter().zip(lines).enumerate().map(|(at, (name, line))| Line {
        name: name.clone(),
        colour: colour(at),
        points: line.iter().map(|(x, spread)| (*x, spread.median)).collect(),
    });
    draw_lines(area, chart, 2, &lines.collect::<Vec<_>>())
}
