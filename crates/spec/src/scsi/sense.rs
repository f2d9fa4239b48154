//! Sense keys and additional sense codes (SPC-4, section 4.5 and annex F.2), and the layout of sense data.

/// Sense key: there is nothing to report.
pub const NO_SENSE: u8 = 0x0;
/// Sense key: the command succeeded after a recovery.
pub const RECOVERED_ERROR: u8 = 0x1;
/// Sense key: the logical unit cannot be accessed.
pub const NOT_READY: u8 = 0x2;
/// Sense key: the medium failed.
pub const MEDIUM_ERROR: u8 = 0x3;
/// Sense key: the hardware failed.
pub const HARDWARE_ERROR: u8 = 0x4;
/// Sense key: the command or its parameters are invalid.
pub const ILLEGAL_REQUEST: u8 = 0x5;
/// Sense key: something happened of which the nexus has not been told.
pub const UNIT_ATTENTION: u8 = 0x6;
/// Sense key: the data are protected.
pub const DATA_PROTECT: u8 = 0x7;
/// Sense key: the command was aborted.
pub const ABORTED_COMMAND: u8 = 0xb;
/// Sense key: the data are not those that the command expects.
pub const MISCOMPARE: u8 = 0xe;

/// Response code of sense data in fixed format, of a current error (SPC-4, section 4.5.3).
pub const FORMAT_FIXED: u8 = 0x70;
/// Response code of sense data in descriptor format, of a current error (SPC-4, section 4.5.2).
pub const FORMAT_DESCRIPTOR: u8 = 0x72;
/// Type of the descriptor with the information field.
pub const DESCRIPTOR_INFORMATION: u8 = 0x00;
/// Type of the descriptor with the sense-key-specific bytes.
pub const DESCRIPTOR_SENSE_KEY_SPECIFIC: u8 = 0x02;

/// An additional sense code with its qualifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdditionalSense {
    /// ADDITIONAL SENSE CODE.
    pub code: u8,
    /// ADDITIONAL SENSE CODE QUALIFIER.
    pub qualifier: u8,
}

/// Defines additional sense codes with their names in the standard.
macro_rules! additional_sense {
    ($($name:ident = $code:literal, $qualifier:literal, $text:literal;)*) => {
        $(
            #[doc = concat!("Additional sense code: ", $text, ".")]
            pub const $name: AdditionalSense = AdditionalSense { code: $code, qualifier: $qualifier };
        )*

        impl AdditionalSense {
            /// Each code that this crate names, in the order of the numbers.
            pub const ALL: &[Self] = &[$($name,)*];

            /// Returns the standard's name, if this crate has it.
            pub const fn name(self) -> Option<&'static str> {
                match (self.code, self.qualifier) {
                    $(($code, $qualifier) => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

additional_sense! {
    NO_ADDITIONAL_SENSE_INFORMATION = 0x00, 0x00, "NO ADDITIONAL SENSE INFORMATION";
    INITIALIZING_COMMAND_REQUIRED = 0x04, 0x02, "LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED";
    WRITE_ERROR = 0x0c, 0x00, "WRITE ERROR";
    UNRECOVERED_READ_ERROR = 0x11, 0x00, "UNRECOVERED READ ERROR";
    PARAMETER_LIST_LENGTH_ERROR = 0x1a, 0x00, "PARAMETER LIST LENGTH ERROR";
    MISCOMPARE_DURING_VERIFY_OPERATION = 0x1d, 0x00, "MISCOMPARE DURING VERIFY OPERATION";
    INVALID_COMMAND_OPERATION_CODE = 0x20, 0x00, "INVALID COMMAND OPERATION CODE";
    LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE = 0x21, 0x00, "LOGICAL BLOCK ADDRESS OUT OF RANGE";
    INVALID_FIELD_IN_CDB = 0x24, 0x00, "INVALID FIELD IN CDB";
    LOGICAL_UNIT_NOT_SUPPORTED = 0x25, 0x00, "LOGICAL UNIT NOT SUPPORTED";
    INVALID_FIELD_IN_PARAMETER_LIST = 0x26, 0x00, "INVALID FIELD IN PARAMETER LIST";
    INVALID_RELEASE_OF_PERSISTENT_RESERVATION = 0x26, 0x04, "INVALID RELEASE OF PERSISTENT RESERVATION";
    WRITE_PROTECTED = 0x27, 0x00, "WRITE PROTECTED";
    SPACE_ALLOCATION_FAILED_WRITE_PROTECT = 0x27, 0x07, "SPACE ALLOCATION FAILED WRITE PROTECT";
    POWER_ON_OCCURRED = 0x29, 0x01, "POWER ON OCCURRED";
    BUS_DEVICE_RESET_FUNCTION_OCCURRED = 0x29, 0x03, "BUS DEVICE RESET FUNCTION OCCURRED";
    I_T_NEXUS_LOSS_OCCURRED = 0x29, 0x07, "I_T NEXUS LOSS OCCURRED";
    MODE_PARAMETERS_CHANGED = 0x2a, 0x01, "MODE PARAMETERS CHANGED";
    RESERVATIONS_PREEMPTED = 0x2a, 0x03, "RESERVATIONS PREEMPTED";
    RESERVATIONS_RELEASED = 0x2a, 0x04, "RESERVATIONS RELEASED";
    REGISTRATIONS_PREEMPTED = 0x2a, 0x05, "REGISTRATIONS PREEMPTED";
    CAPACITY_DATA_HAS_CHANGED = 0x2a, 0x09, "CAPACITY DATA HAS CHANGED";
    COMMANDS_CLEARED_BY_ANOTHER_INITIATOR = 0x2f, 0x00, "COMMANDS CLEARED BY ANOTHER INITIATOR";
    SAVING_PARAMETERS_NOT_SUPPORTED = 0x39, 0x00, "SAVING PARAMETERS NOT SUPPORTED";
    INQUIRY_DATA_HAS_CHANGED = 0x3f, 0x03, "INQUIRY DATA HAS CHANGED";
    REPORTED_LUNS_DATA_HAS_CHANGED = 0x3f, 0x0e, "REPORTED LUNS DATA HAS CHANGED";
    INTERNAL_TARGET_FAILURE = 0x44, 0x00, "INTERNAL TARGET FAILURE";
    INSUFFICIENT_REGISTRATION_RESOURCES = 0x55, 0x04, "INSUFFICIENT REGISTRATION RESOURCES";
}

impl core::fmt::Display for AdditionalSense {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{:02x}/{:02x}", self.code, self.qualifier),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_in_order_and_have_names() {
        let numbers = AdditionalSense::ALL.iter().map(|sense| (sense.code, sense.qualifier));
        assert!(numbers.is_sorted_by(|a, b| a < b));
        assert_eq!(INVALID_FIELD_IN_CDB.to_string(), "INVALID FIELD IN CDB");
        assert_eq!(AdditionalSense { code: 0x5d, qualifier: 0x10 }.to_string(), "5d/10");
    }
}
