//! What can be wrong with an update.

use crate::{Iova, UserAddr};

/// Why a translation is not taken in. The front-end is to blame for each but [`UpdateError::Full`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// No bytes.
    #[error("translation of {iova} is empty")]
    Empty {
        /// Where it begins.
        iova: Iova,
    },
    /// An end that does not fit into 64 bits.
    #[error("translation of {len:#x} bytes at {iova} to {user} wraps around")]
    Wraps {
        /// Where it begins.
        iova: Iova,
        /// What it leads to.
        user: UserAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// Not whole pages of 4 KiB.
    #[error("translation of {len:#x} bytes at {iova} to {user} is not of whole pages")]
    Misaligned {
        /// Where it begins.
        iova: Iova,
        /// What it leads to.
        user: UserAddr,
        /// Its length in bytes.
        len: u64,
    },
    /// Neither reading nor writing.
    #[error("translation of {iova} allows nothing")]
    NoAccess {
        /// Where it begins.
        iova: Iova,
    },
    /// There is no node left for it: evict something, or say that the nodes in limbo can be used.
    #[error("no room for the translation of {iova}")]
    Full {
        /// Where it begins.
        iova: Iova,
    },
}
