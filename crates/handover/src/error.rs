//! The errors of this crate.

use std::io;
use std::ops::RangeInclusive;

/// The most characters of a sentence.
const SENTENCE_MAX: usize = 1000;

/// The reason for which a state is not written, not read, or not handed over. Each is the end of a sentence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The other process knows no format that this process knows.
    #[error(
        "it has formats {} to {} of the state, and this process has {} to {}",
        theirs.start(), theirs.end(), ours.start(), ours.end()
    )]
    Formats {
        /// The formats of the other process.
        theirs: RangeInclusive<u32>,
        /// The formats of this process.
        ours: RangeInclusive<u32>,
    },
    /// The bytes do not begin like a state of a format that this process knows.
    #[error("it is no state of a known format")]
    Foreign,
    /// A part of a state is too long.
    #[error("its {part} has {len} bytes, and the limit is {max}")]
    TooLong {
        /// The part.
        part: &'static str,
        /// Its length.
        len: u64,
        /// The largest length.
        max: u64,
    },
    /// The lengths of the parts contradict the length of the whole.
    #[error("its length contradicts its contents")]
    Length,
    /// The memory of a state can still be changed.
    #[error("its memory is not sealed")]
    NotSealed,
    /// The text is no state.
    #[error("its text is not valid: {0}")]
    Text(String),
    /// A field cannot have its value.
    #[error("its {field} cannot be {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// A descriptor does not exist, is named twice, or is not named.
    #[error("its descriptor {0} is missing, or not used once")]
    Descriptor(u64),
    /// A state has more descriptors than fit into its messages.
    #[error("it has {0} descriptors")]
    TooManyDescriptors(usize),
    /// This process did not get all descriptors of a message.
    #[error(
        "a descriptor did not arrive: the limit of open files (RLIMIT_NOFILE) is reached, or a security module \
         keeps this process from it"
    )]
    LostDescriptors,
    /// The other process sent something that is no message, or no message for this moment.
    #[error("it sent {0}")]
    Message(&'static str),
    /// The other process said nothing in time.
    #[error("it does not answer")]
    TimedOut,
    /// The other process has ended, or has closed the channel.
    #[error("it has ended")]
    Ended,
    /// The other process refused, with a sentence.
    #[error("{0}")]
    Refused(String),
    /// The kernel refused a call.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Text(sentence(error.to_string().as_bytes()))
    }
}

impl Error {
    /// Makes the error of a field.
    pub(crate) fn field(field: &'static str, value: impl ToString) -> Self {
        Self::Field { field, value: sentence(value.to_string().as_bytes()) }
    }
}

/// Returns a sentence for the log: bytes that another process has sent, or is going to read, without line
/// breaks and commands of terminals.
pub(crate) fn sentence(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SENTENCE_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_one_line_of_a_log() {
        assert_eq!(sentence(b"a\nb\x1b[31m\xff"), "a b [31m\u{fffd}");
        assert_eq!(sentence(&[b'a'; 5000]).len(), SENTENCE_MAX);
    }
}
