//! The null port, as an operator writes it.

use crate::ports::port::{Name, OpenPort, Opening, Pairs, PortError, PortKind};
use kickless_net_port::TestFrame;
use kickless_opener::Target;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// The highest rate of test frames, per second.
const RATE_MAX: u32 = 1_000_000;

/// The port `null`.
pub(crate) const NULL: PortKind = PortKind {
    form: "null",
    help: "null discards them; null,rate=N,length=MIN-MAX also delivers N test frames per second to each pair of \
           queues, with these lengths in bytes",
    pairs: Pairs::Usual,
    parse: |text| {
        let mut parts = text.split(',');
        (parts.next() == Some("null"))
            .then(|| Ok(Arc::new(parse(parts).map_err(PortError::from)?) as Arc<dyn Name>))
    },
};

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

fn parse<'a>(parts: impl Iterator<Item = &'a str>) -> Result<NullPort, InvalidNull> {
    let mut port = NullPort::default();
    for part in parts {
        match part.split_once('=') {
            Some(("rate", rate)) => {
                port.rate = rate.parse().ok().filter(|rate| *rate <= RATE_MAX).ok_or(InvalidNull::Rate)?;
            }
            Some(("length", lengths)) => port.lengths = parse_lengths(lengths)?,
            _ => return Err(InvalidNull::Option(part.to_owned())),
        }
    }
    Ok(port)
}

fn parse_lengths(text: &str) -> Result<RangeInclusive<u32>, InvalidNull> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u32>().map_err(|_| InvalidNull::Length);
    let (min, max) = (number(min)?, number(max)?);
    match TestFrame::LEN_MIN <= min && min <= max && max <= TestFrame::LEN_MAX {
        true => Ok(min..=max),
        false => Err(InvalidNull::Length),
    }
}

/// The error of an option of a null port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum InvalidNull {
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

impl Name for NullPort {
    fn pairs(&self) -> Option<u16> {
        None
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn target(&self) -> Option<Target> {
        None
    }

    fn open(&self, _opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        Ok(self.clone().into())
    }
}

impl fmt::Display for NullPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        f.write_str("null")?;
        if self.rate != default.rate {
            write!(f, ",rate={}", self.rate)?;
        }
        if self.lengths != default.lengths {
            write!(f, ",length={}-{}", self.lengths.start(), self.lengths.end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_grow_within_their_range() {
        let port = NullPort { rate: 1, lengths: 60..=1000 };
        assert_eq!([0, 1, 2].map(|n| port.length(n)), [60, 157, 254]);
        assert!((0..2000).chain([u64::MAX]).all(|n| port.lengths.contains(&port.length(n))));
        assert_eq!(NullPort { rate: 1, lengths: 70..=70 }.length(9), 70);
    }
}
