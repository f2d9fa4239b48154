//! What one queue has written, on its way into the log.

use crate::fault::Damaged;
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
    log: Option<Box<On>>,
    /// A mark has set a bit that was clear since somebody asked.
    news: bool,
}

#[derive(Debug)]
struct On {
    log: Arc<Log>,
    gather: Gather,
}

impl Marks {
    /// Marks for nobody.
    pub fn off() -> Self {
        Self::default()
    }

    /// From now on, marks go to this log; what was gathered goes to the one before.
    pub fn set_log(&mut self, log: Option<&Arc<Log>>) {
        self.commit();
        match (&mut self.log, log) {
            (Some(on), Some(log)) => on.log = log.clone(),
            (here, log) => {
                *here = log.map(|log| Box::new(On { log: log.clone(), gather: Gather::default() }))
            }
        }
    }

    /// Whether there is a log.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.log.is_some()
    }

    /// Whether the log has lost marks: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        self.log.as_ref()?.log.damaged()
    }

    /// Whether marks wait to be committed.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.log.as_ref().is_some_and(|on| !on.gather.is_empty())
    }

    /// `len` bytes at `gpa` were written.
    #[inline]
    pub fn wrote(&mut self, gpa: Gpa, len: u64) {
        if let Some(on) = &mut self.log {
            self.news |= on.add(gpa, len);
        }
    }

    /// `len` bytes at a host address were written, which `map` has mapped.
    #[inline]
    pub(crate) fn wrote_host(&mut self, map: &Map, host: NonNull<u8>, len: usize) {
        if let Some(on) = &mut self.log {
            map.each_gpa_of(host, len, |gpa, len| self.news |= on.add(gpa, len));
        }
    }

    /// Puts what was gathered into the log. To be called after the data was written and before the driver hears of it,
    /// and after what tells the driver was written.
    #[inline]
    pub fn commit(&mut self) {
        if let Some(on) = &mut self.log {
            self.news |= on.gather.commit(&*on.log);
        }
    }

    /// [`Marks::commit`] where a sequentially consistent fence has come between what was written and this already.
    #[inline]
    pub fn commit_fenced(&mut self) {
        if let Some(on) = &mut self.log {
            self.news |= on.gather.commit_fenced(&*on.log);
        }
    }

    /// Whether a bit that was clear has been set since this was called last.
    #[inline]
    pub fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }
}

impl On {
    /// Whether something had to be committed, and was new.
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
