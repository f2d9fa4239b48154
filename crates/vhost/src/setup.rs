//! What the front-end has said of a ring. Pure.

use kickless_virtqueue::device::Addresses;

/// The set-up of one ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Setup {
    /// Entries, once SET_VRING_NUM has come.
    pub(crate) size: Option<u16>,
    /// Where its areas lie, once SET_VRING_ADDR has come.
    pub(crate) addresses: Option<Addresses>,
    /// The first available entry to take: what SET_VRING_BASE said, or where it stopped.
    pub(crate) next_avail: u16,
    /// A kick descriptor has come and GET_VRING_BASE has not: *started* in the words of the specification.
    pub(crate) started: bool,
    /// SET_VRING_ENABLE, or no protocol features, with which rings are enabled from the beginning.
    pub(crate) enabled: bool,
}

impl Setup {
    /// Whether it is to run: all that is needed is known, it was started, and it is enabled.
    pub(crate) fn runs(&self) -> Option<(u16, Addresses)> {
        match (self.size, self.addresses) {
            (Some(size), Some(addresses)) if self.started && self.enabled => Some((size, addresses)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_only_when_all_is_there() {
        let whole = Setup {
            size: Some(256),
            addresses: Some(Addresses::default()),
            next_avail: 7,
            started: true,
            enabled: true,
        };
        assert_eq!(whole.runs(), Some((256, Addresses::default())));
        for lacking in [
            Setup { size: None, ..whole.clone() },
            Setup { addresses: None, ..whole.clone() },
            Setup { started: false, ..whole.clone() },
            Setup { enabled: false, ..whole.clone() },
        ] {
            assert_eq!(lacking.runs(), None, "{lacking:?}");
        }
    }
}
