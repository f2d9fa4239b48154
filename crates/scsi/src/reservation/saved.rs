//! The state as bytes, for a file that outlasts the process, and for the process that continues.
//!
//! The layout is: `KSPR`, the version, flags, the generation, the number of registrations; the key, the
//! length of the identity and the identity of each; the type of the reservation and the number of its holder
//! among the registrations; the length of the identity and the identity that has the reservation of RESERVE;
//! a hash of all this. Integers are big-endian.

use crate::command::ReservationType;
use crate::number::big_endian;
use crate::reservation::nexus::{TRANSPORT_ID_LEN_MAX, TransportId};
use crate::reservation::state::{REGISTRATIONS_MAX, Registration, Reservation, Reservations};
use kickless_spec::hash::fnv1a;

const MAGIC: &[u8; 4] = b"KSPR";
const VERSION: u8 = 1;
/// Flag: the state persists.
const PERSISTS: u8 = 1;
/// The number of the holder if there is none.
const NO_HOLDER: u16 = u16::MAX;
const HASH_LEN: usize = 8;
/// Length of the longest state.
pub const SAVED_LEN_MAX: usize =
    12 + REGISTRATIONS_MAX * (9 + TRANSPORT_ID_LEN_MAX) + 3 + 1 + TRANSPORT_ID_LEN_MAX + HASH_LEN;

/// The reason why bytes are not the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SavedError {
    /// Another program wrote them.
    #[error("it is not a state of reservations")]
    Foreign,
    /// Another version of this program wrote them.
    #[error("version {0} of the state of reservations is unknown")]
    Version(u8),
    /// They changed, or some are missing.
    #[error("the state of reservations is damaged")]
    Damaged,
    /// They contradict themselves.
    #[error("the state of reservations is invalid: {0}")]
    Invalid(&'static str),
}

impl Reservations {
    /// Returns the state as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([VERSION, if self.persists { PERSISTS } else { 0 }]);
        bytes.extend(self.generation.to_be_bytes());
        bytes.extend((self.registrations.len() as u16).to_be_bytes());
        for Registration { nexus, key } in &self.registrations {
            bytes.extend(key.to_be_bytes());
            push_id(&mut bytes, Some(nexus));
        }
        let holder = self.reservation.as_ref().and_then(|reservation| reservation.holder.as_ref());
        let is_holder = |registration: &Registration| Some(&registration.nexus) == holder;
        let number = self.registrations.iter().position(is_holder).map_or(NO_HOLDER, |number| number as u16);
        bytes.push(self.reservation.as_ref().map_or(0, |reservation| reservation.kind as u8));
        bytes.extend(number.to_be_bytes());
        push_id(&mut bytes, self.reserved_by.as_ref());
        bytes.extend(fnv1a(&bytes).to_be_bytes());
        bytes
    }

    /// Returns the state of these bytes, which may come from anywhere. `can_persist` is that of
    /// [`Reservations::new`]: without it, the state does not persist any more.
    ///
    /// # Errors
    /// The bytes are not those of [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(bytes: &[u8], can_persist: bool) -> Result<Self, SavedError> {
        let (magic, rest) = bytes.split_first_chunk().ok_or(SavedError::Foreign)?;
        if magic != MAGIC {
            return Err(SavedError::Foreign);
        }
        match rest.first() {
            Some(&VERSION) => {}
            Some(version) => return Err(SavedError::Version(*version)),
            None => return Err(SavedError::Damaged),
        }
        let (body, hash) = bytes.split_last_chunk::<HASH_LEN>().ok_or(SavedError::Damaged)?;
        if fnv1a(body).to_be_bytes() != *hash {
            return Err(SavedError::Damaged);
        }
        // The length was checked above: `rest` has more than the hash.
        let mut reader = Reader(body.get(MAGIC.len() + 1..).ok_or(SavedError::Damaged)?);
        let state = reader.state(can_persist)?;
        if reader.0.is_empty() { Ok(state) } else { Err(SavedError::Invalid("there are more bytes")) }
    }
}

/// Adds an identity behind its length, or the length 0.
fn push_id(bytes: &mut Vec<u8>, id: Option<&TransportId>) {
    let id = id.map_or(&[][..], TransportId::bytes);
    bytes.push(id.len() as u8);
    bytes.extend(id);
}

/// The bytes that were not read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], SavedError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(SavedError::Damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self, len: usize) -> Result<u64, SavedError> {
        Ok(big_endian(self.take(len)?))
    }

    /// Reads an identity. `None` has no bytes.
    fn id(&mut self) -> Result<Option<TransportId>, SavedError> {
        let len = self.number(1)? as usize;
        if len == 0 {
            return Ok(None);
        }
        let id = TransportId::new(self.take(len)?);
        id.map(Some).map_err(|_| SavedError::Invalid("an identity is too long"))
    }

    fn state(&mut self, can_persist: bool) -> Result<Reservations, SavedError> {
        let flags = self.number(1)? as u8;
        if flags & !PERSISTS != 0 {
            return Err(SavedError::Invalid("a flag is unknown"));
        }
        let generation = self.number(4)? as u32;
        let registrations = self.registrations()?;
        let reservation = self.reservation(&registrations)?;
        let reserved_by = self.id()?;
        if reserved_by.is_some() && !registrations.is_empty() {
            return Err(SavedError::Invalid("it has reservations of both kinds"));
        }
        let persists = can_persist && flags & PERSISTS != 0;
        Ok(Reservations { can_persist, persists, generation, registrations, reservation, reserved_by })
    }

    fn registrations(&mut self) -> Result<Vec<Registration>, SavedError> {
        let count = self.number(2)? as usize;
        if count > REGISTRATIONS_MAX {
            return Err(SavedError::Invalid("it has too many registrations"));
        }
        let mut registrations: Vec<Registration> = Vec::new();
        for _ in 0..count {
            let key = self.number(8)?;
            let nexus = self.id()?.ok_or(SavedError::Invalid("a registration has no nexus"))?;
            if key == 0 {
                return Err(SavedError::Invalid("a registration has no key"));
            }
            if registrations.iter().any(|registration| registration.nexus == nexus) {
                return Err(SavedError::Invalid("a nexus is registered twice"));
            }
            registrations.push(Registration { nexus, key });
        }
        Ok(registrations)
    }

    fn reservation(&mut self, registrations: &[Registration]) -> Result<Option<Reservation>, SavedError> {
        let (kind, number) = (self.number(1)? as u8, self.number(2)? as u16);
        let holder = registrations.get(usize::from(number)).map(|registration| registration.nexus.clone());
        if kind == 0 && number == NO_HOLDER {
            return Ok(None);
        }
        let kind = ReservationType::from_raw(kind);
        let kind = kind.ok_or(SavedError::Invalid("the type of the reservation is unknown"))?;
        let is_valid = match kind.is_of_all_registrants() {
            true => number == NO_HOLDER && !registrations.is_empty(),
            false => holder.is_some(),
        };
        if !is_valid {
            return Err(SavedError::Invalid("the reservation has no holder"));
        }
        Ok(Some(Reservation { kind, holder }))
    }
}
