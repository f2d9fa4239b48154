//! The address of a logical unit, as requests and events carry it (virtio 1.3, section 5.6.6.1).

use kickless_spec::scsi::{LUN_LEN, LUN_MAX};

/// The address method of the flat format, in the upper two bits (SAM-5, section 4.7.7).
const FLAT: u8 = 0x40;
/// The first byte of addresses of logical units of targets.
const OF_TARGET: u8 = 1;
/// The address of the REPORT LUNS well-known logical unit (SAM-5, section 4.7.4).
const REPORT_LUNS: [u8; 2] = [0xc1, 0x01];

/// The address of a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A logical unit of a target.
    Unit {
        /// The target.
        target: u8,
        /// The number of the logical unit, at most [`LUN_MAX`].
        lun: u16,
    },
    /// The REPORT LUNS well-known logical unit.
    ReportLuns {
        /// The target that it belongs to; `None` if the request names the one of the controller.
        target: Option<u8>,
    },
}

/// An address that names nothing. The response is `S_BAD_TARGET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address does not name a logical unit")]
pub struct InvalidAddress;

impl Address {
    /// Parses the field of a request.
    ///
    /// The number of a logical unit has the flat format. The peripheral device format, which SAM-5 permits
    /// for numbers below 256, is understood too.
    ///
    /// # Errors
    /// The field has another format, more than one level, or a bus.
    pub fn parse(field: [u8; LUN_LEN]) -> Result<Self, InvalidAddress> {
        let [first, target, high, low, rest @ ..] = field;
        if rest != [0; 4] {
            return Err(InvalidAddress);
        }
        if [first, target] == REPORT_LUNS && [high, low] == [0, 0] {
            return Ok(Self::ReportLuns { target: None });
        }
        if first != OF_TARGET {
            return Err(InvalidAddress);
        }
        if [high, low] == REPORT_LUNS {
            return Ok(Self::ReportLuns { target: Some(target) });
        }
        match high {
            0 => Ok(Self::Unit { target, lun: low.into() }),
            high if high & 0xc0 == FLAT => {
                Ok(Self::Unit { target, lun: u16::from_be_bytes([high & !FLAT, low]) })
            }
            _ => Err(InvalidAddress),
        }
    }

    /// Returns the field of a request or of an event. A number above [`LUN_MAX`] is taken modulo it plus one.
    pub fn to_bytes(self) -> [u8; LUN_LEN] {
        match self {
            Self::Unit { target, lun } => {
                let [high, low] = (lun & LUN_MAX).to_be_bytes();
                [OF_TARGET, target, high | FLAT, low, 0, 0, 0, 0]
            }
            Self::ReportLuns { target: None } => report_luns_entry(),
            Self::ReportLuns { target: Some(target) } => {
                [OF_TARGET, target, REPORT_LUNS[0], REPORT_LUNS[1], 0, 0, 0, 0]
            }
        }
    }
}

/// Returns the entry of a logical unit in the answer to a REPORT LUNS that a target gets.
///
/// Numbers below 256 have the peripheral device format, as SAM-5 asks for. Linux takes an entry in the flat
/// format for a large number.
pub fn entry(lun: u16) -> [u8; LUN_LEN] {
    let [high, low] = (lun & LUN_MAX).to_be_bytes();
    [if high == 0 { 0 } else { high | FLAT }, low, 0, 0, 0, 0, 0, 0]
}

/// Returns the entry of the REPORT LUNS well-known logical unit.
pub(crate) fn report_luns_entry() -> [u8; LUN_LEN] {
    [REPORT_LUNS[0], REPORT_LUNS[1], 0, 0, 0, 0, 0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_formats() {
        let unit = |target, lun| Ok(Address::Unit { target, lun });
        assert_eq!(Address::parse([1, 0, 0x40, 0, 0, 0, 0, 0]), unit(0, 0));
        assert_eq!(Address::parse([1, 255, 0x7f, 0xff, 0, 0, 0, 0]), unit(255, LUN_MAX));
        assert_eq!(Address::parse([1, 3, 0, 9, 0, 0, 0, 0]), unit(3, 9));
        assert_eq!(Address::parse([1, 3, 0x41, 9, 0, 0, 0, 0]), unit(3, 265));
        let report_luns = |target| Ok(Address::ReportLuns { target });
        assert_eq!(Address::parse([0xc1, 1, 0, 0, 0, 0, 0, 0]), report_luns(None));
        assert_eq!(Address::parse([1, 7, 0xc1, 1, 0, 0, 0, 0]), report_luns(Some(7)));
    }

    #[test]
    fn other_addresses_name_nothing() {
        for field in [
            [0; 8],
            [2, 0, 0x40, 0, 0, 0, 0, 0],
            // A bus, extended addressing, and another well-known logical unit.
            [1, 0, 1, 0, 0, 0, 0, 0],
            [1, 0, 0x80, 0, 0, 0, 0, 0],
            [1, 0, 0xc1, 2, 0, 0, 0, 0],
            // A second level.
            [1, 0, 0x40, 0, 0, 1, 0, 0],
            [0xc1, 1, 0, 0, 0, 0, 0, 1],
            [0xc1, 1, 0, 1, 0, 0, 0, 0],
            [0xc1, 2, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(Address::parse(field), Err(InvalidAddress), "{field:x?}");
        }
    }

    #[test]
    fn fields_are_parsed_as_they_are_written() {
        for target in [0, 1, 255] {
            for lun in [0, 1, 255, 256, LUN_MAX] {
                let address = Address::Unit { target, lun };
                assert_eq!(Address::parse(address.to_bytes()), Ok(address));
            }
        }
        for target in [None, Some(0), Some(200)] {
            let address = Address::ReportLuns { target };
            assert_eq!(Address::parse(address.to_bytes()), Ok(address));
        }
    }

    #[test]
    fn entries_of_small_numbers_have_the_peripheral_format() {
        assert_eq!(entry(255), [0, 255, 0, 0, 0, 0, 0, 0]);
        assert_eq!(entry(256), [0x41, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(entry(LUN_MAX), [0x7f, 0xff, 0, 0, 0, 0, 0, 0]);
    }
}
