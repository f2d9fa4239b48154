//! Turns panics of libraries into failures of single requests.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

thread_local! {
    static CATCHES: Cell<bool> = const { Cell::new(false) };
}

/// Calls `call` and catches a panic.
///
/// # Errors
/// It panicked.
pub(crate) fn catch<T>(call: impl FnOnce() -> T) -> thread::Result<T> {
    let outer = CATCHES.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    CATCHES.set(outer);
    result
}

/// Returns whether this crate catches a panic of the current thread.
///
/// A program whose panic hook ends the process asks this first.
pub fn catches_panic() -> bool {
    CATCHES.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_announced_and_caught() {
        assert!(!catches_panic());
        let result = catch(|| {
            assert!(catch(catches_panic).unwrap() && catches_panic());
            panic!("a library's mistake");
        });
        let _: Box<dyn std::any::Any + Send> = result.unwrap_err();
        assert!(!catches_panic());
    }
}
