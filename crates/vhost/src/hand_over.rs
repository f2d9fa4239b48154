//! A server that is parked, so that the next process can go on with its session.

use crate::server::{Presence, Server, Visits};
use crate::session::Session;
use crate::slot::NotParked;
use crate::statistics::Statistics;
use kickless_device::Position;
use kickless_handover::v1::{Final, HalfMessage};
use kickless_handover::{Giving, v1};
use kickless_sync::lock;
use kickless_sync::mpsc::{Receiver, RecvTimeoutError};
use kickless_vhost_user as vhost_user;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// The reason for which a server cannot be handed over now. Each is the end of a sentence about its device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    /// The thread of the server has ended.
    #[error("it is not served any more")]
    Ended,
    /// A message of the front-end is still being carried out.
    #[error("its front-end is in the middle of something that takes long: a message, or its end")]
    Busy,
    /// This process does not keep each file of guest memory.
    #[error(
        "its front-end has shared more files than this process keeps open for a device: a larger limit of open files \
         (LimitNOFILE=) lets it keep more"
    )]
    FileNotKept,
    /// A ring has requests that nothing but this process knows of.
    #[error(
        "{requests} of its requests in ring {index} have failed and wait for an operator, and its front-end has given no \
         in-flight buffer that would tell the next process of them"
    )]
    Kept {
        /// The ring.
        index: u16,
        /// The number of requests.
        requests: u16,
    },
    /// A ring is not parked.
    #[error("ring {0} still has requests in flight")]
    RingRuns(u16),
    /// A worker has ended.
    #[error("a worker has ended")]
    Worker,
    /// The state cannot be written.
    #[error("its state cannot be written: {0}")]
    State(#[from] kickless_handover::Error),
    /// A descriptor cannot be duplicated.
    #[error("its descriptors cannot be duplicated: {0}")]
    Descriptor(#[from] io::Error),
}

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

/// Returns a half message as a part of a record.
pub(crate) fn half_message(
    half: Option<vhost_user::HalfMessage<'_>>,
    to: &mut Giving,
) -> Result<Option<HalfMessage>, HandOverError> {
    let Some(vhost_user::HalfMessage { bytes, fds }) = half else { return Ok(None) };
    let bytes = to.bytes(&bytes)?;
    let descriptors = fds.iter().map(|fd| to.fd(fd)).collect::<Result<_, _>>()?;
    Ok(Some(HalfMessage { bytes, descriptors }))
}
