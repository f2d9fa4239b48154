//! A session as a record for the next process, and a session of such a record.

use super::Session;
use crate::channel::is_unix_stream;
use crate::error::{HandOverError, RequestError};
use crate::half_message;
use crate::iotlb::Translations;
use crate::negotiation::Negotiated;
use crate::rings::PreparedTask;
use crate::server::Server;
use kickless_device::{Call, Position};
use kickless_handover::v1::{self, RingFinal, SessionFinal};
use kickless_handover::{Given, Giving};
use kickless_sync::mpsc::Receiver;
use kickless_vhost_user::Backend;
use std::collections::BTreeMap;

impl Session {
    /// Returns the number of changes of what [`Session::give`] gives.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns whether a vIOMMU has been negotiated.
    pub(crate) fn has_iommu(&self) -> bool {
        self.translations.is_some()
    }

    /// Asks all rings that run to park.
    pub(crate) fn park_rings(&self) -> Vec<(u16, Receiver<Position>)> {
        self.rings.park()
    }

    /// Lets all rings go on, whether they are parked or not yet.
    pub(crate) fn unpark_rings(&self) {
        self.rings.unpark();
    }

    /// Counts a change if another part of a message has arrived.
    pub(super) fn note_half_messages(&mut self) {
        let received = (self.backend.received(), self.channel.received());
        if std::mem::replace(&mut self.half_received, received) != received {
            self.changes += 1;
        }
    }

    /// Returns the session as it is between two messages, with duplicates of its descriptors.
    pub(crate) fn give(&self, to: &mut Giving) -> Result<v1::Session, HandOverError> {
        let (files, regions) = self.memory.give(to)?;
        let (log, logs) = self.memory.give_log(to)?;
        Ok(v1::Session {
            connection: to.fd(&self.backend)?,
            half_message: half_message::give(self.backend.half_message(), to)?,
            features: self.negotiated.features.bits(),
            features_set: self.negotiated.features_set,
            protocol_features: self.negotiated.protocol.bits(),
            files,
            regions,
            log,
            logs,
            logged: self.rings.logged.as_ref().map(|logged| to.fd(logged)).transpose()?,
            inflight: self.rings.inflight.as_ref().map(|buffer| buffer.give(to)).transpose()?,
            own_inflight: None,
            backend_channel: self.channel.give(to)?,
            rings: self.rings.give(to)?,
        })
    }

    /// Returns what has changed until the pause, from the positions of the rings that are parked.
    pub(crate) fn give_final(
        &mut self,
        positions: &BTreeMap<u16, Position>,
    ) -> Result<(SessionFinal, Vec<RingFinal>), HandOverError> {
        self.channel.note_config_change(&*self.device);
        let (awaiting, replies) =
            self.translations.as_ref().map_or_else(Default::default, Translations::give_awaiting);
        let (config_changed, was_running) = self.channel.flags();
        let state = SessionFinal {
            awaiting,
            replies,
            config_changed,
            was_running,
            driver_known: self.driver_known,
            expects_new_driver: self.rings.expects_new_driver,
            is_open: self.rings.is_open(),
            has_closed: self.rings.has_closed,
            transferred: self.transfers.last(),
        };
        Ok((state, self.rings.give_final(positions)?))
    }

    /// Makes a session of what another process has given, and the tasks of the rings that run there. Each
    /// part is checked as if the front-end had sent it.
    pub(crate) fn restore(
        server: &Server,
        from: &v1::Session,
        given: &mut Given,
    ) -> Result<(Box<Self>, Vec<PreparedTask>), RequestError> {
        let connection = given.fd(from.connection)?;
        if !is_unix_stream(&connection) {
            return Err(RequestError::NoUnixStream);
        }
        let mut backend = Backend::new(connection);
        if let Some(half) = &from.half_message {
            let (bytes, fds) = half_message::take(half, given)?;
            backend = backend.with_half_message(bytes, fds)?;
        }
        let mut session = server.new_session(backend);
        session.negotiated = Negotiated::restore(&*session.device, from)?;
        if session.negotiated.iommu() {
            session.need_translations()?;
        }
        session.memory.restore(from, given)?;
        if let Some(logged) = from.logged {
            session.rings.logged = Some(Call::new(given.fd(logged)?).map_err(RequestError::Descriptor)?);
        }
        if let Some(inflight) = &from.inflight {
            session.rings.inflight =
                Some(crate::inflight::Inflight::restore(inflight, given, &session.mapper)?);
        }
        if from.own_inflight.is_some() {
            return Err(RequestError::OwnInflight);
        }
        if let Some(channel) = &from.backend_channel {
            session.channel.restore(channel, given)?;
        }
        session.rings.restore(&from.rings, given)?;
        let offered = Negotiated::offered_at_most(&*session.device);
        let mut tasks = Vec::new();
        for ring in from.rings.iter().filter(|ring| ring.runs_with.is_some()) {
            tasks.push(session.rings.prepare(ring, session.memory.view(), offered)?);
        }
        session.note_half_messages();
        Ok((session, tasks))
    }

    /// Takes what has changed in the other process until the pause.
    pub(crate) fn receive_final(
        &mut self,
        state: &SessionFinal,
        rings: &[RingFinal],
        tasks: &mut [PreparedTask],
    ) -> Result<(), RequestError> {
        if !tasks.is_empty() && !state.is_open {
            return Err(RequestError::NotOpen);
        }
        if !state.awaiting.is_empty() {
            self.need_translations()?;
        }
        if let Some(translations) = &mut self.translations {
            translations.restore_awaiting(state)?;
        }
        self.channel.set_flags(state.config_changed, state.was_running);
        self.driver_known = state.driver_known;
        self.rings.expects_new_driver = state.expects_new_driver;
        self.rings.has_closed = state.has_closed;
        self.transfers.set_last(state.transferred);
        self.rings.receive_final(rings, tasks)
    }

    /// Begins to serve as the other process did. From here on, the end of the session closes the device if
    /// the device is open.
    pub(crate) fn begin_restored(
        &mut self,
        tasks: Vec<PreparedTask>,
        is_open: bool,
    ) -> Result<(), crate::Ended> {
        self.totals_before = self.statistics.totals();
        self.rings.begin_restored(tasks, is_open)
    }
}
