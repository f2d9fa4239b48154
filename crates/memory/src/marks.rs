//! Gathers what one queue has written, and marks it in the log.
//!
//! # The page of a mark
//! A request in flight keeps the mapping that it was translated with until the operating system completes it.
//! Meanwhile the front-end may have moved the memory to another guest-physical address, and the reader of the
//! log looks for the mark there.
//!
//! So the mark of a request does not use the address that the request had. It begins with the host address.
//! The request keeps the mapping, so the host address still belongs to the same bytes. There are three cases:
//! 1. The bytes are in the queue's present map. The mark goes to their address in that map. A mark at a new
//!    address is correct only after readers of the log know the new map. They do: the bytes count as written
//!    at the completion, which is now.
//! 2. Otherwise the bytes were removed while the request was in flight. Before memory is removed, the session
//!    waits for all requests that use it. So the last change has removed them, and the mark goes to their
//!    address before that change. It is committed before the request releases its mapping
//!    ([`View::unpin_unless`](crate::View::unpin_unless)), and so before the session answers the front-end.
//! 3. Otherwise [`Marks::set_view`] was not called for each change. The mark goes to the address that the
//!    request had.
//!
//! A write through the present map is marked by its guest-physical address at once. ([`View`](crate::View)
//! checks that the map is the present one.)

use crate::fault::Damaged;
use crate::host_index::HostIndex;
use crate::log::{Log, MarkBatch, word_of, words_of};
use crate::{Gpa, Map};
use std::ptr::NonNull;
use std::sync::Arc;

/// The marks of one queue. Each function that writes guest memory takes this, so that no write can go
/// unmarked.
///
/// Without a log, it costs one branch. With a log, marks are gathered, and [`Marks::commit`] puts them into
/// the log. [`crate::log`] explains when that must happen.
#[derive(Debug, Default)]
pub struct Marks {
    on: Option<Box<Active>>,
    /// Whether a mark has set a clear bit since the last [`Marks::take_newly_set`].
    newly_set: bool,
}

#[derive(Debug)]
struct Active {
    gathered: GatheredMarks,
    /// The present addresses of memory.
    now: HostIndex,
    /// The addresses before the last change.
    before: HostIndex,
}

#[derive(Debug)]
struct GatheredMarks {
    log: Arc<Log>,
    batch: MarkBatch,
}

impl Marks {
    /// Returns marks without a log.
    pub fn off() -> Self {
        Self::default()
    }

    /// Makes marks go to `log` from now on, if there is one, at the addresses in `hosts`. Commits earlier
    /// marks to the earlier log first.
    pub(crate) fn set_log(&mut self, log: Option<&Arc<Log>>, hosts: &HostIndex) {
        self.commit();
        match (&mut self.on, log) {
            (Some(on), Some(log)) => {
                on.gathered.log = log.clone();
                if !on.now.is_same(hosts) {
                    on.before = std::mem::replace(&mut on.now, hosts.clone());
                }
            }
            (here, log) => {
                let on = |log: &Arc<Log>| Active {
                    gathered: GatheredMarks { log: log.clone(), batch: MarkBatch::default() },
                    now: hosts.clone(),
                    before: HostIndex::default(),
                };
                *here = log.map(|log| Box::new(on(log)));
            }
        }
    }

    /// Returns whether there is a log.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Returns the damage if the log has lost marks: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        self.on.as_ref()?.gathered.log.damaged()
    }

    /// Returns whether there are marks to commit.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.on.as_ref().is_some_and(|on| !on.gathered.batch.is_empty())
    }

    /// Marks `len` bytes at `gpa`, in the present map, as written.
    #[inline]
    pub fn wrote(&mut self, gpa: Gpa, len: u64) {
        if let Some(on) = &mut self.on {
            self.newly_set |= on.gathered.add(gpa, len);
        }
    }

    /// Marks `len` bytes at `gpa` in `map` as written. All of them are in that map, which may be an earlier
    /// one.
    #[inline]
    pub(crate) fn wrote_in(&mut self, map: &Map, gpa: Gpa, len: u64) {
        if let Some(on) = &mut self.on {
            self.newly_set |= match on.now.is_same(map.hosts()) {
                true => on.gathered.add(gpa, len),
                false => on.add_in(map, gpa, len),
            };
        }
    }

    /// Marks `len` bytes at a host address as written. They are in a mapping of `map`, which may be an
    /// earlier map.
    #[inline]
    pub(crate) fn wrote_host(&mut self, map: &Map, host: NonNull<u8>, len: usize) {
        if let Some(on) = &mut self.on {
            self.newly_set |= on.add_host(map, host.as_ptr().addr(), len);
        }
    }

    /// Puts the gathered marks into the log.
    ///
    /// Call it after the data is written and before the used index or flags are. Call it again after that
    /// write.
    #[inline]
    pub fn commit(&mut self) {
        if let Some(on) = &mut self.on {
            self.newly_set |= on.gathered.batch.commit(&*on.gathered.log);
        }
    }

    /// Does the same as [`Marks::commit`] if a sequentially consistent fence has already followed the data.
    #[inline]
    pub fn commit_fenced(&mut self) {
        if let Some(on) = &mut self.on {
            self.newly_set |= on.gathered.batch.commit_fenced(&*on.gathered.log);
        }
    }

    /// Returns whether a clear bit has been set since the last call.
    #[inline]
    pub fn take_newly_set(&mut self) -> bool {
        std::mem::take(&mut self.newly_set)
    }
}

// Each function returns whether it had to commit early and thereby set a clear bit.
impl Active {
    #[inline]
    fn add_host(&mut self, map: &Map, mut at: usize, mut left: usize) -> bool {
        let mut newly_set = false;
        while left > 0 {
            let gathered = &mut self.gathered;
            let mut here = self.now.locate(at, left, |gpa, len| newly_set |= gathered.add(gpa, len));
            if here == 0 {
                here = self.add_removed(map, at, left, &mut newly_set);
            }
            at += here;
            left -= here;
        }
        newly_set
    }

    /// Marks the first of these bytes, which are not in present memory any more. Returns how many bytes that
    /// is.
    #[cold]
    fn add_removed(&mut self, map: &Map, at: usize, len: usize, newly_set: &mut bool) -> usize {
        let gathered = &mut self.gathered;
        let mut add = |gpa, len| *newly_set |= gathered.add(gpa, len);
        match self.before.locate(at, len, &mut add) {
            0 => match map.hosts().locate(at, len, add) {
                // The bytes are in no mapping, so they were not written.
                0 => len,
                here => here,
            },
            here => here,
        }
    }

    #[cold]
    fn add_in(&mut self, map: &Map, gpa: Gpa, len: u64) -> bool {
        let mut newly_set = false;
        // All of the range is in the map, because it was written.
        let _ = map.pieces(gpa, len, |host, len| newly_set |= self.add_host(map, host.as_ptr().addr(), len));
        newly_set
    }
}

impl GatheredMarks {
    #[inline]
    fn add(&mut self, gpa: Gpa, len: u64) -> bool {
        // Nearly always the range is within one word.
        match word_of(gpa, len) {
            Some((word, bits)) if self.batch.add(word, bits) => false,
            _ => self.add_each(gpa, len),
        }
    }

    #[cold]
    fn add_each(&mut self, gpa: Gpa, len: u64) -> bool {
        let mut newly_set = false;
        for (word, bits) in words_of(gpa, len) {
            while !self.batch.add(word, bits) {
                // The gathered marks may be committed at any time, because their data is written.
                newly_set |= self.batch.commit(&*self.log);
            }
        }
        newly_set
    }
}
