//! The channel on which the back-end speaks first, and what is waited for beside the front-end's messages.

use crate::error::Refusal;
use crate::iotlb::Translations;
use crate::others::Others;
use crate::rings::Rings;
use kickless_device::Device;
use kickless_vhost_user::{BackendMessage, BackendRequester, Error, Wait};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tracing::{debug, warn};

/// A session's channel.
#[derive(Default)]
pub(crate) struct Channel {
    requester: Option<BackendRequester>,
    /// The front-end is to hear that the configuration space has changed.
    news: bool,
    /// A ring ran when that was looked at last.
    ran: bool,
}

impl Channel {
    /// SET_BACKEND_REQ_FD.
    pub(crate) fn set(
        &mut self,
        socket: OwnedFd,
        translations: Option<&mut Translations>,
    ) -> Result<(), Refusal> {
        let mode = fstat(&socket).map_err(|error| Refusal::Descriptor(error.into()))?.st_mode;
        if FileType::from_raw_mode(mode) != FileType::Socket {
            return Err(Refusal::NoSocket);
        }
        self.requester = Some(BackendRequester::new(socket));
        if let Some(translations) = translations {
            translations.ask_again();
        }
        Ok(())
    }

    /// Tells of a changed configuration space, sends misses and takes their replies, until there is a message of the front-end's,
    /// or a reason to stop.
    pub(crate) fn serve_until(
        &mut self,
        messages: BorrowedFd<'_>,
        stop: BorrowedFd<'_>,
        device: &dyn Device,
        mut translations: Option<&mut Translations>,
        rings: &Rings,
        others: &mut Others<'_>,
    ) -> io::Result<()> {
        let changes = device.config_changes();
        if changes.is_none() && translations.is_none() && others.listener().is_none() {
            return Ok(());
        }
        loop {
            if changes.is_some() {
                self.look_for_news(device, rings.any_running());
            }
            if let Some(translations) = &mut translations {
                translations.collect();
            }
            self.exchange(messages, translations.as_deref_mut(), rings);
            let waits = self.has_news() || translations.as_ref().is_some_and(|of| of.has_unsent());
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = vec![readable(messages), readable(stop)];
            let listener = others.listener().map(readable);
            let watches = listener.is_some();
            fds.extend(listener);
            fds.extend(changes.map(|changes| readable(changes.as_fd())));
            fds.extend(translations.as_ref().map(|translations| readable(translations.signal())));
            if let Some(requester) = &self.requester {
                let flags = if waits { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
                fds.push(PollFd::from_borrowed_fd(requester.as_fd(), flags));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if fds[..2].iter().any(|fd| !fd.revents().is_empty()) {
                return Ok(());
            }
            if watches {
                others.note(&fds[2]);
            }
        }
    }

    /// A front-end hears of nothing before its device has started, and has read the space by then (QEMU's drops the message). So it
    /// is told again each time that the first ring starts, which costs it a look.
    fn look_for_news(&mut self, device: &dyn Device, runs: bool) {
        let changed = device.config_changes().is_some_and(|changes| changes.clear());
        let ran = std::mem::replace(&mut self.ran, runs);
        let starts = runs && !ran;
        self.news |= changed || starts;
    }

    /// Whether there is something to tell, and somebody to listen.
    fn has_news(&self) -> bool {
        self.news && self.ran
    }

    /// All that can be sent and received without waiting.
    fn exchange(&mut self, messages: BorrowedFd<'_>, translations: Option<&mut Translations>, rings: &Rings) {
        let tells = self.has_news();
        let Some(requester) = &mut self.requester else { return };
        let mut done = Ok(());
        if tells {
            done = match requester.send(&BackendMessage::ConfigChange, false, &Wait::never()) {
                Ok(_) => {
                    self.news = false;
                    Ok(())
                }
                Err(Error::Interrupted) => Ok(()),
                Err(error) => Err(error),
            };
        }
        let needed = translations.is_some();
        done = done.and_then(|()| match translations {
            Some(translations) => translations.exchange(requester, messages, rings),
            None => hears_nothing(requester),
        });
        if let Err(error) = done {
            if needed {
                warn!(%error, "the back-end's channel is dropped; queues that wait for translations stand");
            } else {
                debug!(%error, "the back-end's channel is dropped");
            }
            self.requester = None;
        }
    }
}

/// Nobody has been asked anything: what comes is the end, or no answer.
fn hears_nothing(requester: &mut BackendRequester) -> Result<(), Error> {
    let code = kickless_spec::vhost_user::BackendRequest::ConfigChangeMsg;
    match requester.recv_reply(code, &Wait::never()) {
        Err(Error::Interrupted) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(Error::Closed),
    }
}
