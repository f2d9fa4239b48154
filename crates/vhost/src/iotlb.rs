//! Translations of a vIOMMU: what the front-end tells, and what it is asked for.
//!
//! Three parties take part, and none waits for another in a circle:
//!
//! * A queue that lacks a translation says so ([`Misses`]) and stands. It waits for nobody: its worker serves others.
//! * The session sends the miss on the back-end's channel, and waits for nothing either: it goes on with whatever comes
//!   next, a message, or a reply on the channel. So it is there when the front-end, which holds its own big lock then, sends
//!   the answer, an UPDATE, and waits until that is acknowledged.
//! * An UPDATE that contradicts an earlier one, and an INVALIDATE, are acknowledged when no queue uses what they take back.
//!   That waits for workers and for I/O in flight, which need neither the front-end nor an answer to a miss. The
//!   session limits how long I/O waits for a remote server (`wait.rs`).
//!
//! GET_VRING_BASE stops a queue whether it stands or not; what it had asked for is forgotten afterwards, and an answer that
//! comes late is a translation like any other. When no ring runs any more, all translations are forgotten: a front-end
//! tells of no invalidation while its device is stopped.

use crate::error::{Ended, Refusal};
use crate::rings::Rings;
use crate::wait::{self, Ends};
use kickless_device::{Iommu, Misses, Update, Waker};
use kickless_memory::{Access, Iotlb, Iova, IovaRange, Map, Miss, Unmapped, UpdateError, UserAddr};
use kickless_spec::vhost_user::{BackendRequest, IotlbAccess, IotlbKind};
use kickless_vhost_user::{BackendMessage, BackendRequester, Error, Iotlb as Message, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use tracing::{debug, info};

/// What a miss asks for: a page.
const PAGE: u64 = 4096;

/// So many misses wait for replies, or to be sent, before something is done about it.
const MISSES_MAX: usize = 1 << 16;

/// A session's translations.
pub(crate) struct Translations {
    iotlb: Iotlb,
    misses: Arc<Misses>,
    /// Misses that could not be sent yet.
    unsent: VecDeque<(u64, Miss)>,
    /// Misses whose replies are to come, in this order.
    awaiting: VecDeque<(u64, Miss)>,
    /// Replies to the first of these that have come and were not looked at.
    replies: usize,
    counts: Counts,
}

/// What has come and gone.
#[derive(Debug, Default)]
struct Counts {
    misses: u64,
    refusals: u64,
    updates: u64,
    invalidations: u64,
    evictions: u64,
}

impl Translations {
    pub(crate) fn new() -> io::Result<Self> {
        let misses = Arc::new(Misses::new(Waker::new()?));
        Ok(Self {
            iotlb: Iotlb::default(),
            misses,
            unsent: VecDeque::new(),
            awaiting: VecDeque::new(),
            replies: 0,
            counts: Counts::default(),
        })
    }

    /// What queues need.
    pub(crate) fn iommu(&self) -> Iommu {
        Iommu { table: self.iotlb.table().clone(), misses: self.misses.clone() }
    }

    /// IOTLB_MSG.
    pub(crate) fn message(
        &mut self,
        message: &Message,
        map: &Map,
        rings: &mut Rings,
        ends: Ends<'_>,
    ) -> Result<(), Refusal> {
        match message.kind {
            IotlbKind::Update => self.update(message, map, rings, ends),
            IotlbKind::Invalidate => {
                self.counts.invalidations += 1;
                let range = IovaRange::new(Iova(message.iova), message.size);
                self.iotlb.invalidate(range);
                Ok(self.settle(rings, ends)?)
            }
            IotlbKind::Miss | IotlbKind::AccessFail => Err(Refusal::IotlbKind),
        }
    }

    fn update(
        &mut self,
        message: &Message,
        map: &Map,
        rings: &mut Rings,
        ends: Ends<'_>,
    ) -> Result<(), Refusal> {
        let (iova, user, len) = (Iova(message.iova), UserAddr(message.user_addr), message.size);
        // All of it is in one region: nothing else would be one piece of the front-end's memory.
        if len > 0 && map.gpa_of_range(user, len).is_none() {
            return Err(match map.gpa_of(user) {
                Some(_) => Refusal::Translation(Unmapped { addr: user.0, len }),
                None => Refusal::TranslationNotShared { addr: user },
            });
        }
        self.counts.updates += 1;
        let access = access_of(message.access);
        loop {
            match self.iotlb.update(iova, len, user, access) {
                Ok(()) => break,
                Err(UpdateError::Full { .. })
                    if self.make_room(IovaRange::new(iova, len), rings, ends)? => {}
                Err(error) => {
                    // A part of it may be in force, and what that replaced is not.
                    self.settle(rings, ends)?;
                    return Err(error.into());
                }
            }
        }
        self.settle(rings, ends)?;
        for queue in self.misses.answered(IovaRange::new(iova, len), access) {
            rings.tell(queue, Update::Look);
        }
        Ok(())
    }

    /// Makes room for a node, if there is something to evict beside what is being updated.
    fn make_room(&mut self, updated: IovaRange, rings: &mut Rings, ends: Ends<'_>) -> Result<bool, Ended> {
        let in_limbo = self.iotlb.has_nodes_in_limbo();
        // What came before is waited for as what it is: it may be more than forgotten.
        self.settle(rings, ends)?;
        if in_limbo {
            return Ok(true);
        }
        let misses = &self.misses;
        // Nodes that the update has linked just now are not to make room for it.
        if !self.iotlb.evict(|range| range.overlaps(updated) || misses.is_pinned(range)) {
            return Ok(false);
        }
        self.counts.evictions += 1;
        if let Some(range) = self.iotlb.take_stale() {
            rings.update_all(|| Update::Forget(range))?;
        }
        self.iotlb.quiesced();
        Ok(true)
    }

    /// Has all queues drop what is not true any more, and waits until no request in flight uses it.
    ///
    /// # Errors
    /// The answer has become useless. The table is left as it is: its nodes in limbo are not used again, for the session ends.
    fn settle(&mut self, rings: &mut Rings, ends: Ends<'_>) -> Result<(), Ended> {
        let Some(range) = self.iotlb.take_stale() else { return Ok(()) };
        let (done, all_done) = mpsc::channel();
        rings.tell_all(|| Update::Invalidate(range, done.clone()));
        drop(done);
        let what = "requests in flight that use an invalidated translation";
        wait::until(
            what,
            ends,
            || rings.limit_remote_waits(),
            |patience| matches!(all_done.recv_timeout(patience), Err(RecvTimeoutError::Disconnected)),
        )?;
        self.iotlb.quiesced();
        Ok(())
    }

    /// No ring runs: what is not true any more will not be told, so nothing is kept.
    pub(crate) fn flush(&mut self) {
        self.iotlb.invalidate(IovaRange::ALL);
        // Nobody is left to drop it.
        let _ = self.iotlb.take_stale();
        self.iotlb.quiesced();
    }

    /// Logs a line about all there has been.
    pub(crate) fn log(&self) {
        let Counts { misses, refusals, updates, invalidations, evictions } = self.counts;
        info!(misses, refusals, updates, invalidations, evictions, "translations of a vIOMMU");
    }

    /// Another channel: what was not answered on the old one is asked for again.
    pub(crate) fn ask_again(&mut self) {
        self.replies = 0;
        while let Some(miss) = self.awaiting.pop_back() {
            self.unsent.push_front(miss);
        }
    }

    /// Takes replies and sends misses, as far as that can be done without waiting.
    pub(crate) fn exchange(
        &mut self,
        channel: &mut BackendRequester,
        messages: BorrowedFd<'_>,
        rings: &Rings,
    ) -> Result<(), Error> {
        self.receive(channel)?;
        // The answer, if there is one, was sent before the reply to the miss: by now it can be seen, and goes first.
        if self.replies > 0 && !is_readable(messages) {
            self.take_replies(rings);
        }
        self.send(channel)
    }

    /// Takes in what queues ask for.
    pub(crate) fn collect(&mut self) {
        self.unsent.extend(self.misses.take_unsent());
        if self.unsent.len() > MISSES_MAX {
            // No channel takes them, and queues that stop and start again ask anew.
            let misses = &self.misses;
            self.unsent.retain(|(number, miss)| misses.is_pending(*number, miss));
        }
    }

    /// Whether misses wait to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Readable when queues ask for something.
    pub(crate) fn signal(&self) -> BorrowedFd<'_> {
        self.misses.signal().as_fd()
    }

    /// Sends what can be sent.
    fn send(&mut self, channel: &mut BackendRequester) -> Result<(), Error> {
        while let Some((number, miss)) = self.unsent.pop_front() {
            if !self.misses.is_pending(number, &miss) {
                // Nobody waits for it any more.
                continue;
            }
            let message = BackendMessage::IotlbMsg(Message {
                kind: IotlbKind::Miss,
                iova: miss.page.0,
                size: PAGE,
                user_addr: 0,
                access: wire_access(miss.access),
            });
            match channel.send(&message, true, &Wait::never()) {
                Ok(_) => {
                    self.counts.misses += 1;
                    self.awaiting.push_back((number, miss));
                }
                Err(Error::Interrupted) => {
                    self.unsent.push_front((number, miss));
                    return Ok(());
                }
                Err(error) => {
                    // The next channel is asked.
                    self.unsent.push_front((number, miss));
                    return Err(error);
                }
            }
            if self.awaiting.len() > MISSES_MAX {
                // A front-end that takes requests and replies to none.
                return Err(Error::Closed);
            }
        }
        Ok(())
    }

    /// Counts the replies that have come.
    fn receive(&mut self, channel: &mut BackendRequester) -> Result<(), Error> {
        loop {
            match channel.recv_reply(BackendRequest::IotlbMsg, &Wait::never()) {
                Ok(_) => {}
                Err(Error::Interrupted) => return Ok(()),
                Err(error) => return Err(error),
            }
            self.replies += 1;
            if self.replies > self.awaiting.len() {
                return Err(Error::Closed);
            }
        }
    }

    /// Takes the replies that have come: what they reply to, and was not answered, is refused.
    fn take_replies(&mut self, rings: &Rings) {
        for (number, miss) in
            self.awaiting.drain(..std::mem::take(&mut self.replies).min(self.awaiting.len()))
        {
            let Some(refusal) = self.misses.replied(number, &miss) else { continue };
            self.counts.refusals += 1;
            debug!(iova = %miss.page, "the front-end has no translation");
            for queue in refusal.queues {
                rings.tell(queue, Update::Refused(refusal.miss));
            }
        }
    }
}

/// Whether the front-end has sent something that was not read yet.
fn is_readable(messages: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(messages, PollFlags::IN)];
    // What fails here fails for who waits for it as well.
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

fn access_of(access: IotlbAccess) -> Access {
    match (access.contains(IotlbAccess::READ), access.contains(IotlbAccess::WRITE)) {
        (true, true) => Access::BOTH,
        (true, false) => Access::READ,
        (false, true) => Access::WRITE,
        (false, false) => Access::NONE,
    }
}

fn wire_access(access: Access) -> IotlbAccess {
    let flag = |of: Access, flag| if access.allows(of) { flag } else { IotlbAccess::empty() };
    flag(Access::READ, IotlbAccess::READ) | flag(Access::WRITE, IotlbAccess::WRITE)
}

#[cfg(test)]
mod tests;
