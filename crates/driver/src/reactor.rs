//! The reactor: a thread of the disk that completes futures. It starts with the first of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use crate::core::Core;
use crate::error::Error;
use crate::options::Waiting;
use crate::poll::{is_ready, readable, sleep};
use crate::reconnect::Reconnect;
use crate::ring::Ring;

impl Core {
    /// Starts the thread, unless it runs already or the options forbid it.
    pub(crate) fn start_reactor(self: &Arc<Self>) -> Result<(), Error> {
        if !self.options.reactor
            || self.reactor.load(Ordering::Relaxed)
            || self.reactor.swap(true, Ordering::AcqRel)
        {
            return Ok(());
        }
        let core = self.clone();
        let spawned = thread::Builder::new().name("kickless-disk".into()).spawn(move || core.react());
        spawned.map(drop).map_err(|source| {
            self.reactor.store(false, Ordering::Release);
            Error::Os { what: "a thread for completions", source }
        })
    }

    fn react(self: Arc<Self>) {
        let mut led = vec![false; self.rings.len()];
        let spin = match self.options.waiting {
            Waiting::Auto | Waiting::Sleep => Duration::ZERO,
            Waiting::Spin(time) => time,
        };
        let mut fds = vec![readable(&self.link.control), readable(&*self.reactor_event)];
        fds.extend(self.rings.iter().map(|ring| readable(&ring.call)));
        let mut last = Instant::now();
        let mut completed = 0;
        while !self.link.is_dead() {
            for (ring, led) in self.rings.iter().zip(&mut led) {
                *led = *led || ring.wait_leader.lead_for_good(&self.reactor_event);
            }
            self.drain_all();
            let now = self.completed();
            if now != completed {
                (completed, last) = (now, Instant::now());
            }
            if last.elapsed() < spin {
                if self.rings.iter().any(Ring::is_idle) {
                    self.check_connection();
                }
                std::hint::spin_loop();
                continue;
            }
            self.sleep_at_all(&mut fds);
        }
    }

    fn drain_all(self: &Arc<Self>) {
        for ring in &self.rings {
            if let Err(error) = ring.drain_for_all() {
                self.die(error);
            }
        }
    }

    /// Sleeps until the device calls for any queue, or there is an event on the connection.
    ///
    /// `fds` has the connection's descriptor, the thread's own, and then those of all queues.
    fn sleep_at_all(self: &Arc<Self>, fds: &mut [PollFd<'_>]) {
        // All queues are armed, even if the first one has completions, because all are disarmed below.
        let busy = self.rings.iter().filter(|ring| !ring.arm()).count();
        let mut happened = false;
        if busy == 0 {
            sleep(fds, None);
            if fds.get(1).is_some_and(is_ready) {
                self.reactor_event.take();
            }
            happened = fds.first().is_some_and(is_ready);
        }
        // The descriptors of the queues come last.
        let calls = fds.iter().skip(2).map(|call| busy == 0 && is_ready(call));
        for (ring, called) in self.rings.iter().zip(calls) {
            if let Err(error) = ring.disarm(called) {
                self.die(error);
            }
        }
        if happened {
            self.check_connection();
        }
    }
}
