//! Makes log lines of events, and suppresses lines beyond the limits.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use kickless_control::CALLS_TARGET;
use kickless_daemon::DEVICE_SPAN;

use super::limit::Admission;
use super::lines::Said;
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

/// Writes the values of a span. A line has them as a field with the name of the span, such as `device=web`.
pub(super) struct SpanValues;

impl<'w> FormatFields<'w> for SpanValues {
    fn format_fields<R: RecordFields>(&self, mut to: Writer<'w>, fields: R) -> fmt::Result {
        let mut values = Values::default();
        fields.record(&mut values);
        to.write_str(&values.0.join(" "))
    }
}

#[derive(Default)]
struct Values(Vec<String>);

impl Visit for Values {
    fn record_str(&mut self, _: &Field, value: &str) {
        self.0.push(value.into());
    }

    fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
        self.0.push(format!("{value:?}"));
    }
}

/// Formats lines. Limits lines of the levels `error`, `warn` and `info`. Does not limit `debug` and `trace`,
/// because an operator who enables them wants all lines.
pub(super) struct Limited {
    pub(super) queue: Arc<LineQueue>,
}

impl<S> FormatEvent<S, SpanValues> for Limited
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        of: &FmtContext<'_, S, SpanValues>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let lines = self.queue.lines();
        // Each call that changes something is logged, because the log is the only trace of it.
        let is_audit = event.metadata().target() == CALLS_TARGET;
        if *event.metadata().level() > Level::INFO || is_audit || WITHOUT_LIMITS.get() {
            return lines.write(event.metadata(), &said(of, event), &mut to);
        }
        let place = event.metadata().callsite();
        match with_device(of, |device| self.queue.admit(place.clone(), device)) {
            Admission::Pass { suppressed } => {
                let mut said = said(of, event);
                if suppressed > 0 {
                    said.add_number("suppressed", suppressed);
                }
                lines.write(event.metadata(), &said, &mut to)
            }
            Admission::Hold => {
                let mut line = String::new();
                lines.write(event.metadata(), &said(of, event), &mut Writer::new(&mut line))?;
                with_device(of, |device| self.queue.hold(place, device, line));
                Ok(())
            }
            Admission::Suppress => Ok(()),
        }
    }
}

/// Returns the message and the fields of an event. The spans that contain it come last.
fn said<S>(of: &FmtContext<'_, S, SpanValues>, event: &Event<'_>) -> Said
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let mut said = Said::default();
    event.record(&mut said);
    for span in of.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
        if let Some(values) = span.extensions().get::<FormattedFields<SpanValues>>() {
            said.add(span.name(), values.as_str());
        }
    }
    said
}

/// Calls `then` with the values of the device span that contains the event, or with empty text if no such
/// span does.
fn with_device<S, T>(of: &FmtContext<'_, S, SpanValues>, then: impl FnOnce(&str) -> T) -> T
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let span = of.event_scope().and_then(|mut scope| scope.find(|span| span.name() == DEVICE_SPAN));
    let Some(span) = span else { return then("") };
    let extensions = span.extensions();
    then(extensions.get::<FormattedFields<SpanValues>>().map_or("", |fields| fields.as_str()))
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
        assert_eq!((of("device=a"), of("device=b")), (burst + 1, 1), "{lines:#?}");
    }

    #[test]
    fn debug_lines_are_not_limited() {
        let count = 10 * BURST as usize;
        let lines = logged(|| (0..count).for_each(|n| debug!(n, "a message")));
        assert_eq!(lines.len(), count);
    }
}
