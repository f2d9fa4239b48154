//! Early submission: operations that go to the kernel before their batch is complete.
//!
//! A batch costs one system call. The device is idle until the batch is prepared and submitted. With 32 reads
//! at a time, where each batch was done before the next came, this cost a quarter of the throughput of a
//! virtual disk. On the other hand, one call for each operation costs the processor time that a batch saves.
//!
//! So before one more operation is staged, the staged ones go if they are at least as many as those in flight
//! for the owner: pieces of 1, 1, 2, 4, 8 and so on. Operations of other owners do not count, because their
//! devices can hang. An idle device begins with the first operation of a batch while the others are being
//! prepared. A busy device gets hardly any more calls.
//!
//! A thread of an owner's share ([`crate::threads::pool`]) gets a whole batch, and submits it in such pieces.
//! This costs calls, but no wake-ups.
//!
//! The operation that was staged last stays until another comes that cannot be merged with it, or until the
//! batch ends. If the thread beside the worker submits ([`crate::submit_thread::handover`]), a batch stays
//! whole, because each piece would cost a wake-up of that thread.

/// Returns whether the staged operations should go before one more is staged.
///
/// `waiting` are staged. `given` are with the kernel, and not completed.
#[inline]
pub(crate) fn is_due(waiting: usize, given: usize) -> bool {
    waiting > 0 && waiting >= given
}

/// Returns the number of operations of a complete batch that go to the kernel next, by the same rule.
pub(crate) fn piece(waiting: usize, given: usize) -> usize {
    waiting.min(given.max(1))
}

#[cfg(test)]
mod tests {
    use super::{is_due, piece};

    /// Returns the sizes of the pieces of a batch that go while it is staged.
    fn pieces(batch: usize, mut given: usize) -> Vec<usize> {
        let (mut pieces, mut waiting) = (Vec::new(), 0);
        for _ in 0..batch {
            if is_due(waiting, given) {
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
