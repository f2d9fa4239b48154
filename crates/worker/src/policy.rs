//! When a queue that was found empty goes from looking to being kicked. Pure: times in, decision out.

use std::time::Duration;

/// How long an empty queue is looked at before it is armed. About what the driver's kick and the worker's wake-up cost together
/// on an idle machine: a spin that ends in vain at most doubles the cost of the sleep that it tried to avoid.
pub const LINGER: Duration = Duration::from_micros(20);

/// What to do with a queue that was found empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Empty {
    /// Look again.
    Look,
    /// Enable kicks and wait for one.
    Arm,
}

/// Decides for a queue that last yielded work `idle` ago.
pub fn empty(idle: Duration) -> Empty {
    if idle < LINGER { Empty::Look } else { Empty::Arm }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lingers_then_arms() {
        assert_eq!(empty(Duration::ZERO), Empty::Look);
        assert_eq!(empty(LINGER - Duration::from_nanos(1)), Empty::Look);
        assert_eq!(empty(LINGER), Empty::Arm);
    }
}
