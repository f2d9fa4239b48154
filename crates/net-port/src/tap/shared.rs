//! TAPs that several cards of this process share: those of uplinks.

use super::{Tap, TapError};
use kickless_handover::{Given, Part};
use kickless_sync::lock;
use std::sync::{Arc, Mutex, Weak};

/// The TAPs that are open, each with its name and its switch.
static TAPS: Mutex<Vec<(String, String, Weak<Tap>)>> = Mutex::new(Vec::new());

impl Tap {
    /// Returns the TAP `name` as the uplink of this switch. Opens it with one queue if no card has it.
    ///
    /// # Errors
    /// The kernel refuses the TAP, or it is the uplink of another switch.
    pub fn share(name: &str, switch: &str) -> Result<Arc<Self>, TapError> {
        Self::share_with(name, switch, || Self::open(name, 1))
    }

    /// Takes the TAP `name` over as the uplink of this switch, as another process gives it. Each card of the
    /// switch has a duplicate of its queue, of which the first one is used.
    ///
    /// # Errors
    /// The descriptor is no such TAP, or it is the uplink of another switch.
    pub fn share_given(
        name: &str,
        switch: &str,
        given: Part,
        from: &mut Given,
    ) -> Result<Arc<Self>, TapError> {
        let tap = Self::taken_over(given, from, Some(name), 1)?;
        Self::share_with(name, switch, || Ok(tap))
    }

    fn share_with(
        name: &str,
        switch: &str,
        open: impl FnOnce() -> Result<Self, TapError>,
    ) -> Result<Arc<Self>, TapError> {
        let mut taps = lock(&TAPS);
        taps.retain(|(_, _, tap)| tap.strong_count() > 0);
        let known = taps.iter().find(|(known, _, _)| known == name);
        if let Some((_, other, tap)) = known
            && let Some(tap) = tap.upgrade()
        {
            return match other == switch {
                true => Ok(tap),
                false => Err(TapError::OtherSwitch { name: name.into(), switch: other.clone() }),
            };
        }
        let tap = Arc::new(open()?);
        taps.push((name.into(), switch.into(), Arc::downgrade(&tap)));
        Ok(tap)
    }
}
