//! The port of a card, as an operator writes it.

use crate::tap::{NAME_MAX, is_interface_name};
use crate::user::Passt;
use crate::{
    InvalidSwitch, InvalidUserOption, InvalidXdp, PasstError, StreamPort, SwitchName, Tap, TapError,
    TestFrame, UserOptions, XDP_MTU_MAX, XdpError, XdpName, XdpPort,
};
use kickless_opener::is_descriptor_name;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::{fmt, io};

/// The lowest number of a descriptor that can be a TAP: the others are the standard streams.
const FD_MIN: i32 = 3;
/// The most descriptors: a queue for each pair that a card can have.
const FDS_MAX: usize = 127;
/// The highest rate of test frames, per second.
const RATE_MAX: u32 = 1_000_000;
/// The longest path of a unix socket, without the zero behind it.
const SOCKET_PATH_MAX: usize = 107;

/// The source of the frames that a card delivers, and the destination of those that its driver sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// `null`: discards the frames of the driver and delivers test frames.
    Null(NullPort),
    /// `loop`: returns the frames of the driver.
    Loop,
    /// `tap:NAME`: a TAP of the host, which may exist already.
    Tap(String),
    /// `tap-fd:FD[,FD...]`: the queues of a TAP that another program has opened. Each is the number of an
    /// inherited descriptor, or the name of one that came with a call.
    TapFd(Vec<String>),
    /// `stream:PATH`: a program that listens on a unix socket, with the framing of QEMU's `-netdev stream`.
    Stream(PathBuf),
    /// `user[,OPTIONS]`: the network of this user, through a `passt` process with these options.
    User(UserOptions),
    /// `switch:NAME[,vlan=N][,uplink=TAP]`: the cards of this process with the same name, and a TAP.
    Switch(SwitchName),
    /// `xdp:IFNAME[,queue=N]`: queues of an interface of the host, through AF_XDP.
    Xdp(XdpName),
}

/// A port that is open.
#[derive(Debug)]
pub enum OpenPort {
    /// The null port.
    Null(NullPort),
    /// The loop port.
    Loop,
    /// A TAP with a queue for each pair of rings.
    Tap(Tap),
    /// A stream socket, which carries one pair of rings.
    Stream(StreamPort),
    /// A switch, which the card joins, and the TAP of its uplink, which it shares with other cards.
    Switch(SwitchName, Option<Arc<Tap>>),
    /// An interface with a queue for each pair of rings.
    Xdp(XdpPort),
}

/// The reason for which a port cannot be opened. Each is one sentence for an operator.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub enum PortError {
    /// A TAP.
    Tap(#[from] TapError),
    /// The process of a user's network.
    Passt(#[from] PasstError),
    /// An interface for AF_XDP.
    Xdp(#[from] XdpError),
    /// The process has no free descriptor.
    Descriptor(#[from] io::Error),
}

impl Port {
    /// Opens the port for a card with this number of pairs of rings. `descriptor` returns a
    /// descriptor by its number or name.
    ///
    /// # Errors
    /// The kernel or the parent process does not provide the TAP, or a program is missing.
    pub fn open(
        &self,
        pairs: u16,
        descriptor: impl Fn(&str) -> Result<OwnedFd, TapError>,
    ) -> Result<OpenPort, PortError> {
        Ok(match self {
            Self::Null(port) => OpenPort::Null(port.clone()),
            Self::Loop => OpenPort::Loop,
            Self::Tap(name) => OpenPort::Tap(Tap::open(name, pairs)?),
            Self::TapFd(fds) => {
                OpenPort::Tap(Tap::adopt(fds.iter().map(|fd| descriptor(fd)).collect::<Result<_, _>>()?)?)
            }
            Self::Switch(name) => {
                let uplink = name.uplink.as_deref().map(|tap| Tap::share(tap, &name.name));
                OpenPort::Switch(name.clone(), uplink.transpose()?)
            }
            Self::Xdp(name) => OpenPort::Xdp(XdpPort::open(name, pairs)?),
            Self::Stream(path) => OpenPort::Stream(StreamPort::to(path)?),
            Self::User(options) => OpenPort::Stream(StreamPort::to_passt(Passt::find(options.clone())?)?),
        })
    }

    /// Returns the number of pairs of rings that the port decides on, if it does.
    pub fn pairs(&self) -> Option<u16> {
        match self {
            // There are at most `FDS_MAX` of them.
            Self::TapFd(fds) => Some(fds.len() as u16),
            Self::Stream(_) | Self::User(_) => Some(1),
            Self::Null(_) | Self::Loop | Self::Tap(_) | Self::Switch(_) | Self::Xdp(_) => None,
        }
    }

    /// Returns the largest MTU whose frames the port carries, if that is less than any other port does.
    pub fn mtu_max(&self) -> Option<u16> {
        match self {
            Self::Xdp(_) => Some(XDP_MTU_MAX),
            _ => None,
        }
    }
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
        if let Some(name) = text.strip_prefix("tap:") {
            return parse_name(name).map(Self::Tap);
        }
        if let Some(fds) = text.strip_prefix("tap-fd:") {
            return parse_fds(fds).map(Self::TapFd);
        }
        if text.starts_with("vhost-user:") {
            return Err(InvalidPort::Removed);
        }
        if let Some(path) = text.strip_prefix("stream:") {
            return parse_path(path).map(Self::Stream);
        }
        if let Some(name) = text.strip_prefix("switch:") {
            return Ok(Self::Switch(name.parse()?));
        }
        if let Some(name) = text.strip_prefix("xdp:") {
            return Ok(Self::Xdp(name.parse()?));
        }
        if let Some(options) = text.strip_prefix("user,") {
            return Ok(Self::User(options.parse()?));
        }
        let mut parts = text.split(',');
        match parts.next() {
            Some("user") => Ok(Self::User(UserOptions::default())),
            Some("null") => parse_null(parts).map(Self::Null),
            Some("loop") => {
                parts.next().map_or(Ok(Self::Loop), |part| Err(InvalidPort::LoopOption(part.to_owned())))
            }
            _ => Err(InvalidPort::Unknown),
        }
    }
}

fn parse_null<'a>(parts: impl Iterator<Item = &'a str>) -> Result<NullPort, InvalidPort> {
    let mut port = NullPort::default();
    for part in parts {
        match part.split_once('=') {
            Some(("rate", rate)) => {
                port.rate = rate.parse().ok().filter(|rate| *rate <= RATE_MAX).ok_or(InvalidPort::Rate)?;
            }
            Some(("length", lengths)) => port.lengths = parse_lengths(lengths)?,
            _ => return Err(InvalidPort::Option(part.to_owned())),
        }
    }
    Ok(port)
}

/// Parses the name of a TAP.
fn parse_name(name: &str) -> Result<String, InvalidPort> {
    match is_interface_name(name) {
        true => Ok(name.to_owned()),
        false => Err(InvalidPort::Name),
    }
}

/// Parses the path of a unix socket.
fn parse_path(path: &str) -> Result<PathBuf, InvalidPort> {
    match (1..=SOCKET_PATH_MAX).contains(&path.len()) && !path.contains('\0') {
        true => Ok(path.into()),
        false => Err(InvalidPort::Path),
    }
}

fn parse_fds(text: &str) -> Result<Vec<String>, InvalidPort> {
    let mut fds = Vec::new();
    for part in text.split(',') {
        let is_digits = part.bytes().all(|byte| byte.is_ascii_digit());
        let number = part.parse::<i32>().ok().filter(|fd| *fd >= FD_MIN && is_digits);
        let name = is_descriptor_name(part).then(|| part.to_owned());
        // Two spellings of a number are one descriptor.
        let fd = number.map(|fd| fd.to_string()).or(name).ok_or(InvalidPort::Descriptor)?;
        if fds.contains(&fd) {
            return Err(InvalidPort::Twice(fd));
        }
        fds.push(fd);
    }
    match fds.len() <= FDS_MAX {
        true => Ok(fds),
        false => Err(InvalidPort::Descriptor),
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
        let port = match self {
            Self::Null(port) => port,
            Self::Loop => return f.write_str("loop"),
            Self::Tap(name) => return write!(f, "tap:{name}"),
            Self::TapFd(fds) => {
                return write!(f, "tap-fd:{}", fds.join(","));
            }
            Self::Stream(path) => return write!(f, "stream:{}", path.display()),
            Self::User(options) => return write!(f, "user{options}"),
            Self::Switch(name) => return write!(f, "switch:{name}"),
            Self::Xdp(name) => return write!(f, "xdp:{name}"),
        };
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
    #[error("a port is tap:NAME, tap-fd:N, switch:NAME, user, stream:PATH, xdp:IFNAME, loop or null")]
    Unknown,
    /// An earlier version had this port.
    #[error(
        "there is no port vhost-user:PATH any more: connect the hypervisor to that back-end itself, or use stream:PATH"
    )]
    Removed,
    /// The path is empty, or too long for a socket.
    #[error("the path of a stream has 1 to {SOCKET_PATH_MAX} bytes")]
    Path,
    /// The name or an option of a switch.
    #[error(transparent)]
    Switch(#[from] InvalidSwitch),
    /// The interface or an option of an XDP port.
    #[error(transparent)]
    Xdp(#[from] InvalidXdp),
    /// An option of a user's network.
    #[error(transparent)]
    User(#[from] InvalidUserOption),
    /// The port has no such option.
    #[error("a null port has no option {0:?}: it has rate=N and length=MIN-MAX")]
    Option(String),
    /// A loop port has no options.
    #[error("a loop port has no option {0:?}")]
    LoopOption(String),
    /// This is no name of an interface.
    #[error("the name of a TAP has 1 to {NAME_MAX} letters, digits and signs other than / : % and a comma")]
    Name,
    /// The numbers of descriptors are wrong.
    #[error(
        "the descriptors of a TAP are 1 to {FDS_MAX} numbers from {FD_MIN} on, or names, with commas between them"
    )]
    Descriptor,
    /// A descriptor is named twice.
    #[error("the descriptor {0} is named twice")]
    Twice(String),
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
        for text in [
            "null",
            "null,rate=7",
            "null,length=60-65550",
            "null,rate=1000000,length=100-100",
            "loop",
            "tap:vm1.net-0",
            "tap:fifteen-letters",
            "tap-fd:3",
            "tap-fd:7,5,6",
            "tap-fd:queue-0,queue-1",
            "stream:/run/a,b:c",
            "switch:lan-1",
            "switch:a,vlan=4094",
            "switch:a,uplink=vm0",
            "xdp:eth0",
            "xdp:eth0.5,queue=4095",
            "user",
            "user,--tcp-ports=22,,80,-4",
        ] {
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
            ("tap", InvalidPort::Unknown),
            ("tap,a", InvalidPort::Unknown),
            ("loop,rate=1", InvalidPort::LoopOption("rate=1".into())),
            ("tap:", InvalidPort::Name),
            ("tap:.", InvalidPort::Name),
            ("tap:sixteen-letters-", InvalidPort::Name),
            ("tap:a b", InvalidPort::Name),
            ("tap:tap%d", InvalidPort::Name),
            ("tap:a,vlan=1", InvalidPort::Name),
            ("tap-fd:", InvalidPort::Descriptor),
            ("tap-fd:2", InvalidPort::Descriptor),
            ("tap-fd:+3", InvalidPort::Descriptor),
            ("tap-fd:3,", InvalidPort::Descriptor),
            ("tap-fd:3,4,3", InvalidPort::Twice("3".into())),
            ("tap-fd:a,3,a", InvalidPort::Twice("a".into())),
            ("tap-fd:a b", InvalidPort::Descriptor),
            ("stream:", InvalidPort::Path),
            ("xdp:", InvalidXdp::Name.into()),
            ("xdp:a/b", InvalidXdp::Name.into()),
            ("xdp:a,queue=", InvalidXdp::Queue.into()),
            ("xdp:a,queue=+1", InvalidXdp::Queue.into()),
            ("xdp:a,queue=4096", InvalidXdp::Queue.into()),
            ("xdp:a,copy", InvalidXdp::Option("copy".into()).into()),
            ("xdp:a,queue=1,queue=1", InvalidXdp::Queue.into()),
            ("vhost-user:/run/a", InvalidPort::Removed),
            ("stream", InvalidPort::Unknown),
            ("user,", InvalidPort::User(InvalidUserOption::Form(String::new()))),
            ("user,--fd=3", InvalidPort::User(InvalidUserOption::Refused("--fd=3".into()))),
            ("users", InvalidPort::Unknown),
            ("switch", InvalidPort::Unknown),
            ("switch:", InvalidPort::Switch(InvalidSwitch::Name)),
            ("switch:a,vlan=0", InvalidPort::Switch(InvalidSwitch::Vlan)),
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
