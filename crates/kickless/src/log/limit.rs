//! Limits the number of similar log lines about one device.
//!
//! A front-end or a guest can cause some lines without end: it connects and disconnects, or sends messages
//! that are refused. Each place in the program that logs has a stock of [`BURST`] lines for each device. The
//! stock grows by one line every [`REFILL`]. A line that finds the stock empty is suppressed and counted. The
//! next line that passes shows the number of suppressed lines. If no line passes within [`REPORT`], the first
//! suppressed line is printed with the number.
//!
//! A new device removes the full stocks of others. The size of the table is therefore at most the number of
//! places in the program times the number of devices that logged there recently.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use super::lines::Lines;

/// More lines than one virtual machine causes normally: it connects and disconnects, and each of its queues
/// may break once.
pub(super) const BURST: u32 = 64;
/// Allows 17000 lines per day in the long run, which are a few megabytes.
const REFILL: Duration = Duration::from_secs(5);
/// The longest time until the log shows that lines are suppressed.
pub(super) const REPORT: Duration = Duration::from_secs(10);

/// The fate of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// The line is printed, with the number of lines suppressed before it.
    Pass { suppressed: u64 },
    /// The line is the first suppressed one. The caller must pass it to [`Limits::hold`].
    Hold,
    /// The line is suppressed.
    Suppress,
}

/// The stocks, by place in the program and device.
pub(super) struct Limits<K> {
    stocks: HashMap<K, HashMap<Box<str>, Stock>>,
    /// The time at which the held lines are printed. `None` if there are none.
    due: Option<Instant>,
}

struct Stock {
    left: u32,
    /// The time up to which `left` contains the refills.
    filled: Instant,
    suppressed: u64,
    /// The first suppressed line.
    held: Option<String>,
}

impl<K> Default for Limits<K> {
    fn default() -> Self {
        Self { stocks: HashMap::new(), due: None }
    }
}

impl<K: Hash + Eq> Limits<K> {
    /// Takes a line from the stock of `place` and `device`, and returns the fate of the caller's line.
    pub(super) fn admit(&mut self, place: K, device: &str, now: Instant) -> Admission {
        let devices = self.stocks.entry(place).or_default();
        if !devices.contains_key(device) {
            // A full stock equals an absent one. Remove full stocks, so that removed devices take no memory.
            devices.retain(|_, stock| {
                stock.fill(now);
                stock.left < BURST || stock.suppressed > 0
            });
            devices.insert(device.into(), Stock { left: BURST, filled: now, suppressed: 0, held: None });
        }
        let Some(stock) = devices.get_mut(device) else { return Admission::Pass { suppressed: 0 } };
        stock.fill(now);
        if stock.left == 0 {
            stock.suppressed += 1;
            self.due.get_or_insert(now + REPORT);
            return if stock.suppressed == 1 { Admission::Hold } else { Admission::Suppress };
        }
        stock.left -= 1;
        stock.held = None;
        Admission::Pass { suppressed: std::mem::take(&mut stock.suppressed) }
    }

    /// Keeps the first suppressed line.
    pub(super) fn hold(&mut self, place: K, device: &str, line: String, now: Instant) {
        let stock = self.stocks.get_mut(&place).and_then(|devices| devices.get_mut(device));
        // A line of another thread may have shown the number in the meantime.
        if let Some(stock) = stock.filter(|stock| stock.suppressed > 0) {
            stock.held = Some(line);
            // A report may have come since the line was suppressed.
            self.due.get_or_insert(now + REPORT);
        }
    }

    /// Returns the time at which to call [`Limits::report`].
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Calls [`Limits::report_all`] if the time has come.
    pub(super) fn report(&mut self, now: Instant, lines: Lines, into: &mut Vec<u8>) {
        if self.due.is_some_and(|due| now >= due) {
            self.report_all(lines, into);
        }
    }

    /// Appends the held lines, of the format `lines`, to `into`, each with the number of lines suppressed
    /// after it.
    pub(super) fn report_all(&mut self, lines: Lines, into: &mut Vec<u8>) {
        self.due = None;
        for stock in self.stocks.values_mut().flat_map(HashMap::values_mut) {
            if let Some(line) = stock.held.take() {
                let others = std::mem::take(&mut stock.suppressed).saturating_sub(1);
                into.extend_from_slice(lines.with_count(line, others).as_bytes());
            }
        }
    }
}

impl Stock {
    fn fill(&mut self, now: Instant) {
        let intervals = now.saturating_duration_since(self.filled).as_nanos() / REFILL.as_nanos();
        let intervals = u32::try_from(intervals).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(intervals).min(BURST);
        if self.left == BURST {
            self.filled = now;
        } else {
            self.filled += REFILL * intervals;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(suppressed: u64) -> Admission {
        Admission::Pass { suppressed }
    }

    fn reported(limits: &mut Limits<u8>, now: Instant) -> String {
        let mut text = Vec::new();
        limits.report(now, Lines::Text, &mut text);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (mut limits, mut now) = (Limits::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(limits.admit(1, "a", now), pass(0));
        }
        assert_eq!(limits.admit(1, "a", now), Admission::Hold);
        limits.hold(1, "a", "first\n".into(), now);
        for _ in 0..9 {
            assert_eq!(limits.admit(1, "a", now), Admission::Suppress);
        }
        now += REFILL;
        assert_eq!(limits.admit(1, "a", now), pass(10));
        assert_eq!(limits.admit(1, "a", now), Admission::Hold);
    }

    #[test]
    fn each_place_and_device_has_its_own_stock() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) == pass(0) {}
        assert_eq!(limits.admit(1, "b", now), pass(0));
        assert_eq!(limits.admit(2, "a", now), pass(0));
        assert_eq!(limits.admit(1, "a", now), Admission::Suppress);
    }

    #[test]
    fn a_flood_that_ends_is_reported() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        assert_eq!(limits.due(), None);
        while limits.admit(1, "a", now) != Admission::Hold {}
        limits.hold(1, "a", "first\n".into(), now);
        for _ in 0..9 {
            limits.admit(1, "a", now);
        }
        assert_eq!(limits.due(), Some(now + REPORT));
        assert_eq!(reported(&mut limits, now), "");
        assert_eq!(reported(&mut limits, now + REPORT), "first suppressed=9\n");
        assert_eq!((limits.due(), reported(&mut limits, now + REPORT)), (None, String::new()));
        assert_eq!(limits.admit(1, "a", now + REPORT), pass(0));
    }

    #[test]
    fn a_line_held_after_a_report_is_in_the_next_report() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) != Admission::Hold {}
        assert_eq!(reported(&mut limits, now + REPORT), "");
        limits.hold(1, "a", "line\n".into(), now + REPORT);
        assert_eq!(limits.due(), Some(now + 2 * REPORT));
        assert_eq!(reported(&mut limits, now + 2 * REPORT), "line\n");
    }

    #[test]
    fn a_single_suppressed_line_is_printed_late_without_a_number() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) != Admission::Hold {}
        limits.hold(1, "a", "line\n".into(), now);
        assert_eq!(reported(&mut limits, now + REPORT), "line\n");
    }

    #[test]
    fn a_stock_grows_up_to_its_maximum() {
        let (mut limits, mut now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) == pass(0) {}
        now += 10_000 * REFILL;
        assert_eq!(limits.admit(1, "a", now), pass(1));
        for _ in 1..BURST {
            assert_eq!(limits.admit(1, "a", now), pass(0));
        }
        assert_eq!(limits.admit(1, "a", now), Admission::Hold);
    }
}
