//! Decides which process serves.
//!
//! The new process serves once its message `taken` is sent. The old one goes on if that message cannot be in
//! its queue any more. Both ask the same queue of the kernel, so they never disagree:
//! - The old process shuts its end for reading. A message that was sent before stays in the queue, and a
//!   later one is EPIPE for the sender. The kernel takes a lock of the queue for either.
//! - Then it reads the queue to its end. The message is there, or it never will be.
//!
//! So no clock decides, and no stop or kill of either process at any moment makes both serve. If both end,
//! neither serves, as after any crash.
//!
//! # An error is not the end
//! If the new process ends while messages to it are unread, the first read is ECONNRESET, and `taken` may
//! come behind it. The old process reads on after each error, until a read returns no bytes. An empty message
//! would look like this end, and no process sends one. A new process that lies in this way gains nothing: it
//! has the devices already.

use crate::error::{Error, sentence};
use crate::message::{HEAD_LEN, Head, Kind};
use crate::socket::{Socket, wait};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

/// The longest part of a message that is looked at: a head and a sentence.
const LOOKED_AT: usize = HEAD_LEN + 4096;
/// The pause after an error that the kernel repeats.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// The result of an offer.
#[derive(Debug)]
#[must_use]
pub enum Decision {
    /// The new process serves. This process never does again.
    Taken(HandedOver),
    /// This process goes on. The new process cannot serve any more, and will find that out.
    Kept(Error),
}

/// The channel after the new process has taken over. Its end tells the new process that this one has ended.
#[derive(Debug)]
pub struct HandedOver {
    channel: OwnedFd,
}

impl HandedOver {
    /// Waits until the new process lets this one end, or has ended ([`Taken::release`]).
    pub fn wait_for_release(&self, deadline: Instant) {
        wait_for_end(&self.channel, deadline);
    }
}

/// The right to serve what an old process served. Only [`NewEnd::take`](crate::NewEnd::take) returns it.
#[derive(Debug)]
pub struct Taken {
    channel: OwnedFd,
}

impl Taken {
    /// Says that this process serves.
    ///
    /// # Errors
    /// The message was not sent. The old process goes on, or has ended.
    pub(crate) fn send(mut socket: Socket, deadline: Instant) -> Result<Self, Error> {
        socket.send(Head::new(Kind::Taken, 0), &[], &[], deadline)?;
        Ok(Self { channel: socket.fd })
    }

    /// Lets the old process end. Until then it waits for a moment, so that a service manager can be told of
    /// this process first.
    pub fn release(&self) {
        // If this fails, the old process ends later.
        let _ = shutdown(&self.channel, Shutdown::Write);
    }

    /// Waits until the old process has ended. Returns `false` if it has not done so in time.
    pub fn wait_for_end(&self, deadline: Instant) -> bool {
        wait_for_end(&self.channel, deadline)
    }
}

/// Waits until the other process sends nothing any more. Returns `false` if it still can at the deadline.
fn wait_for_end(channel: &OwnedFd, deadline: Instant) -> bool {
    loop {
        match recv(channel, &mut [0; HEAD_LEN][..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return true,
            // Nothing that it still says matters.
            Ok(_) | Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(_) if wait(channel, PollFlags::IN, deadline).is_err() => return false,
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            return false;
        }
    }
}

/// Waits for the new process to serve, until `deadline`. Returns when it is certain which process does.
pub(crate) fn decide(mut socket: Socket, deadline: Instant) -> Decision {
    let why = match first(&socket.fd, deadline) {
        Ok(()) => return Decision::Taken(HandedOver { channel: socket.fd }),
        Err(why) => why,
    };
    // If this fails, the queue has no end before that of the new process, which is waited for below.
    let _ = shutdown(&socket.fd, Shutdown::Read);
    if is_taken_at_last(&socket.fd) {
        return Decision::Taken(HandedOver { channel: socket.fd });
    }
    socket.refuse(&match &why {
        Error::TimedOut => "this process has not taken over in time".to_owned(),
        why => why.to_string(),
    });
    Decision::Kept(why)
}

/// Waits for the first message. It is `taken`, or a reason for which this process would go on.
fn first(channel: &OwnedFd, deadline: Instant) -> Result<(), Error> {
    let mut buffer = [0; LOOKED_AT];
    loop {
        match recv(channel, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Error::Ended),
            Ok((len, _)) => return judge(buffer.get(..len).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(channel, PollFlags::IN, deadline)?,
            Err(Errno::CONNRESET) => return Err(Error::Ended),
            Err(error) => return Err(error.into()),
        }
    }
}

fn judge(message: &[u8]) -> Result<(), Error> {
    match Head::kind(message) {
        Some(Kind::Taken) => Ok(()),
        Some(Kind::Refused) => Err(Error::Refused(sentence(message.get(HEAD_LEN..).unwrap_or_default()))),
        Some(other) => Err(other.out_of_order()),
        None => Err(Error::Message("an unknown message")),
    }
}

/// Reads the queue to its end. Returns whether `taken` is in it.
fn is_taken_at_last(channel: &OwnedFd) -> bool {
    let mut kind = [0; 2];
    loop {
        match recv(channel, &mut kind[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return false,
            Ok((2, _)) if Head::kind(&kind) == Some(Kind::Taken) => return true,
            Ok(_) | Err(Errno::INTR | Errno::CONNRESET) => {}
            // The queue was not shut.
            Err(_) => thread::sleep(RETRY_AFTER),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

    const SOON: Duration = Duration::from_secs(60);

    fn pair() -> (Socket, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (old, new) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        (Socket::new(old), new)
    }

    /// Returns the decision after the new process has sent these messages.
    fn decided(messages: &[&[u8]], has_unread: bool, has_ended: bool) -> bool {
        let (old, new) = pair();
        for message in messages {
            send(&new, message, SendFlags::NOSIGNAL).unwrap();
        }
        if has_unread {
            send(&old.fd, b"unread", SendFlags::NOSIGNAL).unwrap();
        }
        let new = (!has_ended).then_some(new);
        let decision = decide(old, Instant::now() + Duration::from_millis(1));
        let is_taken = matches!(decision, Decision::Taken(_));
        if let Some(new) = new {
            let late = send(&new, &Head::new(Kind::Taken, 0).with(&[]), SendFlags::NOSIGNAL);
            assert!(is_taken || late == Err(Errno::PIPE), "{late:?}");
        }
        is_taken
    }

    #[test]
    fn a_queue_is_read_to_its_end() {
        let taken = &Head::new(Kind::Taken, 0).with(&[])[..];
        let ready = &Head::new(Kind::Ready, 0).with(&[])[..];
        let refused = &Head::new(Kind::Refused, 0).with(b"no")[..];
        for before in [&[][..], &[ready], &[refused], &[b"?", ready, &[0; 20_000]]] {
            for (has_unread, has_ended) in [(false, false), (false, true), (true, false), (true, true)] {
                assert!(!decided(before, has_unread, has_ended), "{before:?}");
                assert!(decided(&[before, &[taken]].concat(), has_unread, has_ended), "{before:?}");
            }
        }
    }

    #[test]
    fn the_reason_is_the_first_one() {
        let (old, new) = pair();
        let refused = Head::new(Kind::Refused, 0).with(b"its disk is gone");
        send(&new, &refused, SendFlags::NOSIGNAL).unwrap();
        drop(new);
        let decision = decide(old, Instant::now() + SOON);
        assert!(matches!(decision, Decision::Kept(Error::Refused(why)) if why == "its disk is gone"));
    }
}
