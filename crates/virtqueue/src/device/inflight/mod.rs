//! What is in flight, written down for the device that comes after this one (vhost-user, *Inflight I/O tracking*).
//!
//! A device that is killed takes its queue's indices with it. What it has popped and not pushed is lost, for the ring says how far
//! it is used, but not which chains before that are still out. So each queue can have a region of memory that the front-end keeps
//! and gives to the next device. This is what is stored there, and why whoever comes next does each chain again that was
//! popped and not shown as used, in the order in which they were popped, and no other.
//!
//! # What counts
//! A process that is killed has carried out all instructions up to some point, and none after it; pages shared with others stay. So
//! the argument is about the order of stores in the program, to the region *and* to the ring, and asks of each point between two of
//! them what the next device makes of it. [`Records::store`](kickless_memory::Records::store) keeps the compiler from moving them.
//! Nothing in the region is read while the queue runs: what it says is kept in memory of our own, and so a front-end that
//! scribbles there harms its own guest, and only after the next start. That is when it is read: once, into a copy, which is checked.
//!
//! # Split
//! An entry for each head. *P* pops, *S* shows a batch, *R* goes on after another device.
//! ```text
//!   P1  entry[head].counter = counter++            S1  entry[h].next = the one before it, for each of the batch
//!   P2  entry[head].inflight = 1                   S2  last_batch_head = the last one
//!                                                  S3  ring: used.idx += batch            the driver sees it
//!   R1  behind = used.idx - used_idx               S4  entry[h].inflight = 0, for each of the batch
//!   R2  if behind != 0: inflight = 0 for as many   S5  used_idx = used.idx
//!       entries from last_batch_head along next
//!   R3  used_idx = used.idx
//!   R4  entries with inflight, by counter, again; next_avail = used.idx + how many they are
//! ```
//! * Before P2 the chain was not popped. `next_avail` is nowhere but in R4: what the device has popped is what it has used and what is
//!   in flight, so P2 says both that the chain is in flight and that it was popped.
//! * Before S3 nothing of the batch is shown, `behind` is 0, and all of it is done again. What S1 and S2 wrote is not looked at.
//! * From S3 on all of the batch is shown. Until S5 `behind` is its length, and R2 finds its entries by S1 and S2, whatever S4 has
//!   come to: S4 leaves `next` as it is, and no chain is popped between S1 and S5.
//! * R itself can be killed: R2 is the same when it is done again, and R3 ends it.
//! * The driver can use a head again as soon as it sees S3. P2 of that is after S5, for one thread does both.
//!
//! # Packed
//! Places in the ring say little: a used descriptor is written over whatever stood there. So an entry is a copy of a descriptor; a
//! chain takes as many as it has, from a list of those that are free, and is known by the first. The two words of the head that change
//! each hold what is new and what was before, and change in one store.
//! ```text
//!   P1  copies; next, last, num; counter; inflight = 1, in entries from free_head on
//!   P2  (free_head, old_free_head) = behind them, both
//!   S1  ring: ids, lengths, flags of all but the first descriptor
//!   S2  each chain of the batch: entry[last].next = free_head, free_head = its first
//!   S3  (free_head, old_free_head) = (the new one, as it was)
//!   S4  (used, old_used) = (the new place, as it was)
//!   S5  ring: flags of the first descriptor        the driver sees all
//!   S6  inflight = 0, for each first entry of the batch
//!   S7  (free_head, old_free_head) = the new one, both
//!   S8  (used, old_used) = the new place, both
//!   R1  if used != old_used: is the place old_used still available?
//!       no:  S7, S8, for S5 was                    yes: free_head, used = old_free_head, old_used
//!   R2  inflight = 0 for all entries that are free
//!   R3  flags of places from used on that say "used" are made to say "available" again, as far as chains in flight reach
//!   R4  entries with inflight, by counter, again; next = used + the sum of their num
//! ```
//! * Before P2 the entries are free, and R2 takes their marks away. P2 says both that the chain is in flight and that it was popped,
//!   for `next` is nowhere but in R4.
//! * Before S5 nothing of the batch is shown, and R1 finds the place available, as the driver has left it: nobody has written over its
//!   flags. S2 changes only where the last entries of chains lead that are in flight, which nobody follows; all that is reached from
//!   `old_free_head` is as it was.
//! * From S5 on all is shown. R1 finds the place used, or available *in the next round*, which is another mark. `used` differs from
//!   `old_used` by place and round until S8, also if the batch is as long as the ring.
//! * S1 may have come to any point. A later device that shows other chains in these places, one at a time, must not have the driver run
//!   into what is left of that batch: R3.
//! * R can be killed, and finds the same when it is done again.
//!
//! # Credit
//! A chain that is popped as credit is not popped here: its *P* comes when it is used, after that of all chains before it. The argument
//! is in [`super::credit`].
//!
//! # Beginning
//! A region whose version is 0 was never begun, and says nothing: the ring goes on where the front-end says. What is still owed to its
//! driver from before is shown first, and the version is stored last.
//!
//! # Batches
//! A queue shows what was pushed whenever it likes. What is shown at once is a batch, and between S1 and the end of S nothing is popped.
//! Chains that were pushed and not shown, because the ring is not in memory or it is not their turn (IN_ORDER), are in flight.

mod packed;
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

/// A region: memory that outlives us, or a test's.
pub(crate) trait Region: std::fmt::Debug {
    /// Bytes in it.
    fn len(&self) -> usize;
    /// Loads the word at an offset in bytes, once.
    fn load(&self, offset: usize) -> u64;
    /// Stores the word at an offset in bytes, in the program's order.
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

/// Entries in a region of so many bytes; no more than there are heads.
fn entries(packed: bool, len: usize) -> u16 {
    let room = len.saturating_sub(inflight_head_len(packed)) / inflight_entry_len(packed);
    u16::try_from(room).unwrap_or(u16::MAX)
}

/// Where an entry begins.
#[inline]
fn at(packed: bool, entry: u16) -> usize {
    inflight_head_len(packed) + inflight_entry_len(packed) * usize::from(entry)
}

/// What another device has left: how many entries, and the word that says so. `None`: nobody has begun.
///
/// # Errors
/// Another version, or a number of entries that a ring of this size cannot have in this region.
fn begun(region: &impl Region, entries: u16, size: u16) -> Result<Option<u64>, RingError> {
    if entries < size {
        return Err(wrong("number of entries that it has room for", entries));
    }
    let word = region.load(INFLIGHT_HEAD);
    // Both formats have these two in the same place.
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

/// The count for the next chain, and the entries in the order of their counters, the oldest last, where it is taken first.
fn in_order<T>(mut entries: Vec<(u64, T)>) -> (u64, Vec<T>) {
    // Stable, so that the order is certain even where somebody counted two alike.
    entries.sort_by_key(|(counter, _)| *counter);
    let next = entries.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
    (next, entries.into_iter().rev().map(|(_, entry)| entry).collect())
}
