//! One end of the channel: messages with descriptors, and deadlines.

use crate::error::{Error, sentence};
use crate::message::{BODY_MAX, HEAD_LEN, Head, Kind};
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

/// The most descriptors of a message. The kernel's limit is 253.
pub(crate) const FDS_IN_MESSAGE: usize = 128;
/// The pause after which a message is tried again when too many descriptors are on their way.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// One end of the channel.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    buffer: Box<[u8]>,
}

/// A message that was received.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) head: Head,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd, buffer: vec![0; HEAD_LEN + BODY_MAX].into() }
    }

    /// Sends a message, with at most [`FDS_IN_MESSAGE`] descriptors. Either it is sent as a whole, or the
    /// result is an error.
    ///
    /// # Errors
    /// The other end is closed. If it has refused before, the error is its sentence.
    pub(crate) fn send(
        &mut self,
        head: Head,
        body: &[u8],
        fds: &[OwnedFd],
        deadline: Instant,
    ) -> Result<(), Error> {
        match self.send_only(head, body, fds, deadline) {
            Err(Error::Ended) => Err(self.reason_of_end()),
            sent => sent,
        }
    }

    /// Sends a message, and reads nothing if the other end is closed.
    ///
    /// # Errors
    /// As for [`Socket::send`].
    pub(crate) fn send_only(
        &self,
        head: Head,
        body: &[u8],
        fds: &[OwnedFd],
        deadline: Instant,
    ) -> Result<(), Error> {
        let message = head.with(body);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        loop {
            match self.send_now(&message, &fds) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait(&self.fd, PollFlags::OUT, deadline)?,
                // The other process takes descriptors out of the queue.
                Err(Errno::TOOMANYREFS) if Instant::now() < deadline => thread::sleep(RETRY_AFTER),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Error::Ended),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn send_now(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_IN_MESSAGE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::NOBUFS);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.fd, &[IoSlice::new(message)], &mut control, flags).map(|_| ())
    }

    /// Returns the reason for which the other end is closed.
    fn reason_of_end(&mut self) -> Error {
        match self.receive(Instant::now()) {
            Err(refused @ Error::Refused(_)) => refused,
            _ => Error::Ended,
        }
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// The other process has ended, or has refused, or has sent no message.
    pub(crate) fn receive(&mut self, deadline: Instant) -> Result<Message, Error> {
        let message = loop {
            match self.receive_now() {
                // The other end was closed with unread messages in it. Its own may follow.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => wait(&self.fd, PollFlags::IN, deadline)?,
                Err(error) => return Err(error.into()),
                Ok(received) => break received?,
            }
        };
        match message.head.kind {
            Kind::Refused => Err(Error::Refused(sentence(&message.body))),
            _ => Ok(message),
        }
    }

    fn receive_now(&mut self) -> Result<Result<Message, Error>, Errno> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_IN_MESSAGE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = recvmsg(&self.fd, &mut [IoSliceMut::new(&mut self.buffer)], &mut control, flags)?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got.bytes == 0 {
            return Ok(Err(Error::Ended));
        }
        if got.flags.contains(ReturnFlags::TRUNC) {
            return Ok(Err(Error::Message("too many bytes")));
        }
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Ok(Err(Error::LostDescriptors));
        }
        let parsed = Head::parse(self.buffer.get(..got.bytes).unwrap_or_default());
        Ok(parsed.map(|(head, body)| Message { head, body: body.to_vec(), fds }))
    }

    /// Sends a sentence, if there is room for it.
    pub(crate) fn refuse(&mut self, why: &str) {
        let body = sentence(why.as_bytes()).into_bytes();
        let head = Head { len: body.len() as u32, ..Head::new(Kind::Refused, 0) };
        // The other process finds the end of the channel instead.
        let _ = self.send_now(&head.with(&body), &[]);
    }
}

/// Waits until an end is ready.
///
/// # Errors
/// It is not in time.
pub(crate) fn wait(fd: &OwnedFd, ready: PollFlags, deadline: Instant) -> Result<(), Error> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(fd, ready)], Some(&timeout)) {
            Ok(0) => return Err(Error::TimedOut),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
