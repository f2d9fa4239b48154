//! Options of an engine, and their names.

use crate::files::shares::Shares;
use std::fmt;
use std::str::FromStr;

/// The most operations that one engine keeps in flight. No device gains from more, and the kernel's limit on
/// completion rings is near.
pub const DEPTH_MAX: u32 = 32768;

/// The most owners that can have a reserve in one engine: 500 devices, as a host with as many small guests
/// has, and some that come while others go. With AIO, seven workers with as many owners fit in the host's
/// default limit (`fs.aio-max-nr`, 65536): each takes 1024 and 16 for each owner.
pub const OWNERS_MAX: u32 = 512;

/// The kernel's limit on completions in a ring (`IORING_MAX_CQ_ENTRIES`).
const _: () = assert!(DEPTH_MAX + OWNERS_MAX * RESERVE <= 65536);

/// Operations that each owner can have in flight beside the depth that all share. This is enough for a guest
/// to go on at a good part of its speed beside a device that hangs.
const RESERVE: u32 = 16;

/// The kind of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// The best one that works here.
    #[default]
    Auto,
    /// io_uring only.
    Uring,
    /// Linux AIO only.
    Aio,
    /// A pool of threads that make blocking calls.
    Threads,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Uring => "io_uring",
            Self::Aio => "aio",
            Self::Threads => "threads",
        })
    }
}

/// The error for a name that is no engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an engine is one of auto, io_uring, aio, threads")]
pub struct UnknownEngine;

impl FromStr for EngineKind {
    type Err = UnknownEngine;

    fn from_str(name: &str) -> Result<Self, UnknownEngine> {
        match name {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::Uring),
            "aio" => Ok(Self::Aio),
            "threads" => Ok(Self::Threads),
            _ => Err(UnknownEngine),
        }
    }
}

/// The options of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// The kind of engine.
    pub kind: EngineKind,
    /// The operations in flight that all owners share: 1 to [`DEPTH_MAX`]. Other values are set to the
    /// nearest of these.
    pub depth: u32,
    /// The number of owners with a reserve of slots and threads beside that, up to [`OWNERS_MAX`]. A device
    /// that hangs can stop others only if there are more owners.
    pub owners: u32,
    /// At most one owner ever uses the engine. The worker then makes calls that can wait for the owner's file
    /// system. No other owner waits with it, and a handover to a thread would cost several context switches.
    pub lone_owner: bool,
}

impl EngineOptions {
    /// Makes default options, without reserves.
    pub fn new(kind: EngineKind, depth: u32) -> Self {
        Self { kind, depth, owners: 0, lone_owner: false }
    }

    /// Returns the owners' shares of the slots.
    pub(crate) fn shares(&self) -> Shares {
        Shares::new(self.depth as usize, RESERVE as usize, self.owners as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_their_values() {
        for kind in [EngineKind::Auto, EngineKind::Uring, EngineKind::Aio, EngineKind::Threads] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("uring".parse::<EngineKind>(), Err(UnknownEngine));
    }
}
