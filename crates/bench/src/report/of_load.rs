//! Draws the latencies and the course of one load, as SVG.

use anyhow::Result;
use plotters::prelude::*;

use super::canvas::{BOLD, FONT, LIGHT, WIDTH, colour, svg};
use super::legend;
use super::plot::{Line, around, chart, draw_lines};
use super::thin::thin_out;
use crate::layout::{plain, rate_mark, time_mark};
use crate::results::{Load, Results};
use crate::turn::Latencies;

const SIZE: (u32, u32) = (WIDTH, 300);
/// The room for the marks and the name of the horizontal axis, and for the marks of the vertical one.
const BELOW: u32 = 44;
const LEFT: u32 = 56;
/// The number of faint lines between two marks of an axis. More would make up most of the file.
const FAINT_LINES: usize = 1;
/// The nines of the last mark of latencies, at which a request of 100 000 is slower. More marks have no room.
const NINES_MAX: f64 = 5.0;

/// Draws, for each share of the requests, the latency that this share does not exceed. Reads and writes have
/// lines of their own.
///
/// The axis counts the nines of the share: 90 %, 99 % and 99.9 % are equally far apart.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn latencies(results: &Results, load: &Load) -> Result<String> {
    let all: Vec<(String, Latencies)> = all_latencies(results, load);
    let nines =
        all.iter().map(|(_, latencies)| (latencies.len() as f64).log10()).fold(1.0, f64::max).min(NINES_MAX);
    let lines: Vec<Line> = all
        .into_iter()
        .enumerate()
        .map(|(at, (name, latencies))| {
            let last = (latencies.len() as f64).log10().min(nines);
            let steps = (0..=200).map(|step| f64::from(step) / 200.0 * last);
            let points =
                steps.map(|x| (x, latencies.value_at_quantile(1.0 - 10f64.powf(-x)) as f64)).collect();
            Line { name, colour: colour(at), points }
        })
        .collect();
    svg(SIZE, |area| {
        let ys = around(lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y));
        let rooms = (BELOW, LEFT, legend::width(lines.iter().map(|line| line.name.as_str())));
        let mut chart = chart(area, rooms, (0.0..nines, ys.log_scale()))?;
        chart
            .configure_mesh()
            .label_style(FONT)
            .bold_line_style(BLACK.mix(BOLD))
            .light_line_style(BLACK.mix(LIGHT))
            .x_labels(NINES_MAX as usize + 1)
            .x_label_formatter(&|x| quantile(*x))
            .y_label_formatter(&|y| time_mark(*y))
            .max_light_lines(FAINT_LINES)
            .x_desc(format!("% of the {}", load.description.units.plural))
            .draw()?;
        draw_lines(area, &mut chart, 2, &lines)
    })
}

/// Returns the latencies of each line, with its name.
fn all_latencies(results: &Results, load: &Load) -> Vec<(String, Latencies)> {
    let operations = load.operations();
    let mut all = Vec::new();
    for at in 0..results.targets.len() {
        let name = results.name_beside_others(at);
        match operations.is_empty() {
            true => all.extend(load.latencies(at).map(|latencies| (name.to_owned(), latencies))),
            false => all.extend(operations.iter().filter_map(|operation| {
                let (_, latencies) = load.operation(at, operation)?;
                Some((format!("{name} {operation}").trim().to_owned(), latencies))
            })),
        }
    }
    all.retain(|(_, latencies)| !latencies.is_empty());
    all
}

/// Formats a share of requests, in percent, from its number of nines.
fn quantile(nines: f64) -> String {
    if nines.fract() != 0.0 {
        return String::new();
    }
    let percent = 100.0 * (1.0 - 10f64.powf(-nines));
    let digits = (nines as usize).saturating_sub(2);
    format!("{percent:.digits$}")
}

/// Draws requests a second over time.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn timeline(results: &Results, load: &Load) -> Result<String> {
    let mut seconds: f64 = 0.0;
    let lines: Vec<Line> = load
        .turns
        .iter()
        .enumerate()
        .map(|(at, turns)| {
            let mut points = Vec::new();
            let mut begin = 0.0;
            for turn in turns {
                let step = turn.seconds / turn.timeline.len().max(1) as f64;
                points.extend(
                    turn.timeline.iter().enumerate().map(|(x, y)| (begin + (x as f64 + 0.5) * step, *y)),
                );
                begin += turn.seconds;
            }
            seconds = seconds.max(begin);
            Line {
                name: results.name_beside_others(at).to_owned(),
                colour: colour(at),
                points: thin_out(&points),
            }
        })
        .collect();
    let most = lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y).fold(1.0, f64::max);
    svg(SIZE, |area| {
        let rooms = (BELOW, LEFT, legend::width(lines.iter().map(|line| line.name.as_str())));
        let mut chart = chart(area, rooms, (0.0..seconds, 0.0..most * 1.1))?;
        chart
            .configure_mesh()
            .label_style(FONT)
            .bold_line_style(BLACK.mix(BOLD))
            .light_line_style(BLACK.mix(LIGHT))
            .x_labels(6)
            .max_light_lines(FAINT_LINES)
            .x_desc("seconds under load")
            .x_label_formatter(&|x| plain(*x))
            .y_label_formatter(&|y| rate_mark(y.round()))
            .draw()?;
        draw_lines(area, &mut chart, 1, &lines)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percent() {
        assert_eq!([0.0, 1.0, 2.0, 3.0, 5.0, 0.5].map(quantile), ["0", "90", "99", "99.9", "99.999", ""]);
    }
}
