//! The names of lines, each beside the end of its line.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::canvas::{Area, LINE, MARGIN, text, text_width};

/// The most characters of a line of a name. A longer name, such as the path of a socket, takes several lines.
const CHARS_MAX: usize = 14;
/// The length of the piece of line before a name.
const SWATCH: i32 = 14;
/// The width of the longest mark at the end of an axis, `99.999`.
const LAST_MARK: i32 = 50;
/// The space between two names.
const GAP: i32 = 4;

/// A name, and the height at which its line ends.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) colour: RGBColor,
    /// `None`: there is no line.
    pub(super) at: Option<i32>,
}

/// Returns the width of the names, with their margin.
pub(super) fn width<'a>(names: impl IntoIterator<Item = &'a str>) -> u32 {
    let lines = names.into_iter().flat_map(lines);
    let chars = lines.map(|line| line.chars().count()).max().unwrap_or(0);
    match chars {
        // Half of the last mark of the axis has room.
        0 => (LAST_MARK / 2 + MARGIN) as u32,
        _ => (text_width(chars) + SWATCH + 3 * GAP + MARGIN) as u32,
    }
}

/// Draws the names to the right of `left`.
///
/// # Errors
/// A name cannot be drawn.
pub(super) fn draw(area: &Area<'_>, left: i32, mut entries: Vec<Entry>) -> Result<()> {
    entries.retain(|entry| !entry.name.is_empty());
    let (_, height) = area.dim_in_pixel();
    let bottom = height as i32;
    // A line that has no points has its name at the bottom.
    entries.sort_by_key(|entry| entry.at.unwrap_or(bottom));
    let wanted: Vec<(i32, i32)> = entries
        .iter()
        .map(|entry| (entry.at.unwrap_or(bottom), lines(&entry.name).len() as i32 * LINE))
        .collect();
    let x = left + GAP;
    for (entry, top) in entries.iter().zip(places(&wanted, bottom - MARGIN)) {
        let middle = top + LINE / 2;
        let swatch = vec![(x, middle), (x + SWATCH, middle)];
        area.draw(&PathElement::new(swatch, entry.colour.stroke_width(3)))?;
        for (at, line) in (0..).zip(lines(&entry.name)) {
            text(area, &line, (x + SWATCH + GAP, middle + at * LINE), HPos::Left)?;
        }
    }
    Ok(())
}

/// Returns the tops of texts that have these middles and heights, so that none covers another. The middles
/// rise.
fn places(wanted: &[(i32, i32)], bottom: i32) -> Vec<i32> {
    let mut tops = Vec::new();
    let mut free = 0;
    for (middle, height) in wanted {
        let top = (middle - height / 2).max(free);
        tops.push(top);
        free = top + height + GAP;
    }
    let mut free = bottom;
    for (top, (_, height)) in tops.iter_mut().zip(wanted).rev() {
        *top = (*top).min(free - height);
        free = *top - GAP;
    }
    tops
}

/// Breaks a name into lines, after a sign between words where there is one.
pub(super) fn lines(name: &str) -> Vec<String> {
    broken(name, CHARS_MAX)
}

/// Breaks a text into lines of at most `max` characters.
pub(super) fn broken(text: &str, max: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut rest: Vec<char> = text.chars().collect();
    while rest.len() > max {
        // A space may follow the last character of a line.
        let head = rest.get(..=max).unwrap_or_default();
        let breaks = head.iter().enumerate().filter(|(at, char)| match char {
            ' ' => true,
            '-' | '/' | '_' | ',' | '.' => *at < max,
            _ => false,
        });
        let end = breaks.map(|(at, _)| at + 1).next_back().unwrap_or(max);
        let line: String = rest.drain(..end).collect();
        lines.push(line.trim_end().to_owned());
    }
    lines.extend(if rest.is_empty() { None } else { Some(rest.into_iter().collect()) });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_breaks_between_words() {
        assert_eq!(lines("kickless"), ["kickless"]);
        assert_eq!(lines("qemu-storage-daemon"), ["qemu-storage-", "daemon"]);
        assert_eq!(lines("/run/vm/disk.sock"), ["/run/vm/disk.", "sock"]);
        assert_eq!(lines("1234567890123456"), ["12345678901234", "56"]);
        assert_eq!(broken("one two three", 7), ["one two", "three"]);
        assert!(lines("").is_empty());
    }

    #[test]
    fn no_name_covers_another() {
        for wanted in
            [vec![(10, 17), (12, 34), (14, 17)], vec![(190, 17), (195, 17), (198, 17)], vec![(5, 17)]]
        {
            let tops = places(&wanted, 200);
            let ends: Vec<i32> = tops.iter().zip(&wanted).map(|(top, (_, height))| top + height).collect();
            assert!(tops.iter().skip(1).zip(&ends).all(|(top, end)| top >= end), "{tops:?}");
            assert!(tops[0] >= 0 && ends.iter().all(|end| *end <= 200), "{tops:?}");
        }
    }
}
