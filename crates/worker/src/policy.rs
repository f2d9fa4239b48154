//! When a queue that was found empty goes from looking to being kicked. Pure: times in, decision out.

use crate::Poll;
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
pub fn empty(poll: Poll, idle: Duration) -> Empty {
    let look = match poll {
        Poll::Always => true,
        Poll::Never => false,
        Poll::Auto { .. } => idle < LINGER,
        Poll::Rate { stop_idle, .. } => idle < stop_idle,
    };
    if look { Empty::Look } else { Empty::Arm }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lingers_then_arms() {
        let auto = Poll::default();
        assert_eq!(empty(auto, Duration::ZERO), Empty::Look);
        assert_eq!(empty(auto, LINGER - Duration::from_nanos(1)), Empty::Look);
        assert_eq!(empty(auto, LINGER), Empty::Arm);
        assert_eq!(empty(Poll::Never, Duration::ZERO), Empty::Arm);
        assert_eq!(empty(Poll::Always, Duration::MAX), Empty::Look);
    }
}
