//! The decision about a queue that was found empty.

use super::Nanos;

/// What to do with a queue that was found empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Look again, and go on looking; ask again at `until`, which is in the future, if nothing has come by then.
    Spin {
        /// When to ask again.
        until: Nanos,
    },
    /// Sleep with kicks off.
    Nap {
        /// When to wake, in the future.
        until: Nanos,
        /// Completions wait until then; otherwise one ends the nap as well.
        deaf: bool,
    },
    /// Enable kicks and wait for one.
    Arm,
}
