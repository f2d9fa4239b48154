//! One contiguous run of guest memory behind one mapping.

use crate::error::Failure;
use crate::mapping::Mapping;
use crate::{Error, Gpa, Mapper, UserAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

/// A range of guest-physical addresses and the mapping that holds its bytes. Clones share the mapping.
#[derive(Clone, Debug)]
pub struct Slot {
    gpa: Gpa,
    user: UserAddr,
    mapping: Arc<Mapping>,
}

impl Slot {
    /// Maps `len` bytes of `file` from `offset` as the guest memory at `gpa`, which the front-end knows as `user`.
    ///
    /// # Errors
    /// An empty range, one that wraps in any of its three spaces, one that is longer than its file, or the kernel's
    /// refusal to map it.
    pub fn map(file: impl AsFd, offset: u64, gpa: Gpa, user: UserAddr, len: u64) -> Result<Self, Error> {
        Self::map_or_share(file, offset, gpa, user, len, &[])
    }

    /// As [`Slot::map`], but shares the mapping of that slot in `old` which has the same bytes of the same file, if there
    /// is one.
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
        Mapper::default().slot(file, offset, gpa, user, len, old)
    }

    /// First guest-physical address.
    pub fn gpa(&self) -> Gpa {
        self.gpa
    }

    /// The front-end's address of the first byte.
    pub fn user(&self) -> UserAddr {
        self.user
    }

    /// Length in bytes; never zero.
    #[expect(clippy::len_without_is_empty, reason = "a slot is never empty")]
    #[inline]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// The mapping that holds the bytes.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Returns whether `gpa` is in it.
    pub fn contains(&self, gpa: Gpa) -> bool {
        self.locate(gpa).is_some()
    }

    /// Bytes from `gpa` to the end of the slot, and the offset of `gpa`; `None` where `gpa` is not in it.
    #[inline]
    pub(crate) fn locate(&self, gpa: Gpa) -> Option<(usize, u64)> {
        let offset = gpa.offset_from(self.gpa)?;
        // The length fits into isize (checked when it was mapped), and so does a smaller offset.
        (offset < self.len()).then(|| (offset as usize, self.len() - offset))
    }
}

impl Mapper {
    /// As [`Slot::map_or_share`].
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
        if len == 0 {
            return Err(Error::Empty { gpa });
        }
        // A last byte at the very top is legal; an end past it is not.
        for (start, field) in [(gpa.0, "guest address"), (user.0, "user address")] {
            if start.checked_add(len - 1).is_none() {
                return Err(Error::Wraps { gpa, field, len });
            }
        }
        let failed = |failure| match failure {
            Failure::Wraps => Error::Wraps { gpa, field: "mmap offset", len },
            Failure::TooShort { needs, has } => Error::FileTooShort { gpa, needs, has },
            Failure::Refused(why) => Error::Refused { gpa, why },
            Failure::Os(source) => Error::Mmap { gpa, source },
        };
        let part = Mapping::part_of(self, &file, offset, len).map_err(failed)?;
        // A damaged mapping does not show the file's bytes any more.
        let is_same = |old: &&Slot| old.mapping.part().is_same(&part) && !old.mapping.is_damaged();
        let mapping = match old.iter().find(is_same) {
            Some(old) => old.mapping.clone(),
            None => Arc::new(Mapping::new(self, file, part).map_err(failed)?),
        };
        Ok(Slot { gpa, user, mapping })
    }
}
