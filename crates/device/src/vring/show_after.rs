//! The moments at which completions of a batch are shown to the driver, before
//! [`Vring::publish`](super::Vring::publish) shows the rest.
//!
//! The driver takes the completions that it is shown and makes new requests of them, while the device goes
//! on. Without this the two take turns. The best moment depends on the driver:
//!
//! * A driver that asks for calls is about to sleep when it finds nothing. It is shown the first completion
//!   at once. Shown half of a batch instead, a driver with 32 requests in flight got a tenth of the requests.
//! * A driver that polls does not sleep, and gets half of a batch. Requests go round in two groups then, one
//!   at each end. Shown the first completion alone, it answers with a single request, so that small groups
//!   form. The price of each group is the way of the index's cache line between two processors, 80 to 400 ns
//!   there and back. With two groups, 8, 16 and 32 requests in flight to a disk that answers at once were
//!   1.15, 1.24 and 1.1 times as fast, and 4 in flight 0.94 times. With a single request in flight, the
//!   driver sees its completion before the worker has found that there is nothing else: 1.03 times as many
//!   requests in packed rings, and 1.05 times in split ones.
//! * If the worker serves other rings meanwhile, these are at its end while the driver has this batch. Then a
//!   group is half of all that the worker serves in a round. Four rings with 8 requests each go round as four
//!   groups of 8, and not of 4, which made them 1.1 times as fast: each group costs two visits.

/// The rule for the moments at which completions are shown. A group is never split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShowAfter {
    /// Shows the first completion at once and the others sixteen at a time to a driver that asks for calls.
    /// Shows half of a batch, but at most eight at a time, to a driver that polls. Shows the only one at
    /// once.
    Early,
    /// Shows nothing before [`Vring::publish`](super::Vring::publish).
    Publish,
}

/// The number of completions, after the first, that a driver that asks for calls is shown together.
const GROUP_WITH_CALLS: u32 = 16;
/// The largest number of completions that a polling driver is shown together: the used elements in a cache
/// line of 64 bytes. More of them saved nothing, with up to 128 requests in flight.
const GROUP_POLLING_MAX: u32 = 8;
/// The number of batches without a call after which a new driver counts as one that polls: some milliseconds.
const POLLS_WHEN_NEW: u32 = 1 << 10;
/// The number of batches without a call after which a driver that was called counts as one that polls. A
/// driver that sleeps may find a completion before each sleep for as long, and then loses some sleeps of 50
/// us: a thousandth of the time of so many batches, which take a microsecond each at least.
const POLLS_AFTER_CALL: u32 = 1 << 16;
/// The number of completions since the last call from which a call says nothing of the driver. The indices of
/// a split ring wrap after 65 536 completions, so the index at which a polling driver once asked for a call
/// comes again as often, less the completions of a batch, at most half of them.
const CALL_INDEX_WRAP: u32 = 1 << 15;

/// The completions that the driver is not shown yet. A task that serves a ring beside others tells it of them
/// at the beginning of a batch ([`Unseen::begin_beside`]).
#[derive(Debug)]
pub(super) struct Unseen {
    rule: ShowAfter,
    count: u32,
    /// The count at which they are shown.
    max: u32,
    /// The number of completions in the last batch.
    last: u32,
    /// The number of completions of this batch that were shown.
    shown: u32,
    /// The number of batches until the driver counts as one that polls.
    until_polling: u32,
    /// The number of completions since the last call.
    since_call: u32,
}

impl Unseen {
    pub(super) fn new(rule: ShowAfter) -> Self {
        let mut unseen =
            Self { rule, count: 0, max: 0, last: 0, shown: 0, until_polling: POLLS_WHEN_NEW, since_call: 0 };
        unseen.max = unseen.first(0);
        unseen
    }

    /// Returns the number of completions of a batch that are shown first, if the worker has served `others`
    /// requests of other tasks since the last batch. It will serve about as many before the next one.
    #[inline]
    fn first(&self, others: u32) -> u32 {
        match self.rule {
            ShowAfter::Publish => u32::MAX,
            ShowAfter::Early if self.until_polling > 0 => 1,
            // Probably the only completion of a batch. It need not wait until the batch has ended.
            ShowAfter::Early if self.last <= 1 => 1,
            // All of the batch, if it is as large as the last one. They are shown before the publish, so that
            // the stores have left the processor at its fence.
            ShowAfter::Early if others >= self.last => self.last,
            ShowAfter::Early => ((self.last + others) / 2).min(GROUP_POLLING_MAX),
        }
    }

    /// Begins a batch beside `others` requests of other tasks: see [`Unseen::first`].
    #[inline]
    pub(super) fn begin_beside(&mut self, others: u32) {
        if others > 0 {
            self.max = self.first(others);
        }
    }

    /// Adds completions. Returns whether to show them now.
    #[inline(always)]
    pub(super) fn add(&mut self, count: u32) -> bool {
        self.count = self.count.saturating_add(count);
        self.count >= self.max
    }

    /// Notes that the completions were shown, and that the batch goes on.
    pub(super) fn shown(&mut self) {
        self.shown = self.shown.saturating_add(std::mem::take(&mut self.count));
        self.max = match self.rule {
            ShowAfter::Publish => u32::MAX,
            ShowAfter::Early if self.until_polling > 0 => GROUP_WITH_CALLS,
            ShowAfter::Early => self.max.max(GROUP_POLLING_MAX),
        };
    }

    /// Notes the end of a batch, which was shown. `called`: the driver wanted a call.
    #[inline]
    pub(super) fn published(&mut self, called: bool) {
        let last = std::mem::take(&mut self.shown).saturating_add(std::mem::take(&mut self.count));
        self.since_call = self.since_call.saturating_add(last);
        let sleeps = called && self.since_call < CALL_INDEX_WRAP;
        self.until_polling = if sleeps { POLLS_AFTER_CALL } else { self.until_polling.saturating_sub(1) };
        if called {
            self.since_call = 0;
        }
        self.last = last;
        self.max = self.first(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of completions that are shown together in a batch of so many.
    fn batch(unseen: &mut Unseen, count: u32, called: bool) -> Vec<u32> {
        let (mut shows, mut last) = (Vec::new(), 0);
        for nth in 1..=count {
            if unseen.add(1) {
                unseen.shown();
                shows.push(nth - std::mem::replace(&mut last, nth));
            }
        }
        unseen.published(called);
        shows
    }

    #[test]
    fn a_driver_that_polls_gets_half_of_a_batch_and_one_that_sleeps_the_first_completion() {
        let mut unseen = Unseen::new(ShowAfter::Early);
        assert_eq!(batch(&mut unseen, 40, true), [1, 16, 16]);
        for _ in 0..POLLS_AFTER_CALL {
            assert_eq!(batch(&mut unseen, 20, false), [1, 16]);
        }
        assert_eq!(batch(&mut unseen, 40, false), [8, 8, 8, 8, 8]);
        assert!(batch(&mut unseen, 7, false).is_empty());
        assert_eq!(batch(&mut unseen, 7, false), [3]);
        assert!(batch(&mut unseen, 2, false).is_empty());
        assert_eq!(batch(&mut unseen, 1, false), [1]);
        assert_eq!(batch(&mut unseen, 1, false), [1]);
        assert_eq!(batch(&mut unseen, 9, false), [1, 8]);
        // One call after so many completions may be that of an old index.
        batch(&mut unseen, 40, true);
        assert_eq!(batch(&mut unseen, 20, false), [8, 8]);
        batch(&mut unseen, 40, true);
        assert_eq!(batch(&mut unseen, 20, false), [1, 16]);
    }

    #[test]
    fn a_polling_driver_gets_all_of_a_batch_while_others_are_served() {
        let mut unseen = Unseen::new(ShowAfter::Early);
        let mut beside = |others, count| {
            unseen.begin_beside(others);
            batch(&mut unseen, count, false)
        };
        // A driver that sleeps is shown the first completion in any case.
        for _ in 0..POLLS_WHEN_NEW {
            assert_eq!(beside(24, 8), [1]);
        }
        assert_eq!(beside(24, 8), [8]);
        assert!(beside(u32::MAX, 7).is_empty());
        assert_eq!(beside(96, 7), [7]);
        assert_eq!(beside(7, 32), [7, 8, 8, 8]);
        assert_eq!(beside(96, 32), [32]);
        // The others have less than half of the work.
        assert_eq!(beside(1, 32), [8, 8, 8, 8]);
        assert_eq!(beside(0, 8), [8]);
        assert_eq!(beside(2, 8), [5]);
        assert!(beside(0, 1).is_empty());
        assert_eq!(beside(24, 1), [1]);
    }

    /// The driver writes its event index once, so it is called again whenever the index comes round.
    #[test]
    fn a_polling_driver_with_an_old_event_index_counts_as_one_that_polls() {
        let mut unseen = Unseen::new(ShowAfter::Early);
        let mut count = 0u32;
        for _ in 0..2 * POLLS_AFTER_CALL {
            let called = count >> 16 != (count + 20) >> 16 || count == 0;
            batch(&mut unseen, 20, called);
            count += 20;
        }
        assert_eq!(batch(&mut unseen, 40, false), [8, 8, 8, 8, 8]);
    }

    #[test]
    fn nothing_is_shown_before_a_publish_if_a_task_wants_that() {
        let mut unseen = Unseen::new(ShowAfter::Publish);
        for _ in 0..3 {
            assert!(batch(&mut unseen, 500, false).is_empty());
        }
    }
}
