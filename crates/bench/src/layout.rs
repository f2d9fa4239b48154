//! Formats numbers and lines for people.

use std::time::Duration;

/// Formats a number of bytes with the largest unit that leaves no fraction.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut rest, mut unit) = (bytes, 0);
    while rest > 0 && rest.is_multiple_of(1024) && unit + 1 < units.len() {
        (rest, unit) = (rest / 1024, unit + 1);
    }
    format!("{rest} {}", units.get(unit).copied().unwrap_or_default())
}

const RATES: [&str; 4] = ["", " k", " M", " G"];
const TIMES: [&str; 4] = [" ns", " us", " ms", " s"];

/// Formats a number per second with three digits.
pub(crate) fn rate(number: f64) -> String {
    scaled(number, &RATES)
}

/// Formats nanoseconds with three digits.
pub(crate) fn time(nanoseconds: f64) -> String {
    scaled(nanoseconds, &TIMES)
}

/// Formats a number per second as the mark of an axis: `1 M`, `2.5 k`.
pub(crate) fn rate_mark(number: f64) -> String {
    mark(number, &RATES)
}

/// Formats nanoseconds as the mark of an axis: `10 ms`.
pub(crate) fn time_mark(nanoseconds: f64) -> String {
    mark(nanoseconds, &TIMES)
}

/// Formats a number without the zeros behind its last digit.
pub(crate) fn plain(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Chooses the unit in which `number` is less than 1000. Returns the number in this unit.
fn in_unit<'a>(number: f64, units: &[&'a str]) -> (f64, &'a str, usize) {
    let (mut number, mut unit) = (number, 0);
    // 999.5 would be rounded to 1000.
    while number >= 999.5 && unit + 1 < units.len() {
        (number, unit) = (number / 1000.0, unit + 1);
    }
    (number, units.get(unit).copied().unwrap_or_default(), unit)
}

fn mark(number: f64, units: &[&str]) -> String {
    let (number, unit, _) = in_unit(number, units);
    format!("{}{unit}", plain(number))
}

fn scaled(number: f64, units: &[&str]) -> String {
    let (number, name, unit) = in_unit(number, units);
    let digits = match number {
        _ if unit == 0 && number.fract() == 0.0 => 0,
        _ if number < 9.995 => 2,
        _ if number < 99.95 => 1,
        _ => 0,
    };
    format!("{number:.digits$}{name}")
}

/// Formats a time that is left, in its two largest units.
pub(crate) fn left(time: Duration) -> String {
    // A second that has begun is left.
    let seconds = time.as_millis().div_ceil(1000);
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest} s"),
        (0, _) => format!("{minutes} min {rest} s"),
        _ => format!("{hours} h {minutes} min"),
    }
}

/// Breaks a text between words into lines of at most `width` characters. The second line and those after it
/// are indented.
pub(crate) fn wrapped(text: &str, width: usize) -> String {
    const INDENT: &str = "    ";
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split(' ') {
        let is_first = line.trim_start().is_empty();
        if !is_first && line.chars().count() + 1 + word.chars().count() > width {
            lines += &line;
            lines.push('\n');
            line = INDENT.to_owned() + word;
        } else {
            line += if is_first { "" } else { " " };
            line += word;
        }
    }
    lines + &line + "\n"
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
        assert_eq!(rate(999.0), "999");
        assert_eq!(rate(9999.0), "10.0 k");
        assert_eq!(rate(1_234_567.0), "1.23 M");
        assert_eq!(rate(19_234_567.0), "19.2 M");
        assert_eq!(time(999.6), "1.00 us");
        assert_eq!(time(45_678.0), "45.7 us");
        assert_eq!(time(1.5e9), "1.50 s");
    }

    #[test]
    fn marks_of_an_axis() {
        assert_eq!(
            [0.0, 10.0, 1e3, 1e6, 2.5e6, 1.2e9].map(rate_mark),
            ["0", "10", "1 k", "1 M", "2.5 M", "1.2 G"]
        );
        assert_eq!([1e2, 1e3, 1e7, 1e9, 2e12].map(time_mark), ["100 ns", "1 us", "10 ms", "1 s", "2000 s"]);
        assert_eq!([0.0, 0.5, 4.0, 0.30000000000000004].map(plain), ["0", "0.5", "4", "0.3"]);
    }

    #[test]
    fn times_that_are_left() {
        let left = |millis| super::left(Duration::from_millis(millis));
        assert_eq!(
            [0, 1, 59_900, 61_000, 3_600_000, 7_499_001].map(left),
            ["0 s", "1 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "2 h 5 min"]
        );
    }

    #[test]
    fn words_stay_whole() {
        assert_eq!(wrapped("one two three", 80), "one two three\n");
        assert_eq!(wrapped("one two three", 8), "one two\n    three\n");
        assert_eq!(wrapped("unbreakable word", 4), "unbreakable\n    word\n");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "10".into()], vec!["long".into(), "9".into()], vec!["x".into()]];
        assert_eq!(columns(&rows), "a     10\nlong   9\nx\n");
    }
}
