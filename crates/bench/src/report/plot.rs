//! Plots as SVG.

use std::ops::Range;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::thin::thin_out;
use crate::layout::{rate, time};
use crate::results::{Load, Results};
use crate::turn::{Latencies, Turn};

/// Colours that people with colour blindness can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];
pub(super) const FONT: (&str, u32) = ("sans-serif", 13);
const SMALL: (u32, u32) = (600, 320);
/// The number of faint lines between two marks of a small plot's axes. More would make up most of the file.
const FAINT_LINES: usize = 2;

/// The place of a chart.
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A chart with two axes.
pub(super) type Chart<'a, X, Y> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>;

/// Draws on a white area of this size, and returns the SVG.
///
/// # Errors
/// `draw` fails.
pub(super) fn svg(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(svg)
}

/// Makes a chart with a margin, and with so many pixels for the labels below and to the left. Without labels
/// below, it has no margin there.
///
/// # Errors
/// There is no room for it.
pub(super) fn chart<'a, X: AsRangedCoord, Y: AsRangedCoord>(
    area: &Area<'a>,
    margin: u32,
    (below, left): (u32, u32),
    (x, y): (X, Y),
) -> Result<Chart<'a, X::CoordDescType, Y::CoordDescType>> {
    Ok(ChartBuilder::on(area)
        .margin(margin)
        .margin_bottom(if below > 0 { margin } else { 0 })
        .x_label_area_size(below)
        .y_label_area_size(left)
        .build_cartesian_2d(x, y)?)
}

/// Draws lines of a width, with their targets in the legend.
///
/// # Errors
/// A line cannot be drawn.
pub(super) fn draw_lines<'a, X, Y>(
    chart: &mut Chart<'a, X, Y>,
    results: &Results,
    width: u32,
    lines: impl IntoIterator<Item = (usize, Vec<(f64, f64)>)>,
) -> Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    for (target, points) in lines {
        let colour = colour(target);
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(width)))?
            .label(results.targets.get(target).map(String::as_str).unwrap_or_default())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    Ok(())
}

/// Returns the colour of a target.
pub(super) fn colour(target: usize) -> RGBColor {
    COLOURS.get(target % COLOURS.len()).copied().unwrap_or(BLACK)
}

/// Returns a range around the numbers for a logarithmic axis. Its ends are two different powers of ten, so
/// that the axis always has a mark.
pub(super) fn around(numbers: impl Iterator<Item = f64>) -> Range<f64> {
    let all: Vec<f64> = numbers.filter(|number| *number > 0.0).map(f64::log10).collect();
    let (Some(least), Some(most)) =
        (all.iter().copied().reduce(f64::min), all.iter().copied().reduce(f64::max))
    else {
        return 1.0..10.0;
    };
    10f64.powf(least.floor())..10f64.powf((most.floor() + 1.0).max(most.ceil()))
}

/// Draws the requests a second of every target at every load.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn rates(results: &Results) -> Result<String> {
    let loads = results.loads.len();
    let height = 110 + 44 * loads as u32 + 18 * (loads * results.targets.len()) as u32;
    svg((960, height), |area| {
        let spreads = |at: usize| {
            results
                .loads
                .iter()
                .enumerate()
                .filter_map(move |(y, load)| Some((y, load.spread(at, Turn::rate)?)))
        };
        let all =
            (0..results.targets.len()).flat_map(spreads).flat_map(|(_, spread)| [spread.least, spread.most]);
        let mut chart = chart(area, 12, (44, 330), (around(all).log_scale(), Bands::of(results)))?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .label_style(FONT)
            .x_desc(format!("{} a second", results.units().plural))
            .x_label_formatter(&|x| rate(*x))
            .y_labels(loads)
            .draw()?;
        for (at, name) in results.targets.iter().enumerate() {
            let step = 0.6 / results.targets.len() as f64;
            let place = |load: usize| (loads - 1 - load) as f64 + 0.8 - step * (at as f64 + 0.5);
            let colour = colour(at);
            let whiskers = spreads(at).map(|(y, spread)| {
                PathElement::new(
                    vec![(spread.least, place(y)), (spread.most, place(y))],
                    colour.stroke_width(3),
                )
            });
            chart.draw_series(whiskers)?;
            let dots =
                spreads(at).map(|(y, spread)| Circle::new((spread.median, place(y)), 5, colour.filled()));
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 5, colour.filled()));
        }
        legend(&mut chart, SeriesLabelPosition::UpperRight)
    })
}

/// An axis with a band for each load, the first on top, and a label in the middle of each band.
struct Bands {
    names: Vec<String>,
}

impl Bands {
    fn of(results: &Results) -> Self {
        Self { names: results.loads.iter().rev().map(|load| load.description.words.clone()).collect() }
    }
}

impl Ranged for Bands {
    type FormatOption = plotters::coord::ranged1d::NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = value / self.names.len() as f64;
        limit.0 + (share * f64::from(limit.1 - limit.0)) as i32
    }

    fn key_points<Hint: plotters::coord::ranged1d::KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        (0..self.names.len()).map(|at| at as f64 + 0.5).collect()
    }

    fn range(&self) -> Range<f64> {
        0.0..self.names.len() as f64
    }
}

impl ValueFormatter<f64> for Bands {
    fn format_ext(&self, value: &f64) -> String {
        self.names.get(*value as usize).cloned().unwrap_or_default()
    }
}

/// Draws, for each share of the requests, the latency that this share does not exceed.
///
/// The axis counts the nines of the share: 90 %, 99 % and 99.9 % are equally far apart.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn latencies(results: &Results, load: &Load) -> Result<String> {
    let all: Vec<(usize, Latencies)> = (0..results.targets.len())
        .filter_map(|at| Some((at, load.latencies(at)?)))
        .filter(|(_, latencies)| !latencies.is_empty())
        .collect();
    let nines =
        all.iter().map(|(_, latencies)| (latencies.len() as f64).log10()).fold(1.0, f64::max).min(6.0);
    let points = |latencies: &Latencies| -> Vec<(f64, f64)> {
        let last = (latencies.len() as f64).log10().min(nines);
        let steps = (0..=200).map(|step| f64::from(step) / 200.0 * last);
        steps.map(|x| (x, latencies.value_at_quantile(1.0 - 10f64.powf(-x)) as f64)).collect()
    };
    svg(SMALL, |area| {
        let ys = around(all.iter().flat_map(|(_, latencies)| points(latencies)).map(|(_, y)| y));
        let mut chart = chart(area, 12, (40, 70), (0.0..nines, ys.log_scale()))?;
        chart
            .configure_mesh()
            .label_style(FONT)
            .x_labels(8)
            .x_label_formatter(&|x| quantile(*x))
            .y_label_formatter(&|y| time(*y))
            .max_light_lines(FAINT_LINES)
            .x_desc(load.description.units.plural)
            .y_desc("no slower than")
            .draw()?;
        draw_lines(&mut chart, results, 2, all.iter().map(|(at, latencies)| (*at, points(latencies))))?;
        legend(&mut chart, SeriesLabelPosition::UpperRight)
    })
}

/// Formats a share of requests from its number of nines.
fn quantile(nines: f64) -> String {
    if nines.fract() != 0.0 {
        return String::new();
    }
    let percent = 100.0 * (1.0 - 10f64.powf(-nines));
    let digits = (nines as usize).saturating_sub(2);
    format!("{percent:.digits$} %")
}

/// Draws requests a second over time.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn timeline(results: &Results, load: &Load) -> Result<String> {
    let lines: Vec<Vec<f64>> = load
        .turns
        .iter()
        .map(|turns| turns.iter().flat_map(|turn| turn.timeline.iter().copied()).collect())
        .collect();
    let rounds = load.turns.iter().map(Vec::len).max().unwrap_or(0);
    let seconds = load.description.time.as_secs_f64() * rounds as f64;
    let most = lines.iter().flatten().copied().fold(1.0, f64::max);
    svg(SMALL, |area| {
        let mut chart = chart(area, 12, (40, 70), (0.0..seconds, 0.0..most * 1.1))?;
        chart
            .configure_mesh()
            .label_style(FONT)
            .max_light_lines(FAINT_LINES)
            .x_desc("seconds under load")
            .y_desc(format!("{} a second", load.description.units.plural))
            .y_label_formatter(&|y| rate(y.round()))
            .draw()?;
        let points = |line: &[f64]| -> Vec<_> {
            let step = seconds / line.len().max(1) as f64;
            line.iter().enumerate().map(|(x, y)| ((x as f64 + 0.5) * step, *y)).collect()
        };
        let lines = lines.iter().map(|line| thin_out(&points(line)));
        draw_lines(&mut chart, results, 1, lines.enumerate())?;
        legend(&mut chart, SeriesLabelPosition::UpperRight)
    })
}

/// Draws the legend at `position`.
///
/// # Errors
/// It cannot be drawn.
pub(super) fn legend<'a, X, Y>(chart: &mut Chart<'a, X, Y>, position: SeriesLabelPosition) -> Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .label_font(FONT)
        .draw()?;
    Ok(())
}
