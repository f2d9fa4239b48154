//! The answers to PERSISTENT RESERVE IN (SPC-4, section 6.15).

use crate::command::{PersistentIn, ReservationType};
use crate::cut::cut;
use crate::reservation::state::{Refused, Registration, Reservations};

/// CRH: RESERVE and RELEASE of a nexus that shares the reservation do nothing.
const CRH: u8 = 0x10;
const PTPL_C: u8 = 0x01;
const PTPL_A: u8 = 0x01;
/// TMV: the mask of types is valid.
const TMV: u8 = 0x80;
/// ALLOW COMMANDS: TEST UNIT READY is permitted, and nothing is said about others.
const ALLOW_COMMANDS: u8 = 0x10;
/// The bits of the types in the two bytes of the mask.
const TYPES: [u8; 2] = [0xea, 0x01];
/// The shortest TransportID.
const TRANSPORT_ID_LEN: usize = 24;
/// The bit R_HOLDER of a full status.
const R_HOLDER: u8 = 0x01;
/// The relative target port: a controller has one.
const TARGET_PORT: u16 = 1;

impl Reservations {
    /// Returns the answer to PERSISTENT RESERVE IN.
    ///
    /// # Errors
    /// There is a reservation of RESERVE.
    pub fn persistent_in(&self, action: PersistentIn, allocation: u32) -> Result<Vec<u8>, Refused> {
        if self.reserved_by.is_some() {
            return Err(Refused::Conflict);
        }
        let bytes = match action {
            PersistentIn::Keys => self.keys(),
            PersistentIn::Reservation => self.holder(),
            PersistentIn::Capabilities => self.capabilities(),
            PersistentIn::FullStatus => self.full_status(),
        };
        Ok(cut(bytes, allocation))
    }

    fn keys(&self) -> Vec<u8> {
        let keys = self.registrations.iter().flat_map(|registration| registration.key.to_be_bytes());
        self.with_head(keys.collect())
    }

    fn holder(&self) -> Vec<u8> {
        let Some(reservation) = &self.reservation else { return self.with_head(Vec::new()) };
        // Holders have no common key if all registered nexuses are.
        let key = reservation.holder.as_ref().and_then(|holder| self.key(holder)).unwrap_or(0);
        let mut body = key.to_be_bytes().to_vec();
        body.extend([0, 0, 0, 0, 0, reservation.kind as u8, 0, 0]);
        self.with_head(body)
    }

    fn capabilities(&self) -> Vec<u8> {
        let capable = CRH | if self.can_persist { PTPL_C } else { 0 };
        let active = TMV | ALLOW_COMMANDS | if self.persists { PTPL_A } else { 0 };
        vec![0, 8, capable, active, TYPES[0], TYPES[1], 0, 0]
    }

    fn full_status(&self) -> Vec<u8> {
        let statuses = self.registrations.iter().flat_map(|registration| self.status(registration));
        self.with_head(statuses.collect())
    }

    fn status(&self, registration: &Registration) -> Vec<u8> {
        let id = registration.nexus.bytes();
        let len = id.len().next_multiple_of(4).max(TRANSPORT_ID_LEN);
        let (flags, kind) = match &self.reservation {
            Some(reservation) if self.is_holder(&registration.nexus) => (R_HOLDER, reservation.kind as u8),
            _ => (0, 0),
        };
        let mut bytes = registration.key.to_be_bytes().to_vec();
        bytes.extend([0, 0, 0, 0, flags, kind, 0, 0, 0, 0]);
        bytes.extend(TARGET_PORT.to_be_bytes());
        bytes.extend((len as u32).to_be_bytes());
        let at = bytes.len();
        bytes.extend(id);
        bytes.resize(at + len, 0);
        bytes
    }

    /// Returns a body behind the generation and its length.
    fn with_head(&self, body: Vec<u8>) -> Vec<u8> {
        let len = body.len() as u32;
        [&self.generation.to_be_bytes()[..], &len.to_be_bytes(), &body].concat()
    }
}

/// The mask has a bit for each type, by its number.
const _: () = {
    let mut types = 0;
    let mut nth = 0;
    while nth < ReservationType::ALL.len() {
        types |= match ReservationType::ALL[nth] {
            ReservationType::WriteExclusive => 0x0200,
            ReservationType::ExclusiveAccess => 0x0800,
            ReservationType::WriteExclusiveRegistrantsOnly => 0x2000,
            ReservationType::ExclusiveAccessRegistrantsOnly => 0x4000,
            ReservationType::WriteExclusiveAllRegistrants => 0x8000,
            ReservationType::ExclusiveAccessAllRegistrants => 0x0001,
        };
        nth += 1;
    }
    assert!(types == u16::from_be_bytes(TYPES));
};
