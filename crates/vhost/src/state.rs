//! The state that a stopped device leaves to the next process: the index at which each ring continues, the
//! completions that each still has to show, and the device's own state. Pure.
//!
//! # Format
//! A header, the device's own part, then for each ring a head and its completions. Numbers are little-endian,
//! and there is no padding. A state of another version is refused, because it may lack something that this
//! version needs. Input is treated as hostile.

use kickless_spec::ring::EVENT_WRAP;
use kickless_virtqueue::device::UnpublishedUsed;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"kickless";
const VERSION: u32 = 1;
/// The largest length of a device's own part, in bytes.
const DEVICE_LEN_MAX: usize = 4096;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    rings: U16,
    /// 1 if the rings have the packed format, otherwise 0.
    packed: U16,
    device_len: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RingHead {
    index: U16,
    size: U16,
    next_avail: U16,
    unpublished: U16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct UnpublishedEntry {
    id: U16,
    descriptors: U16,
    len: U32,
}

/// The limits of a device, and so of its states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The number of rings.
    pub queues_max: u16,
    /// The number of entries of a ring.
    pub queue_size_max: u16,
}

impl Bounds {
    /// Returns the largest length of a state within these limits, in bytes.
    pub fn bytes_max(&self) -> usize {
        let entries = usize::from(self.queue_size_max) * size_of::<UnpublishedEntry>();
        let rings = usize::from(self.queues_max) * (size_of::<RingHead>() + entries);
        size_of::<Header>() + DEVICE_LEN_MAX + rings
    }
}

/// The state of one ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingState {
    /// The number of the ring.
    pub index: u16,
    /// The number of its entries.
    pub size: u16,
    /// The first available entry that was not taken. In a packed ring, bit 15 is the wrap counter.
    pub next_avail: u16,
    /// Completions that the driver was not shown yet.
    pub unpublished: Vec<UnpublishedUsed>,
}

/// The state of a stopped device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedState {
    /// The rings have the packed format.
    pub packed: bool,
    /// The device's own state.
    pub device: Vec<u8>,
    /// The rings that were set up, by ascending index.
    pub rings: Vec<RingState>,
}

/// The reason for which bytes are no state of this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// They do not begin like a state.
    #[error("it is no state of a kickless device")]
    Foreign,
    /// They are of another version of the format.
    #[error("it has version {0}, and this back-end knows version {VERSION}")]
    Version(u32),
    /// They end before the state does.
    #[error("it ends in the middle")]
    Short,
    /// They are longer than the state.
    #[error("{0} bytes follow its end")]
    Long(usize),
    /// A field cannot have this value.
    #[error("its {field} cannot be {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
    },
    /// A ring cannot have this value in a field.
    #[error("the {field} of its ring {ring} cannot be {value}")]
    Ring {
        /// The ring.
        ring: u16,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
    },
}

impl SavedState {
    /// Returns the bytes to transfer. No ring may have more than its size in `unpublished`, and the device's
    /// part may not be longer than 4096 bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            rings: (self.rings.len() as u16).into(),
            packed: u16::from(self.packed).into(),
            device_len: (self.device.len() as u32).into(),
        };
        let mut bytes = [header.as_bytes(), &self.device].concat();
        for ring in &self.rings {
            let head = RingHead {
                index: ring.index.into(),
                size: ring.size.into(),
                next_avail: ring.next_avail.into(),
                unpublished: (ring.unpublished.len() as u16).into(),
            };
            bytes.extend_from_slice(head.as_bytes());
            for used in &ring.unpublished {
                let (id, descriptors, len) = (used.id.into(), used.descriptors.into(), used.len.into());
                bytes.extend_from_slice(UnpublishedEntry { id, descriptors, len }.as_bytes());
            }
        }
        bytes
    }

    /// Returns the state in these bytes.
    ///
    /// # Errors
    /// They are no state, or none that a device within `bounds` can have been in.
    pub fn from_bytes(mut bytes: &[u8], bounds: &Bounds) -> Result<Self, StateError> {
        let header: Header = take(&mut bytes)?;
        if header.magic != MAGIC {
            return Err(StateError::Foreign);
        }
        if header.version != VERSION {
            return Err(StateError::Version(header.version.get()));
        }
        let (rings, packed, device_len) =
            (header.rings.get(), header.packed.get(), header.device_len.get() as usize);
        let field = |field, value| StateError::Field { field, value };
        if rings > bounds.queues_max {
            return Err(field("number of rings", rings.into()));
        }
        if packed > 1 {
            return Err(field("format of rings", packed.into()));
        }
        if device_len > DEVICE_LEN_MAX {
            return Err(field("length of the device's part", header.device_len.get()));
        }
        let (device, rest) = bytes.split_at_checked(device_len).ok_or(StateError::Short)?;
        bytes = rest;
        let mut state = Self { packed: packed == 1, device: device.to_vec(), rings: Vec::new() };
        for _ in 0..rings {
            let ring = ring(&mut bytes, state.packed, bounds)?;
            if state.rings.last().is_some_and(|last| last.index >= ring.index) {
                return Err(field("order of rings", ring.index.into()));
            }
            state.rings.push(ring);
        }
        if bytes.is_empty() { Ok(state) } else { Err(StateError::Long(bytes.len())) }
    }
}

fn take<T: FromBytes>(bytes: &mut &[u8]) -> Result<T, StateError> {
    let (value, rest) = T::read_from_prefix(bytes).map_err(|_| StateError::Short)?;
    *bytes = rest;
    Ok(value)
}

fn ring(bytes: &mut &[u8], packed: bool, bounds: &Bounds) -> Result<RingState, StateError> {
    let head: RingHead = take(bytes)?;
    let (index, size, next_avail) = (head.index.get(), head.size.get(), head.next_avail.get());
    let wrong = |field, value: u16| StateError::Ring { ring: index, field, value: value.into() };
    if index >= bounds.queues_max {
        return Err(wrong("index", index));
    }
    if size == 0 || size > bounds.queue_size_max || !(packed || size.is_power_of_two()) {
        return Err(wrong("size", size));
    }
    if packed && next_avail & !EVENT_WRAP >= size {
        return Err(wrong("place", next_avail));
    }
    // All completions that were not shown were popped from the ring, so there are at most as many as it has
    // entries.
    if head.unpublished.get() > size {
        return Err(wrong("count of completions", head.unpublished.get()));
    }
    let mut unpublished = Vec::with_capacity(head.unpublished.get().into());
    let mut descriptors = 0;
    for _ in 0..head.unpublished.get() {
        let entry: UnpublishedEntry = take(bytes)?;
        let used = UnpublishedUsed {
            id: entry.id.get(),
            len: entry.len.get(),
            descriptors: entry.descriptors.get(),
        };
        // The driver chooses the ids of a packed ring.
        if !packed && used.id >= size {
            return Err(wrong("completed head", used.id));
        }
        descriptors += u32::from(used.descriptors);
        if packed != (used.descriptors > 0) || descriptors > size.into() {
            return Err(wrong("count of completed descriptors", used.descriptors));
        }
        unpublished.push(used);
    }
    Ok(RingState { index, size, next_avail, unpublished })
}
