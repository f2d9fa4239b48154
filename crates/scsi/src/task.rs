//! The requests of the control queue (virtio 1.3, section 5.6.6.2).

use crate::address::{Address, InvalidAddress};
use kickless_spec::scsi::{
    AsyncNotification, S_BAD_TARGET, S_FAILURE, S_FUNCTION_REJECTED, T_AN_QUERY, T_AN_SUBSCRIBE, T_TMF,
    T_TMF_ABORT_TASK, T_TMF_ABORT_TASK_SET, T_TMF_CLEAR_ACA, T_TMF_CLEAR_TASK_SET, T_TMF_I_T_NEXUS_RESET,
    T_TMF_LOGICAL_UNIT_RESET, T_TMF_QUERY_TASK, T_TMF_QUERY_TASK_SET, TaskManagement,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

/// A request of the control queue. The address may be of a logical unit that there is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// Manage commands of a logical unit.
    Task {
        /// The logical unit.
        address: Address,
        /// The function.
        function: TaskFunction,
    },
    /// Reset the nexus: abort its commands on all logical units of this target.
    NexusReset {
        /// The target.
        target: u8,
    },
    /// Say which of these asynchronous notifications are supported (query), or report them from now on
    /// (subscribe). The device supports none, so that the answer is the same.
    AsyncNotification {
        /// The logical unit.
        address: Address,
        /// The notifications, `EVT_ASYNC_*`.
        requested: u32,
    },
}

/// A task management function (SAM-5, section 7). `id` is that of the request of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskFunction {
    /// Abort one command of this nexus.
    AbortTask {
        /// The command.
        id: u64,
    },
    /// Abort all commands of this nexus.
    AbortTaskSet,
    /// End an auto contingent allegiance. There is none, because NACA is refused, and the response is
    /// `S_FUNCTION_REJECTED`.
    ClearAca,
    /// Abort the commands of all nexuses.
    ClearTaskSet,
    /// Reset the logical unit: abort the commands of all nexuses, end a reservation of RESERVE, and give the
    /// mode pages their defaults. Persistent reservations stay.
    LogicalUnitReset,
    /// Whether a command of this nexus is in flight.
    QueryTask {
        /// The command.
        id: u64,
    },
    /// Whether any command of this nexus is in flight.
    QueryTaskSet,
}

/// The reason why a request of the control queue is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The request is shorter than its type.
    #[error("the control request is too short")]
    Short,
    /// The type of the request is unknown.
    #[error("there is no control request {0}")]
    Type(u32),
    /// The function is unknown.
    #[error("there is no task management function {0}")]
    Function(u32),
    /// The address names nothing.
    #[error("the control request does not name a logical unit")]
    Address(#[from] InvalidAddress),
}

impl ControlError {
    /// Returns the response, one of `S_*`.
    pub fn response(self) -> u8 {
        match self {
            Self::Short | Self::Type(_) => S_FAILURE,
            Self::Function(_) => S_FUNCTION_REJECTED,
            Self::Address(_) => S_BAD_TARGET,
        }
    }
}

impl ControlRequest {
    /// The bytes of the longest request. A caller need not read more.
    pub const LEN_MAX: usize = size_of::<TaskManagement>();

    /// Parses the readable part of a request.
    ///
    /// # Errors
    /// The request is too short, unknown, or names nothing.
    pub fn parse(bytes: &[u8]) -> Result<Self, ControlError> {
        let (kind, _) = U32::read_from_prefix(bytes).map_err(|_| ControlError::Short)?;
        match kind.get() {
            T_TMF => {
                let (request, _) =
                    TaskManagement::read_from_prefix(bytes).map_err(|_| ControlError::Short)?;
                Self::task(&request)
            }
            T_AN_QUERY | T_AN_SUBSCRIBE => {
                let request = AsyncNotification::read_from_prefix(bytes);
                let (request, _) = request.map_err(|_| ControlError::Short)?;
                let address = Address::parse(request.lun)?;
                Ok(Self::AsyncNotification { address, requested: request.event_requested.get() })
            }
            other => Err(ControlError::Type(other)),
        }
    }

    fn task(request: &TaskManagement) -> Result<Self, ControlError> {
        let id = request.id.get();
        let function = match request.subtype.get() {
            T_TMF_ABORT_TASK => TaskFunction::AbortTask { id },
            T_TMF_ABORT_TASK_SET => TaskFunction::AbortTaskSet,
            T_TMF_CLEAR_ACA => TaskFunction::ClearAca,
            T_TMF_CLEAR_TASK_SET => TaskFunction::ClearTaskSet,
            // Only the target counts.
            T_TMF_I_T_NEXUS_RESET => {
                return match request.lun {
                    [1, target, ..] => Ok(Self::NexusReset { target }),
                    _ => Err(InvalidAddress.into()),
                };
            }
            T_TMF_LOGICAL_UNIT_RESET => TaskFunction::LogicalUnitReset,
            T_TMF_QUERY_TASK => TaskFunction::QueryTask { id },
            T_TMF_QUERY_TASK_SET => TaskFunction::QueryTaskSet,
            other => return Err(ControlError::Function(other)),
        };
        Ok(Self::Task { address: Address::parse(request.lun)?, function })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn task(subtype: u32, lun: [u8; 8]) -> Result<ControlRequest, ControlError> {
        let request = TaskManagement { kind: T_TMF.into(), subtype: subtype.into(), lun, id: 77.into() };
        ControlRequest::parse(request.as_bytes())
    }

    const LUN: [u8; 8] = [1, 2, 0x40, 3, 0, 0, 0, 0];
    const ADDRESS: Address = Address::Unit { target: 2, lun: 3 };

    #[test]
    fn each_function() {
        for (subtype, function) in [
            (0, TaskFunction::AbortTask { id: 77 }),
            (1, TaskFunction::AbortTaskSet),
            (2, TaskFunction::ClearAca),
            (3, TaskFunction::ClearTaskSet),
            (5, TaskFunction::LogicalUnitReset),
            (6, TaskFunction::QueryTask { id: 77 }),
            (7, TaskFunction::QueryTaskSet),
        ] {
            assert_eq!(task(subtype, LUN), Ok(ControlRequest::Task { address: ADDRESS, function }));
            assert_eq!(task(subtype, [0; 8]).map_err(ControlError::response), Err(S_BAD_TARGET));
        }
        assert_eq!(task(4, LUN), Ok(ControlRequest::NexusReset { target: 2 }));
        assert_eq!(task(4, [1, 9, 0xff, 0, 0, 0, 0, 0]), Ok(ControlRequest::NexusReset { target: 9 }));
        assert_eq!(task(4, [0; 8]).map_err(ControlError::response), Err(S_BAD_TARGET));
        assert_eq!(task(8, LUN).map_err(ControlError::response), Err(S_FUNCTION_REJECTED));
    }

    #[test]
    fn notifications_and_malformed_requests() {
        for kind in [T_AN_QUERY, T_AN_SUBSCRIBE] {
            let request = AsyncNotification { kind: kind.into(), lun: LUN, event_requested: 6.into() };
            let parsed = ControlRequest::parse(request.as_bytes());
            assert_eq!(parsed, Ok(ControlRequest::AsyncNotification { address: ADDRESS, requested: 6 }));
            assert_eq!(ControlRequest::parse(&request.as_bytes()[..15]), Err(ControlError::Short));
        }
        for bytes in [&[][..], &[0; 3], &[0; 23]] {
            assert_eq!(ControlRequest::parse(bytes), Err(ControlError::Short));
        }
        assert_eq!(ControlRequest::parse(&[3, 0, 0, 0]), Err(ControlError::Type(3)));
        assert_eq!(ControlError::Type(3).response(), S_FAILURE);
    }
}
