//! Operations that go to the kernel before their batch is complete.
//!
//! A batch costs one system call, and the device stands still until it has been prepared and made: with 32 reads at a time, each
//! batch done before the next comes, that was a quarter of the throughput of a virtual disk. One call for each operation costs the processor
//! what a batch is there to save. So before one more is staged, what is staged goes, if that is as much as the engine has been given
//! and not done: pieces of 1, 1, 2, 4, 8 and so on. A device that has nothing to do begins with the first operation of a batch while
//! the others are being prepared, and for a busy one there is hardly a call more.
//!
//! The operation that was staged last stays until another comes that cannot be merged with it, or the batch ends. Where a thread
//! submits ([`crate::desk`]) a batch stays whole: it costs the wake-up of that thread.

/// Whether the operations that wait are to go before one more does.
///
/// `waiting` have not been handed to the kernel; `given` have, and are not completed.
#[inline]
pub(crate) fn is_time(waiting: usize, given: usize) -> bool {
    waiting > 0 && waiting >= given
}

#[cfg(test)]
mod tests {
    use super::is_time;

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
    fn an_idle_device_gets_small_pieces_and_a_busy_one_the_batch() {
        assert_eq!(pieces(1, 0), []);
        assert_eq!(pieces(32, 0), [1, 1, 2, 4, 8]);
        assert_eq!(pieces(32, 20), [20]);
        assert_eq!(pieces(32, 32), []);
    }
}
