//! A server in the process that takes over.

use crate::Ended;
use crate::error::{RequestError, RestoreError};
use crate::rings::PreparedTask;
use crate::server::{Presence, Server, Visits};
use crate::session::Session;
use crate::statistics::Statistics;
use kickless_handover::Given;
use kickless_handover::v1::{Device, Final};
use kickless_sync::lock;
use std::sync::Arc;

/// A server whose session another process has given. Nothing of it runs before [`Restored::begin`], and its
/// thread waits before its first step.
///
/// Until [`Restored::begin`], dropping it changes nothing that the other process sees, and the thread goes on
/// waiting. So it can be made again, or the process can end. Afterwards, dropping it is
/// [`Restored::go_on`].
pub struct Restored {
    visits: Arc<Visits>,
    statistics: Arc<Statistics>,
    /// For the check of the final record.
    described: Device,
    // Before the session, whose memory they use.
    tasks: Vec<PreparedTask>,
    session: Option<Box<Session>>,
    queues_max: u16,
    is_open: bool,
    has_begun: bool,
}

impl Server {
    /// Makes the session of a device that another process still serves: maps its memory, and makes the tasks
    /// of its rings. Reads and writes neither memory nor sockets. Called before the thread of this server
    /// begins.
    ///
    /// The state comes from a process that can be hostile, so each part is checked as if a front-end had sent
    /// it.
    ///
    /// # Errors
    /// A part is refused.
    pub fn restore(&self, device: &Device, given: &mut Given) -> Result<Restored, RestoreError> {
        self.visits().slot.hold();
        let (session, tasks) = match &device.session {
            Some(from) => {
                let (session, tasks) = Session::restore(self, from, given)?;
                (Some(session), tasks)
            }
            None => (None, Vec::new()),
        };
        *lock(&self.visits().presence) = match session {
            Some(_) => Presence::Connected,
            None => Presence::Free,
        };
        Ok(Restored {
            visits: self.visits().clone(),
            statistics: self.statistics().clone(),
            described: Device { session: device.session.clone(), ..Device::default() },
            tasks,
            session,
            queues_max: self.queues_max(),
            is_open: false,
            has_begun: false,
        })
    }
}

impl Restored {
    /// Takes what has changed in the other process until the pause, counters too. Touches no memory of the
    /// guest.
    ///
    /// # Errors
    /// The record contradicts the session.
    pub fn receive_final(&mut self, state: &Final) -> Result<(), RestoreError> {
        state.check_against(&self.described)?;
        if state.stops.len() > usize::from(self.queues_max) {
            let (index, count) = (state.stops.len() as u32 - 1, self.queues_max.into());
            return Err(RequestError::Index { index, count, option: "num-queues" }.into());
        }
        if let (Some(session), Some(of_session)) = (&mut self.session, &state.session) {
            session.receive_final(of_session, &state.rings, &mut self.tasks)?;
            self.is_open = of_session.is_open;
            let last = if state.is_last_session { Presence::Last } else { Presence::Connected };
            *lock(&self.visits.presence) = last;
        }
        lock(&self.visits.stops).clone_from(&state.stops);
        self.statistics.receive(state);
        Ok(())
    }

    /// Maps the rings and runs their tasks. No other process uses them any more.
    ///
    /// # Errors
    /// A worker has ended.
    pub fn begin(&mut self) -> Result<(), Ended> {
        self.has_begun = true;
        match &mut self.session {
            Some(session) => session.begin_restored(std::mem::take(&mut self.tasks), self.is_open),
            None => Ok(()),
        }
    }

    /// Lets the thread of the server go on, after [`Restored::begin`].
    pub fn go_on(self) {}
}

impl Drop for Restored {
    fn drop(&mut self) {
        if self.has_begun {
            self.visits.slot.give_back(self.session.take());
        }
    }
}
