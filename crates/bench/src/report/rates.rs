//! Draws the rates of all targets at all loads, as SVG.
//!
//! Each load is a block of rows. A row has the name of a target, its rate on a logarithmic axis, and the rate
//! as a number. So there is no legend, and the plot is as narrow as a phone.

use std::ops::Range;

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::canvas::{Area, BOLD, LINE, MARGIN, WIDTH, colour, svg, text, text_width};
use super::legend::{broken, lines};
use super::plot::around;
use crate::layout::{rate, rate_mark};
use crate::results::{Results, Spread};
use crate::turn::Turn;

/// The room for a rate as a number: `999 k`, and the gap before it.
const VALUE: i32 = 60;
/// The space between a name and the axis.
const GAP: i32 = 12;
/// The height of the axis with its marks and its name.
const AXIS: i32 = 2 * LINE + MARGIN;
/// The most marks of the axis, which are as far apart as one is long.
const MARKS_MAX: usize = 5;

/// The rows of a load, from top to bottom.
struct Block {
    heading: Vec<String>,
    rows: Vec<Row>,
}

struct Row {
    name: Vec<String>,
    colour: RGBColor,
    rate: Spread,
}

impl Row {
    fn height(&self) -> i32 {
        self.name.len().max(1) as i32 * LINE
    }
}

impl Block {
    fn all(results: &Results) -> Vec<Self> {
        let chars =
            (0..).take_while(|chars| text_width(*chars) < WIDTH as i32 - 2 * MARGIN).last().unwrap_or(1);
        let rows = |load: &crate::results::Load| {
            let row = |(at, name): (usize, &String)| {
                // The name of the only target is that of the page.
                let name = if results.targets.len() > 1 { lines(name) } else { Vec::new() };
                Some(Row { name, colour: colour(at), rate: load.spread(at, Turn::rate)? })
            };
            results.targets.iter().enumerate().filter_map(row).collect()
        };
        let block = |load: &crate::results::Load| Self {
            heading: broken(&load.description.label(results.descriptions()), chars),
            rows: rows(load),
        };
        results.loads.iter().map(block).collect()
    }

    fn height(&self) -> i32 {
        self.heading.len() as i32 * LINE + self.rows.iter().map(Row::height).sum::<i32>() + GAP
    }
}

/// The axis of rates.
struct Axis {
    /// The powers of ten at its ends.
    powers: Range<i32>,
    /// The pixels at its ends.
    across: Range<i32>,
}

impl Axis {
    fn x(&self, rate: f64) -> i32 {
        let (first, last) = (f64::from(self.powers.start), f64::from(self.powers.end));
        let share = ((rate.max(f64::MIN_POSITIVE).log10() - first) / (last - first)).clamp(0.0, 1.0);
        self.across.start + (share * f64::from(self.across.end - self.across.start)).round() as i32
    }

    /// Returns the rates at its marks.
    fn marks(&self) -> impl Iterator<Item = f64> {
        let step = self.powers.len().div_ceil(MARKS_MAX).max(1);
        (self.powers.start..=self.powers.end).step_by(step).map(|power| 10f64.powi(power))
    }
}

/// Draws the requests a second of every target at every load: a dot at the median, and a line from the least
/// to the most.
///
/// # Errors
/// The plot cannot be drawn.
pub(super) fn draw(results: &Results) -> Result<String> {
    let blocks = Block::all(results);
    let rows = || blocks.iter().flat_map(|block| &block.rows);
    let chars = rows().flat_map(|row| &row.name).map(|line| line.chars().count()).max().unwrap_or(0);
    let rates = around(rows().flat_map(|row| [row.rate.least, row.rate.median, row.rate.most]));
    let axis = Axis {
        powers: rates.start.log10().round() as i32..rates.end.log10().round() as i32,
        across: MARGIN + text_width(chars) + GAP..WIDTH as i32 - MARGIN - VALUE,
    };
    let height = MARGIN + blocks.iter().map(Block::height).sum::<i32>() + AXIS;
    svg((WIDTH, height as u32), |area| {
        let mut y = MARGIN;
        for block in &blocks {
            y = draw_block(area, block, &axis, y)?;
        }
        for mark in axis.marks() {
            text(area, &rate_mark(mark), (axis.x(mark), y + LINE / 2), HPos::Center)?;
        }
        let name = format!("{} a second", results.units().plural);
        text(area, &name, ((axis.across.start + axis.across.end) / 2, y + 3 * LINE / 2), HPos::Center)
    })
}

/// Draws a block whose top is at `y`. Returns its bottom.
fn draw_block(area: &Area<'_>, block: &Block, axis: &Axis, mut y: i32) -> Result<i32> {
    for line in &block.heading {
        text(area, line, (MARGIN, y + LINE / 2), HPos::Left)?;
        y += LINE;
    }
    let bottom = y + block.rows.iter().map(Row::height).sum::<i32>();
    for mark in axis.marks() {
        let x = axis.x(mark);
        area.draw(&PathElement::new(vec![(x, y), (x, bottom)], BLACK.mix(BOLD).stroke_width(1)))?;
    }
    for row in &block.rows {
        let middle = y + row.height() / 2;
        for (at, line) in (0..).zip(&row.name) {
            let name = (axis.across.start - GAP, y + at * LINE + LINE / 2);
            text(area, line, name, HPos::Right)?;
        }
        let Spread { median, least, most } = row.rate;
        let whisker = vec![(axis.x(least), middle), (axis.x(most), middle)];
        area.draw(&PathElement::new(whisker, row.colour.stroke_width(3)))?;
        area.draw(&Circle::new((axis.x(median), middle), 5, row.colour.filled()))?;
        text(area, &rate(median.round()), (WIDTH as i32 - MARGIN, middle), HPos::Right)?;
        y += row.height();
    }
    Ok(y + GAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_has_few_marks() {
        let axis = |powers| Axis { powers, across: 100..400 };
        assert_eq!(axis(3..6).marks().collect::<Vec<_>>(), [1e3, 1e4, 1e5, 1e6]);
        assert_eq!(axis(0..9).marks().collect::<Vec<_>>(), [1e0, 1e2, 1e4, 1e6, 1e8]);
        assert_eq!([1e3, 1e6, 1e9, 0.0].map(|rate| axis(3..6).x(rate)), [100, 400, 400, 100]);
    }
}
