//! Tables whose columns are shown whole or not at all.

use ratatui::layout::Constraint;
use ratatui::style::Style;
use ratatui::text::Span;
use ratatui::widgets::{Row, Table};

/// A column.
pub(super) struct Column<'a> {
    heading: &'static str,
    cells: Vec<Span<'a>>,
    width: u16,
    /// Columns of a high rank are left out if there is no room.
    rank: u8,
}

impl<'a> Column<'a> {
    /// Makes a column that has room for its texts, and for at least `least` characters, so that it keeps its
    /// width while figures change.
    pub(super) fn new(
        heading: &'static str,
        rank: u8,
        least: usize,
        cells: impl IntoIterator<Item = Span<'a>>,
    ) -> Self {
        let cells: Vec<Span<'a>> = cells.into_iter().collect();
        let width = cells.iter().map(Span::width).fold(heading.len().max(least), usize::max);
        Self { heading, cells, width: u16::try_from(width).unwrap_or(u16::MAX), rank }
    }
}

/// Makes a table of those columns that fit into so many characters. At least one column is left.
pub(super) fn table<'a>(mut columns: Vec<Column<'a>>, width: u16, head: Style) -> Table<'a> {
    fit(&mut columns, width);
    let rows = (0..columns.first().map_or(0, |column| column.cells.len())).map(|row| {
        let cells = columns.iter().map(|column| column.cells.get(row).cloned().unwrap_or_default());
        Row::new(cells.collect::<Vec<_>>())
    });
    let rows: Vec<Row<'a>> = rows.collect();
    let widths: Vec<Constraint> = columns.iter().map(|column| Constraint::Length(column.width)).collect();
    let headings = Row::new(columns.iter().map(|column| column.heading).collect::<Vec<_>>());
    Table::new(rows, widths).header(headings.style(head))
}

/// Leaves out columns until all have room, with a space between two.
fn fit(columns: &mut Vec<Column<'_>>, width: u16) {
    let needs =
        |columns: &[Column<'_>]| columns.iter().map(|column| u32::from(column.width) + 1).sum::<u32>();
    while columns.len() > 1 && needs(columns) > u32::from(width) + 1 {
        let last = (0..columns.len()).max_by_key(|at| columns.get(*at).map(|column| column.rank));
        last.into_iter().for_each(|at| drop(columns.remove(at)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_go_whole() {
        let left = |width| {
            let column = |heading, rank| Column::new(heading, rank, 5, [Span::raw("12345678")]);
            let mut columns = vec![column("name", 0), column("read/s", 2), column("state", 1)];
            fit(&mut columns, width);
            columns.iter().map(|column| column.heading).collect::<Vec<_>>()
        };
        assert_eq!(left(26), ["name", "read/s", "state"]);
        assert_eq!(left(25), ["name", "state"]);
        assert_eq!(left(16), ["name"]);
        assert_eq!(left(1), ["name"]);
    }
}
