//! The settings that a driver makes through the control queue, and the commands for them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kickless_spec::net::{
    CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK, CTRL_GUEST_OFFLOADS, CTRL_GUEST_OFFLOADS_SET, CTRL_MAC,
    CTRL_MAC_ADDR_SET, CTRL_MAC_TABLE_SET, CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, CTRL_RX, CTRL_RX_ALLMULTI,
    CTRL_RX_ALLUNI, CTRL_RX_NOBCAST, CTRL_RX_NOMULTI, CTRL_RX_NOUNI, CTRL_RX_PROMISC, CTRL_VLAN,
    CTRL_VLAN_ADD, CTRL_VLAN_DEL, MAC_LEN, NetFeatures,
};

/// The largest number of VLANs: their numbers have 12 bits, and the last one is reserved.
const VLANS: u16 = 4095;

/// A filter of received frames that is either on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RxMode {
    /// Take all frames.
    Promiscuous,
    /// Take all multicast frames.
    AllMulticast,
    /// Take all unicast frames.
    AllUnicast,
    /// Take no multicast frames.
    NoMulticast,
    /// Take no unicast frames.
    NoUnicast,
    /// Take no broadcast frames.
    NoBroadcast,
}

impl RxMode {
    fn command(self) -> u8 {
        match self {
            Self::Promiscuous => CTRL_RX_PROMISC,
            Self::AllMulticast => CTRL_RX_ALLMULTI,
            Self::AllUnicast => CTRL_RX_ALLUNI,
            Self::NoMulticast => CTRL_RX_NOMULTI,
            Self::NoUnicast => CTRL_RX_NOUNI,
            Self::NoBroadcast => CTRL_RX_NOBCAST,
        }
    }

    /// Returns the feature that the command needs.
    fn feature(self) -> NetFeatures {
        match self {
            Self::Promiscuous | Self::AllMulticast => NetFeatures::CTRL_RX,
            _ => NetFeatures::CTRL_RX_EXTRA,
        }
    }
}

/// A command of the control queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) class: u8,
    pub(crate) command: u8,
    pub(crate) data: Vec<u8>,
    /// The purpose, for errors.
    pub(crate) purpose: &'static str,
    /// The feature that it needs.
    pub(crate) feature: NetFeatures,
}

/// A change of the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Pairs(u16),
    Mac([u8; MAC_LEN]),
    Addresses(Vec<[u8; MAC_LEN]>, Vec<[u8; MAC_LEN]>),
    RxMode(RxMode, bool),
    Vlan(u16, bool),
    Offloads(NetFeatures),
    Announced,
}

impl Change {
    /// Returns the command that makes the change.
    pub(crate) fn command(&self) -> Command {
        let command =
            |class, command, data, purpose, feature| Command { class, command, data, purpose, feature };
        match self {
            Self::Pairs(pairs) => {
                let data = pairs.to_le_bytes().to_vec();
                command(CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, data, "set the number of pairs", NetFeatures::MQ)
            }
            Self::Mac(mac) => command(
                CTRL_MAC,
                CTRL_MAC_ADDR_SET,
                mac.to_vec(),
                "set the address",
                NetFeatures::CTRL_MAC_ADDR,
            ),
            Self::Addresses(unicast, multicast) => {
                let table = |addresses: &[[u8; MAC_LEN]]| {
                    // Lossless: the caller bounds the number.
                    let count = (addresses.len() as u32).to_le_bytes();
                    count.into_iter().chain(addresses.iter().flatten().copied()).collect::<Vec<u8>>()
                };
                let data = [table(unicast), table(multicast)].concat();
                command(CTRL_MAC, CTRL_MAC_TABLE_SET, data, "set the addresses to take", NetFeatures::CTRL_RX)
            }
            Self::RxMode(mode, on) => {
                let data = vec![u8::from(*on)];
                command(CTRL_RX, mode.command(), data, "set a receive mode", mode.feature())
            }
            Self::Vlan(vlan, takes) => {
                let code = if *takes { CTRL_VLAN_ADD } else { CTRL_VLAN_DEL };
                let data = vlan.to_le_bytes().to_vec();
                command(CTRL_VLAN, code, data, "change the VLANs", NetFeatures::CTRL_VLAN)
            }
            Self::Offloads(offloads) => command(
                CTRL_GUEST_OFFLOADS,
                CTRL_GUEST_OFFLOADS_SET,
                offloads.bits().to_le_bytes().to_vec(),
                "set the offloads",
                NetFeatures::CTRL_GUEST_OFFLOADS,
            ),
            Self::Announced => command(
                CTRL_ANNOUNCE,
                CTRL_ANNOUNCE_ACK,
                Vec::new(),
                "acknowledge an announcement",
                NetFeatures::GUEST_ANNOUNCE,
            ),
        }
    }
}

/// The settings that were made, to make them again after a reconnection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pairs: Option<u16>,
    mac: Option<[u8; MAC_LEN]>,
    addresses: Option<Change>,
    modes: BTreeMap<RxMode, bool>,
    vlans: BTreeSet<u16>,
    offloads: Option<NetFeatures>,
}

impl Settings {
    /// Records a change.
    pub(crate) fn record(&mut self, change: Change) {
        match change {
            Change::Pairs(pairs) => self.pairs = Some(pairs),
            Change::Mac(mac) => self.mac = Some(mac),
            Change::Addresses(..) => self.addresses = Some(change),
            Change::RxMode(mode, on) => drop(self.modes.insert(mode, on)),
            Change::Vlan(vlan, true) if vlan < VLANS => drop(self.vlans.insert(vlan)),
            Change::Vlan(vlan, _) => drop(self.vlans.remove(&vlan)),
            Change::Offloads(offloads) => self.offloads = Some(offloads),
            Change::Announced => {}
        }
    }

    /// Returns the changes that make these settings on a fresh card. The modes, which can end its promiscuous
    /// mode, come after the addresses and VLANs that it then needs.
    pub(crate) fn changes(&self) -> impl Iterator<Item = Change> + '_ {
        let modes = self.modes.iter().map(|(mode, on)| Change::RxMode(*mode, *on));
        let vlans = self.vlans.iter().map(|vlan| Change::Vlan(*vlan, true));
        self.pairs
            .map(Change::Pairs)
            .into_iter()
            .chain(self.mac.map(Change::Mac))
            .chain(self.addresses.clone())
            .chain(vlans)
            .chain(modes)
            .chain(self.offloads.map(Change::Offloads))
    }

    /// Makes these settings on a fresh card by `run`, which gets each change and the time for its answer.
    /// Each has the time `limit`, and all together have time until `deadline`. Without it, a card that
    /// answers each of thousands late would keep the driver from giving it up.
    ///
    /// # Errors
    /// The first error of `run`.
    pub(crate) fn make_again<E>(
        &self,
        limit: Duration,
        deadline: Instant,
        now: impl Fn() -> Instant,
        mut run: impl FnMut(Change, Duration) -> Result<(), E>,
    ) -> Result<(), E> {
        self.changes()
            .try_for_each(|change| run(change, limit.min(deadline.saturating_duration_since(now()))))
    }

    pub(crate) fn mac(&self) -> Option<[u8; MAC_LEN]> {
        self.mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_their_data() {
        let table = Change::Addresses(vec![[1; 6]], vec![[2; 6], [3; 6]]).command();
        let data = [&[1, 0, 0, 0][..], &[1; 6], &[2, 0, 0, 0], &[2; 6], &[3; 6]].concat();
        assert_eq!((table.class, table.command, table.data), (1, 0, data));
        let vlan = Change::Vlan(0x123, false).command();
        assert_eq!((vlan.class, vlan.command, vlan.data), (2, 1, vec![0x23, 1]));
        assert_eq!(Change::RxMode(RxMode::NoBroadcast, true).command().command, 5);
    }

    #[test]
    fn the_last_setting_is_made_again() {
        let mut settings = Settings::default();
        for change in [
            Change::Pairs(2),
            Change::Pairs(4),
            Change::Vlan(7, true),
            Change::Vlan(8, true),
            Change::Vlan(7, false),
            Change::RxMode(RxMode::Promiscuous, true),
            Change::RxMode(RxMode::Promiscuous, false),
            Change::Announced,
        ] {
            settings.record(change);
        }
        let changes: Vec<_> = settings.changes().collect();
        let expected = [Change::Pairs(4), Change::Vlan(8, true), Change::RxMode(RxMode::Promiscuous, false)];
        assert_eq!(changes, expected);
    }

    /// The card answers each command in time, but late.
    #[test]
    fn a_card_that_is_slow_with_each_setting_has_no_more_time_than_for_all() {
        let mut settings = Settings::default();
        (0..VLANS).for_each(|vlan| settings.record(Change::Vlan(vlan, true)));
        let begun = Instant::now();
        let (passed, mut commands) = (std::cell::Cell::new(Duration::ZERO), 0);
        let (limit, late, all) = (Duration::from_secs(5), Duration::from_secs(4), Duration::from_secs(30));
        let result = settings.make_again(
            limit,
            begun + all,
            || begun + passed.get(),
            |_, limit| {
                commands += 1;
                passed.set(passed.get() + late.min(limit));
                if limit < late { Err("no answer") } else { Ok(()) }
            },
        );
        assert_eq!((result, commands, passed.get()), (Err("no answer"), 8, all));
    }
}
