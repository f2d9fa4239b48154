//! Early submission: operations that go to the kernel before their batch is complete.
//!
//! A batch costs one system call. The device is idle until the batch is prepared and submitted. With 32 reads
//! at a time, where each batch was done before the next came, this cost a quarter of the throughput of a
//! virtual disk. On the other hand, one call for each operation costs the processor time that a batch saves.
//!
//! So a batch goes to the kernel in pieces. Before one more operation is staged, the staged ones are
//! submitted if they are at least as many as the owner has in flight. The pieces have 1, 1, 2, 4, 8
//! operations and so on. Operations of other owners do not count, because their devices can hang. An idle
//! device begins with the first operation while the others are being prepared. A busy device gets hardly any
//! more calls.
//!
//! A thread of an owner's share ([`crate::threads::pool`]) gets a whole batch, and submits it in such pieces.
//! This costs calls, but no wake-ups.
//!
//! The operation that was staged last stays until another comes that cannot be merged with it, or until the
//! batch ends.

/// Returns whether the staged operations should go before one more is staged.
///
/// `staged` operations are staged. The kernel has `in_kernel` operations of the owner.
#[inline]
pub(crate) fn is_due(staged: usize, in_kernel: usize) -> bool {
    staged > 0 && staged >= in_kernel
}

/// Returns the size of the next piece of a batch whose operations are all staged, by the same rule.
pub(crate) fn next_piece(staged: usize, in_kernel: usize) -> usize {
    staged.min(in_kernel.max(1))
}

#[cfg(test)]
mod tests {
    use super::{is_due, next_piece};

    /// Returns the sizes of the pieces that are submitted while a batch is being staged.
    fn pieces(batch: usize, mut in_kernel: usize) -> Vec<usize> {
        let (mut pieces, mut staged) = (Vec::new(), 0);
        for _ in 0..batch {
            if is_due(staged, in_kernel) {
                pieces.push(staged);
                in_kernel += std::mem::take(&mut staged);
            }
            staged += 1;
        }
        pieces
    }

    #[test]
    fn a_complete_batch_has_pieces_of_the_same_sizes() {
        let pieces = |mut staged: usize, mut in_kernel: usize| {
            let mut pieces = Vec::new();
            while staged > 0 {
                pieces.push(next_piece(staged, in_kernel));
                in_kernel += pieces[pieces.len() - 1];
                staged -= pieces[pieces.len() - 1];
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
        assert!(pieces(1, 0).is_empty());
        assert_eq!(pieces(32, 0), [1, 1, 2, 4, 8]);
        assert_eq!(pieces(32, 20), [20]);
        assert!(pieces(32, 32).is_empty());
    }
}
