//! The buffer in which a back-end writes down what it has in flight, so that the next one can go on (vhost-user's
//! INFLIGHT_SHMFD). It is not guest memory, but the front-end has it too and can write to it at any time.
#![expect(unsafe_code, reason = "island: atomic access to the words of a mapping")]

use crate::error::{Failure, InflightError};
use crate::fault::Damaged;
use crate::mapper::Mapper;
use crate::mapping::Mapping;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// The whole buffer. Mapped until the last reference to it, or to a part of it, goes.
#[derive(Clone, Debug)]
pub struct Inflight {
    mapping: Arc<Mapping>,
}

impl Inflight {
    /// Maps `len` bytes of `file` from `offset`.
    ///
    /// # Errors
    /// No bytes, an offset that is no multiple of 8, a range that wraps or is longer than its file, or the kernel's refusal
    /// to map it.
    pub fn map(file: impl AsFd, offset: u64, len: u64) -> Result<Self, InflightError> {
        Mapper::default().inflight(file, offset, len)
    }

    /// `len` bytes from `offset` on, which is a multiple of 8; `None` if they are not all in the buffer.
    pub fn records(&self, offset: usize, len: usize) -> Option<Records> {
        // The length fits into isize: it was checked when it was mapped.
        let whole = self.mapping.len() as usize;
        if !offset.is_multiple_of(WORD) || offset > whole || len > whole - offset {
            return None;
        }
        // SAFETY: at most the length of the mapping.
        let start = unsafe { self.mapping.base().add(offset) };
        Some(Records { start: start.cast(), words: len / WORD, mapping: self.mapping.clone() })
    }
}

impl Mapper {
    /// As [`Inflight::map`].
    ///
    /// # Errors
    /// As there, and [`InflightError::Refused`].
    pub fn inflight(&self, file: impl AsFd, offset: u64, len: u64) -> Result<Inflight, InflightError> {
        if len == 0 {
            return Err(InflightError::Empty);
        }
        if !offset.is_multiple_of(WORD as u64) {
            return Err(InflightError::Misaligned { offset });
        }
        let failed = |failure| match failure {
            Failure::Wraps => InflightError::Wraps { offset, len },
            Failure::TooShort { needs, has } => InflightError::FileTooShort { needs, has },
            Failure::Refused(why) => InflightError::Refused(why),
            Failure::Os(source) => InflightError::Mmap { source },
        };
        let part = Mapping::part_of(self, &file, offset, len).map_err(failed)?;
        Ok(Inflight { mapping: Arc::new(Mapping::new(self, file, part).map_err(failed)?) })
    }
}

/// A part of the buffer: what one queue has in flight.
///
/// It is for another process to read if this one is killed, so what counts is which stores come before which in the order of
/// instructions: a process that is killed has carried out all before some instruction, and none after it, and the kernel keeps
/// the pages. So each store stays where the program has it, for the compiler; the processor needs no fence.
#[derive(Debug)]
pub struct Records {
    /// Aligned: the mapping begins at a page, the buffer at a multiple of 8 in it, and this at another.
    start: NonNull<u64>,
    /// Whole words that there are.
    words: usize,
    mapping: Arc<Mapping>,
}

impl Records {
    /// Length in bytes, of whole words.
    pub fn len(&self) -> usize {
        self.words * WORD
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// The word at `offset`.
    ///
    /// # Panics
    /// It is not in this part: offsets come from our own arithmetic over a validated length, never from the front-end.
    #[inline(always)]
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(WORD));
        let index = offset / WORD;
        assert!(index < self.words, "record out of its buffer");
        // SAFETY: so many words from `start` on are in the mapping.
        let word = unsafe { self.start.add(index) };
        // SAFETY:
        // - it is mapped as long as `self`, which holds the mapping, and aligned (see `start`);
        // - all of our accesses to it are atomic; the front-end's are not in this program.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }
    }

    /// Loads the word at `offset`, a multiple of 8 in this part, once.
    pub fn load(&self, offset: usize) -> u64 {
        u64::from_le(self.word(offset).load(Ordering::Relaxed))
    }

    /// Stores the word at `offset`, a multiple of 8 in this part, in one go: after all that the program writes anywhere before it, and
    /// before all that it writes after it.
    #[inline(always)]
    pub fn store(&self, offset: usize, word: u64) {
        compiler_fence(Ordering::SeqCst);
        self.word(offset).store(word.to_le(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Whether the buffer has lost pages, and what was written there with them: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        let mapping = &self.mapping;
        mapping.is_damaged().then(|| Damaged::Inflight { len: mapping.len(), first: mapping.tell() })
    }
}

// SAFETY: shared memory that any thread may access, by atomics only, while the mapping lives.
unsafe impl Send for Records {}
// SAFETY: as above.
unsafe impl Sync for Records {}
