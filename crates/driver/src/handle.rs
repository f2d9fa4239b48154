//! The handle that all users of an open disk share.

use std::sync::Arc;
use std::thread;

use crate::core::Core;
use crate::error::Error;
use crate::reconnect::Reconnect;
use crate::ring::is_delivering;

/// Closes the disk when the last user drops it.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if is_delivering() {
            // A callback dropped it, so this thread holds a lock that closing needs.
            let core = self.core.clone();
            let spawned = thread::Builder::new().name("kickless-close".into()).spawn(move || core.close());
            if spawned.is_err() {
                self.core.die(Error::Unplugged);
            }
        } else {
            self.core.close();
        }
    }
}
