//! A server that is parked, so that the next process can go on with its session.

use crate::error::HandOverError;
use crate::server::{Presence, Server, Visits};
use crate::session::Session;
use crate::slot::NotParked;
use crate::statistics::Statistics;
use kickless_device::Position;
use kickless_handover::v1::Final;
use kickless_handover::{Giving, v1};
use kickless_sync::lock;
use kickless_sync::mpsc::{Receiver, RecvTimeoutError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Asks a server to park. Dropping it withdraws that, so that the server goes on.
pub struct ParkRequest {
    visits: Option<Arc<Visits>>,
    statistics: Arc<Statistics>,
}

/// A server that is parked between two messages of its front-end, or without one. Its thread waits, and
/// messages and connections wait in their sockets. Rings run until they are parked too.
///
/// Dropping it lets the rings and the thread go on, as if nothing had happened. A process that has given the
/// server away does not drop it, but ends.
pub struct Parked {
    visits: Arc<Visits>,
    statistics: Arc<Statistics>,
    session: Option<Box<Session>>,
    /// The rings that are asked to park and have not answered.
    parking: Vec<(u16, Receiver<Position>)>,
    positions: BTreeMap<u16, Position>,
}

impl Server {
    /// Asks the thread of the server to park. Does not wait. A server whose thread has not begun is parked at
    /// once, and its thread waits when it begins.
    ///
    /// Only one thread of the process may park a server at a time.
    pub fn park(&self) -> ParkRequest {
        self.visits().slot.ask();
        ParkRequest { visits: Some(self.visits().clone()), statistics: self.statistics().clone() }
    }
}

impl ParkRequest {
    /// Waits until the server is parked.
    ///
    /// # Errors
    /// It is not parked before the deadline, or its thread has ended. The request is withdrawn then.
    pub fn wait(mut self, deadline: Instant) -> Result<Parked, HandOverError> {
        let Some(visits) = self.visits.take() else { return Err(HandOverError::Ended) };
        let session = visits.slot.take(deadline).map_err(|why| match why {
            NotParked::Ended => HandOverError::Ended,
            NotParked::TimedOut => HandOverError::Busy,
        })?;
        let (parking, positions) = (Vec::new(), BTreeMap::new());
        Ok(Parked { visits, statistics: self.statistics.clone(), session, parking, positions })
    }
}

impl Drop for ParkRequest {
    fn drop(&mut self) {
        if let Some(visits) = &self.visits {
            visits.slot.withdraw();
        }
    }
}

impl Parked {
    /// Returns the number of changes of what [`Parked::give`] gives, over all front-ends. If it has changed
    /// since an earlier park, the session has to be given again, or there is another one, or none.
    pub fn changes(&self) -> u64 {
        self.visits.slot.changes() + self.session.as_ref().map_or(0, |session| session.changes())
    }

    /// Returns whether a front-end is connected.
    pub fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// Returns whether rings may wait for translations, which only a session that is not parked can ask for.
    /// Such a server is parked last.
    pub fn has_iommu(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.has_iommu())
    }

    /// Returns the session for [`v1::Device::session`], with duplicates of its descriptors. Rings may run.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub fn give(&self, to: &mut Giving) -> Result<Option<v1::Session>, HandOverError> {
        self.session.as_ref().map(|session| session.give(to)).transpose()
    }

    /// Asks all rings to park. Does not wait.
    pub fn park_rings(&mut self) {
        if let Some(session) = &self.session {
            self.parking = session.park_rings();
        }
    }

    /// Waits until all rings are parked, but not beyond the deadline. Returns whether they are. A deadline
    /// that has passed is a look.
    ///
    /// # Errors
    /// A worker has ended.
    pub fn wait_for_rings(&mut self, deadline: Instant) -> Result<bool, HandOverError> {
        while let Some((index, parking)) = self.parking.last() {
            match parking.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(position) => self.positions.insert(*index, position),
                Err(RecvTimeoutError::Timeout) => return Ok(false),
                Err(RecvTimeoutError::Disconnected) => return Err(HandOverError::Worker),
            };
            self.parking.pop();
        }
        Ok(true)
    }

    /// Returns the number of a ring that is asked to park, and is not parked.
    pub fn unparked_ring(&self) -> Option<u16> {
        self.parking.last().map(|(index, _)| *index)
    }

    /// Lets all rings go on, whether they are parked or not yet. The session stays parked.
    pub fn unpark_rings(&mut self) {
        if let Some(session) = &self.session {
            session.unpark_rings();
        }
        self.parking.clear();
        self.positions.clear();
    }

    /// Adds to a final record what has changed until the pause: the session, its rings, and all that the
    /// server knows, counters too. All rings are parked.
    ///
    /// # Errors
    /// A ring is not parked, or has requests that no other process can know of.
    pub fn give_final(&mut self, to: &mut Final) -> Result<(), HandOverError> {
        if let Some(session) = &mut self.session {
            let (state, rings) = session.give_final(&self.positions)?;
            (to.session, to.rings) = (Some(state), rings);
        }
        to.stops = lock(&self.visits.stops).clone();
        to.is_last_session = *lock(&self.visits.presence) == Presence::Last;
        self.statistics.give(to);
        Ok(())
    }

    /// Lets the rings and the thread go on.
    pub fn go_on(self) {}
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.unpark_rings();
        self.visits.slot.give_back(self.session.take());
    }
}
