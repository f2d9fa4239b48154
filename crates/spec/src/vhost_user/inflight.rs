//! The in-flight buffer, which records the requests in flight (*Inflight I/O tracking*).
//!
//! The buffer has one region for each ring. A region is a head and an entry for each descriptor. It is read
//! and written in words of 64 bits, each with one instruction, so that a process that is killed between two
//! instructions leaves whole words behind.
//!
//! The specification does not say where the next region begins. QEMU's library for back-ends and DPDK round
//! up to 64 bytes, and so does this module.

/// The only version of a region that exists. The version of a region that was never used is 0.
pub const INFLIGHT_VERSION: u16 = 1;
/// Alignment of a region within the buffer.
const REGION_ALIGN: usize = 64;
/// Offset of [`SplitHead`] or [`PackedHead`] in a region. This word has the version.
pub const INFLIGHT_HEAD: usize = 8;
/// Offset of [`PackedUsed`] in a packed ring's region.
pub const INFLIGHT_PACKED_USED: usize = 16;
/// Offset of the counter in an entry. Its value orders entries by the time at which the device popped them.
pub const INFLIGHT_COUNTER: usize = 8;
/// Offset of the descriptor's copy in an entry of a packed ring's region. Its first word has the id, the
/// flags and the length, its second the address.
pub const INFLIGHT_DESC: usize = 16;

/// Returns the bytes of an entry.
pub const fn inflight_entry_len(packed: bool) -> usize {
    if packed { 32 } else { 16 }
}

/// Returns the bytes of a region's head.
pub const fn inflight_head_len(packed: bool) -> usize {
    if packed { 32 } else { 16 }
}

/// Returns the bytes from one region to the next, for rings of `size` descriptors.
pub const fn inflight_region_len(packed: bool, size: u16) -> usize {
    (inflight_head_len(packed) + inflight_entry_len(packed) * size as usize).next_multiple_of(REGION_ALIGN)
}

/// Joins four fields of 16 bits; the first becomes the lowest.
const fn word(fields: [u16; 4]) -> u64 {
    let [a, b, c, d] = fields;
    a as u64 | (b as u64) << 16 | (c as u64) << 32 | (d as u64) << 48
}

const fn fields(word: u64) -> [u16; 4] {
    [word as u16, (word >> 16) as u16, (word >> 32) as u16, (word >> 48) as u16]
}

/// Makes the struct of a word of four fields.
macro_rules! word_of {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$field_doc])* pub $field: u16,)* }

        impl $name {
            /// Splits a word into its fields.
            pub const fn from_word(word: u64) -> Self {
                let [$($field),*] = fields(word);
                Self { $($field),* }
            }

            /// Joins the fields to a word.
            pub const fn word(self) -> u64 {
                word([$(self.$field),*])
            }
        }
    };
}

word_of! {
    /// The second word of a split ring's region.
    SplitHead {
        /// [`INFLIGHT_VERSION`], or 0.
        version,
        /// Number of entries.
        desc_num,
        /// The head that was pushed last in the batch that is being published.
        last_batch_head,
        /// `used.idx` of the ring after the last finished batch.
        used_idx,
    }
}

word_of! {
    /// The second word of a packed ring's region.
    PackedHead {
        /// [`INFLIGHT_VERSION`], or 0.
        version,
        /// Number of entries.
        desc_num,
        /// The first free entry, as it will be once the current batch is published.
        free_head,
        /// The first free entry after the last finished batch.
        old_free_head,
    }
}

/// The third word of a packed ring's region: two positions in the ring, each with its wrap counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedUsed {
    /// The next descriptor to use, as it will be once the current batch is published.
    pub used_idx: u16,
    /// The next descriptor to use after the last finished batch.
    pub old_used_idx: u16,
    /// The wrap counter of `used_idx`.
    pub used_wrap_counter: bool,
    /// The wrap counter of `old_used_idx`.
    pub old_used_wrap_counter: bool,
}

impl PackedUsed {
    /// Splits a word into its fields.
    pub const fn from_word(word: u64) -> Self {
        let [used_idx, old_used_idx, wraps, _] = fields(word);
        Self {
            used_idx,
            old_used_idx,
            used_wrap_counter: wraps & 0xff != 0,
            old_used_wrap_counter: wraps >> 8 != 0,
        }
    }

    /// Joins the fields to a word.
    pub const fn word(self) -> u64 {
        let wraps = self.used_wrap_counter as u16 | (self.old_used_wrap_counter as u16) << 8;
        word([self.used_idx, self.old_used_idx, wraps, 0])
    }
}

/// The first word of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightEntry {
    /// This entry is the first of a chain that is in flight.
    pub inflight: bool,
    /// The next entry. In a split ring's region, that is the next one of the batch. In a packed ring's
    /// region, it is the next one of the chain or of the free list.
    pub next: u16,
    /// The last entry of the chain. Only in the first entry of a chain, for a packed ring.
    pub last: u16,
    /// The number of the chain's entries, for a packed ring.
    pub num: u16,
}

impl InflightEntry {
    /// Splits the first word of an entry of a packed or a split ring's region.
    pub const fn from_word(packed: bool, word: u64) -> Self {
        let [flag, second, third, fourth] = fields(word);
        let inflight = flag & 0xff == 1;
        match packed {
            true => Self { inflight, next: second, last: third, num: fourth },
            false => Self { inflight, next: fourth, last: 0, num: 0 },
        }
    }

    /// Joins the fields to a word.
    pub const fn word(self, packed: bool) -> u64 {
        let flag = self.inflight as u16;
        match packed {
            true => word([flag, self.next, self.last, self.num]),
            false => word([flag, 0, 0, self.next]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout() {
        // Counted by hand from the C structures of the specification.
        let head = SplitHead { version: 1, desc_num: 2, last_batch_head: 3, used_idx: 4 };
        assert_eq!(head.word().to_le_bytes(), [1, 0, 2, 0, 3, 0, 4, 0]);
        assert_eq!(SplitHead::from_word(head.word()), head);
        let head = PackedHead { version: 1, desc_num: 2, free_head: 3, old_free_head: 0x1004 };
        assert_eq!(head.word().to_le_bytes(), [1, 0, 2, 0, 3, 0, 4, 0x10]);
        assert_eq!(PackedHead::from_word(head.word()), head);
        let used = PackedUsed {
            used_idx: 5,
            old_used_idx: 6,
            used_wrap_counter: true,
            old_used_wrap_counter: false,
        };
        assert_eq!(used.word().to_le_bytes(), [5, 0, 6, 0, 1, 0, 0, 0]);
        assert_eq!(PackedUsed::from_word(used.word()), used);
        let other = PackedUsed { used_wrap_counter: false, old_used_wrap_counter: true, ..used };
        assert_eq!(other.word().to_le_bytes(), [5, 0, 6, 0, 0, 1, 0, 0]);
        assert_eq!(PackedUsed::from_word(other.word()), other);
        let split = InflightEntry { inflight: true, next: 0x0107, last: 0, num: 0 };
        assert_eq!(split.word(false).to_le_bytes(), [1, 0, 0, 0, 0, 0, 7, 1]);
        assert_eq!(InflightEntry::from_word(false, split.word(false)), split);
        let packed = InflightEntry { inflight: true, next: 7, last: 8, num: 9 };
        assert_eq!(packed.word(true).to_le_bytes(), [1, 0, 7, 0, 8, 0, 9, 0]);
        assert_eq!(InflightEntry::from_word(true, packed.word(true)), packed);
        // The padding behind the flag has no meaning.
        assert!(
            InflightEntry::from_word(true, 0xff01).inflight && !InflightEntry::from_word(false, 2).inflight
        );
    }

    #[test]
    fn regions() {
        assert_eq!((inflight_region_len(false, 128), inflight_region_len(true, 128)), (2112, 4160));
        assert_eq!((inflight_region_len(false, 1), inflight_region_len(true, 1)), (64, 64));
        assert_eq!((inflight_region_len(false, 3), inflight_region_len(false, 4)), (64, 128));
        assert_eq!((inflight_region_len(true, 2), inflight_region_len(true, 3)), (128, 128));
    }
}
