//! The channel for the back-end's own messages. A session also waits here for all its events.

use crate::error::{HandOverError, RequestError};
use crate::half_message;
use crate::iotlb::Translations;
use crate::rings::Rings;
use crate::wait::LEAVES_WITHIN;
use crate::waiting_frontends::WaitingFrontends;
use kickless_device::Device;
use kickless_handover::{Given, Giving, v1};
use kickless_vhost_user::{BackendMessage, BackendRequester, Error, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getpeername};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// Returns whether a socket is connected to one that has a name. Both ends of a `socketpair` have none.
fn has_named_peer(socket: &OwnedFd) -> bool {
    getpeername(socket).is_ok_and(|peer| {
        peer.and_then(|peer| SocketAddrUnix::try_from(peer).ok())
            // An unnamed socket has an empty abstract name here.
            .is_some_and(|peer| {
                peer.path().is_some() || peer.abstract_name().is_some_and(|name| !name.is_empty())
            })
    })
}

/// Returns whether this is a unix stream socket. A socket of another kind may stay ready without anything to
/// read or to report, for example because of an error queue. A wait for it would never end.
pub(crate) fn is_unix_stream(socket: &OwnedFd) -> bool {
    socket_domain(socket) == Ok(AddressFamily::UNIX) && socket_type(socket) == Ok(SocketType::STREAM)
}

/// Accepts a socket as the end of a channel.
fn requester(socket: OwnedFd) -> Result<BackendRequester, RequestError> {
    if !is_unix_stream(&socket) {
        return Err(RequestError::NoUnixStream);
    }
    // The other end of a connection to a server has the server's name. If the front-end could pass its end of
    // this session, or of another one, that session would never see that it has left.
    if has_named_peer(&socket) {
        return Err(RequestError::OwnConnection);
    }
    Ok(BackendRequester::new(socket))
}

/// The descriptors, beside those of the session, for whose events its thread waits.
pub(crate) struct Waits<'a> {
    /// Readable when the process is to stop.
    pub(crate) stop: BorrowedFd<'a>,
    /// Readable while the session is asked to park.
    pub(crate) asked: Option<BorrowedFd<'a>>,
    pub(crate) waiting_frontends: WaitingFrontends<'a>,
}

/// A session's channel.
#[derive(Default)]
pub(crate) struct Channel {
    requester: Option<BackendRequester>,
    /// The configuration space has changed, and the front-end was not told yet.
    config_changed: bool,
    /// A ring ran at the last check.
    was_running: bool,
    /// `Some` while misses need the channel and the front-end has closed it: the moment of the warning,
    /// unless the front-end leaves before.
    warn_at: Option<Instant>,
}

impl Channel {
    /// Carries out SET_BACKEND_REQ_FD.
    pub(crate) fn set(
        &mut self,
        socket: OwnedFd,
        translations: Option<&mut Translations>,
    ) -> Result<(), RequestError> {
        self.requester = Some(requester(socket)?);
        self.warn_at = None;
        if let Some(translations) = translations {
            translations.resend_unanswered();
        }
        Ok(())
    }

    /// Returns the channel as a part of a record.
    pub(crate) fn give(&self, to: &mut Giving) -> Result<Option<v1::BackendChannel>, HandOverError> {
        let Some(requester) = &self.requester else { return Ok(None) };
        let socket = to.fd(requester)?;
        Ok(Some(v1::BackendChannel { socket, half_reply: half_message::give(requester.half_message(), to)? }))
    }

    /// Accepts the channel of a session of another process.
    pub(crate) fn restore(
        &mut self,
        from: &v1::BackendChannel,
        given: &mut Given,
    ) -> Result<(), RequestError> {
        let mut channel = requester(given.fd(from.socket)?)?;
        if let Some(half) = &from.half_reply {
            let (bytes, fds) = half_message::take(half, given)?;
            channel = channel.with_half_message(bytes, fds)?;
        }
        self.requester = Some(channel);
        Ok(())
    }

    /// Returns the number of bytes of a reply that have arrived, if it is not complete. `None` without a
    /// channel.
    pub(crate) fn received(&self) -> Option<usize> {
        self.requester.as_ref().map(BackendRequester::received)
    }

    /// Returns whether there is a change of the configuration space to report, and whether a ring ran at the
    /// last check.
    pub(crate) fn flags(&self) -> (bool, bool) {
        (self.config_changed, self.was_running)
    }

    /// Sets what [`Channel::flags`] has returned in another process.
    pub(crate) fn set_flags(&mut self, config_changed: bool, was_running: bool) {
        (self.config_changed, self.was_running) = (config_changed, was_running);
    }

    /// Notes a change of the configuration space that has come while the session was parked.
    pub(crate) fn note_config_change(&mut self, device: &dyn Device) {
        self.config_changed |= device.config_changes().is_some_and(|changes| changes.clear());
    }

    /// Reports changes of the configuration space, sends misses and takes their replies. Returns when there
    /// is a message of the front-end, or a reason to stop or to park.
    pub(crate) fn serve_until(
        &mut self,
        messages: BorrowedFd<'_>,
        device: &dyn Device,
        mut translations: Option<&mut Translations>,
        rings: &Rings,
        Waits { stop, asked, waiting_frontends }: &mut Waits<'_>,
    ) -> io::Result<()> {
        let changes = device.config_changes();
        if changes.is_none() && translations.is_none() && !waiting_frontends.is_watching() {
            return Ok(());
        }
        loop {
            if changes.is_some() {
                self.check_config(device, rings.any_running());
            }
            if let Some(translations) = &mut translations {
                translations.collect();
            }
            self.exchange(messages, translations.as_deref_mut(), rings);
            let waits = self.can_report_change() || translations.as_ref().is_some_and(|of| of.has_unsent());
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = vec![readable(messages), readable(*stop)];
            fds.extend(asked.map(readable));
            let ends = fds.len();
            let listener = waiting_frontends.listener().map(readable);
            let watches = listener.is_some();
            fds.extend(listener);
            fds.extend(changes.map(|changes| readable(changes.as_fd())));
            fds.extend(translations.as_ref().map(|translations| readable(translations.signal())));
            if let Some(requester) = &self.requester {
                let flags = if waits { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
                fds.push(PollFd::from_borrowed_fd(requester.as_fd(), flags));
            }
            // A ring that does not run waits for no translation.
            let warns_in = self.warn_at.filter(|_| rings.any_running());
            let warns_in = warns_in.map(|at| at.saturating_duration_since(Instant::now()));
            if warns_in == Some(Duration::ZERO) {
                self.warn_at = None;
                warn_of_blocked_queues(&Error::Closed);
            }
            let timeout = warns_in.into_iter().chain(waiting_frontends.timeout()).min().map(timespec);
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if fds[..ends].iter().any(|fd| !fd.revents().is_empty()) {
                return Ok(());
            }
            if watches && !fds[ends].revents().is_empty() {
                waiting_frontends.note();
            }
            waiting_frontends.warn_if_due();
        }
    }

    /// Checks whether there is a change to report.
    ///
    /// QEMU drops a report that comes before its device has started, and has read the space by then. So a
    /// report is repeated each time that the first ring starts. This costs the front-end one read of the
    /// space.
    fn check_config(&mut self, device: &dyn Device, runs: bool) {
        let changed = device.config_changes().is_some_and(|changes| changes.clear());
        let ran = std::mem::replace(&mut self.was_running, runs);
        let starts = runs && !ran;
        self.config_changed |= changed || starts;
    }

    /// Returns whether there is a change to report, and a front-end that accepts it.
    fn can_report_change(&self) -> bool {
        self.config_changed && self.was_running
    }

    /// Sends and receives as much as possible without waiting.
    fn exchange(&mut self, messages: BorrowedFd<'_>, translations: Option<&mut Translations>, rings: &Rings) {
        let tells = self.can_report_change();
        let Some(requester) = &mut self.requester else { return };
        let mut done = Ok(());
        if tells {
            done = match requester.send(&BackendMessage::ConfigChange, false, &Wait::never()) {
                Ok(_) => {
                    self.config_changed = false;
                    Ok(())
                }
                Err(Error::Interrupted) => Ok(()),
                Err(error) => Err(error),
            };
        }
        let needed = translations.is_some();
        done = done.and_then(|()| match translations {
            Some(translations) => translations.exchange(requester, messages, rings),
            None => expect_no_reply(requester),
        });
        if let Err(error) = done {
            self.requester = None;
            match error {
                _ if !needed => debug!(%error, "the back-end's channel is dropped"),
                // This may be the first sign of a front-end that leaves.
                Error::Closed => self.warn_at = Some(Instant::now() + LEAVES_WITHIN),
                error => warn_of_blocked_queues(&error),
            }
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

fn warn_of_blocked_queues(error: &Error) {
    warn!(%error, "the back-end's channel is dropped; queues that wait for translations stay blocked");
}

/// Checks a channel on which the front-end owes no reply. A reply is an error, as is the end of the channel.
fn expect_no_reply(requester: &mut BackendRequester) -> Result<(), Error> {
    let code = kickless_spec::vhost_user::BackendRequest::ConfigChangeMsg;
    match requester.recv_reply(code, &Wait::never()) {
        Err(Error::Interrupted) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(Error::Closed),
    }
}
