//! The registrations and the reservation, and what they permit.

use crate::attention::Attention;
use crate::command::{Access, ReservationType};
use crate::reservation::nexus::TransportId;
use crate::sense::Sense;

/// The most registrations of a logical unit.
pub const REGISTRATIONS_MAX: usize = 128;

/// The reservations of a logical unit, which all nexuses share.
///
/// Nothing here does I/O. A caller that keeps the state in a file changes a copy, writes the copy if
/// [`Effects::save`] says so, and then replaces the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservations {
    /// The caller keeps the state for a nexus that asks for it (PTPL_C).
    pub(super) can_persist: bool,
    /// The last registration asked for it (PTPL_A).
    pub(super) persists: bool,
    /// PRGENERATION.
    pub(super) generation: u32,
    /// Oldest first. No nexus is there twice, and no key is 0.
    pub(super) registrations: Vec<Registration>,
    /// `None` if there are no registrations.
    pub(super) reservation: Option<Reservation>,
    /// The nexus that has the reservation of RESERVE.
    pub(super) reserved_by: Option<TransportId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registration {
    pub(super) nexus: TransportId,
    pub(super) key: u64,
}

/// A persistent reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reservation {
    pub(super) kind: ReservationType,
    /// The holder, which is registered. `None` if all registered nexuses are holders.
    pub(super) holder: Option<TransportId>,
}

/// The consequences of a change, for the caller to apply before it answers GOOD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// The unit attentions of other nexuses. A nexus that is not connected needs none.
    pub attentions: Vec<(TransportId, Attention)>,
    /// The nexuses whose commands on the logical unit are aborted. The one of the command is not among them.
    pub aborted: Vec<TransportId>,
    /// The state must be on stable storage.
    pub save: bool,
}

/// The reason why a change or a report is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The status is RESERVATION CONFLICT.
    Conflict,
    /// The status is CHECK CONDITION.
    Check(Sense),
}

/// The commands that reservations permit to a nexus.
///
/// This is small enough to be kept for each nexus. It holds until the next change of the reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permits {
    /// The commands of [`Access::Status`].
    pub status: bool,
    /// The commands of [`Access::Read`].
    pub read: bool,
    /// The commands of [`Access::Write`].
    pub write: bool,
}

impl Permits {
    /// Everything.
    pub const ALL: Self = Self { status: true, read: true, write: true };

    /// Returns whether commands of this class are permitted. The status of others is RESERVATION CONFLICT.
    #[inline]
    pub fn contains(self, access: Access) -> bool {
        match access {
            Access::Exempt | Access::Reservation => true,
            Access::Status => self.status,
            Access::Read => self.read,
            Access::Write => self.write,
        }
    }
}

impl Reservations {
    /// Makes the state of a logical unit without reservations. `can_persist` says that the caller can keep it
    /// in a file.
    pub fn new(can_persist: bool) -> Self {
        Self {
            can_persist,
            persists: false,
            generation: 0,
            registrations: Vec::new(),
            reservation: None,
            reserved_by: None,
        }
    }

    /// Returns the commands that are permitted to a nexus (SPC-4, section 5.13.1; SBC-3, section 4.17;
    /// SPC-2, section 5.5).
    pub fn permits(&self, nexus: &TransportId) -> Permits {
        if self.reserved_by.as_ref().is_some_and(|by| by != nexus) {
            return Permits { status: false, read: false, write: false };
        }
        match &self.reservation {
            Some(reservation) if !self.shares(nexus) => {
                Permits { status: true, read: reservation.kind.permits_reads(), write: false }
            }
            _ => Permits::ALL,
        }
    }

    /// Returns whether state must be kept when the process ends (APTPL).
    pub fn persists(&self) -> bool {
        self.persists
    }

    /// Reserves the logical unit for a nexus, as RESERVE does.
    ///
    /// # Errors
    /// It is reserved by another nexus, or there are registrations that the nexus does not share.
    pub fn reserve(&mut self, nexus: &TransportId) -> Result<(), Refused> {
        if self.is_compatible(nexus)? {
            return Ok(());
        }
        if self.reserved_by.as_ref().is_some_and(|by| by != nexus) {
            return Err(Refused::Conflict);
        }
        self.reserved_by = Some(nexus.clone());
        Ok(())
    }

    /// Ends the reservation of a nexus, as RELEASE does. The reservation of another nexus stays.
    ///
    /// # Errors
    /// There are registrations that the nexus does not share.
    pub fn release(&mut self, nexus: &TransportId) -> Result<(), Refused> {
        if !self.is_compatible(nexus)? {
            self.lose_nexus(nexus);
        }
        Ok(())
    }

    /// Returns whether RESERVE and RELEASE do nothing, because the nexus shares a persistent reservation
    /// (CRH; SPC-4, section 5.13.3).
    ///
    /// # Errors
    /// There are registrations, and it does not.
    fn is_compatible(&self, nexus: &TransportId) -> Result<bool, Refused> {
        if self.registrations.is_empty() {
            return Ok(false);
        }
        if self.shares(nexus) { Ok(true) } else { Err(Refused::Conflict) }
    }

    /// Ends the reservation of RESERVE of a nexus that was lost or reset. Registrations stay.
    pub fn lose_nexus(&mut self, nexus: &TransportId) {
        self.reserved_by.take_if(|by| by == nexus);
    }

    /// Ends the reservation of RESERVE, because the logical unit was reset. Registrations stay.
    pub fn reset(&mut self) {
        self.reserved_by = None;
    }

    /// Makes the state after a loss of power: only that which a nexus asked to persist stays.
    pub fn power_on(&mut self) {
        if !self.persists {
            *self = Self::new(self.can_persist);
        }
        self.generation = 0;
        self.reserved_by = None;
    }

    /// Returns the key of a registered nexus.
    pub(super) fn key(&self, nexus: &TransportId) -> Option<u64> {
        self.registrations.iter().find(|registration| registration.nexus == *nexus).map(|found| found.key)
    }

    /// Returns whether a nexus is a holder of the persistent reservation.
    pub(super) fn is_holder(&self, nexus: &TransportId) -> bool {
        match &self.reservation {
            Some(Reservation { holder: Some(holder), .. }) => holder == nexus,
            Some(Reservation { holder: None, .. }) => self.key(nexus).is_some(),
            None => false,
        }
    }

    /// Returns whether the persistent reservation permits everything to a nexus.
    fn shares(&self, nexus: &TransportId) -> bool {
        let is_shared = self.reservation.as_ref().is_some_and(|reservation| reservation.kind.is_shared());
        self.is_holder(nexus) || is_shared && self.key(nexus).is_some()
    }
}
