//! What the front-end has said of a ring. Pure.

use crate::state::RingState;
use kickless_device::{Areas, Disabled, IovaAddresses, Stopped};
use kickless_memory::Iova;
use kickless_spec::features::Features;
use kickless_spec::ring::EVENT_WRAP;
use kickless_virtqueue::device::{Addresses, Held};
use std::fmt;

/// What a ring has to be like for a state to be of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) size: u16,
    pub(crate) packed: bool,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} entries", if self.packed { "packed" } else { "split" }, self.size)
    }
}

/// The set-up of one ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Setup {
    /// Entries, once SET_VRING_NUM has come.
    pub(crate) size: Option<u16>,
    /// Where its areas lie, once SET_VRING_ADDR has come. What the numbers mean depends on the features: see [`areas`].
    pub(crate) addresses: Option<Addresses>,
    /// The first available entry to take: what SET_VRING_BASE said, or where it stopped. In a packed ring bit 15 is the wrap
    /// counter. `None`: nothing was said yet, and it begins where rings begin.
    pub(crate) next_avail: Option<u16>,
    /// Where it stopped last: in this session, or elsewhere as a loaded state says. SET_VRING_BASE does not change this.
    pub(crate) stopped_at: Option<u16>,
    /// Completions that it still owes its driver from when it ran last.
    pub(crate) held: Vec<Held>,
    /// These two come from a state that was loaded, of a ring of this shape. Until it has run, SET_VRING_BASE changes nothing:
    /// a front-end that sends states need not know where popping goes on, and may say how far the driver is instead.
    pub(crate) loaded: Option<Shape>,
    /// A kick descriptor has come and GET_VRING_BASE has not: *started* in the words of the specification.
    pub(crate) started: bool,
    /// SET_VRING_ENABLE, or no protocol features, with which rings are enabled from the beginning.
    pub(crate) enabled: bool,
}

/// Where SET_VRING_ADDR says that areas are. Behind a vIOMMU its numbers, that of the log among them, are addresses as the
/// device sees them.
pub(crate) fn areas(said: Addresses, features: Features) -> Areas {
    if !features.contains(Features::ACCESS_PLATFORM) {
        return Areas::User(said);
    }
    let Addresses { desc, avail, used, log } = said;
    let log = log.map(|log| Iova(log.0));
    Areas::Iova(IovaAddresses { desc: Iova(desc.0), avail: Iova(avail.0), used: Iova(used.0), log })
}

impl Setup {
    /// Goes on from where it stopped.
    pub(crate) fn resume(&mut self, Stopped { next_avail, held, .. }: Stopped) {
        (self.next_avail, self.stopped_at) = (Some(next_avail), Some(next_avail));
        self.held = held;
    }

    /// Goes on from where it stopped elsewhere.
    pub(crate) fn load(&mut self, ring: RingState, packed: bool) {
        self.loaded = Some(Shape { size: ring.size, packed });
        self.resume(Stopped { next_avail: ring.next_avail, has_work: false, held: ring.held });
    }

    /// Where it stands; `None`: nothing was said of it yet.
    pub(crate) fn save(&self, index: u16) -> Option<RingState> {
        let size = self.loaded.map(|loaded| loaded.size).or(self.size)?;
        Some(RingState { index, size, next_avail: self.next_avail?, held: self.held.clone() })
    }

    /// The first available entry to take. A packed ring begins at index 0 in a round with the wrap counter set.
    pub(crate) fn next_avail(&self, packed: bool) -> u16 {
        self.next_avail.unwrap_or(if packed { EVENT_WRAP } else { 0 })
    }

    /// Whether only SET_VRING_BASE says where it goes on: the ring did not stop there.
    pub(crate) fn is_unconfirmed(&self) -> bool {
        self.next_avail.is_some() && self.next_avail != self.stopped_at
    }

    /// Whether it goes on from where a driver had come to.
    pub(crate) fn goes_on(&self, packed: bool) -> bool {
        self.next_avail(packed) != Self::default().next_avail(packed)
    }

    /// What GET_VRING_BASE answers. QEMU wants of a packed ring also, in the upper half, how far it is used; when a ring has
    /// stopped that is as far as it is taken.
    pub(crate) fn base(&self, packed: bool) -> u32 {
        let next = u32::from(self.next_avail(packed));
        if packed { next << 16 | next } else { next }
    }

    /// The index in what SET_VRING_BASE says; `None` for what cannot be resumed. The upper half of a packed ring's is as
    /// in [`Setup::base`], or, where the front-end does not say how far it is used, zero. Chains that were taken and not used
    /// are not known here, so it has to be the same index.
    pub(crate) fn index_of_base(base: u32, packed: bool) -> Option<u16> {
        let (low, high) = (base as u16, (base >> 16) as u16);
        (high == 0 || (packed && high == low)).then_some(low)
    }

    /// SET_VRING_BASE. Another index than where it stopped begins another life of the ring, whose driver is owed
    /// nothing.
    pub(crate) fn set_base(&mut self, next_avail: u16) {
        if self.loaded.is_some() {
            return;
        }
        if Some(next_avail) != self.next_avail {
            self.held = Vec::new();
        }
        self.next_avail = Some(next_avail);
    }

    /// Returns the size and addresses to run with: all that is needed is known, the ring was started, and it is enabled, or
    /// drained while it is `disabled`.
    pub(crate) fn runs(&self, disabled: Disabled) -> Option<(u16, Addresses)> {
        let is_served = self.enabled || disabled == Disabled::Drained;
        match (self.size, self.addresses) {
            (Some(size), Some(addresses)) if self.started && is_served => Some((size, addresses)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_owed_within_one_life() {
        let held = vec![Held { id: 3, len: 1, descriptors: 0 }];
        let mut setup = Setup::default();
        setup.resume(Stopped { next_avail: 9, has_work: false, held: held.clone() });
        setup.set_base(9);
        assert_eq!((setup.next_avail, &setup.held), (Some(9), &held));
        setup.set_base(0);
        assert_eq!((setup.next_avail, setup.held), (Some(0), Vec::new()));
    }

    #[test]
    fn a_loaded_state_goes_before_a_base() {
        let mut setup = Setup::default();
        assert_eq!(setup.save(1), None);
        let ring = RingState {
            index: 1,
            size: 16,
            next_avail: 9,
            held: vec![Held { id: 3, len: 1, descriptors: 0 }],
        };
        setup.load(ring.clone(), false);
        setup.set_base(12);
        assert_eq!(setup.save(1), Some(ring));
        setup.loaded = None;
        setup.set_base(12);
        assert_eq!((setup.next_avail, setup.held), (Some(12), Vec::new()));
    }

    #[test]
    fn a_base_is_confirmed_where_the_ring_stopped() {
        let mut setup = Setup::default();
        assert!(!setup.is_unconfirmed(), "it begins where rings begin");
        setup.set_base(9);
        assert!(setup.is_unconfirmed());
        // It has run, and runs again without being told where, or with the same base.
        setup.resume(Stopped { next_avail: 12, has_work: false, held: Vec::new() });
        assert!(!setup.is_unconfirmed());
        setup.set_base(12);
        assert!(!setup.is_unconfirmed());
        setup.set_base(11);
        assert!(setup.is_unconfirmed());
        let mut loaded = Setup::default();
        loaded.load(RingState { index: 1, size: 16, next_avail: 9, held: Vec::new() }, true);
        loaded.set_base(12);
        assert!(!loaded.is_unconfirmed());
    }

    #[test]
    fn bases_of_both_formats() {
        let setup = Setup { next_avail: Some(0x8003), ..Setup::default() };
        assert_eq!((setup.base(false), setup.base(true)), (0x8003, 0x8003_8003));
        assert_eq!((Setup::default().base(false), Setup::default().base(true)), (0, 0x8000_8000));
        for base in [0x8003, 0x8003_8003] {
            assert_eq!(Setup::index_of_base(base, true), Some(0x8003));
        }
        assert_eq!(Setup::index_of_base(0x8003, false), Some(0x8003));
        assert_eq!(Setup::index_of_base(0x8003_8003, false), None);
        assert_eq!(Setup::index_of_base(0x8002_8003, true), None);
    }

    #[test]
    fn runs_only_when_all_is_there() {
        let whole = Setup {
            size: Some(256),
            addresses: Some(Addresses::default()),
            next_avail: Some(7),
            stopped_at: None,
            held: Vec::new(),
            loaded: None,
            started: true,
            enabled: true,
        };
        let runs = Some((256, Addresses::default()));
        assert_eq!(whole.runs(Disabled::LeftAlone), runs);
        let disabled = Setup { enabled: false, ..whole.clone() };
        assert_eq!(disabled.runs(Disabled::Drained), runs);
        for lacking in [
            Setup { size: None, ..whole.clone() },
            Setup { addresses: None, ..whole.clone() },
            Setup { started: false, ..whole.clone() },
            Setup { enabled: false, ..whole.clone() },
        ] {
            assert_eq!(lacking.runs(Disabled::LeftAlone), None, "{lacking:?}");
        }
    }
}
