//! A ring: its set-up, and where it continues.

use crate::error::Error;
use crate::parts::Fd;
use kickless_spec::features::Features;
use kickless_spec::ring::{EVENT_WRAP, QUEUE_SIZE_MAX};
use serde::{Deserialize, Serialize};

/// The set-up of a ring by the front-end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ring {
    /// Its number.
    pub index: u16,
    /// The number of entries, once it is set.
    pub size: Option<u16>,
    /// The addresses of its areas, once they are set.
    pub addresses: Option<Addresses>,
    /// The shape that a loaded state demands.
    pub loaded: Option<Shape>,
    /// It was started.
    pub is_started: bool,
    /// It is enabled.
    pub is_enabled: bool,
    /// The feature bits that it runs with, which a later message cannot change. `None`: it does not run.
    pub runs_with: Option<u64>,
    /// The descriptor of kicks.
    pub kick: Option<Fd>,
    /// The descriptor of calls.
    pub call: Option<Fd>,
    /// The descriptor of errors.
    pub err: Option<Fd>,
}

/// The addresses of SET_VRING_ADDR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Addresses {
    /// The descriptor area.
    pub desc: u64,
    /// The driver area.
    pub avail: u64,
    /// The device area.
    pub used: u64,
    /// The address under which marks of the device area are logged.
    pub log: Option<u64>,
}

/// The size and format of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// The number of entries.
    pub size: u16,
    /// It has the packed format.
    pub is_packed: bool,
}

/// The place where a ring continues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingFinal {
    /// Its number.
    pub index: u16,
    /// The first available entry to take. In a packed ring, bit 15 is the wrap counter. `None`: the initial
    /// one.
    pub next_avail: Option<u16>,
    /// The index at which it stopped last, or was parked.
    pub stopped_at: Option<u16>,
    /// Completions that the driver was not shown yet.
    pub unpublished: Vec<Completion>,
    /// The driver broke the ring, or its memory is gone.
    pub is_broken: bool,
    /// Requests were in the ring when it stopped last.
    pub had_work: bool,
    /// It has left requests in the in-flight buffer.
    pub has_left: bool,
}

/// A completion that the driver was not shown yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Completion {
    /// The head of the chain, or the driver's id in a packed ring.
    pub id: u16,
    /// The bytes that were written.
    pub len: u32,
    /// The descriptors that the chain has in a packed ring. 0 in a split ring.
    pub descriptors: u16,
}

impl Shape {
    fn check(self) -> Result<(), Error> {
        let is_size =
            (1..=QUEUE_SIZE_MAX).contains(&self.size) && (self.is_packed || self.size.is_power_of_two());
        if is_size { Ok(()) } else { Err(Error::field("size of a ring", self.size)) }
    }
}

impl Ring {
    /// Returns the shape in which it runs, or has to. A ring that does not run can be of any shape: its
    /// front-end may not have finished.
    fn shape(&self) -> Option<Shape> {
        let packed = |bits| Features::from_bits_retain(bits).contains(Features::RING_PACKED);
        let runs = self.size.zip(self.runs_with).map(|(size, bits)| Shape { size, is_packed: packed(bits) });
        self.loaded.or(runs)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.shape().map_or(Ok(()), Shape::check)?;
        let any_format = self.size.map(|size| Shape { size, is_packed: true });
        any_format.map_or(Ok(()), Shape::check)
    }
}

impl RingFinal {
    /// Checks that a ring of this set-up can continue there.
    pub(super) fn check(&self, ring: &Ring) -> Result<(), Error> {
        if self.index != ring.index {
            return Err(Error::field("ring", self.index));
        }
        let Some(Shape { size, is_packed }) = ring.shape() else {
            // It is checked when the ring starts.
            return match self.unpublished.len() > usize::from(QUEUE_SIZE_MAX) {
                true => Err(Error::field("number of completions", self.unpublished.len())),
                false => Ok(()),
            };
        };
        if let Some(place) = self.next_avail.filter(|at| is_packed && at & !EVENT_WRAP >= size) {
            return Err(Error::field("place of a ring", place));
        }
        // Completions that were not shown were taken from the ring, so it had room for all of them.
        if self.unpublished.len() > usize::from(size) {
            return Err(Error::field("number of completions", self.unpublished.len()));
        }
        let mut descriptors = 0;
        for completion in &self.unpublished {
            // The driver chooses the ids of a packed ring.
            if !is_packed && completion.id >= size {
                return Err(Error::field("completed head", completion.id));
            }
            descriptors += u32::from(completion.descriptors);
            if is_packed != (completion.descriptors > 0) || descriptors > size.into() {
                return Err(Error::field("number of completed descriptors", completion.descriptors));
            }
        }
        Ok(())
    }
}
