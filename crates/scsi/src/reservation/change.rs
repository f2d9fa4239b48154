//! The service actions of PERSISTENT RESERVE OUT (SPC-4, section 5.13).

use crate::attention::Attention;
use crate::command::{PersistentAction, ReservationType};
use crate::reservation::nexus::TransportId;
use crate::reservation::request::PersistentOut;
use crate::reservation::state::{
    Effects, REGISTRATIONS_MAX, Refused, Registration, Reservation, Reservations,
};
use crate::sense::Sense;
use kickless_spec::scsi::sense::{
    ILLEGAL_REQUEST, INSUFFICIENT_REGISTRATION_RESOURCES, INVALID_RELEASE_OF_PERSISTENT_RESERVATION,
};

/// The place of APTPL in the parameter list.
const APTPL: (u16, u8) = (20, 0);
/// The place of the service action reservation key in the parameter list.
const ACTION_KEY: (u16, u8) = (8, 7);
/// The place of the scope and the type in the command.
const SCOPE_AND_TYPE: (u16, u8) = (2, 7);

impl Reservations {
    /// Executes a PERSISTENT RESERVE OUT of a nexus.
    ///
    /// # Errors
    /// The nexus is not registered with the key, the reservation forbids the change, or a parameter is
    /// invalid. Then nothing changes.
    pub fn persistent_out(
        &mut self,
        nexus: &TransportId,
        request: &PersistentOut,
    ) -> Result<Effects, Refused> {
        // SPC-2, section 5.5.1: the holder of the other kind of reservation gets a conflict too.
        if self.reserved_by.is_some() {
            return Err(Refused::Conflict);
        }
        let persisted = self.persists;
        let mut effects = Effects::default();
        let has_changed = match request.action {
            PersistentAction::Register | PersistentAction::RegisterAndIgnore => {
                self.register(nexus, request, &mut effects)?
            }
            action => {
                if self.key(nexus) != Some(request.key) {
                    return Err(Refused::Conflict);
                }
                match action {
                    PersistentAction::Release => {
                        self.release_persistent(nexus, request.kind, &mut effects)?
                    }
                    PersistentAction::Clear => self.clear(nexus, &mut effects),
                    PersistentAction::Preempt => self.preempt(nexus, request, false, &mut effects)?,
                    PersistentAction::PreemptAndAbort => self.preempt(nexus, request, true, &mut effects)?,
                    _ => self.reserve_persistent(nexus, request.kind)?,
                }
            }
        };
        effects.save = has_changed && (persisted || self.persists);
        Ok(effects)
    }

    /// Registers a nexus, changes its key, or ends its registration. Returns whether anything happened.
    fn register(
        &mut self,
        nexus: &TransportId,
        request: &PersistentOut,
        effects: &mut Effects,
    ) -> Result<bool, Refused> {
        let registered = self.key(nexus);
        let checks_key = request.action == PersistentAction::Register;
        if checks_key && request.key != registered.unwrap_or(0) {
            return Err(Refused::Conflict);
        }
        if request.persist && !self.can_persist {
            return Err(Refused::Check(Sense::invalid_parameter(APTPL.0, APTPL.1)));
        }
        match (registered, request.action_key) {
            (None, 0) => return Ok(false),
            (None, key) => {
                if self.registrations.len() >= REGISTRATIONS_MAX {
                    let code = INSUFFICIENT_REGISTRATION_RESOURCES;
                    return Err(Refused::Check(Sense::new(ILLEGAL_REQUEST, code)));
                }
                self.registrations.push(Registration { nexus: nexus.clone(), key });
            }
            (Some(_), 0) => self.unregister(nexus, effects),
            (Some(_), key) => {
                let own = self.registrations.iter_mut().find(|registration| registration.nexus == *nexus);
                if let Some(own) = own {
                    own.key = key;
                }
            }
        }
        self.persists = request.persist;
        self.advance();
        Ok(true)
    }

    /// Ends the registration of a nexus, and the reservation that is its own or that loses its last holder.
    fn unregister(&mut self, nexus: &TransportId, effects: &mut Effects) {
        let was_holder = self.is_holder(nexus);
        self.registrations.retain(|registration| registration.nexus != *nexus);
        let Some(reservation) = &self.reservation else { return };
        let kind = reservation.kind;
        if !was_holder || kind.is_of_all_registrants() && !self.registrations.is_empty() {
            return;
        }
        self.reservation = None;
        if kind.is_shared() {
            self.tell_others(nexus, Attention::ReservationsReleased, effects);
        }
    }

    /// Makes the reservation of a holder. Returns whether there was none.
    fn reserve_persistent(
        &mut self,
        nexus: &TransportId,
        kind: Option<ReservationType>,
    ) -> Result<bool, Refused> {
        let kind = kind.ok_or(invalid_type())?;
        match &self.reservation {
            None => {
                self.reservation = Some(held_by(nexus, kind));
                Ok(true)
            }
            Some(reservation) if reservation.kind == kind && self.is_holder(nexus) => Ok(false),
            Some(_) => Err(Refused::Conflict),
        }
    }

    /// Ends the reservation if the nexus is a holder. Returns whether it ended.
    fn release_persistent(
        &mut self,
        nexus: &TransportId,
        kind: Option<ReservationType>,
        effects: &mut Effects,
    ) -> Result<bool, Refused> {
        let Some(reservation) = &self.reservation else { return Ok(false) };
        if !self.is_holder(nexus) {
            return Ok(false);
        }
        if kind != Some(reservation.kind) {
            let code = INVALID_RELEASE_OF_PERSISTENT_RESERVATION;
            return Err(Refused::Check(Sense::new(ILLEGAL_REQUEST, code)));
        }
        let is_shared = reservation.kind.is_shared();
        self.reservation = None;
        if is_shared {
            self.tell_others(nexus, Attention::ReservationsReleased, effects);
        }
        Ok(true)
    }

    /// Ends the reservation and all registrations.
    fn clear(&mut self, nexus: &TransportId, effects: &mut Effects) -> bool {
        self.tell_others(nexus, Attention::ReservationsPreempted, effects);
        self.reservation = None;
        self.registrations.clear();
        self.advance();
        true
    }

    /// Ends registrations of other nexuses, and takes the reservation if it is one of theirs (SPC-4, section
    /// 5.13.11.4).
    fn preempt(
        &mut self,
        nexus: &TransportId,
        request: &PersistentOut,
        abort: bool,
        effects: &mut Effects,
    ) -> Result<bool, Refused> {
        let key = request.action_key;
        let preempted = self.reservation.as_ref().filter(|reservation| match &reservation.holder {
            Some(holder) => self.key(holder) == Some(key),
            None => key == 0,
        });
        match preempted.map(|reservation| reservation.kind) {
            Some(before) => {
                let kind = request.kind.ok_or(invalid_type())?;
                let removes_all = before.is_of_all_registrants();
                self.remove(
                    |other| other.nexus != *nexus && (removes_all || other.key == key),
                    nexus,
                    effects,
                );
                if kind != before {
                    self.tell_others(nexus, Attention::ReservationsReleased, effects);
                }
                self.reservation = Some(held_by(nexus, kind));
            }
            None if key == 0 => {
                return Err(Refused::Check(Sense::invalid_parameter(ACTION_KEY.0, ACTION_KEY.1)));
            }
            // The nexus may end its own registration in this way. It is then not the holder.
            None => {
                if self.remove(|other| other.key == key, nexus, effects) == 0 {
                    return Err(Refused::Conflict);
                }
                if self.registrations.is_empty() {
                    self.reservation = None;
                }
            }
        }
        if abort {
            let preempted =
                effects.attentions.iter().filter(|(_, what)| *what == Attention::RegistrationsPreempted);
            effects.aborted = preempted.map(|(other, _)| other.clone()).collect();
        }
        self.advance();
        Ok(true)
    }

    /// Removes registrations, and tells the other nexuses that lose them. Returns their number.
    fn remove(
        &mut self,
        mut is_removed: impl FnMut(&Registration) -> bool,
        nexus: &TransportId,
        effects: &mut Effects,
    ) -> usize {
        let before = self.registrations.len();
        self.registrations.retain(|registration| {
            let stays = !is_removed(registration);
            if !stays && registration.nexus != *nexus {
                let told = (registration.nexus.clone(), Attention::RegistrationsPreempted);
                effects.attentions.push(told);
            }
            stays
        });
        before - self.registrations.len()
    }

    /// Adds an attention for each registered nexus but this one.
    fn tell_others(&self, nexus: &TransportId, attention: Attention, effects: &mut Effects) {
        let others = self.registrations.iter().filter(|registration| registration.nexus != *nexus);
        effects.attentions.extend(others.map(|other| (other.nexus.clone(), attention)));
    }

    fn advance(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

fn held_by(nexus: &TransportId, kind: ReservationType) -> Reservation {
    Reservation { kind, holder: (!kind.is_of_all_registrants()).then(|| nexus.clone()) }
}

fn invalid_type() -> Refused {
    Refused::Check(Sense::invalid_field(SCOPE_AND_TYPE.0, SCOPE_AND_TYPE.1))
}
