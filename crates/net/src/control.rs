//! Parses the commands of the control queue. Has no state and no side effects.

use kickless_spec::net::{
    CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK, CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, ControlHeader, NetFeatures,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::U16;

/// A valid command of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Use this many pairs of rings, from 1 to the maximum of the card.
    SetPairs(u16),
    /// The driver has announced its addresses.
    Announced,
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
}

impl Command {
    /// The length of the longest valid command plus one byte. A caller that reads up to this length of a
    /// command can tell that it is too long.
    pub const LEN_MAX: usize = size_of::<ControlHeader>() + size_of::<U16>() + 1;

    /// Parses the header and the data of a command, without the byte for the answer.
    ///
    /// # Errors
    /// The command is invalid. The device answers it with [`ERR`](kickless_spec::net::ERR).
    pub fn parse(bytes: &[u8], features: NetFeatures, pairs_max: u16) -> Result<Self, CommandError> {
        let (header, data) = ControlHeader::read_from_prefix(bytes).map_err(|_| CommandError::Short)?;
        match (header.class, header.command) {
            (CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET) if features.contains(NetFeatures::MQ) => {
                let pairs = U16::read_from_bytes(data).map_err(|_| CommandError::Length)?.get();
                match (1..=pairs_max).contains(&pairs) {
                    true => Ok(Self::SetPairs(pairs)),
                    false => Err(CommandError::Pairs { pairs }),
                }
            }
            (CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK) if features.contains(NetFeatures::GUEST_ANNOUNCE) => {
                if data.is_empty() { Ok(Self::Announced) } else { Err(CommandError::Length) }
            }
            (class, command) => Err(CommandError::Unknown { class, command }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        let parse = |bytes: &[u8]| Command::parse(bytes, NetFeatures::all(), 4);
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
        assert_eq!(parse(&[0, 0, 1]), Err(CommandError::Unknown { class: 0, command: 0 }));
        assert_eq!(parse(&[4, 1, 1, 0]), Err(CommandError::Unknown { class: 4, command: 1 }));
    }

    #[test]
    fn commands_need_their_features() {
        let without = |bytes: &[u8], feature| Command::parse(bytes, NetFeatures::all() - feature, 4);
        assert!(without(&[4, 0, 1, 0], NetFeatures::MQ).is_err());
        assert!(without(&[3, 0], NetFeatures::GUEST_ANNOUNCE).is_err());
    }
}
