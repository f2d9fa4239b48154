//! Records the chains in flight for the next device (vhost-user, *Inflight I/O tracking*).
//!
//! A device that is killed loses its queue's indices. The ring says how far it is used, but not which of the
//! earlier chains are still in flight. So each queue can have a region of memory that the front-end keeps and
//! gives to the next device. This module defines the contents of the region. It also shows that the next
//! device resubmits each chain that was popped and not shown as used, in the order of the pops, and no other
//! chain.
//!
//! # The model
//! A killed process has carried out all instructions up to some point, and none after it. Pages that it
//! shares with others stay. So the argument is about the order of stores in the program, to the region *and*
//! to the ring. For each point between two stores, it says what the next device finds.
//! [`Records::store`](kickless_memory::Records::store) keeps the compiler from reordering these stores.
//!
//! While the queue runs, nothing in the region is read, because the queue keeps its contents in its own
//! memory. The region is read once at the next start, into a copy, which is checked. So a front-end that
//! overwrites the region harms only its own guest, and only after the next start.
//!
//! # Split
//! There is an entry for each head. *P* pops, *S* shows a batch, *R* resumes after another device.
//! ```text
//!   P1  entry[head].counter = counter++            S1  entry[h].next = the one before, for each of the batch
//!   P2  entry[head].inflight = 1                   S2  last_batch_head = the last one
//!                                                  S3  ring: used.idx += batch            the driver sees it
//!   R1  behind = used.idx - used_idx               S4  entry[h].inflight = 0, for each of the batch
//!   R2  if behind != 0: inflight = 0 for as many   S5  used_idx = used.idx
//!       entries from last_batch_head along next
//!   R3  used_idx = used.idx
//!   R4  resubmit entries with inflight, by counter; next_avail = used.idx + their number
//! ```
//! * Before P2 the chain was not popped. Only R4 computes `next_avail`: the popped chains are the used ones
//!   and those in flight. So P2 says both that the chain is in flight and that it was popped.
//! * Before S3 nothing of the batch is shown. `behind` is 0, and all of the batch is resubmitted. The stores
//!   of S1 and S2 are ignored.
//! * From S3 on all of the batch is shown. Until S5, `behind` is its length, and R2 finds its entries by S1
//!   and S2, however far S4 has come. S4 does not change `next`, and no chain is popped between S1 and S5.
//! * The device can be killed during R. R2 has the same result when it is repeated, and R3 ends it.
//! * The driver can reuse a head as soon as it sees S3. P2 of that chain comes after S5, because one thread
//!   does both.
//!
//! # Packed
//! The ring's descriptors tell little, because a used descriptor overwrites an available one. So an entry is
//! a copy of a descriptor. A chain takes as many entries as it has descriptors, from a free list, and is
//! known by the first entry. Each of the two words of the head holds a new and an old value, and changes in
//! one store.
//! ```text
//!   P1  copies; next, last, num; counter; inflight = 1, in entries from free_head on
//!   P2  (free_head, old_free_head) = behind them, both
//!   S1  ring: ids, lengths, flags of all but the first descriptor, each as its chain is pushed
//!   S2  each chain of the batch: entry[last].next = free_head, free_head = its first
//!   S3  (free_head, old_free_head) = (the new one, unchanged)
//!   S4  (used, old_used) = (the new position, unchanged)
//!   S5  ring: flags of the first descriptor        the driver sees all
//!   S6  inflight = 0, for each first entry of the batch
//!   S7  (free_head, old_free_head) = the new one, both
//!   S8  (used, old_used) = the new position, both
//!   R1  if used != old_used: is the descriptor at old_used still available?
//!       no:  S7, S8, because S5 was done           yes: free_head, used = old_free_head, old_used
//!   R2  inflight = 0 for all free entries
//!   R3  flags from used on that say "used" become "available" again, as far as chains in flight reach
//!   R4  resubmit entries with inflight, by counter; next = used + the sum of their num
//! ```
//! * Before P2 the entries are free, and R2 clears their marks. P2 says both that the chain is in flight and
//!   that it was popped, because only R4 computes `next`.
//! * Before S5 nothing of the batch is shown. R1 finds the descriptor available, as the driver left it,
//!   because its flags were not overwritten. S2 changes only the links behind the last entries of chains in
//!   flight, which are never followed. The list from `old_free_head` on is unchanged.
//! * From S5 on everything is shown. R1 finds the descriptor used, or available *in the next round*, which
//!   has other flags. `used` differs from `old_used` by index or round until S8, even if the batch is as long
//!   as the ring.
//! * S1 may have stopped at any point. A later device shows other chains in these descriptors, one at a time.
//!   Behind these, the driver must not find the rest of the old batch. R3 makes it invisible.
//! * The device can be killed during R. R has the same result when it is repeated.
//!
//! # Credit
//! A chain that is popped as credit is not popped here. Its *P* comes when it is used, after the *P* of all
//! chains before it. The argument is in [`super::credit`].
//!
//! # The first use
//! A region whose version is 0 was never used, and says nothing. The ring begins where the front-end says.
//! Chains that are still held from before are shown first, and the version is stored last.
//!
//! # Batches
//! A queue shows pushed chains at any time. The chains that are shown at once are a batch, and nothing is
//! popped between S2 (split: S1) and the end of S. In a packed ring, chains are popped between the stores of
//! S1, which overwrite descriptors of earlier chains only. R3 reaches over all of them. Chains that are
//! pushed and not shown are in flight. They wait for the ring's memory or for their turn (IN_ORDER).

mod packed;
mod resubmissions;
mod split;
#[cfg(test)]
mod tests;

pub(super) use packed::Packed;
pub(super) use split::Split;

use crate::RingError;
use kickless_memory::Records;
use kickless_spec::vhost_user::{
    INFLIGHT_HEAD, INFLIGHT_VERSION, SplitHead, inflight_entry_len, inflight_head_len,
};
use resubmissions::Resubmissions;

/// A region: memory that survives this process, or a test's model of it.
pub(crate) trait Region: std::fmt::Debug {
    /// Returns the number of bytes.
    fn len(&self) -> usize;
    /// Loads the word at an offset in bytes, once.
    fn load(&self, offset: usize) -> u64;
    /// Stores the word at an offset in bytes, in the order of the program.
    fn store(&self, offset: usize, word: u64);
}

impl Region for Records {
    fn len(&self) -> usize {
        Self::len(self)
    }

    fn load(&self, offset: usize) -> u64 {
        Self::load(self, offset)
    }

    #[inline(always)]
    fn store(&self, offset: usize, word: u64) {
        Self::store(self, offset, word);
    }
}

/// Returns the number of entries in a region of `len` bytes; at most the number of heads.
fn entries(packed: bool, len: usize) -> u16 {
    let room = len.saturating_sub(inflight_head_len(packed)) / inflight_entry_len(packed);
    u16::try_from(room).unwrap_or(u16::MAX)
}

/// Returns the offset of an entry.
fn at(packed: bool, entry: u16) -> usize {
    inflight_head_len(packed) + inflight_entry_len(packed) * usize::from(entry)
}

/// Returns the first word of the region's head as another device has left it, or `None` if the region was
/// never used. The word contains the number of entries.
///
/// # Errors
/// The region has another version, or a number of entries that is impossible for a ring of this size in this
/// region.
fn begun(region: &impl Region, entries: u16, size: u16) -> Result<Option<u64>, RingError> {
    if entries < size {
        return Err(wrong("number of entries that it has room for", entries));
    }
    let word = region.load(INFLIGHT_HEAD);
    // Both formats have these two fields at the same offset.
    let SplitHead { version, desc_num, .. } = SplitHead::from_word(word);
    match version {
        0 => Ok(None),
        INFLIGHT_VERSION if (size..=entries).contains(&desc_num) => Ok(Some(word)),
        INFLIGHT_VERSION => Err(wrong("number of entries", desc_num)),
        _ => Err(wrong("version", version)),
    }
}

#[cold]
fn wrong(field: &'static str, value: u16) -> RingError {
    RingError::Inflight { field, value }
}

/// Returns the counter for the next chain, and the entries in the order of their counters: the oldest is
/// resubmitted first.
fn in_order<T>(mut entries: Vec<(u64, T)>) -> (u64, Resubmissions<T>) {
    // Stable, so that the order is defined even if two counters are equal.
    entries.sort_by_key(|(counter, _)| *counter);
    let next = entries.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
    (next, Resubmissions::new(entries.into_iter().rev().map(|(_, entry)| entry).collect()))
}
