//! The settings that a driver makes through the control queue, and the commands for them.

use kickless_spec::net::{CTRL_MAC, CTRL_MAC_ADDR_SET, CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, MAC_LEN, NetFeatures};

/// A command of the control queue.
pub(crate) struct Command {
    pub(crate) class: u8,
    pub(crate) command: u8,
    /// At most an address, so that all commands fit into their slots.
    pub(crate) data: Vec<u8>,
    /// The purpose, for errors.
    pub(crate) purpose: &'static str,
    /// The feature that it needs.
    pub(crate) feature: NetFeatures,
}

/// A change of the settings.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    Pairs(u16),
    Mac([u8; MAC_LEN]),
}

impl Change {
    /// Returns the command that makes the change.
    pub(crate) fn command(self) -> Command {
        match self {
            Self::Pairs(pairs) => Command {
                class: CTRL_MQ,
                command: CTRL_MQ_VQ_PAIRS_SET,
                data: pairs.to_le_bytes().to_vec(),
                purpose: "set the number of pairs",
                feature: NetFeatures::MQ,
            },
            Self::Mac(mac) => Command {
                class: CTRL_MAC,
                command: CTRL_MAC_ADDR_SET,
                data: mac.to_vec(),
                purpose: "set the address",
                feature: NetFeatures::CTRL_MAC_ADDR,
            },
        }
    }
}

/// The settings that were made, to make them again after a reconnection.
#[derive(Clone, Copy, Default)]
pub(crate) struct Settings {
    pairs: Option<u16>,
    pub(crate) mac: Option<[u8; MAC_LEN]>,
}

impl Settings {
    /// Records a change.
    pub(crate) fn record(&mut self, change: Change) {
        match change {
            Change::Pairs(pairs) => self.pairs = Some(pairs),
            Change::Mac(mac) => self.mac = Some(mac),
        }
    }

    /// Returns the changes that make these settings on a fresh card.
    pub(crate) fn changes(self) -> impl Iterator<Item = Change> {
        self.pairs.map(Change::Pairs).into_iter().chain(self.mac.map(Change::Mac))
    }
}
