//! A fake device that calls hooks of a test.

use std::sync::Arc;

use kickless_device::{CloseError, Operate};
use kickless_testing::{Fake, FakeDevice};

type Hook = Arc<dyn Fn() + Send + Sync>;

/// The hooks that a device calls.
#[derive(Clone)]
pub(crate) struct Hooks {
    /// Called by `Device::limit_remote_waits`, in a forced removal.
    pub(crate) limit_remote_waits: Hook,
    /// Called by `Device::close`. Returns whether everything was written back.
    pub(crate) close: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Called when the device is dropped.
    pub(crate) drop: Hook,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { limit_remote_waits: Arc::new(|| {}), close: Arc::new(|| true), drop: Arc::new(|| {}) }
    }
}

impl Hooks {
    /// Makes a device that calls these hooks.
    pub(crate) fn into_device(self) -> Arc<dyn Operate> {
        Arc::new(FakeDevice(Hooked(self)))
    }
}

struct Hooked(Hooks);

impl Fake for Hooked {
    fn limit_remote_waits(&self) {
        (self.0.limit_remote_waits)();
    }

    fn close(&self) -> Result<(), CloseError> {
        if (self.0.close)() { Ok(()) } else { Err(CloseError("the disk is full".into())) }
    }
}

impl Drop for Hooked {
    fn drop(&mut self) {
        (self.0.drop)();
    }
}
