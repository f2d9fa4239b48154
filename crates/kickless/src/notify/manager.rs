//! The socket of the service manager.

use std::env;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr, write};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, sendmsg, socket_with,
};
use rustix::pipe::{PipeFlags, pipe_with};

/// The variable with the address of the service manager.
const VARIABLE: &str = "NOTIFY_SOCKET";
/// The longest time that the service manager has for a message, and for all messages before it.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// The most descriptors of a message.
const FDS_MAX: usize = 2;

/// A connection to the service manager.
pub(crate) struct Notify {
    socket: OwnedFd,
    address: SocketAddrUnix,
}

impl AsFd for Notify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Notify {
    /// Connects to the service manager. Returns nothing if none has started this process, or if it takes no
    /// messages.
    ///
    /// # Errors
    /// It cannot be reached.
    #[expect(clippy::disallowed_methods, reason = "a command that has its paths")]
    pub(crate) fn connect() -> Result<Option<Self>> {
        let Some(address) = env::var_os(VARIABLE) else { return Ok(None) };
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name),
            path => SocketAddrUnix::new(path),
        };
        let connected = address.and_then(|address| {
            let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_WAIT))?;
            connect(&socket, &address)?;
            Ok(Self { socket, address })
        });
        connected.map(Some).context("the service manager cannot be reached")
    }

    /// Sends assignments, as [`Notify::tell`] does, also to a service manager that has made its socket anew.
    ///
    /// # Errors
    /// The service manager takes none.
    #[expect(clippy::disallowed_methods, reason = "the process that opens files, or one without a sandbox")]
    pub(super) fn tell_again(&self, text: &[u8]) -> rustix::io::Result<()> {
        let write = || retry_on_intr(|| write(&self.socket, text)).map(drop);
        match write() {
            Err(Errno::CONNREFUSED) => {
                connect(&self.socket, &self.address)?;
                write()
            }
            written => written,
        }
    }

    /// Sends assignments, one in each line, with these descriptors.
    ///
    /// # Errors
    /// The service manager takes none.
    pub(crate) fn tell(&self, text: &str, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            bail!("too many descriptors for a message");
        }
        let sent = retry_on_intr(|| {
            sendmsg(&self.socket, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL)
        });
        sent.context("the service manager takes no message").map(drop)
    }

    /// Waits until the service manager has carried out all messages before.
    ///
    /// # Errors
    /// It has not done so in time.
    pub(crate) fn barrier(&self) -> Result<()> {
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC).context("no free descriptor")?;
        self.tell("BARRIER=1", &[theirs.as_fd()])?;
        // The service manager closes the last one.
        drop(theirs);
        let deadline = Instant::now() + ANSWER_WAIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&timeout)) {
                Ok(0) => bail!("the service manager does not answer"),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("the service manager cannot be waited for"),
            }
        }
    }
}
