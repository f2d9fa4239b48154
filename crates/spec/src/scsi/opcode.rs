//! Operation codes, service actions, and numbers of pages.

/// TEST UNIT READY (SPC-4).
pub const TEST_UNIT_READY: u8 = 0x00;
/// REQUEST SENSE (SPC-4).
pub const REQUEST_SENSE: u8 = 0x03;
/// READ(6) (SBC-3).
pub const READ_6: u8 = 0x08;
/// WRITE(6) (SBC-2).
pub const WRITE_6: u8 = 0x0a;
/// INQUIRY (SPC-4).
pub const INQUIRY: u8 = 0x12;
/// MODE SELECT(6) (SPC-4).
pub const MODE_SELECT_6: u8 = 0x15;
/// RESERVE(6) (SPC-2).
pub const RESERVE_6: u8 = 0x16;
/// RELEASE(6) (SPC-2).
pub const RELEASE_6: u8 = 0x17;
/// MODE SENSE(6) (SPC-4).
pub const MODE_SENSE_6: u8 = 0x1a;
/// START STOP UNIT (SBC-3).
pub const START_STOP_UNIT: u8 = 0x1b;
/// PREVENT ALLOW MEDIUM REMOVAL (SPC-4).
pub const PREVENT_ALLOW_MEDIUM_REMOVAL: u8 = 0x1e;
/// READ CAPACITY(10) (SBC-3).
pub const READ_CAPACITY_10: u8 = 0x25;
/// READ(10) (SBC-3).
pub const READ_10: u8 = 0x28;
/// WRITE(10) (SBC-3).
pub const WRITE_10: u8 = 0x2a;
/// WRITE AND VERIFY(10) (SBC-3).
pub const WRITE_AND_VERIFY_10: u8 = 0x2e;
/// VERIFY(10) (SBC-3).
pub const VERIFY_10: u8 = 0x2f;
/// SYNCHRONIZE CACHE(10) (SBC-3).
pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
/// WRITE SAME(10) (SBC-3).
pub const WRITE_SAME_10: u8 = 0x41;
/// UNMAP (SBC-3).
pub const UNMAP: u8 = 0x42;
/// MODE SELECT(10) (SPC-4).
pub const MODE_SELECT_10: u8 = 0x55;
/// RESERVE(10) (SPC-2).
pub const RESERVE_10: u8 = 0x56;
/// RELEASE(10) (SPC-2).
pub const RELEASE_10: u8 = 0x57;
/// MODE SENSE(10) (SPC-4).
pub const MODE_SENSE_10: u8 = 0x5a;
/// PERSISTENT RESERVE IN (SPC-4).
pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
/// PERSISTENT RESERVE OUT (SPC-4).
pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
/// READ(16) (SBC-3).
pub const READ_16: u8 = 0x88;
/// COMPARE AND WRITE (SBC-3).
pub const COMPARE_AND_WRITE: u8 = 0x89;
/// WRITE(16) (SBC-3).
pub const WRITE_16: u8 = 0x8a;
/// WRITE AND VERIFY(16) (SBC-3).
pub const WRITE_AND_VERIFY_16: u8 = 0x8e;
/// VERIFY(16) (SBC-3).
pub const VERIFY_16: u8 = 0x8f;
/// SYNCHRONIZE CACHE(16) (SBC-3).
pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
/// WRITE SAME(16) (SBC-3).
pub const WRITE_SAME_16: u8 = 0x93;
/// SERVICE ACTION IN(16): `SAI_*` (SBC-3).
pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
/// REPORT LUNS (SPC-4).
pub const REPORT_LUNS: u8 = 0xa0;
/// MAINTENANCE IN: `MI_*` (SPC-4).
pub const MAINTENANCE_IN: u8 = 0xa3;
/// READ(12) (SBC-3).
pub const READ_12: u8 = 0xa8;
/// WRITE(12) (SBC-3).
pub const WRITE_12: u8 = 0xaa;
/// WRITE AND VERIFY(12) (SBC-3).
pub const WRITE_AND_VERIFY_12: u8 = 0xae;
/// VERIFY(12) (SBC-3).
pub const VERIFY_12: u8 = 0xaf;

/// Service action of SERVICE ACTION IN(16): READ CAPACITY(16).
pub const SAI_READ_CAPACITY_16: u8 = 0x10;
/// Service action of SERVICE ACTION IN(16): GET LBA STATUS.
pub const SAI_GET_LBA_STATUS: u8 = 0x12;
/// Service action of MAINTENANCE IN: REPORT SUPPORTED OPERATION CODES.
pub const MI_REPORT_SUPPORTED_OPERATION_CODES: u8 = 0x0c;

/// Service action of PERSISTENT RESERVE IN: READ KEYS (SPC-4, section 6.15).
pub const PRIN_READ_KEYS: u8 = 0;
/// Service action of PERSISTENT RESERVE IN: READ RESERVATION.
pub const PRIN_READ_RESERVATION: u8 = 1;
/// Service action of PERSISTENT RESERVE IN: REPORT CAPABILITIES.
pub const PRIN_REPORT_CAPABILITIES: u8 = 2;
/// Service action of PERSISTENT RESERVE IN: READ FULL STATUS.
pub const PRIN_READ_FULL_STATUS: u8 = 3;

/// Service action of PERSISTENT RESERVE OUT: REGISTER (SPC-4, section 6.16).
pub const PROUT_REGISTER: u8 = 0;
/// Service action of PERSISTENT RESERVE OUT: RESERVE.
pub const PROUT_RESERVE: u8 = 1;
/// Service action of PERSISTENT RESERVE OUT: RELEASE.
pub const PROUT_RELEASE: u8 = 2;
/// Service action of PERSISTENT RESERVE OUT: CLEAR.
pub const PROUT_CLEAR: u8 = 3;
/// Service action of PERSISTENT RESERVE OUT: PREEMPT.
pub const PROUT_PREEMPT: u8 = 4;
/// Service action of PERSISTENT RESERVE OUT: PREEMPT AND ABORT.
pub const PROUT_PREEMPT_AND_ABORT: u8 = 5;
/// Service action of PERSISTENT RESERVE OUT: REGISTER AND IGNORE EXISTING KEY.
pub const PROUT_REGISTER_AND_IGNORE: u8 = 6;
/// Service action of PERSISTENT RESERVE OUT: REGISTER AND MOVE.
pub const PROUT_REGISTER_AND_MOVE: u8 = 7;

/// VPD page: supported VPD pages (SPC-4, section 7.8).
pub const VPD_SUPPORTED_PAGES: u8 = 0x00;
/// VPD page: unit serial number.
pub const VPD_UNIT_SERIAL_NUMBER: u8 = 0x80;
/// VPD page: device identification.
pub const VPD_DEVICE_IDENTIFICATION: u8 = 0x83;
/// VPD page: block limits (SBC-3, section 6.5).
pub const VPD_BLOCK_LIMITS: u8 = 0xb0;
/// VPD page: block device characteristics.
pub const VPD_BLOCK_DEVICE_CHARACTERISTICS: u8 = 0xb1;
/// VPD page: logical block provisioning.
pub const VPD_LOGICAL_BLOCK_PROVISIONING: u8 = 0xb2;

/// Mode page: caching (SBC-3, section 6.4.5).
pub const MODE_CACHING: u8 = 0x08;
/// Mode page: control (SPC-4, section 7.5.8).
pub const MODE_CONTROL: u8 = 0x0a;
/// Code of MODE SENSE for all pages.
pub const MODE_ALL_PAGES: u8 = 0x3f;
/// Code of MODE SENSE for all subpages.
pub const MODE_ALL_SUBPAGES: u8 = 0xff;
