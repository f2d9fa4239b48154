//! The limits within which a device's files are mapped.

use crate::backing;
use crate::error::MappingError;
use crate::quota::{Charge, Quota};
use std::os::fd::AsFd;
use std::sync::Arc;

/// Maps the files of a device's front-ends. It can limit the address space that the device uses, and it can
/// refuse slow files. The default does neither.
#[derive(Clone, Debug, Default)]
pub struct Mapper {
    quota: Option<Arc<Quota>>,
    refuse_slow: bool,
}

impl Mapper {
    /// Makes a mapper that charges its mappings to `quota`.
    pub fn within(quota: Arc<Quota>) -> Self {
        Self { quota: Some(quota), ..Self::default() }
    }

    /// Makes this mapper refuse files whose pages a worker might wait for without end: those of FUSE, of
    /// network file systems, and of others that are not known to be prompt.
    #[must_use]
    pub fn refuse_slow(self) -> Self {
        Self { refuse_slow: true, ..self }
    }

    /// Checks whether the file may be mapped.
    pub(crate) fn admit(&self, file: impl AsFd) -> Result<(), MappingError> {
        if self.refuse_slow {
            backing::check(file)
                .map_err(MappingError::Os)?
                .map_err(|slow| MappingError::Refused(slow.into()))?;
        }
        Ok(())
    }

    /// Charges `bytes` for one mapping, if there is a quota.
    pub(crate) fn charge(&self, bytes: u64) -> Result<Option<Charge>, MappingError> {
        let charge = self.quota.as_ref().map(|quota| quota.charge(bytes)).transpose();
        charge.map_err(|exhausted| MappingError::Refused(exhausted.into()))
    }
}
