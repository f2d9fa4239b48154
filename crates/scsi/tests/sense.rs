//! Tests sense data byte for byte.

use kickless_scsi::{FieldPointer, Sense};
use kickless_spec::scsi::sense::*;

#[test]
fn fixed_format() {
    assert_eq!(
        Sense::OUT_OF_RANGE.data(false).bytes(),
        [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x21, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        Sense::invalid_field(7, 7).data(false).bytes(),
        [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcf, 0, 7]
    );
    assert_eq!(
        Sense::invalid_parameter(0x102, 0).data(false).bytes(),
        [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x26, 0, 0, 0x88, 1, 2]
    );
    assert_eq!(
        Sense::read_error(0x0102_0304).data(false).bytes(),
        [0xf0, 0, 3, 1, 2, 3, 4, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0]
    );
    // A field of whole bytes has no bit.
    let pointer = Some(FieldPointer { is_in_cdb: true, byte: 5, bit: None });
    let whole = Sense { pointer, ..Sense::invalid_field(0, 0) };
    assert_eq!(whole.data(false).bytes()[15..], [0xc0, 0, 5]);
    // There is no room for this block.
    assert_eq!(Sense::write_error(1 << 32).data(false).bytes()[..7], [0x70, 0, 3, 0, 0, 0, 0]);
}

#[test]
fn descriptor_format() {
    assert_eq!(Sense::WRITE_PROTECTED.data(true).bytes(), [0x72, 7, 0x27, 0, 0, 0, 0, 0]);
    assert_eq!(
        Sense::miscompare(0x1_0000_0002).data(true).bytes(),
        [0x72, 0xe, 0x1d, 0, 0, 0, 0, 12, 0, 10, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    );
    assert_eq!(
        Sense::invalid_field(2, 5).data(true).bytes(),
        [0x72, 5, 0x24, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0xcd, 0, 2, 0]
    );
    let both = Sense { information: Some(u64::MAX), ..Sense::invalid_parameter(1, 1) };
    let data = both.data(true);
    assert_eq!((data.bytes().len(), data.bytes()[7], data.bytes()[20]), (28, 20, 2));
}

#[test]
fn sense_data_are_cut_to_the_buffer() {
    let data = Sense::NO_SPACE.data(false);
    assert_eq!(data.cut(96), data.bytes());
    assert_eq!(data.cut(u64::MAX), data.bytes());
    assert_eq!(data.cut(8), [0x70, 0, 7, 0, 0, 0, 0, 10]);
    assert_eq!(data.cut(0), []);
}

#[test]
fn each_sense_has_its_key_and_code() {
    for (sense, key, code) in [
        (Sense::NONE, NO_SENSE, NO_ADDITIONAL_SENSE_INFORMATION),
        (Sense::INVALID_OPCODE, ILLEGAL_REQUEST, INVALID_COMMAND_OPERATION_CODE),
        (Sense::NO_SUCH_UNIT, ILLEGAL_REQUEST, LOGICAL_UNIT_NOT_SUPPORTED),
        (Sense::LIST_LENGTH, ILLEGAL_REQUEST, PARAMETER_LIST_LENGTH_ERROR),
        (Sense::WRITE_PROTECTED, DATA_PROTECT, WRITE_PROTECTED),
        (Sense::NO_SPACE, DATA_PROTECT, SPACE_ALLOCATION_FAILED_WRITE_PROTECT),
        (Sense::INTERNAL_FAILURE, HARDWARE_ERROR, INTERNAL_TARGET_FAILURE),
        (Sense::write_error(0), MEDIUM_ERROR, WRITE_ERROR),
        (Sense::miscompare(0), MISCOMPARE, MISCOMPARE_DURING_VERIFY_OPERATION),
    ] {
        assert_eq!((sense.key, sense.code), (key, code));
    }
}
