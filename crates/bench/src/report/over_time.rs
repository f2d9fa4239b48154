//! Draws requests, kicks and the processor time of the back-end over time, as SVG.

use anyhow::Result;
use plotters::prelude::*;

use super::canvas::{BOLD, FONT, LIGHT, colour, svg};
use super::legend;
use super::plot::{Line, chart, draw_lines};
use crate::layout::{plain, rate_mark};
use crate::results::{Load, Results};
use crate::turn::Moment;

const WIDTH: u32 = 760;
/// The last plot is taller because it has the time axis.
const HEIGHTS: [u32; 3] = [150, 150, 190];

/// The room for the marks and the name of the vertical axes.
const LEFT: u32 = 76;

/// The number of moments of which each point of the processor time is the mean. The kernel counts the time of
/// a running thread in ticks, which are about as long as a moment.
const MEAN_MOMENTS: usize = 3;

/// The name of a figure, its value at a moment, and its format.
type Figure = (&'static str, fn(&Moment) -> Option<f64>, fn(f64) -> String);

const FIGURES: [Figure; 3] = [
    ("requests/s", |moment| Some(moment.requests), rate_mark),
    ("kicks/s", |moment| Some(moment.kicks), rate_mark),
    ("back-end CPU", |moment| moment.back_end_cpu, percent),
];

/// Formats a share of one processor.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Returns the means of each point and its neighbours.
fn smoothed(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let mean = |near: &[(f64, f64)]| {
        let middle = near.get(near.len() / 2)?.0;
        Some((middle, near.iter().map(|(_, y)| y).sum::<f64>() / near.len() as f64))
    };
    points.windows(MEAN_MOMENTS).filter_map(mean).collect()
}

/// Draws the last turn of each target at a load, one figure below the other.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn draw(results: &Results, load: &Load) -> Result<String> {
    let lines: Vec<&[Moment]> = load
        .turns
        .iter()
        .map(|turns| turns.last().map(|turn| turn.moments.as_slice()).unwrap_or_default())
        .collect();
    let seconds = load.description.time.as_secs_f64();
    let right = legend::width(results.targets.iter().map(String::as_str));
    svg((WIDTH, HEIGHTS.iter().sum()), |area| {
        let mut rest = area.clone();
        for (at, ((name, figure, write), height)) in FIGURES.into_iter().zip(HEIGHTS).enumerate() {
            let (area, below) = rest.split_vertically(height);
            rest = below;
            let is_last = at + 1 == FIGURES.len();
            let drawn = |(at, moments): (usize, &&[Moment])| {
                let points = moments.iter().filter_map(|moment| Some((moment.at, figure(moment)?))).collect();
                let points = if is_last { smoothed(points) } else { points };
                let name = results.targets.get(at).cloned().unwrap_or_default();
                Line { name, colour: colour(at), points }
            };
            let drawn: Vec<Line> = lines.iter().enumerate().map(drawn).collect();
            let most = drawn
                .iter()
                .flat_map(|line| &line.points)
                .fold(if is_last { 1.0 } else { 100.0 }, |most: f64, (_, y)| most.max(*y));
            let rooms = (if is_last { 44 } else { 0 }, LEFT, right);
            let mut chart = chart(&area, rooms, (0.0..seconds, 0.0..most * 1.05))?;
            chart
                .configure_mesh()
                .disable_x_mesh()
                .label_style(FONT)
                .bold_line_style(BLACK.mix(BOLD))
                .light_line_style(BLACK.mix(LIGHT))
                .x_labels(8)
                .y_labels(4)
                .y_max_light_lines(2)
                .x_desc(if is_last { "seconds" } else { "" })
                .x_label_formatter(&|x| plain(*x))
                .y_desc(name)
                .y_label_formatter(&|y| write(*y))
                .draw()?;
            draw_lines(&area, &mut chart, 1, &drawn)?;
        }
        Ok(())
    })
}
