//! Operations that go to the kernel before their batch is complete.
//!
//! A batch costs one system call, and the device stands still until it has been prepared and made: with 32 reads at a time, each
//! batch done before the next comes, that was a quarter of the throughput of a virtual disk. One call for each operation costs the processor
//! what a batch is there to save. So before one more is staged, what is staged goes, if that is as much as the engine has been given
//! and not done for the owner: pieces of 1, 1, 2, 4, 8 and so on. Operations of other owners do not count, because their devices can
//! hang. A device that has nothing to do begins with the first operation of a batch while
//! the others are being prepared, and for a busy one there is hardly a call more.
//!
//! A thread of an owner's share ([`crate::threads::pool`]) gets a whole batch, and gives it to the kernel in such pieces: that costs calls and no wake-ups.
//!
//! The operation that was staged last stays until another comes that cannot be merged with it, or the batch ends. Where the thread
//! beside the worker submits ([`crate::submit_thread::handover`]) a batch stays whole: it costs the wake-up of that thread.

/// Whether the operations that wait are to go before one more does.
///
/// `waiting` have not been handed to the kernel; `given` have, and are not completed.
#[inline]
pub(crate) fn is_time(waiting: usize, given: usize) -> bool {
    waiting > 0 && waiting >= given
}

/// Returns how many of those that wait go to the kernel next, where all of them are there and one after the other goes. The same rule.
pub(crate) fn piece(waiting: usize, given: usize) -> usize {
    waiting.min(given.max(1))
}

#[cfg(test)]
mod tests {
    use super::{is_time, piece};

    /// Of a batch, the sizes of the pieces that go while it is staged.
    fn pieces(batch: usize, mut given: usize) -> Vec<usize> {
        let (mut pieces, mut waiting) = (Vec::new(), 0);
        for _ in 0..batch {
            if is_time(waiting, given) {
                pieces.push(waiting);
                given += std::mem::take(&mut waiting);
            }
            waiting += 1;
        }
        pieces
    }

    #[test]
    fn a_batch_that_is_there_goes_in_the_same_pieces() {
        let pieces = |mut waiting: usize, mut given: usize| {
            let mut pieces = Vec::new();
            while waiting > 0 {
                pieces.push(piece(waiting, given));
                given += pieces[pieces.len() - 1];
                waiting -= pieces[pieces.len() - 1];
            }
            pieces
        };
        assert_eq!(pieces(1, 0), [1]);
        assert_eq!(pieces(32, 0), [1, 1, 2, 4, 8, 16]);
        assert_eq!(pieces(32, 20), [20, 12]);
        assert_eq!(pieces(32, 32), [32]);
    }

    #[test]
    fn an_idle_device_gets_small_pieces_and_a_busy_one_the_batch() {
        assert_eq!(pieces(1, 0), []);
        assert_eq!(pieces(32, 0), [1, 1, 2, 4, 8]);
        assert_eq!(pieces(32, 20), [20]);
        assert_eq!(pieces(32, 32), []);
    }
}
