//! Commands of the control queue. Pure: bytes in, a command out.

use kickless_spec::net::{
    CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK, CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, ControlHeader, NetFeatures,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::U16;

/// A command of the driver that can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Use this many pairs of rings, from 1 to the most that the card has.
    SetPairs(u16),
    /// The driver has announced its addresses.
    Announced,
}

/// Why a command is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has no whole header.
    #[error("the command has no header")]
    Short,
    /// The card has no such command, or it was not negotiated.
    #[error("there is no command {command} of class {class}")]
    Unknown {
        /// Its class.
        class: u8,
        /// Its number.
        command: u8,
    },
    /// Its data is of another length than the command's.
    #[error("the data of the command has the wrong length")]
    Length,
    /// The card has not so many pairs, or it is none.
    #[error("the card cannot use {pairs} pairs of rings")]
    Pairs {
        /// What was asked for.
        pairs: u16,
    },
}

impl Command {
    /// Bytes of the longest command that is known, and one more, so that a longer one is known to be longer.
    pub const LEN_MAX: usize = size_of::<ControlHeader>() + size_of::<U16>() + 1;

    /// Understands a command: its header and its data, without the byte for the answer.
    ///
    /// # Errors
    /// It is to be answered with [`ERR`](kickless_spec::net::ERR).
    pub fn parse(bytes: &[u8], features: NetFeatures, pairs_max: u16) -> Result<Self, Refusal> {
        let (header, data) = ControlHeader::read_from_prefix(bytes).map_err(|_| Refusal::Short)?;
        match (header.class, header.command) {
            (CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET) if features.contains(NetFeatures::MQ) => {
                let pairs = U16::read_from_bytes(data).map_err(|_| Refusal::Length)?.get();
                match (1..=pairs_max).contains(&pairs) {
                    true => Ok(Self::SetPairs(pairs)),
                    false => Err(Refusal::Pairs { pairs }),
                }
            }
            (CTRL_ANNOUNCE, CTRL_ANNOUNCE_ACK) if features.contains(NetFeatures::GUEST_ANNOUNCE) => {
                if data.is_empty() { Ok(Self::Announced) } else { Err(Refusal::Length) }
            }
            (class, command) => Err(Refusal::Unknown { class, command }),
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
            assert_eq!(parse(&[4, 0, low, high]), Err(Refusal::Pairs { pairs }));
        }
        assert_eq!(parse(&[3, 0]), Ok(Command::Announced));
        for bytes in [&[4, 0, 1][..], &[4, 0, 1, 0, 0], &[4, 0], &[3, 0, 0]] {
            assert_eq!(parse(bytes), Err(Refusal::Length));
        }
        assert_eq!(parse(&[]), Err(Refusal::Short));
        assert_eq!(parse(&[4]), Err(Refusal::Short));
        assert_eq!(parse(&[0, 0, 1]), Err(Refusal::Unknown { class: 0, command: 0 }));
        assert_eq!(parse(&[4, 1, 1, 0]), Err(Refusal::Unknown { class: 4, command: 1 }));
    }

    #[test]
    fn commands_need_their_features() {
        let without = |bytes: &[u8], feature| Command::parse(bytes, NetFeatures::all() - feature, 4);
        assert!(without(&[4, 0, 1, 0], NetFeatures::MQ).is_err());
        assert!(without(&[3, 0], NetFeatures::GUEST_ANNOUNCE).is_err());
    }
}
