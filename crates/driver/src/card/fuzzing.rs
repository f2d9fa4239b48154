//! The rings of a pair without a connection, for the fuzz target: the input is the back-end.

use kickless_memory::Map;
use kickless_spec::features::Features;

use crate::card::features;
use crate::card::memory::Frame;
use crate::card::rings::{PairLayout, PairRings};
use crate::error::Error;
use crate::memory::{self, Regions};

/// The addresses of a ring, as the back-end gets them: descriptors, driver area and device area.
pub type Addresses = [u64; 3];

/// A queue pair in memory of its own.
pub struct Pair(PairRings, Map);

impl Pair {
    /// The first address of the memory.
    pub const START: u64 = memory::FIRST;

    /// Makes a pair.
    ///
    /// # Errors
    /// The size is invalid, or there is no memory.
    pub fn new(size: u16, features: Features, buffer_len: u32) -> Result<Self, Error> {
        let net = features::of_card(features);
        let buffer_len = features::buffer_len(net, buffer_len, 1500);
        let layout = PairLayout::new(memory::FIRST, size, features, buffer_len)?;
        let regions = Regions::new(layout.end() - memory::FIRST, false)?;
        let region = regions.all().first().cloned().ok_or(Error::NoMemory { len: 0 })?;
        let rings = PairRings::new(0, &layout, &region, net)?;
        let map = region.map().clone();
        Ok(Self(rings, map))
    }

    /// Returns the memory.
    pub fn map(&self) -> &Map {
        &self.1
    }

    /// Returns the addresses of the receive ring and of the transmit ring.
    pub fn addresses(&self) -> [Addresses; 2] {
        self.0.setups().map(|setup| [setup.desc, setup.driver, setup.device])
    }

    /// Sends frames of this length. Returns their number.
    ///
    /// # Errors
    /// The back-end broke the rules of the ring.
    pub fn send(&mut self, count: usize, len: usize) -> Result<usize, Error> {
        let (sent, _) = self.0.send(
            count,
            |_| len,
            |at, frame| {
                frame.write(at, &[7; 64]);
            },
        )?;
        Ok(sent.frames)
    }

    /// Receives up to `max` frames.
    ///
    /// # Errors
    /// The back-end broke the rules of the ring.
    pub fn receive(&mut self, max: usize, each: impl FnMut(&Frame<'_>)) -> Result<usize, Error> {
        self.0.receive(max, each).map(|received| received.frames)
    }

    /// Receives up to `max` frames, and sends them back.
    ///
    /// # Errors
    /// The back-end broke the rules of a ring.
    pub fn forward(&mut self, max: usize) -> Result<usize, Error> {
        self.0.forward(max, |_| true).map(|done| done.received.frames)
    }

    /// Returns the number of frames in flight.
    pub fn in_flight(&self) -> u64 {
        self.0.transmit.in_flight()
    }

    /// Makes the rings anew.
    ///
    /// # Errors
    /// The rings cannot be made.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.0.restart().map(drop)
    }
}
