//! The heads of messages. Pure.
//!
//! ```text
//!   kind (2)   descriptors of the whole record (2)   number (4)   length of the body (4)   body
//! ```
//! Numbers are little-endian. A body is a record's text, a record's sealed memory ([`IN_MEMORY`]), or a
//! sentence.

use crate::error::Error;

/// The length of a head.
pub(crate) const HEAD_LEN: usize = 12;
/// The longest body in a message. A longer one is in memory.
pub(crate) const BODY_MAX: usize = 32 << 10;
/// The length of a body that is in memory, whose descriptor is the first one.
pub(crate) const IN_MEMORY: u32 = u32::MAX;

/// Defines the kinds, with their numbers and their names in errors.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $number:literal, $sent:literal;)*) => {
        /// The kind of a message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Kind {
            $($(#[$doc])* $kind = $number,)*
        }

        impl Kind {
            fn new(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$kind),)*
                    _ => None,
                }
            }

            /// Returns the error of a message of this kind at a wrong moment.
            pub(crate) fn out_of_order(self) -> Error {
                Error::Message(match self {
                    $(Self::$kind => concat!($sent, " out of order"),)*
                })
            }
        }
    };
}

kinds! {
    /// Old: the plan. `number`: the devices that have records.
    Plan = 1, "a plan";
    /// Old: a device.
    Device = 2, "a device";
    /// Old: a device has left.
    Gone = 3, "the end of a device";
    /// Old: a device in the pause.
    Final = 4, "the final state of a device";
    /// Old: all have come. `number`: the final records.
    Last = 5, "the end of the states";
    /// Old: more descriptors of the last record.
    More = 6, "more descriptors";
    /// Both: a sentence. The sender has given up.
    Refused = 7, "a refusal";
    /// New: the plan can be served.
    Ready = 8, "an answer to the plan";
    /// New: the device is made, or was dropped.
    Made = 9, "an answer to a device";
    /// New: the descriptors have come, and more are expected.
    Got = 10, "an answer to descriptors";
    /// New: it serves.
    Taken = 11, "that it serves";
}

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    pub(crate) fds: u16,
    pub(crate) number: u32,
    pub(crate) len: u32,
}

impl Head {
    /// Makes the head of a message without a body.
    pub(crate) fn new(kind: Kind, number: u32) -> Self {
        Self { kind, fds: 0, number, len: 0 }
    }

    /// Returns the kind of a message, whatever follows.
    pub(crate) fn kind(message: &[u8]) -> Option<Kind> {
        message.first_chunk().and_then(|kind| Kind::new(u16::from_le_bytes(*kind)))
    }

    /// Returns the head and the body of a message that another process has sent.
    ///
    /// # Errors
    /// It is no message.
    pub(crate) fn parse(message: &[u8]) -> Result<(Self, &[u8]), Error> {
        const SHORT: Error = Error::Message("too few bytes");
        let (head, body) = message.split_first_chunk::<HEAD_LEN>().ok_or(SHORT)?;
        let [k0, k1, f0, f1, n0, n1, n2, n3, l0, l1, l2, l3] = *head;
        let kind = Kind::new(u16::from_le_bytes([k0, k1])).ok_or(Error::Message("an unknown message"))?;
        let (fds, number) = (u16::from_le_bytes([f0, f1]), u32::from_le_bytes([n0, n1, n2, n3]));
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        let expected = if len == IN_MEMORY { 0 } else { len as usize };
        if body.len() != expected {
            return Err(Error::Message("a body of another length than it says"));
        }
        Ok((Self { kind, fds, number, len }, body))
    }

    /// Returns a message with this body.
    pub(crate) fn with(self, body: &[u8]) -> Vec<u8> {
        let Self { kind, fds, number, len } = self;
        let mut message = Vec::with_capacity(HEAD_LEN + body.len());
        message.extend((kind as u16).to_le_bytes());
        message.extend(fds.to_le_bytes());
        message.extend(number.to_le_bytes());
        message.extend(len.to_le_bytes());
        message.extend(body);
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn heads_are_read_as_they_were_written(number: u32, fds: u16, kind in 1..12u16, body: Vec<u8>) {
            let head = Head { kind: Kind::new(kind).unwrap(), fds, number, len: body.len() as u32 };
            let message = head.with(&body);
            let (read, rest) = Head::parse(&message).unwrap();
            prop_assert_eq!((read, rest, Head::kind(&message)), (head, &body[..], Some(head.kind)));
            prop_assert!(Head::parse(&message[..message.len() - 1]).is_err());
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>) {
            if let Ok((head, body)) = Head::parse(&bytes) {
                prop_assert_eq!(head.with(body), bytes);
            }
        }
    }
}
