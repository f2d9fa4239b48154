//! Errors of a driver that end its ring.

/// A violation of the ring's rules by the driver. The queue returns no more chains. Chains that it returned
/// before can still be pushed and published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The avail index is further ahead than the number of free descriptors.
    #[error("avail index {idx} is more than {room} past {next}")]
    AvailIndex {
        /// The index in the ring.
        idx: u16,
        /// The first entry that is not popped.
        next: u16,
        /// The largest valid distance: the queue size, less the chains that the device has popped and not yet
        /// published.
        room: u16,
    },
    /// An entry of the avail ring is not the index of a descriptor.
    #[error("head {head} in a table of {size} descriptors")]
    Head {
        /// The entry.
        head: u16,
        /// The queue size.
        size: u16,
    },
    /// A packed ring: a descriptor is available although the device holds all of them.
    #[error("more descriptors are available than the ring has")]
    Full,
    /// A packed ring: an earlier device has served it beyond the base at which this one begins.
    #[error(
        "the ring was served beyond {base:#x} already: the front-end does not know how far the previous device had come, \
 and a packed ring does not show it"
    )]
    Base {
        /// The base: an index, with the wrap counter in bit 15.
        base: u16,
    },
    /// The in-flight buffer of an earlier device is inconsistent.
    #[error("the in-flight buffer is inconsistent: the {field} is {value}")]
    Inflight {
        /// The inconsistent field.
        field: &'static str,
        /// Its value.
        value: u16,
    },
    /// A packed ring: a second chain has the id of a chain in flight.
    #[error("id {id} is in flight twice")]
    DuplicateId {
        /// The id.
        id: u16,
    },
    /// `next` is outside of its table.
    #[error("chain {head} goes on at {next} in a table of {entries} descriptors")]
    Next {
        /// The chain.
        head: u16,
        /// The index at which the chain goes on.
        next: u16,
        /// Descriptors in that table.
        entries: u32,
    },
    /// More descriptors than a chain can have. Most likely there is a loop.
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
        /// The number of bytes.
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
        /// The index at which the chain goes on.
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
        /// Address of the table.
        addr: u64,
        /// Length of the table.
        len: u32,
    },
}
