//! The reason why a command failed, and the sense data that tell it (SPC-4, section 4.5).

use kickless_spec::scsi::sense::{
    self as codes, AdditionalSense, DESCRIPTOR_INFORMATION, DESCRIPTOR_SENSE_KEY_SPECIFIC, FORMAT_DESCRIPTOR,
    FORMAT_FIXED,
};

/// Length of sense data in fixed format.
const FIXED_LEN: usize = 18;
/// Length of the head of sense data in descriptor format.
const DESCRIPTORS_AT: usize = 8;
/// Length of the descriptor with the information field.
const INFORMATION_LEN: usize = 12;
/// Length of the descriptor with the sense-key-specific bytes.
const SPECIFIC_LEN: usize = 8;
/// Length of the longest sense data.
pub const SENSE_LEN_MAX: usize = DESCRIPTORS_AT + INFORMATION_LEN + SPECIFIC_LEN;

/// The reason why a command ends with CHECK CONDITION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// The sense key.
    pub key: u8,
    /// The additional sense code.
    pub code: AdditionalSense,
    /// The invalid field, for sense key ILLEGAL REQUEST.
    pub pointer: Option<FieldPointer>,
    /// The information field: the address of a block, or an offset in the data of the driver.
    pub information: Option<u64>,
}

/// The place of an invalid field (SPC-4, section 4.5.2.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldPointer {
    /// The field is in the command, and otherwise in its parameter list.
    pub is_in_cdb: bool,
    /// Its first byte.
    pub byte: u16,
    /// Its most significant bit, unless the field is whole bytes.
    pub bit: Option<u8>,
}

impl FieldPointer {
    /// Returns the sense-key-specific bytes.
    fn to_bytes(self) -> [u8; 3] {
        let [high, low] = self.byte.to_be_bytes();
        let flags = 0x80 | if self.is_in_cdb { 0x40 } else { 0 };
        [flags | self.bit.map_or(0, |bit| 0x08 | bit & 7), high, low]
    }
}

impl Sense {
    /// Nothing to report. REQUEST SENSE answers with it.
    pub const NONE: Self = Self::new(codes::NO_SENSE, codes::NO_ADDITIONAL_SENSE_INFORMATION);
    /// The operation code is unknown.
    pub const INVALID_OPCODE: Self = Self::new(codes::ILLEGAL_REQUEST, codes::INVALID_COMMAND_OPERATION_CODE);
    /// There is no such logical unit.
    pub const NO_SUCH_UNIT: Self = Self::new(codes::ILLEGAL_REQUEST, codes::LOGICAL_UNIT_NOT_SUPPORTED);
    /// The range is not within the disk.
    pub const OUT_OF_RANGE: Self =
        Self::new(codes::ILLEGAL_REQUEST, codes::LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE);
    /// The parameter list is too short, or ends within a field.
    pub const LIST_LENGTH: Self = Self::new(codes::ILLEGAL_REQUEST, codes::PARAMETER_LIST_LENGTH_ERROR);
    /// The disk is read-only.
    pub const WRITE_PROTECTED: Self = Self::new(codes::DATA_PROTECT, codes::WRITE_PROTECTED);
    /// The disk has no space left.
    pub const NO_SPACE: Self = Self::new(codes::DATA_PROTECT, codes::SPACE_ALLOCATION_FAILED_WRITE_PROTECT);
    /// The device failed, and not the medium.
    pub const INTERNAL_FAILURE: Self = Self::new(codes::HARDWARE_ERROR, codes::INTERNAL_TARGET_FAILURE);

    /// Makes sense without a field pointer and without information.
    pub const fn new(key: u8, code: AdditionalSense) -> Self {
        Self { key, code, pointer: None, information: None }
    }

    /// Makes INVALID FIELD IN CDB. `bit` is the most significant bit of the field.
    pub const fn invalid_field(byte: u16, bit: u8) -> Self {
        Self::pointing(codes::INVALID_FIELD_IN_CDB, true, byte, bit)
    }

    /// Makes INVALID FIELD IN PARAMETER LIST. `bit` is the most significant bit of the field.
    pub const fn invalid_parameter(byte: u16, bit: u8) -> Self {
        Self::pointing(codes::INVALID_FIELD_IN_PARAMETER_LIST, false, byte, bit)
    }

    const fn pointing(code: AdditionalSense, is_in_cdb: bool, byte: u16, bit: u8) -> Self {
        let pointer = Some(FieldPointer { is_in_cdb, byte, bit: Some(bit) });
        Self { pointer, ..Self::new(codes::ILLEGAL_REQUEST, code) }
    }

    /// Makes the sense of a read that failed at this block.
    pub const fn read_error(lba: u64) -> Self {
        let sense = Self::new(codes::MEDIUM_ERROR, codes::UNRECOVERED_READ_ERROR);
        Self { information: Some(lba), ..sense }
    }

    /// Makes the sense of a write that failed at this block.
    pub const fn write_error(lba: u64) -> Self {
        Self { information: Some(lba), ..Self::new(codes::MEDIUM_ERROR, codes::WRITE_ERROR) }
    }

    /// Makes the sense of data that differ from the disk first at this offset in the data of the driver.
    pub const fn miscompare(offset: u64) -> Self {
        let sense = Self::new(codes::MISCOMPARE, codes::MISCOMPARE_DURING_VERIFY_OPERATION);
        Self { information: Some(offset), ..sense }
    }

    /// Returns the sense data, in descriptor format if `descriptors`, and else in fixed format.
    ///
    /// The fixed format has no room for an information above 2^32 - 1, and leaves it out.
    pub fn data(&self, descriptors: bool) -> SenseData {
        if descriptors { self.descriptors() } else { self.fixed() }
    }

    fn fixed(&self) -> SenseData {
        let mut bytes = [0; SENSE_LEN_MAX];
        bytes[0] = FORMAT_FIXED;
        bytes[2] = self.key;
        bytes[7] = FIXED_LEN as u8 - 8;
        if let Some(information) = self.information.and_then(|number| u32::try_from(number).ok()) {
            // VALID.
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        bytes[12] = self.code.code;
        bytes[13] = self.code.qualifier;
        if let Some(pointer) = self.pointer {
            bytes[15..18].copy_from_slice(&pointer.to_bytes());
        }
        SenseData { bytes, len: FIXED_LEN }
    }

    fn descriptors(&self) -> SenseData {
        let mut data = SenseData { bytes: [0; SENSE_LEN_MAX], len: DESCRIPTORS_AT };
        data.bytes[..4].copy_from_slice(&[FORMAT_DESCRIPTOR, self.key, self.code.code, self.code.qualifier]);
        if let Some(information) = self.information {
            // VALID.
            data.push(&[DESCRIPTOR_INFORMATION, INFORMATION_LEN as u8 - 2, 0x80, 0]);
            data.push(&information.to_be_bytes());
        }
        if let Some(pointer) = self.pointer {
            let [flags, high, low] = pointer.to_bytes();
            let len = SPECIFIC_LEN as u8 - 2;
            data.push(&[DESCRIPTOR_SENSE_KEY_SPECIFIC, len, 0, 0, flags, high, low, 0]);
        }
        data.bytes[7] = (data.len - DESCRIPTORS_AT) as u8;
        data
    }
}

/// Sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenseData {
    bytes: [u8; SENSE_LEN_MAX],
    len: usize,
}

impl SenseData {
    fn push(&mut self, more: &[u8]) {
        let end = self.len + more.len();
        self.bytes[self.len..end].copy_from_slice(more);
        self.len = end;
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the bytes that a driver with `room` bytes for sense data gets. The lengths in them are those
    /// of all bytes (SPC-4, section 4.5.1).
    pub fn cut(&self, room: u64) -> &[u8] {
        &self.bytes()[..self.len.min(usize::try_from(room).unwrap_or(usize::MAX))]
    }
}
