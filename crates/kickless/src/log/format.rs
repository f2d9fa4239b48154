//! Formats log lines as text, and suppresses lines beyond the limits.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use kickless_control::CALLS_TARGET;
use kickless_daemon::DEVICE_SPAN;

use super::limit::{Admission, with_count};
use super::queue::LineQueue;

thread_local! {
    static WITHOUT_LIMITS: Cell<bool> = const { Cell::new(false) };
}

/// Calls `report` and suppresses none of its lines, because the operator requested them.
pub(crate) fn without_limits(report: impl FnOnce()) {
    WITHOUT_LIMITS.set(true);
    report();
    WITHOUT_LIMITS.set(false);
}

/// Formats lines. Limits lines of the levels `error`, `warn` and `info`. Does not limit `debug` and `trace`,
/// because an operator who enables them wants all lines.
pub(super) struct Limited {
    pub(super) queue: Arc<LineQueue>,
    pub(super) format: Format<Full>,
}

impl<S, N> FormatEvent<S, N> for Limited
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, of: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        // Each call that changes something is logged, because the log is the only trace of it.
        let is_audit = event.metadata().target() == CALLS_TARGET;
        if *event.metadata().level() > Level::INFO || is_audit || WITHOUT_LIMITS.get() {
            return self.format.format_event(of, to, event);
        }
        let place = event.metadata().callsite();
        match with_device(of, |device| self.queue.admit(place.clone(), device)) {
            Admission::Pass { suppressed: 0 } => self.format.format_event(of, to, event),
            Admission::Pass { suppressed } => to.write_str(&with_count(self.plain(of, event)?, suppressed)),
            Admission::Hold => {
                let line = self.plain(of, event)?;
                with_device(of, |device| self.queue.hold(place, device, line));
                Ok(())
            }
            Admission::Suppress => Ok(()),
        }
    }
}

impl Limited {
    /// Returns the line without colours.
    fn plain<S, N>(&self, of: &FmtContext<'_, S, N>, event: &Event<'_>) -> Result<String, fmt::Error>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
        N: for<'a> FormatFields<'a> + 'static,
    {
        let mut line = String::new();
        self.format.format_event(of, Writer::new(&mut line), event)?;
        Ok(line)
    }
}

/// Calls `then` with the fields of the device span that contains the event, or with empty text if no such
/// span does.
fn with_device<S, N, T>(of: &FmtContext<'_, S, N>, then: impl FnOnce(&str) -> T) -> T
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    let span = of.event_scope().and_then(|mut scope| scope.find(|span| span.name() == DEVICE_SPAN));
    let Some(span) = span else { return then("") };
    let extensions = span.extensions();
    then(extensions.get::<FormattedFields<N>>().map_or("", |fields| fields.as_str()))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;
    use std::time::{Duration, Instant};

    use tracing::{debug, error_span, info};

    use super::super::limit::BURST;
    use super::*;

    /// Returns the lines that `log` logs.
    fn logged(log: impl FnOnce()) -> Vec<String> {
        #[derive(Clone, Default)]
        struct Text(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Text {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (queue, text) = (Arc::new(LineQueue::default()), Text::default());
        let (writers, sink) = (queue.clone(), text.clone());
        thread::spawn(move || writers.write_to(sink, |lost| format!("lost {lost}\n")));
        let filter = super::super::filter::parse("", "debug").unwrap();
        let subscriber = super::super::subscriber(&queue, filter, false);
        tracing::subscriber::with_default(subscriber.0, log);
        assert!(queue.wait_until_written(Instant::now() + Duration::from_secs(20)));
        let text = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_flood_of_one_device_does_not_suppress_lines_of_others() {
        let burst = BURST as usize;
        let told = |device: &str| {
            error_span!(DEVICE_SPAN, name = device).in_scope(|| info!("the same line"));
        };
        let lines = logged(|| {
            for _ in 0..10 * burst {
                told("a");
            }
            told("b");
            without_limits(|| told("a"));
        });
        let of = |name: &str| lines.iter().filter(|line| line.contains(name)).count();
        assert_eq!((of("name=\"a\""), of("name=\"b\"")), (burst + 1, 1), "{lines:#?}");
    }

    #[test]
    fn debug_lines_are_not_limited() {
        let count = 10 * BURST as usize;
        let lines = logged(|| (0..count).for_each(|n| debug!(n, "a message")));
        assert_eq!(lines.len(), count);
    }
}
