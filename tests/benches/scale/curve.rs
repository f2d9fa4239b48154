//! Curves with the shapes that they should have, and their tables.

use crate::common::Spread;

/// The most columns of figures of a table.
const COLUMNS_MAX: usize = 3;
/// The largest measure of a curve that still has its shape. A step of the axis is a factor of 4 or 8, so a
/// cost that is worse than its shape by the square root of the axis exceeds it within two steps.
const MEASURE_MAX: f64 = 2.0;

/// The shape that a curve should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Does not grow. Its measure is the last figure over the smallest.
    Flat,
    /// Grows at most as much as the value of the axis. Its measure is the last figure for each unit of the
    /// axis over the smallest one before.
    Linear,
    /// A rate that does not fall. Its measure is the largest one over the last.
    Kept,
}

/// A figure at each value of an axis.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    pub(crate) points: Vec<(f64, Spread)>,
}

impl Curve {
    /// Makes a curve of the figures at the values of an axis. The axis may have more values.
    pub(crate) fn new(name: impl Into<String>, shape: Shape, axis: &[u64], figures: Vec<Spread>) -> Curve {
        let points = axis.iter().map(|x| *x as f64).zip(figures).collect();
        Curve { name: name.into(), shape, points }
    }

    /// Returns how much more the last point is than the shape allows. At most 1 fits the shape exactly.
    fn measure(&self) -> f64 {
        let cost = |(x, spread): &(f64, Spread)| match self.shape {
            Shape::Flat => spread.median,
            Shape::Linear => spread.median / x,
            Shape::Kept => 1.0 / spread.median,
        };
        let Some((last, before)) = self.points.split_last() else { return f64::NAN };
        cost(last) / before.iter().map(cost).fold(f64::INFINITY, f64::min)
    }

    /// Returns the cell that says whether the curve has its shape.
    fn verdict(&self) -> String {
        let (shape, measure) = (format!("{:?}", self.shape).to_lowercase(), self.measure());
        // No cost at all has no ratio.
        if self.points.iter().all(|(_, spread)| spread.median == 0.0) {
            return "none".into();
        }
        match measure <= MEASURE_MAX {
            true => format!("{shape}: {measure:.2}"),
            false => format!("**not {shape}: {measure:.2}**"),
        }
    }
}

/// Curves with the same unit.
pub(crate) struct Panel {
    pub(crate) figure: &'static str,
    pub(crate) curves: Vec<Curve>,
}

/// Panels with the same axis.
pub(crate) struct Group {
    pub(crate) axis: &'static str,
    pub(crate) panels: Vec<Panel>,
}

impl Group {
    /// Returns the tables of Markdown: one, or one for each panel if it would be too wide.
    pub(crate) fn tables(&self) -> String {
        let all: Vec<(&str, &Curve)> = self.columns().collect();
        if all.len() <= COLUMNS_MAX {
            return self.table(&all);
        }
        let one = |panel: &Panel| {
            self.table(&self.columns().filter(|(figure, _)| *figure == panel.figure).collect::<Vec<_>>())
        };
        self.panels.iter().map(one).collect::<Vec<_>>().join("\n")
    }

    fn columns(&self) -> impl Iterator<Item = (&str, &Curve)> {
        self.panels.iter().flat_map(|panel| panel.curves.iter().map(|curve| (panel.figure, curve)))
    }

    fn table(&self, columns: &[(&str, &Curve)]) -> String {
        let points = columns.iter().flat_map(|(_, curve)| &curve.points);
        let mut axis: Vec<f64> = points.map(|(x, _)| *x).collect();
        axis.sort_by(f64::total_cmp);
        axis.dedup();
        let mut rows = vec![vec![self.axis.to_owned()], vec!["---".to_owned()]];
        rows.extend(axis.iter().map(|x| vec![x.to_string()]));
        rows.push(vec!["shape".to_owned()]);
        for (figure, curve) in columns {
            let at = |x: &f64| curve.points.iter().find(|(of, _)| of == x).map(|(_, spread)| cell(spread));
            let cells = axis.iter().map(|x| at(x).unwrap_or_default());
            let mut cells = [format!("{figure}, {}", curve.name), "---".to_owned()].into_iter().chain(cells);
            rows.iter_mut().for_each(|row| row.push(cells.next().unwrap_or_else(|| curve.verdict())));
        }
        rows.iter().map(|row| format!("| {} |\n", row.join(" | "))).collect()
    }
}

/// Formats a figure with its spread.
fn cell(Spread { median, min, max }: &Spread) -> String {
    match digits(*min) == digits(*max) {
        true => digits(*median),
        false => format!("{} ({} to {})", digits(*median), digits(*min), digits(*max)),
    }
}

/// Formats a number with three digits.
pub(crate) fn digits(number: f64) -> String {
    let decimals = match number.abs() {
        0.0 | 99.95.. => 0,
        9.995.. => 1,
        _ => 2,
    };
    format!("{number:.decimals$}")
}
