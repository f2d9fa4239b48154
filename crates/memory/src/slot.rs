//! A contiguous range of guest memory with one mapping.

use crate::error::Purpose;
use crate::mapping::{MappedRange, Mapping};
use crate::{Error, Gpa, Mapper, UserAddr};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// A range of guest-physical addresses and the mapping that holds its bytes. Clones share the mapping.
#[derive(Clone, Debug)]
pub struct Slot {
    gpa: Gpa,
    user: UserAddr,
    range: MappedRange,
}

impl Slot {
    /// Maps `len` bytes of `file` from `offset` on as the guest memory at `gpa`. `user` is the front-end's
    /// address of it.
    ///
    /// # Errors
    /// An empty range, one that wraps in any of its three address spaces, one that is longer than its file,
    /// or the kernel's refusal to map it.
    pub fn map(file: impl AsFd, offset: u64, gpa: Gpa, user: UserAddr, len: u64) -> Result<Self, Error> {
        Self::map_or_share(file, offset, gpa, user, len, &[])
    }

    /// Does the same as [`Slot::map`], but shares the mapping of a slot in `old` that has the same bytes of
    /// the same file, if there is one.
    ///
    /// # Errors
    /// As [`Slot::map`].
    pub fn map_or_share(
        file: impl AsFd,
        offset: u64,
        gpa: Gpa,
        user: UserAddr,
        len: u64,
        old: &[Slot],
    ) -> Result<Self, Error> {
        Mapper::of_process().slot(file, offset, gpa, user, len, old)
    }

    /// Returns the first guest-physical address.
    pub fn gpa(&self) -> Gpa {
        self.gpa
    }

    /// Returns the front-end's address of the first byte.
    pub fn user(&self) -> UserAddr {
        self.user
    }

    /// Returns the length in bytes; never zero.
    #[expect(clippy::len_without_is_empty, reason = "a slot is never empty")]
    #[inline]
    pub fn len(&self) -> u64 {
        self.range.len()
    }

    /// Returns the mapping that holds the bytes.
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.range.mapping()
    }

    /// Returns the host address of the first byte. Valid for the length of the slot, as long as this slot.
    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.range.base()
    }

    /// Returns whether `gpa` is in this slot.
    pub fn contains(&self, gpa: Gpa) -> bool {
        self.locate(gpa).is_some()
    }

    /// Returns the offset of `gpa` and the bytes from there to the end of the slot, or `None` if `gpa` is not
    /// in it.
    #[inline]
    pub(crate) fn locate(&self, gpa: Gpa) -> Option<(usize, u64)> {
        let offset = gpa.offset_from(self.gpa)?;
        // The length fits into isize (checked when it was mapped), and so does a smaller offset.
        (offset < self.len()).then(|| (offset as usize, self.len() - offset))
    }
}

impl Mapper {
    /// Maps a slot as [`Slot::map_or_share`] does, within the limits of this mapper.
    ///
    /// # Errors
    /// As [`Slot::map`], and [`Error::Refused`].
    pub fn slot(
        &self,
        file: impl AsFd,
        offset: u64,
        gpa: Gpa,
        user: UserAddr,
        len: u64,
        old: &[Slot],
    ) -> Result<Slot, Error> {
        let purpose = Purpose::Region(gpa);
        if len == 0 {
            return Err(Error::Empty { purpose });
        }
        // A last byte at the highest address is allowed; a byte beyond it is not.
        for (start, field) in [(gpa.0, "guest address"), (user.0, "user address")] {
            if start.checked_add(len - 1).is_none() {
                return Err(Error::Wraps { purpose, field, start, len });
            }
        }
        let part = Mapping::part_of(self, purpose, &file, offset, len)?;
        // A damaged mapping no longer shows the file's bytes.
        let is_same = |old: &&Slot| old.mapping().part().is_same(&part) && !old.mapping().is_damaged();
        let mapping = match old.iter().find(is_same) {
            Some(old) => old.mapping().clone(),
            None => Arc::new(Mapping::new(self, purpose, file, part)?),
        };
        Ok(Slot { gpa, user, range: MappedRange::new(mapping) })
    }
}
