//! The address of an NBD server and the name of its export, in the form of the NBD URI specification.
//!
//! Source: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/uri.md>, on RFC 3986.

use super::percent;
use kickless_values::nearest;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The port that IANA assigned to NBD.
const PORT: u16 = 10809;

/// The largest name of an export in bytes (NBD protocol, "Values": strings).
const EXPORT_BYTES_MAX: usize = 4096;

/// The parameters with a meaning.
const PARAMETERS: [&str; 2] = ["socket", "reconnect-delay"];

/// The default time to wait for a lost server.
const RECONNECT_DELAY: Duration = Duration::from_secs(10);

/// The longest time to wait for a lost server: a day.
const RECONNECT_DELAY_MAX: u64 = 86400;

/// An export of an NBD server: `nbd://HOST[:PORT]/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`.
///
/// The query parameter `reconnect-delay=SECONDS` is an extension: the time that requests wait for a lost
/// server. The parameters of TLS are ignored. The specification says so of all others too, but they are
/// refused: a mistyped `reconnect-delay` would be noticed only when the server is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    pub(crate) server: Server,
    pub(crate) export: String,
    pub(crate) reconnect_delay: Duration,
    text: String,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

/// The reason why a text does not name an export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadUri {
    /// The scheme is another one.
    #[error("an NBD server is nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH")]
    Scheme,
    /// The scheme requires encryption.
    #[error("TLS is not supported: use nbd:// through a tunnel, or nbd+unix://")]
    Tls,
    /// The path of the unix socket is missing, or there is also a host.
    #[error("nbd+unix:// takes no host and needs ?socket=PATH")]
    Socket,
    /// The host is missing or invalid.
    #[error("{0:?} is not a host with an optional port: write nbd://HOST/EXPORT or nbd://HOST:PORT/EXPORT")]
    Host(String),
    /// A percent sign is not followed by two digits, or the bytes are not UTF-8.
    #[error("{0:?} is not percent-encoded text")]
    Encoding(String),
    /// No server can have an export of this name.
    #[error("the name of an export has 4096 bytes at most, and no byte 0")]
    Export,
    /// There is no such parameter.
    #[error("{}", unknown(.0))]
    Parameter(String),
    /// The time is invalid.
    #[error("reconnect-delay is a number of seconds from 0 to 86400")]
    ReconnectDelay,
}

impl FromStr for NbdUri {
    type Err = BadUri;

    fn from_str(text: &str) -> Result<Self, BadUri> {
        let (scheme, rest) = text.split_once("://").ok_or(BadUri::Scheme)?;
        let (rest, _fragment) = rest.split_once('#').unwrap_or((rest, ""));
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let mut socket = None;
        let mut reconnect_delay = RECONNECT_DELAY;
        for (name, value) in query.split('&').filter(|part| !part.is_empty()).map(pair) {
            match name {
                "socket" => socket = Some(decode(value)?),
                "reconnect-delay" => reconnect_delay = seconds(value)?,
                // A server without TLS has no use for them.
                name if name.starts_with("tls-") => {}
                name => return Err(BadUri::Parameter(name.to_owned())),
            }
        }
        let server = match scheme {
            "nbd" => tcp(authority)?,
            "nbd+unix" => match socket {
                Some(path) if authority.is_empty() && !path.is_empty() && !path.contains('\0') => {
                    Server::Unix(path.into())
                }
                _ => return Err(BadUri::Socket),
            },
            "nbds" | "nbds+unix" | "nbds+vsock" => return Err(BadUri::Tls),
            _ => return Err(BadUri::Scheme),
        };
        let export = decode(path)?;
        if export.len() > EXPORT_BYTES_MAX || export.contains('\0') {
            return Err(BadUri::Export);
        }
        Ok(Self { server, export, reconnect_delay, text: text.to_owned() })
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Parses a host with an optional port. An IPv6 address is in brackets.
fn tcp(authority: &str) -> Result<Server, BadUri> {
    let bad = || BadUri::Host(authority.to_owned());
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or_else(bad)?;
            let port = if after.is_empty() { None } else { Some(after.strip_prefix(':').ok_or_else(bad)?) };
            (host, port)
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let host = decode(host)?;
    // The name of a user would only be for TLS.
    if host.is_empty() || host.contains(['@', '/', '\0']) {
        return Err(bad());
    }
    let port = match port {
        None | Some("") => PORT,
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().ok().filter(|&port| port > 0).ok_or_else(bad)?
        }
        Some(_) => return Err(bad()),
    };
    Ok(Server::Tcp { host, port })
}

/// Splits a parameter into its name and its value.
fn pair(part: &str) -> (&str, &str) {
    part.split_once('=').unwrap_or((part, ""))
}

/// Returns the sentence about an unknown parameter.
fn unknown(name: &str) -> String {
    let cure = match nearest(name, PARAMETERS) {
        Some(known) => format!("did you mean {known}?"),
        None => format!("it has {}", PARAMETERS.join(" and ")),
    };
    format!("an NBD server has no parameter {name:?}: {cure}")
}

fn seconds(text: &str) -> Result<Duration, BadUri> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = text.parse().ok().filter(|&seconds: &u64| digits && seconds <= RECONNECT_DELAY_MAX);
    seconds.map(Duration::from_secs).ok_or(BadUri::ReconnectDelay)
}

/// Decodes percent-encoding.
fn decode(text: &str) -> Result<String, BadUri> {
    percent::decode(text).ok_or_else(|| BadUri::Encoding(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Server {
        Server::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn addresses() {
        for (text, server, export) in [
            ("nbd://host", tcp("host", 10809), ""),
            ("nbd://host/", tcp("host", 10809), ""),
            ("nbd://host:1234/disk", tcp("host", 1234), "disk"),
            ("nbd://[::1]/a/b", tcp("::1", 10809), "a/b"),
            ("nbd://[fe80::1%25eth0]:99/x", tcp("fe80::1%eth0", 99), "x"),
            ("nbd://host//x", tcp("host", 10809), "/x"),
            ("nbd://host/a%20b%2Fc?tls-type=none", tcp("host", 10809), "a b/c"),
            ("nbd+unix:///?socket=/run/s", Server::Unix("/run/s".into()), ""),
            ("nbd+unix:///e?socket=nbd%3f.sock#f", Server::Unix("nbd?.sock".into()), "e"),
        ] {
            let uri: NbdUri = text.parse().unwrap();
            assert_eq!((&uri.server, uri.export.as_str()), (&server, export), "{text}");
            assert_eq!((uri.to_string(), uri.reconnect_delay), (text.to_owned(), RECONNECT_DELAY));
        }
        let uri: NbdUri = "nbd+unix:///e?reconnect-delay=0&socket=s".parse().unwrap();
        assert_eq!(uri.reconnect_delay, Duration::ZERO);
    }

    #[test]
    fn refuses_other_addresses() {
        for (text, error) in [
            ("nbd:host", BadUri::Scheme),
            ("http://host/", BadUri::Scheme),
            ("nbds://host/", BadUri::Tls),
            ("nbds+unix:///?socket=s", BadUri::Tls),
            ("nbd+unix:///e", BadUri::Socket),
            ("nbd+unix:///e?socket=", BadUri::Socket),
            ("nbd+unix://host/e?socket=s", BadUri::Socket),
            ("nbd:///e", BadUri::Host(String::new())),
            ("nbd://host:0/e", BadUri::Host("host:0".into())),
            ("nbd://host:+1/e", BadUri::Host("host:+1".into())),
            ("nbd://me@host/e", BadUri::Host("me@host".into())),
            ("nbd://[::1/e", BadUri::Host("[::1".into())),
            ("nbd://[::1]9/e", BadUri::Host("[::1]9".into())),
            ("nbd://host/%4", BadUri::Encoding("%4".into())),
            ("nbd://host/%ff", BadUri::Encoding("%ff".into())),
            ("nbd://host/%00", BadUri::Export),
            ("nbd://host/?foo=1", BadUri::Parameter("foo".into())),
            ("nbd://host/?reconnect-delay", BadUri::ReconnectDelay),
            ("nbd://host/?reconnect-delay=-1", BadUri::ReconnectDelay),
            ("nbd://host/?reconnect-delay=86401", BadUri::ReconnectDelay),
        ] {
            assert_eq!(text.parse::<NbdUri>(), Err(error), "{text}");
        }
        let mistyped = "nbd://host/?reconect-delay=9".parse::<NbdUri>().unwrap_err().to_string();
        assert_eq!(
            mistyped,
            "an NBD server has no parameter \"reconect-delay\": did you mean reconnect-delay?"
        );
        assert_eq!(format!("nbd://h/{}", "x".repeat(4097)).parse::<NbdUri>(), Err(BadUri::Export));
    }
}
