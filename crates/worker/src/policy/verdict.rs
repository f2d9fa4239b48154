//! The decision about a queue that was found empty.

use super::Nanos;

/// The decision about a queue that was found empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Poll the ring again and again. Ask the policy again at `until`, which is in the future, if no work has
    /// come by then.
    Spin {
        /// The time at which to ask again.
        until: Nanos,
    },
    /// Sleep with kicks off.
    Nap {
        /// The time at which to wake, in the future.
        until: Nanos,
        /// Completions do not end the nap. Otherwise one does.
        ignore_completions: bool,
    },
    /// Enable kicks and wait for one.
    Arm,
}
