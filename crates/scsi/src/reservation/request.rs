//! The parameter list of PERSISTENT RESERVE OUT (SPC-4, section 6.16.3).

use crate::command::{PersistentAction, PersistentReserveOut, ReservationType};
use crate::number::big_endian;
use crate::sense::Sense;

/// The byte of the list with flags, and these.
const FLAGS_AT: usize = 20;
const SPEC_I_PT: u8 = 0x08;
const ALL_TG_PT: u8 = 0x04;
const APTPL: u8 = 0x01;

/// A PERSISTENT RESERVE OUT with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentOut {
    /// The service action.
    pub action: PersistentAction,
    /// The type of the reservation, as in [`PersistentReserveOut`].
    pub kind: Option<ReservationType>,
    /// RESERVATION KEY: the key with which the nexus is registered.
    pub key: u64,
    /// SERVICE ACTION RESERVATION KEY: the new key, or the one to preempt.
    pub action_key: u64,
    /// APTPL: registrations and the reservation outlast the process. False for other service actions than
    /// those that register.
    pub persist: bool,
}

impl PersistentOut {
    /// Parses the first bytes of a parameter list, at most [`PersistentReserveOut::LIST_LEN`].
    ///
    /// # Errors
    /// The list has another length, or asks for a registration of other initiators (SPEC_I_PT) or at other
    /// targets (ALL_TG_PT).
    pub fn parse(command: &PersistentReserveOut, list: &[u8]) -> Result<Self, Sense> {
        let list = list.get(..PersistentReserveOut::LIST_LEN as usize).ok_or(Sense::LIST_LENGTH)?;
        let flags = list[FLAGS_AT];
        let registers =
            matches!(command.action, PersistentAction::Register | PersistentAction::RegisterAndIgnore);
        // The other service actions ignore the flags.
        if registers && flags & SPEC_I_PT != 0 {
            return Err(Sense::invalid_parameter(FLAGS_AT as u16, 3));
        }
        if registers && flags & ALL_TG_PT != 0 {
            return Err(Sense::invalid_parameter(FLAGS_AT as u16, 2));
        }
        if command.list_len != PersistentReserveOut::LIST_LEN {
            return Err(Sense::LIST_LENGTH);
        }
        Ok(Self {
            action: command.action,
            kind: command.kind,
            key: big_endian(&list[..8]),
            action_key: big_endian(&list[8..16]),
            persist: registers && flags & APTPL != 0,
        })
    }
}
