//! A device without function, which calls hooks of a test.

use std::sync::Arc;

use kickless_device::{ConfigError, Device, InvalidState, QueueTask, StartError, Vring, Words};
use kickless_spec::features::Features;

type Hook = Arc<dyn Fn() + Send + Sync>;

/// The hooks that the device calls.
#[derive(Clone)]
pub(crate) struct Hooks {
    /// Called by `Device::limit_remote_waits`, in a forced removal.
    pub(crate) limit_remote_waits: Hook,
    /// Called when the device is closed.
    pub(crate) drop: Hook,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { limit_remote_waits: Arc::new(|| {}), drop: Arc::new(|| {}) }
    }
}

pub(crate) struct Hooked(pub(crate) Hooks);

impl Drop for Hooked {
    fn drop(&mut self) {
        (self.0.drop)();
    }
}

impl Device for Hooked {
    fn words(&self) -> Words {
        Words { name: "fake", rings_option: "a test: rings=" }
    }
    fn features(&self) -> Features {
        Features::VERSION_1
    }
    fn queues_max(&self) -> u16 {
        1
    }
    fn queue_size_max(&self) -> u16 {
        64
    }
    fn limit_remote_waits(&self) {
        (self.0.limit_remote_waits)();
    }
    fn reset(&self) {}
    fn restore_unknown(&self) {}
    fn read_config(&self, _: usize, into: &mut [u8]) {
        into.fill(0);
    }
    fn write_config(&self, _: usize, _: &[u8]) -> Result<(), ConfigError> {
        Ok(())
    }
    fn open(&self) -> Result<(), StartError> {
        Ok(())
    }
    fn close(&self) {}
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }
    fn load(&self, _: &[u8]) -> Result<(), InvalidState> {
        Ok(())
    }
    fn start_queue(&self, _: Vring, _: Features) -> Result<Box<dyn QueueTask>, StartError> {
        Err(StartError("no queue is started".into()))
    }
}
