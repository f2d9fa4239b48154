//! Unit attentions: events of which a nexus is told with its next command (SAM-5, section 5.14).

use crate::sense::Sense;
use kickless_spec::scsi::opcode::{INQUIRY, REPORT_LUNS, REQUEST_SENSE};
use kickless_spec::scsi::sense::{self as codes, AdditionalSense};

/// Returns whether a command is executed although a unit attention is pending (SAM-5, section 5.14). REQUEST
/// SENSE then answers with it.
///
/// The attention ends all other commands, also invalid ones. So the device looks for one before it parses the
/// command.
#[inline]
pub fn passes_attention(cdb: &[u8]) -> bool {
    matches!(cdb.first(), Some(&(INQUIRY | REPORT_LUNS | REQUEST_SENSE)))
}

/// A unit attention. The first ones are reported first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Attention {
    /// The logical unit is new for the nexus.
    PowerOn,
    /// The logical unit was reset.
    Reset,
    /// The nexus was lost, or reset.
    NexusLoss,
    /// Another nexus cleared the commands of this one.
    CommandsCleared,
    /// Another nexus ended the persistent reservation and all registrations.
    ReservationsPreempted,
    /// Another nexus removed the registration of this one.
    RegistrationsPreempted,
    /// Another nexus released the persistent reservation that this one shared.
    ReservationsReleased,
    /// Another nexus, or a reset, changed mode pages.
    ModeParametersChanged,
    /// The disk has another size.
    CapacityChanged,
    /// The names of the logical unit changed.
    InquiryDataChanged,
    /// Logical units of the target came or went.
    LunsChanged,
}

impl Attention {
    /// All attentions, those with the highest priority first.
    pub const ALL: [Self; 11] = [
        Self::PowerOn,
        Self::Reset,
        Self::NexusLoss,
        Self::CommandsCleared,
        Self::ReservationsPreempted,
        Self::RegistrationsPreempted,
        Self::ReservationsReleased,
        Self::ModeParametersChanged,
        Self::CapacityChanged,
        Self::InquiryDataChanged,
        Self::LunsChanged,
    ];

    /// Returns the additional sense code.
    pub fn code(self) -> AdditionalSense {
        match self {
            Self::PowerOn => codes::POWER_ON_OCCURRED,
            Self::Reset => codes::BUS_DEVICE_RESET_FUNCTION_OCCURRED,
            Self::NexusLoss => codes::I_T_NEXUS_LOSS_OCCURRED,
            Self::CommandsCleared => codes::COMMANDS_CLEARED_BY_ANOTHER_INITIATOR,
            Self::ReservationsPreempted => codes::RESERVATIONS_PREEMPTED,
            Self::RegistrationsPreempted => codes::REGISTRATIONS_PREEMPTED,
            Self::ReservationsReleased => codes::RESERVATIONS_RELEASED,
            Self::ModeParametersChanged => codes::MODE_PARAMETERS_CHANGED,
            Self::CapacityChanged => codes::CAPACITY_DATA_HAS_CHANGED,
            Self::InquiryDataChanged => codes::INQUIRY_DATA_HAS_CHANGED,
            Self::LunsChanged => codes::REPORTED_LUNS_DATA_HAS_CHANGED,
        }
    }

    /// Returns the sense of the command that reports it.
    pub fn sense(self) -> Sense {
        Sense::new(codes::UNIT_ATTENTION, self.code())
    }
}

/// The pending unit attentions of a nexus and a logical unit.
///
/// Each attention is pending at most once, so there are never more than there are kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attentions(u16);

impl Attentions {
    /// Returns those of a nexus for which the logical unit is new.
    pub fn new() -> Self {
        Self(Attention::PowerOn.bit())
    }

    /// Adds an attention. Power on replaces all others, because the nexus then learns everything anew.
    pub fn add(&mut self, attention: Attention) {
        match attention {
            Attention::PowerOn => *self = Self::new(),
            _ => self.0 |= attention.bit(),
        }
    }

    /// Returns the attention to report, and forgets it.
    pub fn take(&mut self) -> Option<Attention> {
        let first = Attention::ALL.into_iter().find(|attention| self.contains(*attention))?;
        self.remove(first);
        Some(first)
    }

    /// Forgets an attention. REPORT LUNS does this with [`Attention::LunsChanged`] (SPC-4, section 6.33).
    pub fn remove(&mut self, attention: Attention) {
        self.0 &= !attention.bit();
    }

    /// Returns whether an attention is pending.
    pub fn contains(&self, attention: Attention) -> bool {
        self.0 & attention.bit() != 0
    }

    /// Returns whether none is pending.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Returns a number for the pending attentions, for the state that another process continues with.
    pub fn to_bits(self) -> u16 {
        self.0
    }

    /// Returns the attentions of such a number. Unknown ones are left out.
    pub fn from_bits(bits: u16) -> Self {
        Self(bits & Attention::ALL.iter().fold(0, |all, attention| all | attention.bit()))
    }
}

impl Attention {
    fn bit(self) -> u16 {
        1 << self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attentions_have_priorities_and_are_told_once() {
        let mut attentions = Attentions::default();
        assert_eq!(attentions.take(), None);
        for attention in Attention::ALL.into_iter().rev().chain(Attention::ALL.into_iter().skip(1)) {
            attentions.add(attention);
        }
        for attention in Attention::ALL {
            assert_eq!(attentions.take(), Some(attention));
        }
        assert!(attentions.is_empty());
    }

    #[test]
    fn power_on_replaces_others() {
        let mut attentions = Attentions::new();
        attentions.add(Attention::CapacityChanged);
        attentions.add(Attention::PowerOn);
        assert_eq!(attentions, Attentions::new());
        attentions.add(Attention::LunsChanged);
        attentions.remove(Attention::LunsChanged);
        assert_eq!((attentions.take(), attentions.take()), (Some(Attention::PowerOn), None));
    }

    #[test]
    fn each_attention_has_a_name() {
        for attention in Attention::ALL {
            assert!(attention.code().name().is_some(), "{attention:?}");
            assert_eq!(attention.sense().key, codes::UNIT_ATTENTION);
        }
    }

    #[test]
    fn numbers_are_those_of_known_attentions() {
        let all = Attentions::from_bits(u16::MAX);
        assert_eq!(all.to_bits(), (1 << Attention::ALL.len()) - 1);
        assert_eq!(Attentions::from_bits(all.to_bits()), all);
    }
}
