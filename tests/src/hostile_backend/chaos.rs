//! Makes a back-end answer at random.

use std::sync::atomic::Ordering;

use anyhow::{Result, ensure};
use kickless_memory::Area;

use crate::hostile_backend::backend_state::BackendState;
use crate::hostile_backend::faults::{AnswerFault, RingFault};
use crate::hostile_backend::ring::Ring;

/// The faults in answers to requests. All other answers are correct.
const FAULTS: [RingFault; 12] = [
    RingFault::IdOutOfRange,
    RingFault::IdNotInFlight,
    RingFault::Twice,
    RingFault::TooLong,
    RingFault::IndexJump,
    RingFault::IndexBack,
    RingFault::WrongWrap,
    RingFault::NoStatus,
    RingFault::Status(7),
    RingFault::OutOfOrder,
    RingFault::RingError,
    RingFault::Silence,
];

/// A random generator and the rates of faults.
pub(crate) struct Chaos {
    state: u64,
    /// Of this many answers, requests and polls of the ring, one has a fault.
    rarity: [u64; 3],
    /// Whether it has overwritten memory with random words. The driver is then not responsible for the
    /// content of chains.
    scribbled: bool,
}

impl Chaos {
    pub(crate) fn new(seed: u64, connection: u64) -> Chaos {
        let mut chaos = Chaos {
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ connection << 32 | 1,
            rarity: [1; 3],
            scribbled: false,
        };
        chaos.next();
        let rarity = [chaos.below(6), chaos.below(7), chaos.below(7)];
        // The first handshake is honest in most runs. Otherwise few rings would start.
        let messages = if connection == 1 && rarity[0] > 0 { u64::MAX } else { 8 << rarity[0] };
        chaos.rarity = [messages, 2 << rarity[1], 2 << rarity[2]];
        chaos
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 16) % limit
    }

    fn one_in(&mut self, rarity: u64) -> bool {
        self.below(rarity) == 0
    }

    fn one_of<T: Copy>(&mut self, what: &[T]) -> T {
        what[self.below(what.len() as u64) as usize]
    }

    /// Returns a fault for the next answer, or `None` for a correct one.
    pub(crate) fn answer(&mut self) -> Option<AnswerFault> {
        self.one_in(self.rarity[0]).then(|| self.one_of(&AnswerFault::ANY))
    }

    /// Polls a ring, and answers its requests correctly or with a fault.
    pub(crate) fn look(&mut self, ring: &mut Ring, shared: &BackendState) -> Result<()> {
        if self.one_in(self.rarity[2]) {
            self.scribbled = true;
            for _ in 0..=self.below(16) {
                self.scribble(ring);
            }
            ring.call();
        }
        if self.scribbled {
            ensure!(!self.one_in(4), "the ring has random content");
            return Ok(());
        }
        if self.one_in(self.rarity[1]) {
            let at = shared.requests.load(Ordering::Acquire) + self.below(4);
            let fault = self.one_of(&FAULTS);
            shared.rules().ring = Some((at, fault));
        }
        ring.look(shared)
    }

    /// Overwrites two bytes of the ring, more often in the part that the device writes.
    fn scribble(&mut self, ring: &Ring) {
        let areas = ring.areas();
        let area: &Area = areas[self.one_of(&[0, 0, 1, 2, 2, 2])];
        let words = (area.len() / 2) as u64;
        // Indices and the first entries have the most effect.
        let word = if self.one_in(2) { self.below(words.min(16)) } else { self.below(words) };
        let at = word as usize * 2;
        let value = match self.below(3) {
            0 => self.next() as u16,
            1 => area.load_u16(at, Ordering::Relaxed).wrapping_add(1),
            _ => area.load_u16(at, Ordering::Relaxed) ^ 1 << self.below(16),
        };
        area.store_u16(at, value, Ordering::Relaxed);
    }
}
