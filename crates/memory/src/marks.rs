//! What one queue has written, on its way into the log.
//!
//! # Where a mark goes
//! A request in flight keeps the mapping that it was translated with, and is done when the operating system says so. By then
//! the front-end may have moved the memory to another guest-physical address, and whoever reads the log looks for it there.
//! So a mark that is made for a request does not trust the address that the request had. It begins with the host address, which is
//! the same as long as the mapping is there, and the request keeps it there: no other bytes can have come to lie at it
//! since. The bytes are
//! 1. in the queue's present map: the mark goes to where they are in that. The page can be marked at its new place only from
//!    the moment on at which the log is read with the new map in mind; it is, for the completion is when they count as written;
//! 2. or else they were removed while the request was in flight. Who removes memory waits for those who use it, so it was by
//!    the last change: the mark goes to where they were before that. It is committed before the request lets go of its mapping
//!    ([`View::unpin_unless`](crate::View::unpin_unless)), and so before the front-end is answered;
//! 3. or else, where nobody has told of each change ([`Marks::set_view`]), where the request had them.
//!
//! What is written with the present map at hand is marked by its guest-physical address at once ([`View`](crate::View) sees to which it is).

use crate::fault::Damaged;
use crate::hosts::Hosts;
use crate::log::{Gather, Log, word_of, words_of};
use crate::{Gpa, Map};
use std::ptr::NonNull;
use std::sync::Arc;

/// The marks of one queue: whatever writes guest memory takes this along, and cannot leave it out.
///
/// With no log all of it is one branch. With one, marks are gathered and reach the log with [`Marks::commit`]: the
/// order that this has to keep is in [`crate::log`].
#[derive(Debug, Default)]
pub struct Marks {
    on: Option<Box<On>>,
    /// A mark has set a bit that was clear since somebody asked.
    news: bool,
}

#[derive(Debug)]
struct On {
    bits: Bits,
    /// Where memory is.
    now: Hosts,
    /// Where it was before it changed.
    before: Hosts,
}

#[derive(Debug)]
struct Bits {
    log: Arc<Log>,
    gather: Gather,
}

impl Marks {
    /// Marks for nobody.
    pub fn off() -> Self {
        Self::default()
    }

    /// Sends marks to this log from now on, if there is one, by the addresses that memory has in `hosts`. Commits what was
    /// gathered to the log before.
    pub(crate) fn set_log(&mut self, log: Option<&Arc<Log>>, hosts: &Hosts) {
        self.commit();
        match (&mut self.on, log) {
            (Some(on), Some(log)) => {
                on.bits.log = log.clone();
                if !on.now.is_same(hosts) {
                    on.before = std::mem::replace(&mut on.now, hosts.clone());
                }
            }
            (here, log) => {
                let on = |log: &Arc<Log>| On {
                    bits: Bits { log: log.clone(), gather: Gather::default() },
                    now: hosts.clone(),
                    before: Hosts::default(),
                };
                *here = log.map(|log| Box::new(on(log)));
            }
        }
    }

    /// Whether there is a log.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Whether the log has lost marks: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        self.on.as_ref()?.bits.log.damaged()
    }

    /// Whether marks wait to be committed.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.on.as_ref().is_some_and(|on| !on.bits.gather.is_empty())
    }

    /// `len` bytes at `gpa` were written, as memory is now.
    #[inline]
    pub fn wrote(&mut self, gpa: Gpa, len: u64) {
        if let Some(on) = &mut self.on {
            self.news |= on.bits.add(gpa, len);
        }
    }

    /// `len` bytes were written that are, or were, at `gpa` in `map`, all of them.
    #[inline]
    pub(crate) fn wrote_in(&mut self, map: &Map, gpa: Gpa, len: u64) {
        if let Some(on) = &mut self.on {
            self.news |= match on.now.is_same(map.hosts()) {
                true => on.bits.add(gpa, len),
                false => on.add_in(map, gpa, len),
            };
        }
    }

    /// `len` bytes at a host address were written, which `map` has mapped, or had.
    #[inline]
    pub(crate) fn wrote_host(&mut self, map: &Map, host: NonNull<u8>, len: usize) {
        if let Some(on) = &mut self.on {
            self.news |= on.add_host(map, host.as_ptr().addr(), len);
        }
    }

    /// Puts what was gathered into the log. To be called after the data was written and before the driver hears of it,
    /// and after what tells the driver was written.
    #[inline]
    pub fn commit(&mut self) {
        if let Some(on) = &mut self.on {
            self.news |= on.bits.gather.commit(&*on.bits.log);
        }
    }

    /// [`Marks::commit`] where a sequentially consistent fence has come between what was written and this already.
    #[inline]
    pub fn commit_fenced(&mut self) {
        if let Some(on) = &mut self.on {
            self.news |= on.bits.gather.commit_fenced(&*on.bits.log);
        }
    }

    /// Whether a bit that was clear has been set since this was called last.
    #[inline]
    pub fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }
}

// Each says whether something had to be committed, and was new.
impl On {
    #[inline]
    fn add_host(&mut self, map: &Map, mut at: usize, mut left: usize) -> bool {
        let mut news = false;
        while left > 0 {
            let bits = &mut self.bits;
            let mut here = self.now.piece(at, left, |gpa, len| news |= bits.add(gpa, len));
            if here == 0 {
                here = self.add_removed(map, at, left, &mut news);
            }
            at += here;
            left -= here;
        }
        news
    }

    /// Where the first of these bytes were, which are not in memory any more; how many that is.
    #[cold]
    fn add_removed(&mut self, map: &Map, at: usize, len: usize, news: &mut bool) -> usize {
        let bits = &mut self.bits;
        let mut add = |gpa, len| *news |= bits.add(gpa, len);
        match self.before.piece(at, len, &mut add) {
            0 => match map.hosts().piece(at, len, add) {
                // Nobody has mapped them, so nobody has written them.
                0 => len,
                here => here,
            },
            here => here,
        }
    }

    #[cold]
    fn add_in(&mut self, map: &Map, gpa: Gpa, len: u64) -> bool {
        let mut news = false;
        // They were written, so they are all there.
        let _ = map.pieces(gpa, len, |host, len| news |= self.add_host(map, host.as_ptr().addr(), len));
        news
    }
}

impl Bits {
    #[inline]
    fn add(&mut self, gpa: Gpa, len: u64) -> bool {
        // Nearly always it is one word.
        match word_of(gpa, len) {
            Some((word, bits)) if self.gather.add(word, bits) => false,
            _ => self.add_each(gpa, len),
        }
    }

    #[cold]
    fn add_each(&mut self, gpa: Gpa, len: u64) -> bool {
        let mut news = false;
        for (word, bits) in words_of(gpa, len) {
            while !self.gather.add(word, bits) {
                // All that was gathered was written before, so it may be marked at any time.
                news |= self.gather.commit(&*self.log);
            }
        }
        news
    }
}
