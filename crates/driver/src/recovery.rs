//! Reconnects to a back-end that went away and came back.
//!
//! Callers do not notice it. Requests in flight stay in flight, and new ones wait in the ring.
//!
//! A thread that lives as long as the outage connects again and negotiates the same features. It gives the
//! back-end new rings with all requests in flight. Then it kicks each queue once, because a kick during the
//! outage went to an eventfd without a reader. Sending requests to a disk twice is harmless.

use kickless_sync::lock;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::connection::{Connection, deadline_after};
use crate::core::{Core, disk_config, set_writeback};
use crate::error::Error;
use crate::event::Event;
use crate::limits::Limits;
use crate::link::Link;
use crate::reconnect::Reconnect;
use crate::ring::{self, Ring};

/// The shortest time in which the back-end must reply in an attempt, even after the deadline.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);

impl Reconnect for Core {
    fn link(&self) -> &Link {
        &self.link
    }

    fn with_connection<R>(&self, with: impl FnOnce(&mut Option<Connection>) -> R) -> R {
        with(&mut self.session().connection)
    }

    fn queue_indices(&self) -> impl Iterator<Item = u8> {
        (0..).zip(&self.rings).map(|(index, _)| index)
    }

    fn wake_all(&self) {
        self.rings.iter().for_each(|ring| ring.wake.signal());
    }

    /// Waits as long as the back-end makes progress.
    fn drain(self: &Arc<Self>) {
        self.rings.iter().for_each(Ring::shut);
        if !ring::is_delivering() {
            self.rings.iter().for_each(|ring| self.finish(ring));
        }
    }

    fn release(self: &Arc<Self>) {
        if ring::is_delivering() { self.fail_all_on_thread() } else { self.fail_all() }
    }

    fn begin_recovery(&self) -> Instant {
        let mut session = self.session();
        let (now, completed) = (Instant::now(), self.completed());
        // A back-end that reconnects without ever completing a request must not extend the deadline.
        let since = match session.stuck {
            Some((since, then))
                if then == completed && self.rings.iter().any(|ring| ring.in_flight() > 0) =>
            {
                since
            }
            _ => now,
        };
        session.stuck = Some((since, completed));
        since
    }

    fn reconnect(self: &Arc<Self>, deadline: Instant) -> Result<(), Error> {
        let mut connection = Connection::open_again(
            self.options.wishes(),
            deadline.max(deadline_after(ATTEMPT_MIN)),
            self.features,
        )?;
        let mut session = self.session();
        let changes = self.link.changes();
        let mut space = disk_config(&mut connection)?;
        let limits = Limits::new(self.features, &space)?.for_queue(self.options.queue_size)?;
        let old = session.limits;
        if limits.size < old.size {
            return Err(Error::Incompatible { what: "a smaller disk" });
        }
        if connection.queues_max < self.rings.len() {
            return Err(Error::Incompatible { what: "fewer queues" });
        }
        if limits.piece_len_max < old.piece_len_max || limits.pieces_max < old.pieces_max {
            return Err(Error::Incompatible { what: "a smaller limit for requests" });
        }
        if session.regions.all().len() > connection.regions_max {
            return Err(Error::Incompatible { what: "room for fewer regions of memory" });
        }
        if let Some(writeback) = session.writeback {
            set_writeback(&mut connection, writeback)?;
            space.writeback = writeback.into();
        }
        connection.share(session.regions.all())?;
        self.link.control.error.take();
        let mut kicks = Vec::with_capacity(self.rings.len());
        for (index, ring) in (0u8..).zip(&self.rings) {
            let kick = Arc::new(Event::new()?);
            ring.restart(limits, kick.clone())?;
            connection.start(index, ring.layout().setup(), &kick, &ring.call, &self.link.control.error)?;
            kicks.push(kick);
        }
        self.link.watch(&mut connection)?;
        (session.space, session.limits, session.changes_seen) = (space, limits, changes);
        *lock(&self.last_config) = (limits, space);
        session.regions_max = connection.regions_max;
        connection.clear_deadline();
        session.connection = Some(connection);
        drop(session);
        self.rings.iter().zip(&kicks).for_each(|(ring, kick)| ring.kick_by(kick));
        if self.link.is_dead() {
            self.close_connection();
        }
        Ok(())
    }
}
