//! Counts the kicks in vain of each device. Pure. [`crate::kicks`] says what for.

use crate::clock::Nanos;
use crate::scheduler::Flow;

/// The number of kicks of one device in vain within a window. They take at most a twentieth of the time.
pub(crate) const IN_VAIN_MAX: u32 = 256;
pub(crate) const WINDOW: Nanos = 1_000_000;

/// The kicks in vain of each device.
#[derive(Debug, Default)]
pub(crate) struct KicksInVain {
    /// The beginning of the window of each flow, and the number of kicks since then.
    flows: Vec<(Nanos, u32)>,
}

impl KicksInVain {
    /// Counts a kick. Returns whether it is one too many.
    pub(crate) fn count(&mut self, flow: Flow, now: Nanos) -> bool {
        let index = flow.index();
        if self.flows.len() <= index {
            self.flows.resize(index + 1, (0, 0));
        }
        let (began, kicks) = &mut self.flows[index];
        if now.saturating_sub(*began) >= WINDOW {
            (*began, *kicks) = (now, 0);
        }
        *kicks += 1;
        *kicks > IN_VAIN_MAX
    }
}
