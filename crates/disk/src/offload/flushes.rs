//! The flushes that a library has at the same time.
//!
//! A failed flush means that acknowledged writes may be lost. The library may report that only once: librbd's
//! write-around cache reports its error to the next flush, and an NBD server with a page cache gets it once
//! from its kernel. The other current flushes of the library then succeed, and so do later ones. So a failed
//! flush counts as a loss, which each queue reports ([`crate::lost_writes`]).
//!
//! The answer of a successful flush can come before that of the failed one. So it is held until the library
//! has ended all other flushes that are in flight at this moment. If one of them fails, the held answer has
//! the higher count. An answer never waits for a flush that was submitted after it came, nor for another
//! answer. So each wait ends. It does not wait either for a flush that was given up because the disk stops.

/// The flushes in flight at a library, and the loss count for its answers. `T` is the data needed to answer a
/// flush.
#[derive(Debug)]
pub(crate) struct Flushes<T> {
    lost_writes: u64,
    /// The number of the next flush.
    next: u64,
    /// The numbers of the flushes in flight.
    in_flight: Vec<u64>,
    /// Successful flushes that are held. Each waits for all flushes in flight with numbers below its own.
    held: Vec<(u64, T)>,
}

impl<T> Default for Flushes<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> Flushes<T> {
    pub(crate) fn new(lost_writes: u64) -> Self {
        Self { lost_writes, next: 0, in_flight: Vec::new(), held: Vec::new() }
    }

    /// Returns the number of times when acknowledged writes may have been lost.
    pub(crate) fn lost_writes(&self) -> u64 {
        self.lost_writes
    }

    /// Begins a flush. Returns its number.
    pub(crate) fn begin(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.in_flight.push(number);
        number
    }

    /// Records that a flush succeeded.
    pub(crate) fn succeed(&mut self, number: u64, flush: T) {
        self.forget(number);
        self.held.push((self.next, flush));
    }

    /// Records that a flush failed.
    pub(crate) fn fail(&mut self, number: u64) {
        self.forget(number);
        self.count_loss();
    }

    /// Records that acknowledged writes may be lost.
    pub(crate) fn count_loss(&mut self) {
        self.lost_writes += 1;
    }

    /// Stops waiting for a flush.
    pub(crate) fn forget(&mut self, number: u64) {
        self.in_flight.retain(|other| *other != number);
    }

    /// Takes a flush that can be answered now. Call this after each of the above, until it returns `None`.
    pub(crate) fn due(&mut self) -> Option<T> {
        let first = self.in_flight.iter().min().copied().unwrap_or(self.next);
        self.take_if(|before, _| before <= first)
    }

    /// Takes a held flush that meets a condition.
    pub(crate) fn take_if(&mut self, mut wanted: impl FnMut(u64, &T) -> bool) -> Option<T> {
        let at = self.held.iter().position(|(before, flush)| wanted(*before, flush))?;
        Some(self.held.remove(at).1)
    }

    /// Returns the held flushes.
    pub(crate) fn held(&self) -> impl Iterator<Item = &T> {
        self.held.iter().map(|(_, flush)| flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(flushes: &mut Flushes<char>) -> String {
        std::iter::from_fn(|| flushes.due()).collect()
    }

    #[test]
    fn an_answer_waits_for_concurrent_flushes() {
        let mut flushes = Flushes::new(3);
        let [a, b, c] = [(); 3].map(|()| flushes.begin());
        flushes.succeed(b, 'b');
        assert_eq!(due(&mut flushes), "");
        // This flush began after b had ended, so b does not wait for it.
        let d = flushes.begin();
        flushes.succeed(a, 'a');
        assert_eq!(due(&mut flushes), "");
        flushes.fail(c);
        assert_eq!((flushes.lost_writes(), &due(&mut flushes)[..]), (4, "b"));
        flushes.forget(d);
        assert_eq!(due(&mut flushes), "a");
        let alone = flushes.begin();
        flushes.succeed(alone, 'e');
        assert_eq!((flushes.lost_writes(), &due(&mut flushes)[..]), (4, "e"));
    }
}
