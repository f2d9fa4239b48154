//! The port of a card, as an operator writes it.

use crate::TestFrame;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// The highest rate of test frames, per second.
const RATE_MAX: u32 = 1_000_000;

/// The source of the frames that a card delivers, and the destination of those that its driver sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// `null`: discards the frames of the driver and delivers test frames.
    Null(NullPort),
}

/// A port that discards the frames of the driver and delivers test frames: `null[,rate=N][,length=MIN-MAX]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullPort {
    /// Test frames per second for each pair of rings. 0 is for none.
    pub rate: u32,
    /// Lengths of test frames in bytes. They grow to the longest and start again near the shortest.
    pub lengths: RangeInclusive<u32>,
}

/// Returns a port without test frames, with the lengths of Ethernet frames.
impl Default for NullPort {
    fn default() -> Self {
        Self { rate: 0, lengths: TestFrame::LEN_MIN..=1514 }
    }
}

impl NullPort {
    /// Bytes by which a frame is longer than the previous one. A prime, so that frames end at all offsets of
    /// their buffers.
    const LENGTH_STEP: u64 = 97;

    /// Returns the length of the frame with this number.
    pub fn length(&self, number: u64) -> u32 {
        let (min, max) = (*self.lengths.start(), *self.lengths.end());
        let span = u64::from(max.saturating_sub(min)) + 1;
        // The remainder fits into a u32, because the span is at most 2^32.
        min + (number.wrapping_mul(Self::LENGTH_STEP) % span) as u32
    }
}

impl FromStr for Port {
    type Err = InvalidPort;

    fn from_str(text: &str) -> Result<Self, InvalidPort> {
        let mut parts = text.split(',');
        if parts.next() != Some("null") {
            return Err(InvalidPort::Unknown);
        }
        let mut port = NullPort::default();
        for part in parts {
            match part.split_once('=') {
                Some(("rate", rate)) => {
                    port.rate =
                        rate.parse().ok().filter(|rate| *rate <= RATE_MAX).ok_or(InvalidPort::Rate)?;
                }
                Some(("length", lengths)) => port.lengths = parse_lengths(lengths)?,
                _ => return Err(InvalidPort::Option(part.to_owned())),
            }
        }
        Ok(Self::Null(port))
    }
}

fn parse_lengths(text: &str) -> Result<RangeInclusive<u32>, InvalidPort> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u32>().map_err(|_| InvalidPort::Length);
    let (min, max) = (number(min)?, number(max)?);
    match TestFrame::LEN_MIN <= min && min <= max && max <= TestFrame::LEN_MAX {
        true => Ok(min..=max),
        false => Err(InvalidPort::Length),
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Null(port) = self;
        let default = NullPort::default();
        f.write_str("null")?;
        if port.rate != default.rate {
            write!(f, ",rate={}", port.rate)?;
        }
        if port.lengths != default.lengths {
            write!(f, ",length={}-{}", port.lengths.start(), port.lengths.end())?;
        }
        Ok(())
    }
}

/// The error of a text that does not describe a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPort {
    /// There is no port of this name.
    #[error("the only port is null")]
    Unknown,
    /// The port has no such option.
    #[error("a null port has no option {0:?}: it has rate=N and length=MIN-MAX")]
    Option(String),
    /// The rate is not a number, or is too high.
    #[error("the rate of test frames is a number from 0 to {RATE_MAX} a second")]
    Rate,
    /// The lengths are not a range, or are outside of the lengths of test frames.
    #[error(
        "the length of test frames is MIN-MAX, from {} to {} bytes",
        TestFrame::LEN_MIN,
        TestFrame::LEN_MAX
    )]
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_displayed_as_it_was_written() {
        for text in ["null", "null,rate=7", "null,length=60-65550", "null,rate=1000000,length=100-100"] {
            assert_eq!(text.parse::<Port>().unwrap().to_string(), text);
        }
        let same = "null,rate=0,length=60-1514".parse::<Port>().unwrap();
        assert_eq!(same, Port::Null(NullPort::default()));
        assert_eq!("null,length=99".parse::<Port>().unwrap().to_string(), "null,length=99-99");
    }

    #[test]
    fn a_text_that_is_not_a_port_is_refused() {
        for (text, error) in [
            ("", InvalidPort::Unknown),
            ("nul", InvalidPort::Unknown),
            ("null,", InvalidPort::Option(String::new())),
            ("null,rat=1", InvalidPort::Option("rat=1".into())),
            ("null,rate=1000001", InvalidPort::Rate),
            ("null,rate=-1", InvalidPort::Rate),
            ("null,length=59-60", InvalidPort::Length),
            ("null,length=70-60", InvalidPort::Length),
            ("null,length=60-65551", InvalidPort::Length),
            ("null,length=", InvalidPort::Length),
        ] {
            assert_eq!(text.parse::<Port>(), Err(error), "{text}");
        }
    }

    #[test]
    fn lengths_grow_within_their_range() {
        let port = NullPort { rate: 1, lengths: 60..=1000 };
        assert_eq!([0, 1, 2].map(|n| port.length(n)), [60, 157, 254]);
        assert!((0..2000).chain([u64::MAX]).all(|n| port.lengths.contains(&port.length(n))));
        assert_eq!(NullPort { rate: 1, lengths: 70..=70 }.length(9), 70);
    }
}
