//! The canvas of plots: an SVG with a font and colours.

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Colours that people with colour blindness can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];
/// The font of all text, and its size in pixels.
pub const FONT: (&str, u32) = ("sans-serif", 14);
/// The largest width of a character of this font: that of a wide font, such as DejaVu Sans, on average.
const CHAR: f64 = 8.4;
/// The height of a line of text.
pub const LINE: i32 = 18;
/// The space around a plot.
pub const MARGIN: i32 = 10;
/// The width of a plot of a page. A screen of 400 pixels shows it at five sixths, with text of 12 pixels.
pub(super) const WIDTH: u32 = 440;

/// The opacity of the lines at the marks of an axis.
pub const BOLD: f64 = 0.25;
/// The opacity of the lines between the marks of an axis.
pub const LIGHT: f64 = 0.08;

/// The colours of plots for readers who prefer dark pages. The SVG itself has those for all others.
pub(super) const DARK: &str = "@media (prefers-color-scheme: dark) {
svg [fill='#FFFFFF'] { fill: #16181d } svg [fill='#000000'] { fill: #d8dade } svg [stroke='#000000'] { stroke: #d8dade }
svg [fill='#0072B2'] { fill: #4da3e0 } svg [stroke='#0072B2'] { stroke: #4da3e0 }
}";

/// The place of a chart.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws on a white area of this size, and returns the SVG.
///
/// # Errors
/// `draw` fails.
pub fn svg(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(svg)
}

/// Makes the SVG of a plot a file of its own, with its colours for dark pages.
pub fn stand_alone(svg: &str) -> String {
    svg.replacen('>', &format!("><style>{DARK}</style>"), 1)
}

/// Returns the colour of a target.
pub fn colour(target: usize) -> RGBColor {
    COLOURS.get(target % COLOURS.len()).copied().unwrap_or(BLACK)
}

/// Returns the width of so many characters.
pub(super) fn text_width(chars: usize) -> i32 {
    (chars as f64 * CHAR).ceil() as i32
}

/// Draws a line of text whose middle is at this height.
///
/// # Errors
/// It cannot be drawn.
pub(super) fn text(area: &Area<'_>, text: &str, place: (i32, i32), side: HPos) -> Result<()> {
    let style = FONT.into_font().color(&BLACK).pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_owned(), place, style))?;
    Ok(())
}
