//! The requests to the process that opens files, and its replies, as bytes.
//!
//! A message is a number that its sender chooses (8 bytes), a code (1 byte) and the fields of that code in
//! their order. Numbers are little-endian, without padding. A text has its length before it (2 bytes) and no
//! NUL. A list has its number of elements before it (2 bytes). Both ends are the same program, so there are
//! no versions. One descriptor can come with a message.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::answers::{Alignment, BlockFacts, FileStatus};
use crate::grant::Target;
use crate::reason::{Want, explained};

/// The most bytes of a request.
pub(crate) const REQUEST_BYTES_MAX: usize = 32 << 10;
/// The most bytes of a reply.
pub(crate) const REPLY_BYTES_MAX: usize = 8 << 10;
/// The most bytes of the reason of a reply. A path with more than half of this is not shown.
const EXPLANATION_BYTES_MAX: usize = REPLY_BYTES_MAX / 2;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Records the things that a device needs under a number, in place of those of this number.
    Enter { entry: u64, targets: Vec<Target> },
    /// Forgets them.
    Leave { entry: u64 },
    /// Asks for the status of a file.
    Status { path: PathBuf },
    /// Opens an image.
    Image { path: PathBuf, writes: bool, is_direct: bool },
    /// Opens the file of a capture, or makes it.
    Capture { path: PathBuf },
    /// Opens the file of the descriptor that comes with it once more.
    Reopen { writes: bool, is_direct: bool },
    /// Checks whether a socket can be made.
    CheckSocket { path: PathBuf },
    /// Makes a socket, and waits for other processes that make one in the same directory.
    Listen { path: PathBuf, wait_ms: u32 },
    /// Removes the name of a socket, if it still stands for this one.
    Unlink { path: PathBuf, device: u64, inode: u64 },
    /// Asks for the path of a socket with the canonical path of its directory.
    RealPath { path: PathBuf },
    /// Connects to a unix socket.
    ConnectUnix { path: PathBuf },
    /// Looks the addresses of a host up.
    Resolve { host: String, port: u16 },
    /// Begins a connection to one of the addresses that were found.
    ConnectTcp { address: SocketAddr },
    /// Makes a queue of a TAP.
    Tap { name: String, flags: i32 },
    /// Asks whether passt is installed.
    FindPasst {},
    /// Starts passt.
    StartPasst { arguments: Vec<String> },
    /// Waits for the end of a child. Kills it afterwards.
    EndPasst { child: u64, wait_ms: u32 },
    /// Asks for the properties of a block device.
    BlockFacts { device: u64 },
    /// Asks for the subsystem of a character device.
    CharSubsystem { device: u64 },
    /// Reads the configuration file.
    ReadConfig {},
    /// Looks the number of a group up. Only between helpers.
    Group { name: String },
}

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// It is done, and there is nothing to say. A descriptor can come with it.
    Done {},
    /// The kernel refuses it, or it is not allowed (`EPERM`).
    Errno { errno: i32 },
    /// It failed for a reason that has no number.
    Failed { text: String },
    /// The kernel refuses a path, for a reason that the number does not say.
    Explained { errno: i32, text: String },
    /// A thing may not be used.
    Refused { grant: u8, reason: u8, text: String },
    /// A file is outside of the roots.
    Outside { grant: u8, path: PathBuf },
    /// A socket cannot be made.
    Socket { option: u8, problem: u8, number: u64, text: String },
    /// A TAP cannot be made.
    Tap { step: u8, errno: i32 },
    /// The status of a file.
    Status { status: FileStatus },
    /// A file is open, with this alignment.
    Opened { alignment: Alignment },
    /// A socket listens. It has this identity.
    Listening { device: u64, inode: u64, mode: u32, uid: u32, gid: u32, was_locked: bool },
    /// A path.
    Path { path: PathBuf },
    /// The addresses of a host.
    Addresses { addresses: Vec<SocketAddr> },
    /// Whether a program is installed.
    Found { is_found: bool },
    /// A child runs.
    Started { child: u64, pid: u32 },
    /// A child has ended by itself with this status, or it was killed.
    Ended { status: Option<i32> },
    /// The properties of a block device.
    Block { facts: BlockFacts },
    /// A short text.
    Text { text: String },
    /// The number of a group.
    Group { id: u32 },
}

impl Reply {
    /// Returns the reply with this error of a path, and with the reason.
    pub(crate) fn of_path(path: &Path, want: Want, error: io::Error) -> Self {
        let Some(errno) = error.raw_os_error() else { return Self::failure(&error) };
        let explained = explained(path, want, error);
        let text = Some(explained.to_string()).filter(|text| text.len() <= EXPLANATION_BYTES_MAX);
        match text.filter(|_| explained.raw_os_error().is_none()) {
            Some(text) => Self::Explained { errno, text },
            None => Self::Errno { errno },
        }
    }

    /// Returns the reply with this error.
    pub(crate) fn failure(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self::Errno { errno },
            None => Self::Failed { text: error.to_string() },
        }
    }
}

/// Writes a message.
///
/// # Errors
/// It is longer than `max` bytes, or a text has a NUL.
pub(crate) fn write<B: Field>(id: u64, body: &B, max: usize) -> Result<Vec<u8>, Errno> {
    let mut writer = Writer { bytes: Vec::new(), has_nul: false };
    id.write(&mut writer);
    body.write(&mut writer);
    match () {
        () if writer.has_nul => Err(Errno::INVAL),
        // The length of a text is wrong only if the text is longer than a message.
        () if writer.bytes.len() > max => Err(Errno::NAMETOOLONG),
        () => Ok(writer.bytes),
    }
}

/// Parses a message. Returns `None` if it is none.
pub(crate) fn parse<B: Field>(bytes: &[u8]) -> Option<(u64, B)> {
    let mut reader = Reader(bytes);
    let message = (u64::read(&mut reader)?, B::read(&mut reader)?);
    reader.0.is_empty().then_some(message)
}

/// The bytes of a message that is written.
pub(crate) struct Writer {
    bytes: Vec<u8>,
    has_nul: bool,
}

/// The bytes of a message that are not parsed yet.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const LEN: usize>(&mut self) -> Option<[u8; LEN]> {
        self.take(LEN)?.try_into().ok()
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let len = u16::read(self)?;
        self.take(len.into()).filter(|text| !text.contains(&0))
    }
}

/// A part of a message.
pub(crate) trait Field: Sized {
    /// Appends it.
    fn write(&self, to: &mut Writer);
    /// Takes it from the beginning. Returns `None` if it is not there.
    fn read(from: &mut Reader<'_>) -> Option<Self>;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        impl Field for $number {
            fn write(&self, to: &mut Writer) {
                to.bytes.extend(self.to_le_bytes());
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                from.array().map(Self::from_le_bytes)
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 i32 }

impl Field for bool {
    fn write(&self, to: &mut Writer) {
        to.bytes.push((*self).into());
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        match u8::read(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

fn write_text(text: &[u8], to: &mut Writer) {
    to.has_nul |= text.contains(&0);
    (text.len() as u16).write(to);
    to.bytes.extend(text);
}

impl Field for String {
    fn write(&self, to: &mut Writer) {
        write_text(self.as_bytes(), to);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        String::from_utf8(from.text()?.to_vec()).ok()
    }
}

impl Field for PathBuf {
    fn write(&self, to: &mut Writer) {
        write_text(self.as_os_str().as_bytes(), to);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(OsString::from_vec(from.text()?.to_vec()).into())
    }
}

impl<T: Field> Field for Vec<T> {
    fn write(&self, to: &mut Writer) {
        (self.len() as u16).write(to);
        self.iter().for_each(|element| element.write(to));
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let count = u16::read(from)?;
        // Each element has a byte at least, so a message bounds the list.
        (0..count).map(|_| T::read(from)).collect()
    }
}

impl<T: Field> Field for Option<T> {
    fn write(&self, to: &mut Writer) {
        self.is_some().write(to);
        self.iter().for_each(|value| value.write(to));
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        match bool::read(from)? {
            true => T::read(from).map(Some),
            false => Some(None),
        }
    }
}

impl Field for SocketAddr {
    fn write(&self, to: &mut Writer) {
        match self.ip() {
            IpAddr::V4(ip) => to.bytes.extend([&[4][..], &ip.octets()].concat()),
            IpAddr::V6(ip) => to.bytes.extend([&[6][..], &ip.octets()].concat()),
        }
        self.port().write(to);
        if let Self::V6(address) = self {
            address.flowinfo().write(to);
            address.scope_id().write(to);
        }
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(match u8::read(from)? {
            4 => SocketAddrV4::new(Ipv4Addr::from(from.array::<4>()?), u16::read(from)?).into(),
            6 => {
                let (ip, port) = (Ipv6Addr::from(from.array::<16>()?), u16::read(from)?);
                SocketAddrV6::new(ip, port, u32::read(from)?, u32::read(from)?).into()
            }
            _ => return None,
        })
    }
}

/// Implements [`Field`] for an enum from its codes and the order of the fields.
macro_rules! codes {
    ($name:ident { $($code:literal $variant:ident { $($field:ident),* })* }) => {
        impl Field for $name {
            fn write(&self, to: &mut Writer) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        to.bytes.push($code);
                        $($field.write(to);)*
                    })*
                }
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                Some(match u8::read(from)? {
                    $($code => Self::$variant { $($field: Field::read(from)?),* },)*
                    _ => return None,
                })
            }
        }
    };
}

/// Implements [`Field`] for a struct from the order of its fields.
macro_rules! fields {
    ($name:ident { $($field:ident),* }) => {
        impl Field for $name {
            fn write(&self, to: &mut Writer) {
                $(self.$field.write(to);)*
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                Some(Self { $($field: Field::read(from)?),* })
            }
        }
    };
}

codes! { Request {
    1 Enter { entry, targets }
    2 Leave { entry }
    3 Status { path }
    4 Image { path, writes, is_direct }
    5 Capture { path }
    6 Reopen { writes, is_direct }
    7 CheckSocket { path }
    8 Listen { path, wait_ms }
    9 Unlink { path, device, inode }
    10 RealPath { path }
    11 ConnectUnix { path }
    12 Resolve { host, port }
    13 ConnectTcp { address }
    14 Tap { name, flags }
    15 FindPasst {}
    16 StartPasst { arguments }
    17 EndPasst { child, wait_ms }
    18 BlockFacts { device }
    19 CharSubsystem { device }
    20 ReadConfig {}
    21 Group { name }
} }

codes! { Reply {
    0 Done {}
    1 Errno { errno }
    2 Failed { text }
    3 Refused { grant, reason, text }
    4 Outside { grant, path }
    5 Socket { option, problem, number, text }
    6 Tap { step, errno }
    7 Status { status }
    8 Opened { alignment }
    9 Listening { device, inode, mode, uid, gid, was_locked }
    10 Path { path }
    11 Addresses { addresses }
    12 Found { is_found }
    13 Started { child, pid }
    14 Ended { status }
    15 Block { facts }
    16 Text { text }
    17 Group { id }
    18 Explained { errno, text }
} }

codes! { Target {
    1 Image { path, writes, chain }
    2 Capture { path }
    3 Socket { path, mode, group }
    4 Unix { path }
    5 Tcp { host, port }
    6 Tap { name }
    7 Passt { arguments }
    8 Library { name, files }
    9 Backing {}
} }

codes! { Alignment {
    0 Unknown {}
    1 Impossible {}
    2 Known { memory, offset }
} }

fields! { FileStatus { device, inode, special, mode, size } }
fields! { BlockFacts { is_protected, is_in_ram, numbers } }

#[cfg(test)]
mod tests;
