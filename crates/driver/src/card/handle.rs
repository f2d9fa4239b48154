//! The handle that all users of a card share.

use std::sync::Arc;

use crate::card::core::CardCore;
use crate::reconnect::Reconnect;

/// Closes the card when the last user drops it.
pub(crate) struct CardHandle {
    pub(crate) core: Arc<CardCore>,
}

impl Drop for CardHandle {
    fn drop(&mut self) {
        self.core.close();
    }
}
