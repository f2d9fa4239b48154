//! Parses the commands of the control queue. Has no state and no side effects.

use crate::card::filter::{Address, Modes};
use kickless_spec::net::{
    CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK, CTRL_GUEST_OFFLOADS, CTRL_GUEST_OFFLOADS_SET, CTRL_MAC,
    CTRL_MAC_ADDR_SET, CTRL_MAC_TABLE_SET, CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, CTRL_RX, CTRL_RX_NOBCAST,
    CTRL_VLAN, CTRL_VLAN_ADD, CTRL_VLAN_DEL, ControlHeader, MAC_LEN, NetFeatures, VLAN_MAX,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The most addresses in both tables of a command. Linux sends the addresses that its programs listen to.
const ADDRESSES_MAX: usize = 2048;

/// A valid command of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Use this many pairs of rings, from 1 to the maximum of the card.
    SetPairs(u16),
    /// The driver has announced its addresses.
    Announced,
    /// Switch a receive mode on or off.
    SetMode(Modes, bool),
    /// Replace the tables of single addresses and of groups.
    SetTables {
        /// Single addresses.
        unicast: &'a [Address],
        /// Addresses of groups.
        multicast: &'a [Address],
    },
    /// Use this address.
    SetAddress(Address),
    /// Accept or refuse the frames of a VLAN.
    SetVlan(u16, bool),
    /// Apply only these offloads to received frames. All of them were negotiated.
    SetOffloads(NetFeatures),
}

/// The reason to answer a command with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// The header is missing or incomplete.
    #[error("the command has no header")]
    Short,
    /// The card has no such command, or the driver did not negotiate it.
    #[error("there is no command {command} of class {class}")]
    Unknown {
        /// The class of the command.
        class: u8,
        /// The number of the command in its class.
        command: u8,
    },
    /// The data does not have the length that the command requires.
    #[error("the data of the command has the wrong length")]
    Length,
    /// The number of pairs is 0, or higher than the maximum of the card.
    #[error("the card cannot use {pairs} pairs of rings")]
    Pairs {
        /// The number of pairs in the command.
        pairs: u16,
    },
    /// A value is not one of those that the command can have.
    #[error("the command has no value {value:#x}")]
    Value {
        /// The value in the command.
        value: u64,
    },
}

impl<'a> Command<'a> {
    /// The length of the longest valid command plus one byte. A caller that reads up to this length of a
    /// command can tell that it is too long.
    pub const LEN_MAX: usize =
        size_of::<ControlHeader>() + 2 * size_of::<U32>() + ADDRESSES_MAX * MAC_LEN + 1;

    /// Parses the header and the data of a command, without the byte for the answer.
    ///
    /// # Errors
    /// The command is invalid. The device answers it with [`ERR`](kickless_spec::net::ERR).
    pub fn parse(bytes: &'a [u8], features: NetFeatures, pairs_max: u16) -> Result<Self, CommandError> {
        let (header, data) = ControlHeader::read_from_prefix(bytes).map_err(|_| CommandError::Short)?;
        if bytes.len() >= Self::LEN_MAX {
            return Err(CommandError::Length);
        }
        let has = |feature| features.contains(feature);
        match (header.class, header.command) {
            (CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET) if has(NetFeatures::MQ) => {
                let pairs = number::<U16>(data)?.get();
                match (1..=pairs_max).contains(&pairs) {
                    true => Ok(Self::SetPairs(pairs)),
                    false => Err(CommandError::Pairs { pairs }),
                }
            }
            (CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK) if has(NetFeatures::GUEST_ANNOUNCE) => {
                if data.is_empty() {
                    Ok(Self::Announced)
                } else {
                    Err(CommandError::Length)
                }
            }
            (CTRL_RX, command @ ..=CTRL_RX_NOBCAST) if has(mode_feature(command)) => {
                match number::<u8>(data)? {
                    on @ 0..=1 => Ok(Self::SetMode(Modes::from_bits_truncate(1 << command), on == 1)),
                    value => Err(CommandError::Value { value: value.into() }),
                }
            }
            (CTRL_MAC, CTRL_MAC_TABLE_SET) if has(NetFeatures::CTRL_RX) => {
                let (unicast, rest) = table(data)?;
                let (multicast, rest) = table(rest)?;
                match rest.is_empty() {
                    true => Ok(Self::SetTables { unicast, multicast }),
                    false => Err(CommandError::Length),
                }
            }
            (CTRL_MAC, CTRL_MAC_ADDR_SET) if has(NetFeatures::CTRL_MAC_ADDR) => {
                number::<Address>(data).map(Self::SetAddress)
            }
            (CTRL_VLAN, command @ (CTRL_VLAN_ADD | CTRL_VLAN_DEL)) if has(NetFeatures::CTRL_VLAN) => {
                match number::<U16>(data)?.get() {
                    vlan @ ..=VLAN_MAX => Ok(Self::SetVlan(vlan, command == CTRL_VLAN_ADD)),
                    value => Err(CommandError::Value { value: value.into() }),
                }
            }
            (CTRL_GUEST_OFFLOADS, CTRL_GUEST_OFFLOADS_SET) if has(NetFeatures::CTRL_GUEST_OFFLOADS) => {
                let value = number::<U64>(data)?.get();
                let offloads = NetFeatures::from_bits(value).ok_or(CommandError::Value { value })?;
                match (features & NetFeatures::GUEST_OFFLOADS).contains(offloads) {
                    true => Ok(Self::SetOffloads(offloads)),
                    false => Err(CommandError::Value { value }),
                }
            }
            (class, command) => Err(CommandError::Unknown { class, command }),
        }
    }
}

/// Returns the feature that has this receive mode.
fn mode_feature(command: u8) -> NetFeatures {
    match command {
        kickless_spec::net::CTRL_RX_PROMISC | kickless_spec::net::CTRL_RX_ALLMULTI => NetFeatures::CTRL_RX,
        _ => NetFeatures::CTRL_RX_EXTRA,
    }
}

/// Parses the data of a command that is one value.
fn number<T: FromBytes>(data: &[u8]) -> Result<T, CommandError> {
    T::read_from_bytes(data).map_err(|_| CommandError::Length)
}

/// Parses the table of addresses at the beginning of `data`. Returns what follows it too.
fn table(data: &[u8]) -> Result<(&[Address], &[u8]), CommandError> {
    let (count, rest) = U32::read_from_prefix(data).map_err(|_| CommandError::Length)?;
    let count = usize::try_from(count.get()).map_err(|_| CommandError::Length)?;
    let len = count.checked_mul(MAC_LEN).ok_or(CommandError::Length)?;
    let (addresses, rest) = rest.split_at_checked(len).ok_or(CommandError::Length)?;
    Ok((addresses.as_chunks().0, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<Command<'_>, CommandError> {
        Command::parse(bytes, NetFeatures::all(), 4)
    }

    #[test]
    fn pairs_and_announcements() {
        assert_eq!(parse(&[4, 0, 1, 0]), Ok(Command::SetPairs(1)));
        assert_eq!(parse(&[4, 0, 4, 0]), Ok(Command::SetPairs(4)));
        for pairs in [0, 5, u16::MAX] {
            let [low, high] = pairs.to_le_bytes();
            assert_eq!(parse(&[4, 0, low, high]), Err(CommandError::Pairs { pairs }));
        }
        assert_eq!(parse(&[3, 0]), Ok(Command::Announced));
        for bytes in [&[4, 0, 1][..], &[4, 0, 1, 0, 0], &[4, 0], &[3, 0, 0]] {
            assert_eq!(parse(bytes), Err(CommandError::Length));
        }
        assert_eq!(parse(&[]), Err(CommandError::Short));
        assert_eq!(parse(&[4]), Err(CommandError::Short));
        assert_eq!(parse(&[0, 6, 1]), Err(CommandError::Unknown { class: 0, command: 6 }));
        assert_eq!(parse(&[4, 1, 1, 0]), Err(CommandError::Unknown { class: 4, command: 1 }));
        assert_eq!(parse(&[6, 0, 1, 0]), Err(CommandError::Unknown { class: 6, command: 0 }));
    }

    #[test]
    fn receive_modes_and_addresses() {
        let modes =
            [Modes::PROMISC, Modes::ALLMULTI, Modes::ALLUNI, Modes::NOMULTI, Modes::NOUNI, Modes::NOBCAST];
        for (command, mode) in (0..).zip(modes) {
            assert_eq!(parse(&[0, command, 1]), Ok(Command::SetMode(mode, true)));
            assert_eq!(parse(&[0, command, 0]), Ok(Command::SetMode(mode, false)));
            assert_eq!(parse(&[0, command, 2]), Err(CommandError::Value { value: 2 }));
            assert_eq!(parse(&[0, command]), Err(CommandError::Length));
        }
        assert_eq!(parse(&[1, 1, 2, 3, 4, 5, 6, 7]), Ok(Command::SetAddress([2, 3, 4, 5, 6, 7])));
        assert_eq!(parse(&[1, 1, 2, 3, 4, 5, 6]), Err(CommandError::Length));
        assert_eq!(parse(&[2, 0, 255, 15]), Ok(Command::SetVlan(4095, true)));
        assert_eq!(parse(&[2, 1, 1, 0]), Ok(Command::SetVlan(1, false)));
        assert_eq!(parse(&[2, 0, 0, 16]), Err(CommandError::Value { value: 4096 }));
    }

    #[test]
    fn tables() {
        let command = |counts: [u32; 2], addresses: &[u8]| {
            let (first, second) = addresses.split_at(6 * counts[0].min(1) as usize);
            [&[1, 0], &counts[0].to_le_bytes()[..], first, &counts[1].to_le_bytes(), second].concat()
        };
        let (one, two) = ([2, 0, 0, 0, 0, 1], [3, 0, 0, 0, 0, 2]);
        let bytes = command([1, 1], &[one, two].concat());
        assert_eq!(parse(&bytes), Ok(Command::SetTables { unicast: &[one], multicast: &[two] }));
        let empty = command([0, 0], &[]);
        assert_eq!(parse(&empty), Ok(Command::SetTables { unicast: &[], multicast: &[] }));
        for wrong in [
            command([0, 1], &[]),
            command([0, 0], &[0]),
            command([1, 2], &[one, two].concat()),
            command([u32::MAX, u32::MAX], &[one, two].concat()),
            bytes[..bytes.len() - 1].to_vec(),
            bytes[..5].to_vec(),
        ] {
            assert_eq!(parse(&wrong), Err(CommandError::Length), "{wrong:?}");
        }
        let count = ADDRESSES_MAX as u32;
        let longest = command([0, count], &[7; 6 * ADDRESSES_MAX]);
        assert_eq!(longest.len() + 1, Command::LEN_MAX);
        assert!(parse(&longest).is_ok());
        assert_eq!(parse(&command([0, count + 1], &[7; 6 * (ADDRESSES_MAX + 1)])), Err(CommandError::Length));
    }

    #[test]
    fn offloads_are_those_that_were_negotiated() {
        let features = NetFeatures::GUEST_CSUM | NetFeatures::GUEST_TSO4 | NetFeatures::CTRL_GUEST_OFFLOADS;
        let parse = |offloads: u64| {
            let bytes = [&[5, 0][..], &offloads.to_le_bytes()].concat();
            match Command::parse(&bytes, features, 1) {
                Ok(Command::SetOffloads(offloads)) => Some(offloads.bits()),
                Err(CommandError::Value { value }) if value == offloads => None,
                other => panic!("{other:?}"),
            }
        };
        for offloads in [0, 2, 2 | 1 << 7] {
            assert_eq!(parse(offloads), Some(offloads));
        }
        for offloads in [1, 1 << 2, 2 | 1 << 8, 1 << 40, u64::MAX] {
            assert_eq!(parse(offloads), None);
        }
    }

    #[test]
    fn commands_need_their_features() {
        let without = |bytes: &[u8], feature| Command::parse(bytes, NetFeatures::all() - feature, 4).is_err();
        assert!(without(&[4, 0, 1, 0], NetFeatures::MQ));
        assert!(without(&[3, 0], NetFeatures::GUEST_ANNOUNCE));
        assert!(without(&[0, 1, 1], NetFeatures::CTRL_RX));
        assert!(without(&[0, 2, 1], NetFeatures::CTRL_RX_EXTRA));
        assert!(without(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], NetFeatures::CTRL_RX));
        assert!(without(&[1, 1, 2, 3, 4, 5, 6, 7], NetFeatures::CTRL_MAC_ADDR));
        assert!(without(&[2, 0, 1, 0], NetFeatures::CTRL_VLAN));
        assert!(without(&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0], NetFeatures::CTRL_GUEST_OFFLOADS));
    }
}
