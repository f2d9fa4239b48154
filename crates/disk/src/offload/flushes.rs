//! Flushes that a library has at the same time.
//!
//! A failed flush says that acknowledged writes may be lost, and the library may say so only once: librbd's write-around cache
//! keeps its error for the next flush, and an NBD server with a file behind a page cache hears of it once from its kernel. The other
//! flushes that the library has then succeed, and so do later ones. So a failed flush counts as a loss, of which each queue is told
//! ([`crate::lost_writes`]).
//!
//! The answer of a flush that succeeded can come before that of the one that failed. So it is held until all flushes have
//! ended that the library had when the answer came: if one of them fails, the answer has the higher count. Each answer waits for
//! flushes that were posted before it came and for no answer, so the waiting ends when the library has ended these. One
//! that is given up because the disk stops is not waited for any more.

/// Flushes that a library has, and the count of lost writes that goes into its answers. `T` is what is needed to answer one.
#[derive(Debug)]
pub(crate) struct Flushes<T> {
    lost_writes: u64,
    /// The number of the next flush.
    next: u64,
    /// Numbers of those that the library has.
    out: Vec<u64>,
    /// Flushes that succeeded and wait for the ones with smaller numbers than this.
    held: Vec<(u64, T)>,
}

impl<T> Default for Flushes<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> Flushes<T> {
    pub(crate) fn new(lost_writes: u64) -> Self {
        Self { lost_writes, next: 0, out: Vec::new(), held: Vec::new() }
    }

    /// Returns how often acknowledged writes may have been lost so far.
    pub(crate) fn lost_writes(&self) -> u64 {
        self.lost_writes
    }

    /// Gives a flush to the library; its number.
    pub(crate) fn begin(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.out.push(number);
        number
    }

    /// The library has said that this flush succeeded.
    pub(crate) fn succeed(&mut self, number: u64, flush: T) {
        self.give_up(number);
        self.held.push((self.next, flush));
    }

    /// The library has said that this flush failed.
    pub(crate) fn fail(&mut self, number: u64) {
        self.give_up(number);
        self.count_loss();
    }

    /// Acknowledged writes may be lost.
    pub(crate) fn count_loss(&mut self) {
        self.lost_writes += 1;
    }

    /// Waits no more for this flush.
    pub(crate) fn give_up(&mut self, number: u64) {
        self.out.retain(|out| *out != number);
    }

    /// Takes one that is to be answered now. To be called until there is none, after each of the above.
    pub(crate) fn due(&mut self) -> Option<T> {
        let first = self.out.iter().min().copied().unwrap_or(self.next);
        self.take_if(|before, _| before <= first)
    }

    /// Takes one that is held, for which this holds.
    pub(crate) fn take_if(&mut self, mut wanted: impl FnMut(u64, &T) -> bool) -> Option<T> {
        let at = self.held.iter().position(|(before, flush)| wanted(*before, flush))?;
        Some(self.held.remove(at).1)
    }

    /// The flushes that are held.
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
    fn an_answer_waits_for_those_beside_it() {
        let mut flushes = Flushes::new(3);
        let [a, b, c] = [(); 3].map(|()| flushes.begin());
        flushes.succeed(b, 'b');
        assert_eq!(due(&mut flushes), "");
        // It came after b had ended: b does not wait for it.
        let d = flushes.begin();
        flushes.succeed(a, 'a');
        assert_eq!(due(&mut flushes), "");
        flushes.fail(c);
        assert_eq!((flushes.lost_writes(), &due(&mut flushes)[..]), (4, "b"));
        flushes.give_up(d);
        assert_eq!(due(&mut flushes), "a");
        let alone = flushes.begin();
        flushes.succeed(alone, 'e');
        assert_eq!((flushes.lost_writes(), &due(&mut flushes)[..]), (4, "e"));
    }
}
