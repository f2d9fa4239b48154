//! The kinds of operations of a disk, for counters and for the log.

use crate::request::{Kind, RangeOp};

/// The operations that are counted, and whose failures are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    /// A request that does not reach the disk: one for an identity, or an invalid one.
    Other,
}

impl Operation {
    pub(crate) const ALL: [(Self, &'static str); 6] = [
        (Self::Read, "read"),
        (Self::Write, "write"),
        (Self::Flush, "flush"),
        (Self::Discard, "discard"),
        (Self::WriteZeroes, "write-zeroes"),
        (Self::Other, "other"),
    ];

    pub(crate) fn of(kind: Kind) -> Self {
        match kind {
            Kind::Write { .. } => Self::Write,
            Kind::Flush => Self::Flush,
            Kind::Extents(RangeOp::Discard) => Self::Discard,
            Kind::Extents(RangeOp::WriteZeroes) => Self::WriteZeroes,
            Kind::Read { .. } => Self::Read,
            Kind::GetId => Self::Other,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// Returns the names of all operations, in the order of their numbers.
    pub(crate) fn names() -> [&'static str; Self::ALL.len()] {
        Self::ALL.map(|(_, name)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_own_name() {
        for (place, (operation, _)) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, place);
        }
    }
}
