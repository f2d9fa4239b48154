//! The thread of one client: it reads what the client sends, and closes what it sent.
//!
//! The close of a descriptor can wait, for as long as the client likes: that of a socket with `SO_LINGER` and
//! unsent data, or of a file on a network. The kernel closes descriptors of a client in three calls: in
//! `close`, in a read without room for them, and in the last close of a connection that has unread ones. This
//! thread makes all three, so only its own client waits. The thread of the server never reads from a
//! connection, and returns each descriptor and the connection itself to this thread.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, RecvMsg, ReturnFlags, recvmsg};

use super::budget::{Budget, Permit};
use crate::inbox::{DESCRIPTORS_MAX, LostDescriptors};

/// The most bytes of one read. It bounds the memory of a client together with the longest line.
pub(super) const READ_BYTES: usize = 16 << 10;
/// The time that a read waits for room in the budget. Other reads hold room for a moment, and a client that
/// is served returns its own within this time.
const ROOM_WAIT: Duration = Duration::from_secs(1);

/// The calls that a socket serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All calls.
    Full,
    /// Calls that change nothing.
    ReadOnly,
}

/// The server's end of the thread of a client. The thread ends after this and all [`GivenFd`]s are dropped.
#[derive(Debug)]
pub(super) struct Reader {
    tasks: Sender<Task>,
}

enum Task {
    /// Keeps a reference to the connection until the end.
    Keep(Arc<UnixStream>),
    /// Reads once, and passes the result on with descriptors that come back by this sender.
    Read(Sender<Task>),
    /// Closes a descriptor.
    Close(OwnedFd, Permit),
}

/// The result of a read.
#[derive(Debug)]
pub(super) enum Received {
    /// The client sends nothing more.
    End,
    /// There is nothing now.
    Nothing,
    /// These bytes came, with these descriptors.
    Bytes(Vec<u8>, Vec<GivenFd>),
    /// Descriptors came, and were closed.
    Lost(LostDescriptors),
}

/// A descriptor that a client has sent. Its thread closes it when this is dropped.
#[derive(Debug)]
pub(crate) struct GivenFd {
    fd: Option<(OwnedFd, Permit)>,
    tasks: Sender<Task>,
}

impl GivenFd {
    /// Returns the descriptor and its part of the budget. The caller closes the descriptor first, on a thread
    /// for which no other client waits.
    pub(crate) fn take(mut self) -> Option<(OwnedFd, Permit)> {
        self.fd.take()
    }
}

impl Drop for GivenFd {
    fn drop(&mut self) {
        if let Some((fd, permit)) = self.fd.take() {
            // The thread takes tasks as long as a sender exists.
            let _ = self.tasks.send(Task::Close(fd, permit));
        }
    }
}

impl Reader {
    /// Starts the thread. It calls `pass_on` with the result of each read, and `ended` at its end.
    ///
    /// # Errors
    /// The process can have no more threads.
    pub(super) fn start(
        access: Access,
        budget: Arc<Budget>,
        pass_on: impl Fn(io::Result<Received>) + Send + 'static,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let (tasks, to_do) = channel();
        let run = move || {
            let mut kept = None;
            for task in to_do {
                match (task, &kept) {
                    (Task::Keep(stream), _) => kept = Some(stream),
                    (Task::Read(tasks), Some(stream)) => pass_on(match access {
                        Access::Full => receive(stream, &budget, &tasks),
                        Access::ReadOnly => receive_bytes(stream, READ_BYTES),
                    }),
                    (Task::Read(_), None) => {}
                    (Task::Close(fd, permit), _) => {
                        drop(fd);
                        drop(permit);
                    }
                }
            }
            drop(kept);
            ended();
        };
        thread::Builder::new().name("control client".into()).spawn(run)?;
        Ok(Self { tasks })
    }

    /// Lets the thread keep a reference to its connection until the end. If the caller drops its own first,
    /// the thread closes the connection.
    pub(super) fn keep(&self, stream: &Arc<UnixStream>) {
        let _ = self.tasks.send(Task::Keep(stream.clone()));
    }

    /// Requests a read.
    pub(super) fn read(&self) {
        let _ = self.tasks.send(Task::Read(self.tasks.clone()));
    }
}

/// Reads bytes. The kernel closes the descriptors that came with them.
fn receive_bytes(stream: &UnixStream, most: usize) -> io::Result<Received> {
    let mut bytes = vec![0; most];
    let received = receive_once(stream, &mut bytes, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())?;
    Ok(match received {
        None => Received::Nothing,
        Some(RecvMsg { bytes: 0, .. }) => Received::End,
        Some(RecvMsg { bytes: len, .. }) => {
            bytes.truncate(len);
            Received::Bytes(bytes, Vec::new())
        }
    })
}

/// Reads bytes and the descriptors that came with them, if the budget has room.
fn receive(stream: &UnixStream, budget: &Arc<Budget>, tasks: &Sender<Task>) -> io::Result<Received> {
    // Only a client that sends descriptors takes from the budget, so look whether there are some. A look
    // keeps them in the socket. Without space for them, it says that they were left out.
    let mut bytes = vec![0; READ_BYTES];
    let seen = receive_once(stream, &mut bytes, &mut RecvAncillaryBuffer::default(), RecvFlags::PEEK)?;
    let len = match seen {
        None => return Ok(Received::Nothing),
        Some(RecvMsg { bytes: 0, .. }) => return Ok(Received::End),
        Some(seen) if !seen.flags.contains(ReturnFlags::CTRUNC) => return receive_bytes(stream, seen.bytes),
        Some(seen) => seen.bytes,
    };
    let Some(permits) = budget.take(DESCRIPTORS_MAX, ROOM_WAIT) else {
        let read = receive_bytes(stream, len);
        return read.map(|_| Received::Lost(LostDescriptors::NoRoom { all: budget.size() }));
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = receive_once(stream, &mut bytes[..len], &mut control, RecvFlags::empty())?;
    let Some(received) = received else { return Ok(Received::Nothing) };
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let descriptors = rights.flatten().zip(permits);
    let descriptors = descriptors.map(|with_permit| GivenFd { fd: Some(with_permit), tasks: tasks.clone() });
    let descriptors: Vec<GivenFd> = descriptors.collect();
    // There were more than there is space for, or this process has no free descriptor.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        let is_full = descriptors.len() < DESCRIPTORS_MAX;
        return Ok(Received::Lost(match is_full {
            true => LostDescriptors::NoneFree,
            false => LostDescriptors::TooMany,
        }));
    }
    bytes.truncate(received.bytes);
    Ok(Received::Bytes(bytes, descriptors))
}

/// Receives once. Returns `None` if there is nothing now.
fn receive_once(
    stream: &UnixStream,
    bytes: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
    flags: RecvFlags,
) -> io::Result<Option<RecvMsg>> {
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    match recvmsg(stream, &mut [IoSliceMut::new(bytes)], control, flags).map_err(io::Error::from) {
        Ok(received) => Ok(Some(received)),
        Err(error) if is_later(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether a call on a connection may succeed later.
pub(super) fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
