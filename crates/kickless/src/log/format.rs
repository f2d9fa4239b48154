//! Log lines as text, except those that are suppressed.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use kickless_daemon::DEVICE_SPAN;

use super::limit::{Admission, with_count};
use super::queue::Queue;

thread_local! {
    static IN_FULL: Cell<bool> = const { Cell::new(false) };
}

/// Does `report`, whose lines come in full: the operator has asked for them.
pub(crate) fn in_full(report: impl FnOnce()) {
    IN_FULL.set(true);
    report();
    IN_FULL.set(false);
}

/// Formats lines of level `info` and above within their limits, and others, which only an operator who wants them all asks
/// for, without.
pub(super) struct Limited {
    pub(super) queue: Arc<Queue>,
    pub(super) format: Format<Full>,
}

impl<S, N> FormatEvent<S, N> for Limited
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, of: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if *event.metadata().level() > Level::INFO || IN_FULL.get() {
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
    /// The line, without colours.
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

/// Calls `then` with the fields of the device's span that the event is in; with nothing, if it is in none.
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

    /// What `log` logs.
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
        let (queue, text) = (Arc::new(Queue::default()), Text::default());
        let (writers, sink) = (queue.clone(), text.clone());
        thread::spawn(move || writers.write_to(sink, |lost| format!("lost {lost}\n")));
        let filter = super::super::filter::parse("", "debug").unwrap();
        let subscriber = super::super::subscriber(&queue, filter, false);
        tracing::subscriber::with_default(subscriber, log);
        assert!(queue.wait_until_written(Instant::now() + Duration::from_secs(20)));
        let text = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn floods_of_one_device_leave_the_others_alone() {
        let burst = BURST as usize;
        let told = |device: &str| {
            error_span!(DEVICE_SPAN, name = device).in_scope(|| info!("the same line"));
        };
        let lines = logged(|| {
            for _ in 0..10 * burst {
                told("a");
            }
            told("b");
            in_full(|| told("a"));
        });
        let of = |name: &str| lines.iter().filter(|line| line.contains(name)).count();
        assert_eq!((of("name=\"a\""), of("name=\"b\"")), (burst + 1, 1), "{lines:#?}");
    }

    #[test]
    fn what_is_asked_for_comes_in_full() {
        let count = 10 * BURST as usize;
        let lines = logged(|| (0..count).for_each(|n| debug!(n, "a message")));
        assert_eq!(lines.len(), count);
    }
}
