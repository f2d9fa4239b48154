//! Formats numbers for people.

/// Formats a number of bytes with the largest unit that leaves no fraction.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut rest, mut unit) = (bytes, 0);
    while rest > 0 && rest.is_multiple_of(1024) && unit + 1 < units.len() {
        (rest, unit) = (rest / 1024, unit + 1);
    }
    format!("{rest} {}", units.get(unit).copied().unwrap_or_default())
}

/// Formats a number per second with three or four digits.
pub(crate) fn rate(number: f64) -> String {
    scaled(number, &["", " k", " M", " G"])
}

/// Formats nanoseconds with three or four digits.
pub(crate) fn time(nanoseconds: f64) -> String {
    scaled(nanoseconds, &[" ns", " us", " ms", " s"])
}

fn scaled(number: f64, units: &[&str]) -> String {
    let (mut number, mut unit) = (number, 0);
    while number >= 9999.5 && unit + 1 < units.len() {
        (number, unit) = (number / 1000.0, unit + 1);
    }
    // Numbers below a hundred get three digits in all.
    let digits = match number {
        _ if unit == 0 && number.fract() == 0.0 => 0,
        _ if number < 9.995 => 2,
        _ if number < 99.95 => 1,
        _ => 0,
    };
    format!("{number:.digits$}{}", units.get(unit).copied().unwrap_or_default())
}

/// Aligns columns: the first to the left, the others to the right, with two spaces between them.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|at| {
            rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let width = *width;
            line += &if at == 0 { format!("{cell:width$}") } else { format!("  {cell:>width$}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(bytes(4096), "4 KiB");
        assert_eq!(bytes(1536), "1536 B");
        assert_eq!(bytes(3 << 30), "3 GiB");
        assert_eq!(bytes(0), "0 B");
        assert_eq!(rate(0.0), "0");
        assert_eq!(rate(9999.0), "9999");
        assert_eq!(rate(10_000.0), "10.0 k");
        assert_eq!(rate(1_234_567.0), "1235 k");
        assert_eq!(rate(19_234_567.0), "19.2 M");
        assert_eq!(time(999.6), "1000 ns");
        assert_eq!(time(45_678.0), "45.7 us");
        assert_eq!(time(1.5e9), "1500 ms");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "10".into()], vec!["long".into(), "9".into()], vec!["x".into()]];
        assert_eq!(columns(&rows), "a     10\nlong   9\nx\n");
    }
}
