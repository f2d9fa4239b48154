//! The cost of sleeping and waking on this machine.

use super::Nanos;

/// A worker's measurements of its machine, made when it starts and updated later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// The processor time of one sleep and the wake that ends it.
    pub sleep_cpu: Nanos,
    /// The time from an event until the worker runs again.
    pub wake_delay: Nanos,
    /// The delay of a timed sleep's end.
    pub nap_overshoot: Nanos,
    /// Other threads want the core; see [`Pressure`](super::Pressure).
    pub contended: bool,
}
