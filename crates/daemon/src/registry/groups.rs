//! The groups of devices that share their limits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use kickless_device::Limiter;
use kickless_sync::lock;

use crate::config::KindConfig;

/// The limiters of all groups, by the kind of their devices and their name. Devices of several kinds share
/// none, because the limits of each kind have units of their own.
#[derive(Default)]
pub(super) struct Groups(Mutex<HashMap<(&'static str, String), Weak<Limiter>>>);

impl Groups {
    /// Returns the limiter of a device with these options. Its limits become those of its group.
    pub(super) fn limiter(&self, of: &KindConfig) -> Arc<Limiter> {
        let limiter = match of.group() {
            None => Arc::default(),
            Some(group) => {
                let mut groups = lock(&self.0);
                groups.retain(|_, limiter| limiter.strong_count() > 0);
                let group = (of.words().name, group);
                let known = groups.get(&group).and_then(Weak::upgrade);
                known.unwrap_or_else(|| {
                    let limiter = Arc::default();
                    groups.insert(group, Arc::downgrade(&limiter));
                    limiter
                })
            }
        };
        limiter.set(&of.limits());
        limiter
    }
}
