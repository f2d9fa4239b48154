//! What a driver can do to its ring that ends the ring.

/// The driver broke the rules of the ring. The queue hands out no more chains; what it handed out can still
/// be pushed and published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The avail index is further on than there are free descriptors.
    #[error("avail index {idx} is more than {room} past {next}")]
    AvailIndex {
        /// The index in the ring.
        idx: u16,
        /// The first entry that was not popped yet.
        next: u16,
        /// How many entries there can be: the queue size, less the chains that the device holds or has not given back yet
        /// as far as the driver can see.
        room: u16,
    },
    /// An entry of the avail ring is no descriptor.
    #[error("head {head} in a table of {size} descriptors")]
    Head {
        /// The entry.
        head: u16,
        /// The queue size.
        size: u16,
    },
    /// A packed ring: something is available where the device holds all there is.
    #[error("more descriptors are available than the ring has")]
    Full,
    /// A packed ring that an earlier device has served beyond where this one is to begin.
    #[error(
        "the ring was served beyond {base:#x} already: the front-end does not know how far a device had come that was lost, \
         and a packed ring does not say it"
    )]
    Base {
        /// Where to begin: an index, with the wrap counter in bit 15.
        base: u16,
    },
    /// What an earlier device wrote down of its requests in flight cannot be followed.
    #[error(
        "what was in flight before cannot be found out: the {field} is {value} in the front-end's buffer"
    )]
    Inflight {
        /// What is wrong there.
        field: &'static str,
        /// What it is.
        value: u16,
    },
    /// A packed ring: an id under which a chain is in flight already.
    #[error("id {id} is in flight twice")]
    Twice {
        /// The id.
        id: u16,
    },
    /// `next` leaves its table.
    #[error("chain {head} goes on at {next} in a table of {entries} descriptors")]
    Next {
        /// The chain.
        head: u16,
        /// The index it goes on at.
        next: u16,
        /// Descriptors in that table.
        entries: u32,
    },
    /// More descriptors than a chain can have: a loop, most likely.
    #[error("chain {head} is longer than {max} descriptors")]
    TooLong {
        /// The chain.
        head: u16,
        /// The limit.
        max: u16,
    },
    /// More bytes than a chain can have (2^32; virtio 1.3, section 2.7.5.2).
    #[error("chain {head} has {len:#x} bytes")]
    TooManyBytes {
        /// The chain.
        head: u16,
        /// Its bytes.
        len: u64,
    },
    /// A buffer that the device reads follows one that it writes (virtio 1.3, section 2.7.4.2).
    #[error("chain {head} has a readable buffer after a writable one")]
    Order {
        /// The chain.
        head: u16,
    },
    /// An indirect table although the feature was not negotiated.
    #[error("chain {head} has an indirect table, which was not negotiated")]
    IndirectNotNegotiated {
        /// The chain.
        head: u16,
    },
    /// An indirect table within an indirect table.
    #[error("chain {head} has an indirect table within an indirect table")]
    IndirectNested {
        /// The chain.
        head: u16,
    },
    /// INDIRECT and NEXT in one descriptor.
    #[error("chain {head} goes on at {next} after its indirect table")]
    IndirectNext {
        /// The chain.
        head: u16,
        /// The index it goes on at.
        next: u16,
    },
    /// The length of an indirect table is zero or no multiple of 16.
    #[error("chain {head} has an indirect table of {len} bytes")]
    IndirectLen {
        /// The chain.
        head: u16,
        /// The length.
        len: u32,
    },
    /// A descriptor of an indirect table is not guest memory.
    #[error("chain {head} has an indirect table of {len} bytes at {addr:#x}, not all in guest memory")]
    IndirectUnmapped {
        /// The chain.
        head: u16,
        /// Where the table is.
        addr: u64,
        /// Its length.
        len: u32,
    },
}
