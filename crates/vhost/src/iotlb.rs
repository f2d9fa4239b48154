//! Translations of a vIOMMU: those that the front-end sends, and those that it is asked for.
//!
//! Queues, the session and the front-end wait for one another, but never in a circle:
//!
//! * A queue that lacks a translation reports it ([`IotlbMisses`]) and pauses. Its worker serves other
//!   queues.
//! * The session sends the miss on the back-end's channel and does not wait for the reply. It goes on with
//!   the next message, or with a reply on the channel. The front-end answers with an UPDATE. It holds its
//!   big lock until the session has acknowledged that, so the session must be ready for it.
//! * The session acknowledges an UPDATE that contradicts an earlier one, or an INVALIDATE, when no queue uses
//!   the old translation. This wait is for workers and I/O in flight. Neither needs the front-end or an
//!   answer to a miss. The session limits how long I/O waits for a remote server (`wait.rs`).
//!
//! GET_VRING_BASE stops a queue even while it waits for a translation. Its misses are forgotten then, and a
//! late answer is a translation like any other. When no ring runs any more, all translations are forgotten,
//! because a front-end sends no invalidations while its device is stopped.

use crate::error::{Ended, RequestError};
use crate::rings::Rings;
use crate::wait::{self, Cancellation, is_readable};
use kickless_device::{Iommu, IotlbMisses, Update, Waker};
use kickless_handover::v1;
use kickless_memory::{Access, Iotlb, Iova, IovaRange, Map, Miss, Unmapped, UpdateError, UserAddr};
use kickless_spec::vhost_user::{BackendRequest, IotlbAccess, IotlbKind};
use kickless_vhost_user::{BackendMessage, BackendRequester, Error, Iotlb as Message, Wait};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use tracing::{debug, info};

/// The size of the page that a miss asks for.
const PAGE: u64 = 4096;

/// The largest number of misses that wait for replies, or to be sent. Beyond it, misses without a waiting
/// queue are dropped, and a channel without replies is closed.
const MISSES_MAX: usize = 1 << 16;

/// A session's translations.
pub(crate) struct Translations {
    iotlb: Iotlb,
    misses: Arc<IotlbMisses>,
    /// Misses that could not be sent yet.
    unsent: VecDeque<(u64, Miss)>,
    /// Misses that wait for their replies, in this order.
    awaiting: VecDeque<(u64, Miss)>,
    /// The number of replies that have come and are not handled yet. They belong to the first misses of
    /// `awaiting`.
    replies: usize,
    counts: Counts,
}

/// Counters for the log.
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
        let misses = Arc::new(IotlbMisses::new(Waker::new()?));
        Ok(Self {
            iotlb: Iotlb::default(),
            misses,
            unsent: VecDeque::new(),
            awaiting: VecDeque::new(),
            replies: 0,
            counts: Counts::default(),
        })
    }

    /// Returns the parts that queues need.
    pub(crate) fn iommu(&self) -> Iommu {
        Iommu { table: self.iotlb.table().clone(), misses: self.misses.clone() }
    }

    /// Carries out IOTLB_MSG.
    pub(crate) fn message(
        &mut self,
        message: &Message,
        map: &Map,
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<(), RequestError> {
        match message.kind {
            IotlbKind::Update => self.update(message, map, rings, cancellation),
            IotlbKind::Invalidate => {
                self.counts.invalidations += 1;
                let range = IovaRange::new(Iova(message.iova), message.size);
                self.iotlb.invalidate(range);
                Ok(self.drop_stale(rings, cancellation)?)
            }
            IotlbKind::Miss | IotlbKind::AccessFail => Err(RequestError::IotlbKind),
        }
    }

    fn update(
        &mut self,
        message: &Message,
        map: &Map,
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<(), RequestError> {
        let (iova, user, len) = (Iova(message.iova), UserAddr(message.user_addr), message.size);
        // A translation must lie within one region: otherwise it is not contiguous in the front-end's memory.
        if len > 0 && map.gpa_of_range(user, len).is_none() {
            return Err(match map.gpa_of(user) {
                Some(_) => RequestError::Translation(Unmapped { addr: user.0, len }),
                None => RequestError::TranslationNotShared { addr: user },
            });
        }
        self.counts.updates += 1;
        let access = access_of(message.access);
        loop {
            match self.iotlb.update(iova, len, user, access) {
                Ok(()) => break,
                Err(UpdateError::Full { .. })
                    if self.make_room(IovaRange::new(iova, len), rings, cancellation)? => {}
                Err(error) => {
                    // A part of the update may be in force, and the translations that it replaced are stale.
                    self.drop_stale(rings, cancellation)?;
                    return Err(error.into());
                }
            }
        }
        self.drop_stale(rings, cancellation)?;
        for queue in self.misses.answered(IovaRange::new(iova, len), access) {
            rings.send_update(queue, Update::Poll);
        }
        Ok(())
    }

    /// Makes room for a node: waits until stale nodes are free, or else evicts translations outside the
    /// updated range. Returns `false` if it found neither.
    fn make_room(
        &mut self,
        updated: IovaRange,
        rings: &mut Rings,
        cancellation: Cancellation<'_>,
    ) -> Result<bool, Ended> {
        let in_limbo = self.iotlb.has_nodes_in_limbo();
        // Stale translations are invalidated first. Forgetting them would not be enough.
        self.drop_stale(rings, cancellation)?;
        if in_limbo {
            return Ok(true);
        }
        let misses = &self.misses;
        // Nodes that the update has just linked must not be evicted for it.
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

    /// Drops stale translations from all queues, and waits until no request in flight uses them.
    ///
    /// # Errors
    /// The answer has become useless. The nodes in limbo stay unused, because the session ends.
    fn drop_stale(&mut self, rings: &mut Rings, cancellation: Cancellation<'_>) -> Result<(), Ended> {
        let Some(range) = self.iotlb.take_stale() else { return Ok(()) };
        let (done, all_done) = mpsc::channel();
        rings.send_update_to_all(|| Update::Invalidate(range, done.clone()));
        drop(done);
        let what = "requests in flight that use an invalidated translation";
        wait::until(
            what,
            cancellation,
            || rings.limit_remote_waits(),
            |patience| matches!(all_done.recv_timeout(patience), Err(RecvTimeoutError::Disconnected)),
        )?;
        self.iotlb.quiesced();
        Ok(())
    }

    /// Drops all translations, because no ring runs and the front-end will report no invalidations.
    pub(crate) fn flush(&mut self) {
        self.iotlb.invalidate(IovaRange::ALL);
        // No queue is left that could use it.
        let _ = self.iotlb.take_stale();
        self.iotlb.quiesced();
    }

    /// Logs a line with all counters.
    pub(crate) fn log(&self) {
        let Counts { misses, refusals, updates, invalidations, evictions } = self.counts;
        info!(misses, refusals, updates, invalidations, evictions, "translations of a vIOMMU");
    }

    /// Sends unanswered misses again, on a new channel.
    pub(crate) fn resend_unanswered(&mut self) {
        self.replies = 0;
        while let Some(miss) = self.awaiting.pop_back() {
            self.unsent.push_front(miss);
        }
    }

    /// Returns the misses that wait for replies, and the number of replies that are not handled yet. Misses
    /// that were not sent are not among them: the queues ask again.
    pub(crate) fn give_awaiting(&self) -> (Vec<v1::Miss>, u32) {
        let miss = |(_, miss): &(u64, Miss)| v1::Miss {
            page: miss.page.0,
            access: match (miss.access.allows(Access::READ), miss.access.allows(Access::WRITE)) {
                (true, true) => v1::Access::ReadWrite,
                (_, false) => v1::Access::Read,
                (false, true) => v1::Access::Write,
            },
        };
        // At most MISSES_MAX.
        (self.awaiting.iter().map(miss).collect(), self.replies as u32)
    }

    /// Expects the replies to the misses of another process. No queue waits for them here.
    pub(crate) fn restore_awaiting(&mut self, from: &v1::SessionFinal) -> Result<(), RequestError> {
        if from.awaiting.len() > MISSES_MAX {
            return Err(RequestError::TooManyMisses(from.awaiting.len()));
        }
        let miss = |miss: &v1::Miss| Miss {
            page: Iova(miss.page),
            access: match miss.access {
                v1::Access::Read => Access::READ,
                v1::Access::Write => Access::WRITE,
                v1::Access::ReadWrite => Access::BOTH,
            },
        };
        // No miss of this process has this number.
        self.awaiting = from.awaiting.iter().map(|from| (0, miss(from))).collect();
        // The record was checked.
        self.replies = (from.replies as usize).min(self.awaiting.len());
        Ok(())
    }

    /// Takes replies and sends misses, as far as possible without waiting.
    pub(crate) fn exchange(
        &mut self,
        channel: &mut BackendRequester,
        messages: BorrowedFd<'_>,
        rings: &Rings,
    ) -> Result<(), Error> {
        self.receive(channel)?;
        // If there is an answer, it was sent before the reply to the miss. So it is readable now, and must be
        // handled first.
        if self.replies > 0 && !is_readable(messages) {
            self.take_replies(rings);
        }
        self.send(channel)
    }

    /// Takes the misses of queues.
    pub(crate) fn collect(&mut self) {
        self.unsent.extend(self.misses.take_unsent());
        if self.unsent.len() > MISSES_MAX {
            // The channel accepts nothing, and queues that stop and start again ask anew.
            let misses = &self.misses;
            self.unsent.retain(|(number, miss)| misses.is_pending(*number, miss));
        }
    }

    /// Returns whether misses wait to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns a descriptor that is readable when queues have new misses.
    pub(crate) fn signal(&self) -> BorrowedFd<'_> {
        self.misses.signal().as_fd()
    }

    /// Sends misses, as far as possible without waiting.
    fn send(&mut self, channel: &mut BackendRequester) -> Result<(), Error> {
        while let Some((number, miss)) = self.unsent.pop_front() {
            if !self.misses.is_pending(number, &miss) {
                // No queue waits for it any more.
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
                    // The miss goes to the next channel.
                    self.unsent.push_front((number, miss));
                    return Err(error);
                }
            }
            if self.awaiting.len() > MISSES_MAX {
                // This front-end accepts misses and replies to none.
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

    /// Handles the replies that have come. A miss without an answer is refused.
    fn take_replies(&mut self, rings: &Rings) {
        for (number, miss) in
            self.awaiting.drain(..std::mem::take(&mut self.replies).min(self.awaiting.len()))
        {
            let Some(refusal) = self.misses.replied(number, &miss) else { continue };
            self.counts.refusals += 1;
            debug!(iova = %miss.page, "the front-end has no translation");
            for queue in refusal.queues {
                rings.send_update(queue, Update::TranslationRefused(refusal.miss));
            }
        }
    }
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
