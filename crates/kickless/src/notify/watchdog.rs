//! Decides when the service manager gets a sign of life.
//!
//! The workers and the control thread are asked to answer after a round, twice within the interval. If all
//! have answered, the service manager is told. So a worker that sleeps wakes for this and for nothing else,
//! and a process that no watchdog watches does nothing.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use std::{env, process};

use tracing::{error, info};

/// Looks within an interval. The second half of it is left for a thread that is late.
const ROUNDS: u32 = 2;
/// Further looks while a thread is late, so that it has nearly the whole interval.
const LOOKS: u32 = 16;
/// The shortest time between two looks, for intervals that are too short to make sense.
const LOOK_MIN: Duration = Duration::from_millis(1);

/// Returns the interval that the service manager has told this process.
pub(crate) fn interval_of_environment() -> Option<Duration> {
    let variable = |name| env::var(name).ok();
    let is_ours = variable("WATCHDOG_PID").is_none_or(|pid| pid.parse() == Ok(process::id()));
    let us = variable("WATCHDOG_USEC").filter(|_| is_ours)?.parse().ok();
    us.filter(|us| *us > 0).map(Duration::from_micros)
}

/// A thread that has to pass a round, and its answer.
pub(crate) type Asked = (String, Receiver<()>);

/// The state of the rounds.
pub(crate) struct Watchdog {
    interval: Duration,
    /// The time of the next look.
    next: Instant,
    /// The threads that have not answered yet.
    asked: Vec<Asked>,
    /// The log has a line about a thread that is late.
    is_late: bool,
}

impl Watchdog {
    /// Makes a watchdog of this interval, which asks at the first look.
    pub(crate) fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, next: now, asked: Vec::new(), is_late: false }
    }

    /// Returns the time until the next look.
    pub(crate) fn due(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// Looks whether all threads have passed a round since the last time, if a look is due. Asks them with
    /// `ask` again. Returns whether the service manager is to be told.
    pub(crate) fn look(&mut self, now: Instant, ask: impl FnOnce() -> Vec<Asked>) -> bool {
        if now < self.next {
            return false;
        }
        // A thread that has ended answers nothing, and the end of a worker ends the process.
        self.asked.retain(|(_, answer)| answer.try_recv() == Err(TryRecvError::Empty));
        if let Some((thread, _)) = self.asked.first() {
            if !self.is_late {
                error!(thread, "a thread does not get on: the watchdog of the service manager is not fed");
            }
            self.is_late = true;
            self.next = now + (self.interval / LOOKS).max(LOOK_MIN);
            return false;
        }
        if self.is_late {
            info!("all threads get on again");
        }
        self.is_late = false;
        self.asked = ask();
        self.next = now + (self.interval / ROUNDS).max(LOOK_MIN);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    fn asked() -> ([Sender<()>; 2], Vec<Asked>) {
        let ((first, a), (second, b)) = (channel(), channel());
        ([first, second], vec![("worker 0".into(), a), ("control".into(), b)])
    }

    #[test]
    fn it_is_fed_at_each_half_while_all_threads_answer() {
        let mut now = Instant::now();
        let mut watchdog = Watchdog::new(INTERVAL, now);
        for _ in 0..3 {
            let (senders, asks) = asked();
            assert!(watchdog.look(now, || asks));
            senders.iter().for_each(|sender| sender.send(()).unwrap());
            assert_eq!(watchdog.due(now), INTERVAL / 2);
            assert!(!watchdog.look(now, || unreachable!("too early")));
            now += INTERVAL / 2;
        }
    }

    #[test]
    fn one_thread_that_does_not_answer_ends_it_until_it_does() {
        let mut now = Instant::now();
        let mut watchdog = Watchdog::new(INTERVAL, now);
        let (senders, asks) = asked();
        assert!(watchdog.look(now, || asks));
        senders[0].send(()).unwrap();
        now += INTERVAL / 2;
        for _ in 0..100 {
            assert!(!watchdog.look(now, || unreachable!("one has not answered")));
            now += watchdog.due(now);
        }
        senders[1].send(()).unwrap();
        assert!(watchdog.look(now, Vec::new));
    }

    #[test]
    fn a_thread_that_is_late_by_less_than_half_is_in_time() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(INTERVAL, start);
        let (senders, asks) = asked();
        assert!(watchdog.look(start, || asks));
        let mut now = start + watchdog.due(start);
        assert!(!watchdog.look(now, Vec::new));
        senders.iter().for_each(|sender| sender.send(()).unwrap());
        now += watchdog.due(now);
        assert!(watchdog.look(now, Vec::new) && now - start < INTERVAL);
    }
}
