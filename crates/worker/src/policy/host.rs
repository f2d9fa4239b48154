//! What sleeping and waking costs on this machine.

use super::Nanos;

/// What a worker knows of the machine that it runs on: measured when it starts, and kept up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Processor time of one sleep and the wake that ends it.
    pub sleep_cpu: Nanos,
    /// From an event to the worker that runs again.
    pub wake_delay: Nanos,
    /// How much later than asked a timed sleep ends.
    pub nap_overshoot: Nanos,
    /// Other threads want the core; see [`Pressure`](super::Pressure).
    pub contended: bool,
}
