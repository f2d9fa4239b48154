//! The parts that all charts share: axes, and lines with their names.

use std::ops::Range;

use anyhow::Result;
use plotters::coord::ranged1d::AsRangedCoord;
use plotters::prelude::*;

use super::canvas::{Area, MARGIN};
use super::legend::{self, Entry};

/// A chart with two axes.
pub(super) type Chart<'a, X, Y> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>;

/// A line of a chart.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) colour: RGBColor,
    pub(super) points: Vec<(f64, f64)>,
}

/// Makes a chart with so many pixels for the labels below, to the left and, for the legend, to the right.
/// Without labels below, it has no margin there.
///
/// # Errors
/// There is no room for it.
pub(super) fn chart<'a, X: AsRangedCoord, Y: AsRangedCoord>(
    area: &Area<'a>,
    (below, left, right): (u32, u32, u32),
    (x, y): (X, Y),
) -> Result<Chart<'a, X::CoordDescType, Y::CoordDescType>> {
    Ok(ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_bottom(if below > 0 { MARGIN } else { 0 })
        .x_label_area_size(below)
        .y_label_area_size(left)
        .margin_right(right)
        .build_cartesian_2d(x, y)?)
}

/// Draws lines of a width, and the name of each beside its end.
///
/// # Errors
/// A line cannot be drawn.
pub(super) fn draw_lines<'a, X, Y>(
    area: &Area<'a>,
    chart: &mut Chart<'a, X, Y>,
    width: u32,
    lines: &[Line],
) -> Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    for line in lines {
        chart.draw_series(LineSeries::new(line.points.iter().copied(), line.colour.stroke_width(width)))?;
    }
    let (_, top) = area.get_base_pixel();
    let entries = lines.iter().map(|line| Entry {
        name: line.name.clone(),
        colour: line.colour,
        at: line.points.last().map(|point| chart.plotting_area().map_coordinate(point).1 - top),
    });
    let (across, _) = chart.plotting_area().get_pixel_range();
    legend::draw(area, across.end, entries.collect())
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
