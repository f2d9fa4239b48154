//! The set-up of a ring by the front-end. Pure.

use crate::state::RingState;
use kickless_device::{Areas, Disabled, IovaAddresses, Stopped};
use kickless_memory::Iova;
use kickless_spec::features::Features;
use kickless_spec::ring::EVENT_WRAP;
use kickless_virtqueue::device::{Addresses, UnpublishedUsed};
use std::fmt;

/// The size and format of a ring, which must match a loaded state.
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
    /// The number of entries, once SET_VRING_NUM has come.
    pub(crate) size: Option<u16>,
    /// The addresses of its areas, once SET_VRING_ADDR has come. Their meaning depends on the features: see
    /// [`areas`].
    pub(crate) addresses: Option<Addresses>,
    /// The first available entry to take, from SET_VRING_BASE or from the last stop. In a packed ring, bit 15
    /// is the wrap counter. `None`: not set, so the ring starts at its initial index.
    pub(crate) next_avail: Option<u16>,
    /// The index at which the ring stopped last, in this session, in an earlier one of this process, or in a
    /// loaded state. SET_VRING_BASE does not change it.
    pub(crate) stopped_at: Option<u16>,
    /// Completions of the last run that the driver was not shown yet.
    pub(crate) unpublished: Vec<UnpublishedUsed>,
    /// The shape of the ring in a loaded state, from which `next_avail` and `unpublished` come. Until the
    /// ring has run, SET_VRING_BASE is ignored: a front-end that transfers states need not know where popping
    /// continues, and may send the driver's index instead.
    pub(crate) loaded: Option<Shape>,
    /// A kick descriptor has come, and GET_VRING_BASE has not: *started* in the words of the specification.
    pub(crate) started: bool,
    /// Set by SET_VRING_ENABLE. Without protocol features, rings are enabled from the start.
    pub(crate) enabled: bool,
}

/// Returns the areas of SET_VRING_ADDR. Behind a vIOMMU, all its addresses are IOVAs, also that of the log.
pub(crate) fn areas(said: Addresses, features: Features) -> Areas {
    if !features.contains(Features::ACCESS_PLATFORM) {
        return Areas::User(said);
    }
    let Addresses { desc, avail, used, log } = said;
    let log = log.map(|log| Iova(log.0));
    Areas::Iova(IovaAddresses { desc: Iova(desc.0), avail: Iova(avail.0), used: Iova(used.0), log })
}

impl Setup {
    /// Continues where the ring stopped.
    pub(crate) fn resume(&mut self, Stopped { next_avail, unpublished, .. }: Stopped) {
        (self.next_avail, self.stopped_at) = (Some(next_avail), Some(next_avail));
        self.unpublished = unpublished;
    }

    /// Continues where the ring stopped in another process.
    pub(crate) fn load(&mut self, ring: RingState, packed: bool) {
        self.loaded = Some(Shape { size: ring.size, packed });
        self.resume(Stopped {
            next_avail: ring.next_avail,
            has_work: false,
            left: 0,
            unpublished: ring.unpublished,
        });
    }

    /// Returns the state of the ring. `None` if it was not set up.
    pub(crate) fn save(&self, index: u16) -> Option<RingState> {
        let size = self.loaded.map(|loaded| loaded.size).or(self.size)?;
        Some(RingState { index, size, next_avail: self.next_avail?, unpublished: self.unpublished.clone() })
    }

    /// Returns the first available entry to take. A packed ring starts at index 0 with the wrap counter set.
    pub(crate) fn next_avail(&self, packed: bool) -> u16 {
        self.next_avail.unwrap_or(if packed { EVENT_WRAP } else { 0 })
    }

    /// Returns whether the index comes from SET_VRING_BASE alone, or is the initial one because there was no
    /// such message: the ring did not stop there.
    pub(crate) fn is_unconfirmed(&self, packed: bool) -> bool {
        self.stopped_at != Some(self.next_avail(packed))
    }

    /// Returns whether the ring continues at an index that a driver has reached.
    pub(crate) fn is_resumed(&self, packed: bool) -> bool {
        self.next_avail(packed) != Self::default().next_avail(packed)
    }

    /// Returns the answer to GET_VRING_BASE. For a packed ring, QEMU expects the used index in the upper
    /// half. In a stopped ring it equals the available one. Requests that are left in the in-flight buffer
    /// do not count as taken.
    pub(crate) fn base(&self, packed: bool) -> u32 {
        let next = u32::from(self.next_avail(packed));
        if packed { next << 16 | next } else { next }
    }

    /// Returns the index in the number of SET_VRING_BASE. `None` if the ring cannot continue there. For a
    /// packed ring, the upper half is as in [`Setup::base`], or zero if the front-end does not know the used
    /// index. A different used index means chains that were taken and not used. Only `has_left` says that the
    /// in-flight buffer has them; the ring then continues from the used index.
    pub(crate) fn index_of_base(base: u32, packed: bool, has_left: bool) -> Option<u16> {
        let (low, high) = (base as u16, (base >> 16) as u16);
        match high {
            0 => Some(low),
            _ if packed && (high == low || has_left) => Some(high),
            _ => None,
        }
    }

    /// Carries out SET_VRING_BASE. An index other than that of the last stop starts the ring anew, without
    /// old completions.
    pub(crate) fn set_base(&mut self, next_avail: u16) {
        if self.loaded.is_some() {
            return;
        }
        if Some(next_avail) != self.next_avail {
            self.unpublished = Vec::new();
        }
        self.next_avail = Some(next_avail);
    }

    /// Returns the size and addresses if the ring can run: they are known, the ring was started, and it is
    /// enabled, or drained while `disabled`.
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
    fn completions_are_kept_until_another_base() {
        let unpublished = vec![UnpublishedUsed { id: 3, len: 1, descriptors: 0 }];
        let mut setup = Setup::default();
        setup.resume(Stopped { next_avail: 9, has_work: false, left: 0, unpublished: unpublished.clone() });
        setup.set_base(9);
        assert_eq!((setup.next_avail, &setup.unpublished), (Some(9), &unpublished));
        setup.set_base(0);
        assert_eq!((setup.next_avail, setup.unpublished), (Some(0), Vec::new()));
    }

    #[test]
    fn a_loaded_state_goes_before_a_base() {
        let mut setup = Setup::default();
        assert_eq!(setup.save(1), None);
        let ring = RingState {
            index: 1,
            size: 16,
            next_avail: 9,
            unpublished: vec![UnpublishedUsed { id: 3, len: 1, descriptors: 0 }],
        };
        setup.load(ring.clone(), false);
        setup.set_base(12);
        assert_eq!(setup.save(1), Some(ring));
        setup.loaded = None;
        setup.set_base(12);
        assert_eq!((setup.next_avail, setup.unpublished), (Some(12), Vec::new()));
    }

    #[test]
    fn a_base_is_confirmed_where_the_ring_stopped() {
        let mut setup = Setup::default();
        assert!(setup.is_unconfirmed(false), "nothing says that it did not run before");
        setup.set_base(9);
        assert!(setup.is_unconfirmed(false));
        // It has run, and runs again without being told where, or with the same base.
        setup.resume(Stopped { next_avail: 12, has_work: false, left: 0, unpublished: Vec::new() });
        assert!(!setup.is_unconfirmed(false));
        setup.set_base(12);
        assert!(!setup.is_unconfirmed(false));
        setup.set_base(11);
        assert!(setup.is_unconfirmed(false));
        let mut loaded = Setup::default();
        loaded.load(RingState { index: 1, size: 16, next_avail: 9, unpublished: Vec::new() }, true);
        loaded.set_base(12);
        assert!(!loaded.is_unconfirmed(true));
    }

    #[test]
    fn bases_of_both_formats() {
        let setup = Setup { next_avail: Some(0x8003), ..Setup::default() };
        assert_eq!((setup.base(false), setup.base(true)), (0x8003, 0x8003_8003));
        assert_eq!((Setup::default().base(false), Setup::default().base(true)), (0, 0x8000_8000));
        for base in [0x8003, 0x8003_8003] {
            assert_eq!(Setup::index_of_base(base, true, false), Some(0x8003));
        }
        assert_eq!(Setup::index_of_base(0x8003, false, false), Some(0x8003));
        assert_eq!(Setup::index_of_base(0x8003_8003, false, true), None);
        assert_eq!(Setup::index_of_base(0x8002_8003, true, false), None);
        assert_eq!(Setup::index_of_base(0x8002_8003, true, true), Some(0x8002), "the used index");
    }

    #[test]
    fn runs_only_when_all_is_there() {
        let whole = Setup {
            size: Some(256),
            addresses: Some(Addresses::default()),
            next_avail: Some(7),
            stopped_at: None,
            unpublished: Vec::new(),
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
