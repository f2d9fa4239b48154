//! The handle that all users of an open disk share.

use std::sync::Arc;
use std::thread;

use crate::core::{Core, is_called_back};
use crate::error::Error;
use crate::reconnect::Reconnect;

/// Closes the disk when the last user drops it.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if is_called_back() {
            // A handler dropped it, so this thread holds a lock that closing needs.
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
