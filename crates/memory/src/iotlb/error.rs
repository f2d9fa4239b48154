//! Errors of an update.

use crate::{Iova, UserAddr};

/// A translation that the table refuses. The front-end is to blame, except for [`UpdateError::Full`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpdateError {
    /// No bytes.
    #[error("translation of {iova} is empty")]
    Empty {
        /// First address of the translation.
        iova: Iova,
    },
    /// An end that does not fit into 64 bits.
    #[error("translation of {len:#x} bytes at {iova} to {user} wraps around")]
    Wraps {
        /// First address of the translation.
        iova: Iova,
        /// The front-end's address that it leads to.
        user: UserAddr,
        /// Length in bytes.
        len: u64,
    },
    /// Not whole pages of 4 KiB.
    #[error("translation of {len:#x} bytes at {iova} to {user} is not of whole pages")]
    Misaligned {
        /// First address of the translation.
        iova: Iova,
        /// The front-end's address that it leads to.
        user: UserAddr,
        /// Length in bytes.
        len: u64,
    },
    /// It allows neither reading nor writing.
    #[error("translation of {iova} allows nothing")]
    NoAccess {
        /// First address of the translation.
        iova: Iova,
    },
    /// There is no node left. The caller must evict translations, or call
    /// [`Iotlb::quiesced`](super::Iotlb::quiesced) so that nodes in limbo can be used.
    #[error("no room for the translation of {iova}")]
    Full {
        /// First address of the translation.
        iova: Iova,
    },
}
