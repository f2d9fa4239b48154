//! The identity of a nexus: a driver and the controller that it is connected to.

use std::sync::Arc;

/// The longest identity.
pub const TRANSPORT_ID_LEN_MAX: usize = 252;

/// The identity of a nexus, as the TransportID of SPC-4 (section 7.6.4) or any other bytes.
///
/// The same driver has the same identity after a reconnection or a migration, and no two have the same one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransportId(Arc<[u8]>);

/// An identity without bytes, or one that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an identity of a nexus has 1 to {TRANSPORT_ID_LEN_MAX} bytes, and not {0}")]
pub struct InvalidTransportId(usize);

impl TransportId {
    /// Makes an identity of 1 to [`TRANSPORT_ID_LEN_MAX`] bytes.
    ///
    /// # Errors
    /// There are fewer or more.
    pub fn new(bytes: &[u8]) -> Result<Self, InvalidTransportId> {
        match bytes.len() {
            1..=TRANSPORT_ID_LEN_MAX => Ok(Self(bytes.into())),
            len => Err(InvalidTransportId(len)),
        }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}
