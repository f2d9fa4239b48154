//! The in-flight buffer (vhost-user's INFLIGHT_SHMFD). A back-end records its requests in flight there, so
//! that the next back-end can go on.
//!
//! The buffer is not guest memory, but the front-end has it too and can write to it at any time.
#![expect(unsafe_code, reason = "island: atomic access to the words of a mapping")]

use crate::error::{Error, Purpose};
use crate::fault::Damaged;
use crate::mapper::Mapper;
use crate::mapping::Mapping;
use crate::unmapper::Released;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// The whole in-flight buffer. It is unmapped after the last reference to it, or to a part of it, is gone.
#[derive(Clone, Debug)]
pub struct Inflight {
    mapping: Arc<Mapping>,
}

impl Inflight {
    /// Maps `len` bytes of `file` from `offset`.
    ///
    /// # Errors
    /// No bytes, an offset that is no multiple of 8, a range that wraps or is longer than its file, or the
    /// kernel's refusal to map it.
    pub fn map(file: impl AsFd, offset: u64, len: u64) -> Result<Self, Error> {
        Mapper::of_process().inflight(file, offset, len)
    }

    /// Returns the length in bytes; never zero.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Returns the file: see [`Mapping::file`].
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.mapping.file()
    }

    /// Returns the offset of the buffer in its file.
    pub fn offset(&self) -> u64 {
        self.mapping.offset()
    }

    /// Returns a handle with which the caller can wait until the buffer is unmapped.
    pub fn released(&self) -> Released {
        self.mapping.released()
    }

    /// Returns the `len` bytes from `offset` on, which is a multiple of 8, or `None` if they are not all in
    /// the buffer.
    pub fn records(&self, offset: usize, len: usize) -> Option<Records> {
        // The length fits into isize: it was checked when it was mapped.
        let whole = self.mapping.len() as usize;
        if !offset.is_multiple_of(WORD) || offset > whole || len > whole - offset {
            return None;
        }
        // SAFETY: the offset is at most the length of the mapping.
        let start = unsafe { self.mapping.base().add(offset) };
        Some(Records { start: start.cast(), words: len / WORD, mapping: self.mapping.clone() })
    }
}

impl Mapper {
    /// Maps the buffer as [`Inflight::map`] does, within the limits of this mapper.
    ///
    /// # Errors
    /// As [`Inflight::map`], and [`Error::Refused`].
    pub fn inflight(&self, file: impl AsFd, offset: u64, len: u64) -> Result<Inflight, Error> {
        Ok(Inflight { mapping: Arc::new(Mapping::of_words(self, Purpose::Inflight, file, offset, len)?) })
    }
}

/// A part of the buffer: the requests in flight of one queue.
///
/// Another process reads it if this one is killed. So only the order of stores in the sequence of
/// instructions counts. A killed process has carried out all stores before some instruction and none after
/// it, and the kernel keeps the pages. The compiler must keep the order of the stores. The processor needs no
/// fence.
#[derive(Debug)]
pub struct Records {
    /// Aligned: the mapping begins at a page, the buffer at a multiple of 8 within it, and this part at a
    /// multiple of 8 within the buffer.
    start: NonNull<u64>,
    /// Number of whole words.
    words: usize,
    mapping: Arc<Mapping>,
}

impl Records {
    /// Returns the length in bytes of all whole words.
    pub fn len(&self) -> usize {
        self.words * WORD
    }

    /// Returns whether this part has no bytes.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// Returns the word at `offset`.
    ///
    /// # Panics
    /// Panics if the word is not in this part. Offsets come from our own arithmetic over a validated length,
    /// never from the front-end.
    #[inline(always)]
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(WORD));
        let index = offset / WORD;
        assert!(index < self.words, "record out of its buffer");
        // SAFETY: `index` is less than the number of words from `start` on that are in the mapping.
        let word = unsafe { self.start.add(index) };
        // SAFETY:
        // - it is mapped as long as `self`, which holds the mapping, and aligned (see `start`);
        // - all of our accesses to it are atomic; the front-end's are not in this program.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }
    }

    /// Loads the word at `offset` once. `offset` is a multiple of 8 in this part.
    pub fn load(&self, offset: usize) -> u64 {
        u64::from_le(self.word(offset).load(Ordering::Relaxed))
    }

    /// Stores the word at `offset` in one instruction: after all earlier writes of the program, and before
    /// all later ones. `offset` is a multiple of 8 in this part.
    #[inline(always)]
    pub fn store(&self, offset: usize, word: u64) {
        compiler_fence(Ordering::SeqCst);
        self.word(offset).store(word.to_le(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Returns the damage if the buffer has lost pages, and the records on them: see [`crate::fault`].
    pub fn damaged(&self) -> Option<Damaged> {
        let mapping = &self.mapping;
        mapping.is_damaged().then(|| Damaged::Inflight { len: mapping.len(), first: mapping.report_once() })
    }
}

// SAFETY: shared memory that any thread may access, by atomics only, while the mapping lives.
unsafe impl Send for Records {}
// SAFETY: as above.
unsafe impl Sync for Records {}
