//! The interface of a port, as an operator writes it.

use crate::tap::{INTERFACE_NAME_MAX, is_interface_name};
use std::fmt;
use std::str::FromStr;

/// The highest number of a queue. No driver has more.
const QUEUE_MAX: u16 = 4095;

/// An interface, and the first of its queues that the card has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpName {
    /// The name of the interface.
    pub interface: String,
    /// The queue of the first pair of rings. Each further pair has the next one.
    pub queue: u16,
}

impl FromStr for XdpName {
    type Err = InvalidXdp;

    fn from_str(text: &str) -> Result<Self, InvalidXdp> {
        let (interface, options) =
            text.split_once(',').map_or((text, None), |(name, rest)| (name, Some(rest)));
        if !is_interface_name(interface) {
            return Err(InvalidXdp::Name);
        }
        let queue = match options {
            None => 0,
            Some(option) => {
                let number =
                    option.strip_prefix("queue=").ok_or_else(|| InvalidXdp::Option(option.to_owned()))?;
                let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
                let number = number.parse().ok().filter(|queue| is_number && *queue <= QUEUE_MAX);
                number.ok_or(InvalidXdp::Queue)?
            }
        };
        Ok(Self { interface: interface.to_owned(), queue })
    }
}

impl fmt::Display for XdpName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.interface)?;
        match self.queue {
            0 => Ok(()),
            queue => write!(f, ",queue={queue}"),
        }
    }
}

/// The error of a text that does not name an interface.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidXdp {
    /// This is no name of an interface.
    #[error(
        "the name of an interface has 1 to {INTERFACE_NAME_MAX} letters, digits and signs other than / : % and a comma"
    )]
    Name,
    /// The number of the queue is wrong.
    #[error("the queue of an interface is a number from 0 to {QUEUE_MAX}")]
    Queue,
    /// There is no such option.
    #[error("an xdp port has no option {0:?}: it has queue=N")]
    Option(String),
}
