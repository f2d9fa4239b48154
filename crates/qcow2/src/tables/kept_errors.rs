//! Errors of operations, kept for the requests that wait for them.

use rustix::io::Errno;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// The time for which an error is kept. A request that waits is woken at once, and takes it. One that was
/// cancelled never does, and a later request must try again instead of taking the error of an earlier time.
/// A request that comes too late tries again as well.
const KEEP_TIME: Duration = Duration::from_secs(1);

/// The errors by what the requests wait for.
#[derive(Debug)]
pub(super) struct KeptErrors<K>(HashMap<K, (Errno, Instant)>);

impl<K> Default for KeptErrors<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> KeptErrors<K> {
    /// Keeps an error.
    pub(super) fn put(&mut self, key: K, errno: Errno) {
        self.put_at(key, errno, Instant::now());
    }

    /// Takes an error out.
    pub(super) fn take(&mut self, key: &K) -> Option<Errno> {
        if self.0.is_empty() { None } else { self.take_at(key, Instant::now()) }
    }

    fn put_at(&mut self, key: K, errno: Errno, now: Instant) {
        self.0.retain(|_, (_, kept)| now.duration_since(*kept) < KEEP_TIME);
        self.0.insert(key, (errno, now));
    }

    fn take_at(&mut self, key: &K, now: Instant) -> Option<Errno> {
        let (errno, kept) = self.0.remove(key)?;
        (now.duration_since(kept) < KEEP_TIME).then_some(errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_taken_once_and_soon() {
        let (mut errors, start) = (KeptErrors::default(), Instant::now());
        errors.put_at(1, Errno::IO, start);
        errors.put_at(2, Errno::NOSPC, start);
        assert_eq!(errors.take_at(&1, start + KEEP_TIME / 2), Some(Errno::IO));
        assert_eq!(errors.take_at(&1, start + KEEP_TIME / 2), None);
        assert_eq!(errors.take_at(&2, start + KEEP_TIME), None);
        // These are not taken.
        for key in 0..100 {
            errors.put_at(key, Errno::IO, start + KEEP_TIME * key);
        }
        assert_eq!(errors.0.len(), 1);
    }
}
