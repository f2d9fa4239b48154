//! Draws the curves of a part as one SVG: a chart for each panel, one below the other, as wide as a telephone
//! shows them without making their text smaller.

use std::ops::Range;

use anyhow::Result;
use kickless_bench::canvas::{self, Area, BOLD, FONT, LIGHT, LINE, MARGIN};
use plotters::prelude::*;

use crate::common::Spread;
use crate::curve::{Curve, Group, Panel};

const WIDTH: u32 = 400;
const CHART: u32 = 240;
/// The room for the marks of the axes.
const LEFT: u32 = 70;
const BELOW: u32 = 40;
/// The length of the piece of line before a name.
const SWATCH: i32 = 14;

/// Returns the height of a chart with the names of its curves.
fn height(panel: &Panel) -> u32 {
    CHART + ((1 + panel.curves.len()) as i32 * LINE + MARGIN) as u32
}

/// Draws the groups.
///
/// # Errors
/// A chart has no room.
pub(crate) fn draw(groups: &[Group]) -> Result<String> {
    let panels = || groups.iter().flat_map(|group| group.panels.iter().map(|panel| (group.axis, panel)));
    let svg = canvas::svg((WIDTH, panels().map(|(_, panel)| height(panel)).sum()), |area| {
        let mut rest = area.clone();
        for (axis, panel) in panels() {
            let (chart, below) = rest.split_vertically(height(panel));
            draw_panel(&chart, axis, panel)?;
            rest = below;
        }
        Ok(())
    })?;
    Ok(canvas::stand_alone(&svg))
}

/// Draws a chart below the names of its curves. Both axes are logarithmic: a flat curve is level, and a
/// linear one rises by a decade for each decade of the axis.
fn draw_panel(area: &Area<'_>, axis: &str, panel: &Panel) -> Result<()> {
    let mut y = MARGIN + LINE / 2;
    area.draw(&Text::new(panel.figure.to_owned(), (MARGIN, y - LINE / 2), FONT.into_font().color(&BLACK)))?;
    for (curve, colour) in panel.curves.iter().zip((0..).map(canvas::colour)) {
        y += LINE;
        area.draw(&PathElement::new(vec![(MARGIN, y), (MARGIN + SWATCH, y)], colour.stroke_width(3)))?;
        let name = (2 * MARGIN + SWATCH, y - LINE / 2);
        area.draw(&Text::new(curve.name.clone(), name, FONT.into_font().color(&BLACK)))?;
    }
    let (_, chart) = area.split_vertically(y + LINE / 2);
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let ys = decades(points().flat_map(|(_, Spread { min, max, .. })| [*min, *max]));
    let xs = points().map(|(x, _)| *x).fold(f64::INFINITY, f64::min)
        ..points().map(|(x, _)| *x).fold(1.0, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(&chart)
        .margin(MARGIN)
        .margin_right(2 * MARGIN)
        .x_label_area_size(BELOW)
        .y_label_area_size(LEFT)
        .build_cartesian_2d(xs.log_scale(), ys.log_scale())?;
    chart
        .configure_mesh()
        .label_style(FONT)
        // More marks would cover one another where an axis has one decade.
        .x_labels(4)
        .y_labels(4)
        .max_light_lines(1)
        .bold_line_style(BLACK.mix(BOLD))
        .light_line_style(BLACK.mix(LIGHT))
        .x_desc(axis)
        .x_label_formatter(&|x| x.to_string())
        .y_label_formatter(&|y| y.to_string())
        .draw()?;
    for (Curve { points, .. }, colour) in panel.curves.iter().zip((0..).map(canvas::colour)) {
        let shown = || points.iter().filter(|(_, spread)| spread.min > 0.0);
        let medians = || shown().map(|(x, spread)| (*x, spread.median));
        chart.draw_series(LineSeries::new(medians(), colour.stroke_width(2)))?;
        chart.draw_series(medians().map(|point| Circle::new(point, 3, colour.filled())))?;
        chart.draw_series(shown().map(|(x, Spread { min, max, .. })| {
            PathElement::new(vec![(*x, *min), (*x, *max)], colour.stroke_width(1))
        }))?;
    }
    Ok(())
}

/// Returns the whole decades around these numbers.
fn decades(numbers: impl Iterator<Item = f64>) -> Range<f64> {
    let powers: Vec<f64> = numbers.filter(|number| *number > 0.0).map(f64::log10).collect();
    let least = powers.iter().copied().fold(f64::INFINITY, f64::min).floor();
    let most = powers.iter().copied().fold(f64::NEG_INFINITY, f64::max).ceil();
    if powers.is_empty() { 1.0..10.0 } else { 10f64.powf(least)..10f64.powf(most.max(least + 1.0)) }
}
