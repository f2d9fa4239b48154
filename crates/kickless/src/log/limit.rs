//! How many lines of one kind may come about one device.
//!
//! A front-end or a guest can cause some lines as often as it likes: it connects and leaves, or sends messages that are
//! refused. Each place in the program that logs has, for each device, a stock of [`BURST`] lines that fills up by one in
//! [`REFILL`]. A line that finds it empty is suppressed and counted. The next one that comes says how many were; if none
//! comes within [`REPORT`], the first of them does.
//!
//! The table is bounded by the places in the program times the devices that logged there lately: a device that comes drops the
//! full stocks of others.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// More than a machine's life causes: it connects and leaves, and each of its queues may break.
pub(super) const BURST: u32 = 64;
/// In the long run 17000 lines a day: a log of some megabytes.
const REFILL: Duration = Duration::from_secs(5);
/// How long it takes at most until it is told that lines are suppressed.
pub(super) const REPORT: Duration = Duration::from_secs(10);

/// The fate of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It comes, after so many that were suppressed.
    Pass { suppressed: u64 },
    /// It is the first that is suppressed: it is to be given to [`Limits::hold`].
    Hold,
    /// It is suppressed.
    Suppress,
}

/// The stocks, by place in the program and device.
pub(super) struct Limits<K> {
    stocks: HashMap<K, HashMap<Box<str>, Stock>>,
    /// When the lines that are held come, if there are any.
    due: Option<Instant>,
}

struct Stock {
    left: u32,
    /// Up to when it has been filled.
    filled: Instant,
    suppressed: u64,
    /// The first of these.
    held: Option<String>,
}

impl<K> Default for Limits<K> {
    fn default() -> Self {
        Self { stocks: HashMap::new(), due: None }
    }
}

impl<K: Hash + Eq> Limits<K> {
    /// Takes a line from the stock of `place` and `device`, if there is one.
    pub(super) fn admit(&mut self, place: K, device: &str, now: Instant) -> Admission {
        let devices = self.stocks.entry(place).or_default();
        if !devices.contains_key(device) {
            // A stock that is full is as good as none: devices that have gone leave nothing behind.
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

    /// Keeps the first line that is suppressed.
    pub(super) fn hold(&mut self, place: K, device: &str, line: String, now: Instant) {
        let stock = self.stocks.get_mut(&place).and_then(|devices| devices.get_mut(device));
        // It may have been told of already, by a line of another thread.
        if let Some(stock) = stock.filter(|stock| stock.suppressed > 0) {
            stock.held = Some(line);
            // A report may have come since the line was suppressed.
            self.due.get_or_insert(now + REPORT);
        }
    }

    /// When to call [`Limits::report`].
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Once it is time, does as [`Limits::report_all`].
    pub(super) fn report(&mut self, now: Instant, into: &mut Vec<u8>) {
        if self.due.is_some_and(|due| now >= due) {
            self.report_all(into);
        }
    }

    /// Appends the lines that are held, each with the number of those suppressed after it.
    pub(super) fn report_all(&mut self, into: &mut Vec<u8>) {
        self.due = None;
        for stock in self.stocks.values_mut().flat_map(HashMap::values_mut) {
            if let Some(line) = stock.held.take() {
                let others = std::mem::take(&mut stock.suppressed).saturating_sub(1);
                into.extend_from_slice(with_count(line, others).as_bytes());
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

/// `line`, with the number of its kind that were suppressed, if any were.
pub(super) fn with_count(mut line: String, suppressed: u64) -> String {
    if suppressed > 0 {
        line.truncate(line.trim_end_matches('\n').len());
        line.push_str(&format!(" suppressed={suppressed}\n"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(suppressed: u64) -> Admission {
        Admission::Pass { suppressed }
    }

    fn reported(limits: &mut Limits<u8>, now: Instant) -> String {
        let mut text = Vec::new();
        limits.report(now, &mut text);
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
    fn each_place_and_device_has_its_own() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) == pass(0) {}
        assert_eq!(limits.admit(1, "b", now), pass(0));
        assert_eq!(limits.admit(2, "a", now), pass(0));
        assert_eq!(limits.admit(1, "a", now), Admission::Suppress);
    }

    #[test]
    fn a_flood_that_ends_is_told() {
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
    fn a_line_that_is_held_after_a_report_comes_with_the_next() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) != Admission::Hold {}
        assert_eq!(reported(&mut limits, now + REPORT), "");
        limits.hold(1, "a", "line\n".into(), now + REPORT);
        assert_eq!(limits.due(), Some(now + 2 * REPORT));
        assert_eq!(reported(&mut limits, now + 2 * REPORT), "line\n");
    }

    #[test]
    fn a_single_one_comes_late_and_as_it_is() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        while limits.admit(1, "a", now) != Admission::Hold {}
        limits.hold(1, "a", "line\n".into(), now);
        assert_eq!(reported(&mut limits, now + REPORT), "line\n");
    }

    #[test]
    fn the_stock_fills_up_and_no_further() {
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
