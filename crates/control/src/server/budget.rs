//! The budget of descriptors of all clients.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

use crate::inbox::DESCRIPTORS_MAX;

/// The part of the descriptors of the process that clients can have: a quarter. Devices, workers and
/// connections need the rest.
const PART: u64 = 4;

/// Bounds the descriptors that clients have sent and that are still open: those that wait for the end of
/// their line, those of calls, and those that are being closed.
///
/// Descriptors of devices do not count. A device has duplicates, as if it had opened them itself.
#[derive(Debug)]
pub(super) struct Budget {
    free: Mutex<usize>,
    returned: Condvar,
    size: usize,
}

/// A part of the budget for one descriptor. Dropping it returns it.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Budget>);

impl Drop for Permit {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.returned.notify_all();
    }
}

impl Budget {
    /// Makes the budget of this process for so many clients: at most a whole line of each.
    pub(super) fn of_process(clients_max: usize) -> Self {
        // No limit is the largest number.
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let part = usize::try_from(limit / PART).unwrap_or(usize::MAX);
        Self::new(part.clamp(DESCRIPTORS_MAX, clients_max * DESCRIPTORS_MAX))
    }

    fn new(size: usize) -> Self {
        Self { free: Mutex::new(size), returned: Condvar::new(), size }
    }

    /// Returns the number of descriptors that all clients can have.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Returns permits for `count` descriptors. Waits for them up to `wait`. Returns `None` if there are
    /// still too few then.
    pub(super) fn take(self: &Arc<Self>, count: usize, wait: Duration) -> Option<Vec<Permit>> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.returned.wait_timeout_while(free, wait, |free| *free < count);
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(count)?;
        Some((0..count).map(|_| Permit(self.clone())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn permits_return_and_are_waited_for() {
        let budget = Arc::new(Budget::new(3));
        let two = budget.take(2, Duration::ZERO).unwrap();
        assert!(budget.take(2, Duration::ZERO).is_none());
        let one = budget.take(1, Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| budget.take(3, Duration::MAX).map(|permits| permits.len()));
            drop((one, two));
            assert_eq!(waiting.join().unwrap(), Some(3));
        });
        assert_eq!(*budget.free.lock().unwrap(), 3);
    }

    #[test]
    fn a_process_has_a_budget_for_one_line_and_keeps_most_for_itself() {
        let size = Budget::of_process(64).size();
        assert!((DESCRIPTORS_MAX..=64 * DESCRIPTORS_MAX).contains(&size));
    }
}
