//! The names of TAPs, and the descriptors of their queues.

use crate::ports::port::{Name, OpenPort, Opening, Pairs, PortError, PortKind};
use kickless_device::Handed;
use kickless_net_port::{INTERFACE_NAME_MAX, Tap, is_interface_name};
use kickless_opener::{Target, is_descriptor_name};
use std::fmt;
use std::sync::Arc;

/// The lowest number of a descriptor that can be a TAP: the others are the standard streams.
const FD_MIN: i32 = 3;
/// The most descriptors: a queue for each pair that a card can have.
const FDS_MAX: usize = 127;

/// The port `tap:NAME`.
pub(crate) const TAP: PortKind = PortKind {
    form: "tap:NAME",
    help: "tap:NAME is a TAP, which is made if it does not exist",
    // Most TAPs have one queue.
    pairs: Pairs::One,
    parse: |text| {
        let name = text.strip_prefix("tap:")?;
        Some(match is_interface_name(name) {
            true => Ok(Arc::new(TapName(name.to_owned()))),
            false => Err(InvalidTap::Name.into()),
        })
    },
};

/// The port `tap-fd:FD[,FD...]`.
pub(crate) const TAP_FD: PortKind = PortKind {
    form: "tap-fd:N",
    help: "tap-fd:N[,N...] are the queues of a TAP that the parent process has opened",
    pairs: Pairs::Descriptors,
    parse: |text| Some(TapFds::parse(text.strip_prefix("tap-fd:")?)),
};

/// The name of a TAP.
#[derive(Debug)]
struct TapName(String);

/// The descriptors of a TAP. Each is the number of an inherited one, or the name of one that came with a
/// call.
#[derive(Debug)]
struct TapFds(Vec<String>);

/// The error of a text that does not describe a TAP.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum InvalidTap {
    /// This is no name of an interface.
    #[error(
        "the name of a TAP has 1 to {INTERFACE_NAME_MAX} letters, digits and signs other than / : % and a comma"
    )]
    Name,
    /// The numbers of descriptors are wrong.
    #[error(
        "the descriptors of a TAP are 1 to {FDS_MAX} numbers from {FD_MIN} on, or names, with commas between them"
    )]
    Descriptor,
    /// A descriptor is named twice.
    #[error("the descriptor {0} is named twice")]
    Twice(String),
}

impl TapFds {
    fn parse(text: &str) -> Result<Arc<dyn Name>, PortError> {
        let mut fds = Vec::new();
        for part in text.split(',') {
            let is_digits = part.bytes().all(|byte| byte.is_ascii_digit());
            let number = part.parse::<i32>().ok().filter(|fd| *fd >= FD_MIN && is_digits);
            let name = is_descriptor_name(part).then(|| part.to_owned());
            // Two spellings of a number are one descriptor.
            let fd = number.map(|fd| fd.to_string()).or(name).ok_or(InvalidTap::Descriptor)?;
            if fds.contains(&fd) {
                return Err(InvalidTap::Twice(fd).into());
            }
            fds.push(fd);
        }
        match fds.len() <= FDS_MAX {
            true => Ok(Arc::new(Self(fds))),
            false => Err(InvalidTap::Descriptor.into()),
        }
    }
}

impl Name for TapName {
    fn pairs(&self) -> Option<u16> {
        None
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn target(&self) -> Option<Target> {
        Some(Target::Tap { name: self.0.clone() })
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        let tap = match opening.take_handed() {
            Some(Handed { state, given }) => Tap::taken_over(state, given, Some(&self.0), opening.pairs)?,
            None => Tap::open(&self.0, opening.pairs)?,
        };
        Ok(tap.into())
    }
}

impl Name for TapFds {
    fn pairs(&self) -> Option<u16> {
        // There are at most `FDS_MAX` of them.
        Some(self.0.len() as u16)
    }

    fn mtu_max(&self) -> Option<u16> {
        None
    }

    fn descriptors(&self) -> &[String] {
        &self.0
    }

    fn target(&self) -> Option<Target> {
        None
    }

    fn open(&self, opening: &Opening<'_>) -> Result<OpenPort, PortError> {
        if let Some(Handed { state, given }) = opening.take_handed() {
            return Ok(Tap::taken_over(state, given, None, opening.pairs)?.into());
        }
        let fds = self.0.iter().map(|fd| (opening.descriptor)(fd)).collect::<Result<_, _>>()?;
        Ok(Tap::adopt(fds)?.into())
    }
}

impl fmt::Display for TapName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap:{}", self.0)
    }
}

impl fmt::Display for TapFds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap-fd:{}", self.0.join(","))
    }
}
