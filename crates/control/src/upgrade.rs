//! The call `daemon.upgrade`: who may make it, and what it asks for.

use std::os::fd::OwnedFd;
use std::time::Duration;

use kickless_values::parse_duration;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};
use serde::{Deserialize, Deserializer, de::Error};

use super::rpc::RpcError;

/// The name of the descriptor that comes with the call.
pub const CHANNEL: &str = "channel";

/// The user id that the kernel shows for users of other namespaces (the default of
/// `kernel.overflowuid`).
const OVERFLOW: u32 = 65534;

/// The time that requests in flight have to complete, by default.
const DRAIN: Duration = Duration::from_secs(2);
/// The times that a caller can choose instead.
const DRAINS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(30);

/// The parameters of `daemon.upgrade`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// The oldest and the newest format of the state that the new process reads.
    pub formats: (u32, u32),
    /// The version of the new program, for the log.
    pub version: String,
    /// The longest time that requests in flight have to complete.
    #[serde(default = "default_drain", deserialize_with = "drain")]
    pub drain: Duration,
    /// The caller only keeps the devices for a process that comes later.
    #[serde(default)]
    pub store: bool,
}

/// A process that takes over.
#[derive(Debug)]
pub struct Successor {
    /// Its parameters.
    pub wants: Upgrade,
    /// The end of the channel to it.
    pub channel: OwnedFd,
}

fn default_drain() -> Duration {
    DRAIN
}

fn drain<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    let drain = parse_duration(&text).map_err(D::Error::custom)?;
    check_drain(drain).map_err(|why| D::Error::custom(format!("drain: {why}")))
}

/// Checks the longest time that requests in flight have to complete. Returns it.
///
/// # Errors
/// It is too short or too long. The error is one sentence.
pub fn check_drain(drain: Duration) -> Result<Duration, &'static str> {
    if DRAINS.contains(&drain) { Ok(drain) } else { Err("it must be from 100ms to 30s") }
}

/// Checks that the caller is the user of this process, or root. Users of other namespaces all look like the
/// overflow user, so that one is nobody's own.
///
/// # Errors
/// It is another user.
pub(crate) fn check_user(caller: u32, own: u32) -> Result<(), RpcError> {
    match caller == 0 || caller == own && own != OVERFLOW {
        true => Ok(()),
        false => Err(RpcError::not_allowed(format!(
            "only root and the user of the daemon ({own}) can take its guests over, and the caller is user {caller}"
        ))),
    }
}

/// Checks that a descriptor is an end of a pair of sockets of the type SOCK_SEQPACKET. Only their queue has
/// an end, after which it is certain which process serves.
///
/// # Errors
/// It is something else.
pub(crate) fn check_channel(channel: &OwnedFd) -> Result<(), RpcError> {
    let is_one = socket_domain(channel) == Ok(AddressFamily::UNIX)
        && socket_type(channel) == Ok(SocketType::SEQPACKET)
        && getpeername(channel).is_ok();
    match is_one {
        true => Ok(()),
        false => Err(RpcError::params(format!(
            "fds: {CHANNEL} is no connected unix socket of the type SOCK_SEQPACKET"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use rustix::net::{SocketFlags, socket_with, socketpair};

    use super::*;

    #[test]
    fn a_channel_is_a_pair_of_sockets() {
        let (unix, kind, flags) = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (own, _theirs) = socketpair(unix, kind, flags, None).unwrap();
        check_channel(&own).unwrap();
        let datagram = UnixDatagram::pair().unwrap().0.into();
        let stream = UnixStream::pair().unwrap().0.into();
        let alone = socket_with(unix, kind, flags, None).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap().into();
        for other in [datagram, stream, alone, file] {
            let error = check_channel(&other).unwrap_err();
            assert!(error.to_string().contains("SOCK_SEQPACKET"), "{error}");
        }
    }

    #[test]
    fn only_the_own_user_and_root_take_over() {
        let may = |caller, own| check_user(caller, own).is_ok();
        assert!(may(0, 0) && may(0, 1000) && may(1000, 1000) && may(0, 65534));
        assert!(!may(1000, 0) && !may(1000, 1001) && !may(65534, 0));
        // It may be any user of another namespace.
        assert!(!may(65534, 65534));
    }
}
