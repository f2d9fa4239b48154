//! virtio-scsi (virtio 1.3, section 5.6), and the constants of the SCSI commands that it carries.
//!
//! Sources: *SCSI Architecture Model - 5* is cited as "SAM-5", *SCSI Primary Commands - 4* as "SPC-4", and
//! *SCSI Block Commands - 3* as "SBC-3". Integers of virtio are little-endian, and those of SCSI big-endian.

pub mod opcode;
pub mod sense;

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Index of the control queue (virtio 1.3, section 5.6.2).
pub const QUEUE_CONTROL: u16 = 0;
/// Index of the event queue.
pub const QUEUE_EVENT: u16 = 1;
/// Index of the first request queue.
pub const QUEUE_REQUEST: u16 = 2;

/// The value of [`Config::sense_size`] after a reset.
pub const SENSE_SIZE_DEFAULT: u32 = 96;
/// The value of [`Config::cdb_size`] after a reset.
pub const CDB_SIZE_DEFAULT: u32 = 32;
/// The largest number of a target (virtio 1.3, section 5.6.4).
pub const TARGET_MAX: u16 = 255;
/// The largest number of a logical unit of a target.
pub const LUN_MAX: u16 = 16383;
/// Length of the field that names a logical unit.
pub const LUN_LEN: usize = 8;

bitflags! {
    /// Feature bits of a SCSI controller (virtio 1.3, section 5.6.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ScsiFeatures: u64 {
        /// A request may have data in both directions.
        const INOUT = 1 << 0;
        /// The device reports targets and logical units that come and go.
        const HOTPLUG = 1 << 1;
        /// The device reports changed parameters of logical units.
        const CHANGE = 1 << 2;
        /// Requests carry protection information.
        const T10_PI = 1 << 3;
    }
}

/// `struct virtio_scsi_config` (virtio 1.3, section 5.6.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Number of request queues.
    pub num_queues: U32,
    /// Most data segments in a command.
    pub seg_max: U32,
    /// Most 512-byte sectors of a transfer. A hint.
    pub max_sectors: U32,
    /// Most commands in flight for a logical unit. A hint.
    pub cmd_per_lun: U32,
    /// Length of the buffers of the event queue.
    pub event_info_size: U32,
    /// Length of the sense data in a response. The driver may write it.
    pub sense_size: U32,
    /// Length of the command in a request. The driver may write it.
    pub cdb_size: U32,
    /// Largest number of a channel: 0.
    pub max_channel: U16,
    /// Largest number of a target.
    pub max_target: U16,
    /// Largest number of a logical unit.
    pub max_lun: U32,
}

/// Offset of [`Config::sense_size`], which the driver may write.
pub const CONFIG_SENSE_SIZE: usize = core::mem::offset_of!(Config, sense_size);
/// Offset of [`Config::cdb_size`], which the driver may write.
pub const CONFIG_CDB_SIZE: usize = core::mem::offset_of!(Config, cdb_size);

/// The readable head of a request (`struct virtio_scsi_req_cmd`, virtio 1.3, section 5.6.6.1). `cdb_size`
/// bytes of the command follow, and then the data for the device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RequestHeader {
    /// The logical unit.
    pub lun: [u8; LUN_LEN],
    /// Names the command in task management requests.
    pub id: U64,
    /// `TASK_*`.
    pub task_attr: u8,
    /// Priority, as SAM defines it.
    pub prio: u8,
    /// Command reference number, as SAM defines it.
    pub crn: u8,
}

/// The writable head of a request. `sense_size` bytes of sense data follow, and then the data for the driver.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ResponseHeader {
    /// Length of the valid sense data.
    pub sense_len: U32,
    /// Bytes of the data buffers that were not transferred.
    pub residual: U32,
    /// Status qualifier, as SAM defines it.
    pub status_qualifier: U16,
    /// `STATUS_*`. Valid if `response` is [`S_OK`].
    pub status: u8,
    /// `S_*`.
    pub response: u8,
}

/// Task attribute: executed in any order.
pub const TASK_SIMPLE: u8 = 0;
/// Task attribute: executed after older commands, and before younger ones.
pub const TASK_ORDERED: u8 = 1;
/// Task attribute: executed before all others.
pub const TASK_HEAD: u8 = 2;
/// Task attribute: executed during an auto contingent allegiance.
pub const TASK_ACA: u8 = 3;

/// Response: the command completed, with any status. For a task management request: function complete.
pub const S_OK: u8 = 0;
/// Response: the command needs more data than the buffers have room for.
pub const S_OVERRUN: u8 = 1;
/// Response: the command was aborted.
pub const S_ABORTED: u8 = 2;
/// Response: there is no such target.
pub const S_BAD_TARGET: u8 = 3;
/// Response: the command was aborted by a reset.
pub const S_RESET: u8 = 4;
/// Response: the device has no room for the command now.
pub const S_BUSY: u8 = 5;
/// Response: the transport failed.
pub const S_TRANSPORT_FAILURE: u8 = 6;
/// Response: the target failed, and another path may work.
pub const S_TARGET_FAILURE: u8 = 7;
/// Response: the nexus failed, and another path may work.
pub const S_NEXUS_FAILURE: u8 = 8;
/// Response: any other failure.
pub const S_FAILURE: u8 = 9;
/// Response to a task management request: function succeeded.
pub const S_FUNCTION_SUCCEEDED: u8 = 10;
/// Response to a task management request: function rejected.
pub const S_FUNCTION_REJECTED: u8 = 11;
/// Response to a task management request: there is no such logical unit.
pub const S_INCORRECT_LUN: u8 = 12;

/// Status: good (SAM-5, section 5.3.1).
pub const STATUS_GOOD: u8 = 0x00;
/// Status: the sense data say why the command failed.
pub const STATUS_CHECK_CONDITION: u8 = 0x02;
/// Status: a comparison is equal.
pub const STATUS_CONDITION_MET: u8 = 0x04;
/// Status: the logical unit cannot accept the command now.
pub const STATUS_BUSY: u8 = 0x08;
/// Status: a reservation of another nexus forbids the command.
pub const STATUS_RESERVATION_CONFLICT: u8 = 0x18;
/// Status: the logical unit has no room for another command.
pub const STATUS_TASK_SET_FULL: u8 = 0x28;
/// Status: an auto contingent allegiance is active.
pub const STATUS_ACA_ACTIVE: u8 = 0x30;
/// Status: another nexus aborted the command.
pub const STATUS_TASK_ABORTED: u8 = 0x40;

/// Type of a control request: task management (virtio 1.3, section 5.6.6.2).
pub const T_TMF: u32 = 0;
/// Type of a control request: which asynchronous notifications are supported.
pub const T_AN_QUERY: u32 = 1;
/// Type of a control request: subscribe to asynchronous notifications.
pub const T_AN_SUBSCRIBE: u32 = 2;

/// Task management function: abort the command `id`.
pub const T_TMF_ABORT_TASK: u32 = 0;
/// Task management function: abort the commands of this nexus.
pub const T_TMF_ABORT_TASK_SET: u32 = 1;
/// Task management function: end an auto contingent allegiance.
pub const T_TMF_CLEAR_ACA: u32 = 2;
/// Task management function: abort the commands of all nexuses.
pub const T_TMF_CLEAR_TASK_SET: u32 = 3;
/// Task management function: abort the commands of this nexus on all logical units of the target.
pub const T_TMF_I_T_NEXUS_RESET: u32 = 4;
/// Task management function: reset the logical unit.
pub const T_TMF_LOGICAL_UNIT_RESET: u32 = 5;
/// Task management function: whether the command `id` is in flight.
pub const T_TMF_QUERY_TASK: u32 = 6;
/// Task management function: whether any command of this nexus is in flight.
pub const T_TMF_QUERY_TASK_SET: u32 = 7;

/// The readable part of a task management request (`struct virtio_scsi_ctrl_tmf`). One writable byte, an
/// `S_*`, is the response.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct TaskManagement {
    /// [`T_TMF`].
    pub kind: U32,
    /// `T_TMF_*`.
    pub subtype: U32,
    /// The logical unit.
    pub lun: [u8; LUN_LEN],
    /// The command, for functions that concern one.
    pub id: U64,
}

/// The readable part of a request about asynchronous notifications (`struct virtio_scsi_ctrl_an`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AsyncNotification {
    /// [`T_AN_QUERY`] or [`T_AN_SUBSCRIBE`].
    pub kind: U32,
    /// The logical unit.
    pub lun: [u8; LUN_LEN],
    /// `EVT_ASYNC_*`.
    pub event_requested: U32,
}

/// The writable part of a request about asynchronous notifications.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AsyncNotificationResponse {
    /// The supported ones of the requested events, `EVT_ASYNC_*`.
    pub event_actual: U32,
    /// `S_*`.
    pub response: u8,
}

/// Asynchronous notification: operational change.
pub const EVT_ASYNC_OPERATIONAL_CHANGE: u32 = 1 << 1;
/// Asynchronous notification: power management.
pub const EVT_ASYNC_POWER_MGMT: u32 = 1 << 2;
/// Asynchronous notification: external request.
pub const EVT_ASYNC_EXTERNAL_REQUEST: u32 = 1 << 3;
/// Asynchronous notification: media change.
pub const EVT_ASYNC_MEDIA_CHANGE: u32 = 1 << 4;
/// Asynchronous notification: multiple hosts.
pub const EVT_ASYNC_MULTI_HOST: u32 = 1 << 5;
/// Asynchronous notification: device busy.
pub const EVT_ASYNC_DEVICE_BUSY: u32 = 1 << 6;

/// A buffer of the event queue (`struct virtio_scsi_event`, virtio 1.3, section 5.6.6.3).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Event {
    /// One of [`T_NO_EVENT`] and the other events, and [`T_EVENTS_MISSED`].
    pub event: U32,
    /// The logical unit.
    pub lun: [u8; LUN_LEN],
    /// The reason, by the event.
    pub reason: U32,
}

/// Event: none. Tells of missed events.
pub const T_NO_EVENT: u32 = 0;
/// Event: a target or a logical unit was reset, came or went. The reason is an `EVT_RESET_*`.
pub const T_TRANSPORT_RESET: u32 = 1;
/// Event: an asynchronous notification. The reason is an `EVT_ASYNC_*`.
pub const T_ASYNC_NOTIFY: u32 = 2;
/// Event: parameters of a logical unit changed. The reason is [`param_change_reason`] of a sense code.
pub const T_PARAM_CHANGE: u32 = 3;
/// Flag of an event: the device had no buffers for earlier ones.
pub const T_EVENTS_MISSED: u32 = 1 << 31;

/// Reason of [`T_TRANSPORT_RESET`]: a hard reset.
pub const EVT_RESET_HARD: u32 = 0;
/// Reason of [`T_TRANSPORT_RESET`]: a logical unit came.
pub const EVT_RESET_RESCAN: u32 = 1;
/// Reason of [`T_TRANSPORT_RESET`]: a logical unit went.
pub const EVT_RESET_REMOVED: u32 = 2;

/// Returns the reason of [`T_PARAM_CHANGE`]: the additional sense code, and its qualifier in the byte above.
pub const fn param_change_reason(code: sense::AdditionalSense) -> u32 {
    code.code as u32 | (code.qualifier as u32) << 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn layouts() {
        // virtio 1.3, sections 5.6.4 and 5.6.6, counted by hand.
        assert_eq!((CONFIG_SENSE_SIZE, CONFIG_CDB_SIZE), (20, 24));
        assert_eq!(offset_of!(Config, max_target), 30);
        assert_eq!((offset_of!(Config, max_lun), size_of::<Config>()), (32, 36));
        assert_eq!((offset_of!(RequestHeader, task_attr), size_of::<RequestHeader>()), (16, 19));
        assert_eq!((offset_of!(ResponseHeader, status), size_of::<ResponseHeader>()), (10, 12));
        assert_eq!((offset_of!(TaskManagement, id), size_of::<TaskManagement>()), (16, 24));
        assert_eq!(size_of::<AsyncNotification>(), 16);
        assert_eq!(size_of::<AsyncNotificationResponse>(), 5);
        assert_eq!(size_of::<Event>(), 16);
    }

    #[test]
    fn reasons_of_changed_parameters() {
        // Linux compares the two bytes of the reason with 2a and 09.
        assert_eq!(param_change_reason(sense::CAPACITY_DATA_HAS_CHANGED), 0x092a);
        assert_eq!(param_change_reason(sense::REPORTED_LUNS_DATA_HAS_CHANGED), 0x0e3f);
    }
}
