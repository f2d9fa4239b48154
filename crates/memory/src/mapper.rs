//! How the files of a device's front-ends are mapped.

use crate::backing;
use crate::error::Failure;
use crate::quota::{Charge, Quota};
use std::os::fd::AsFd;
use std::sync::Arc;

/// Maps the files of a device's front-ends: within the device's share of the address space, and only files whose pages are at hand. Each
/// of these two bounds is there if it was asked for; the default maps everything.
#[derive(Clone, Debug, Default)]
pub struct Mapper {
    quota: Option<Arc<Quota>>,
    only_at_hand: bool,
}

impl Mapper {
    /// Maps within this share.
    pub fn within(quota: Arc<Quota>) -> Self {
        Self { quota: Some(quota), ..Self::default() }
    }

    /// The same, and refuses files whose pages a worker could wait for without end: those of FUSE, of network file systems, and of whatever
    /// else is not known to have them at hand.
    #[must_use]
    pub fn only_at_hand(self) -> Self {
        Self { only_at_hand: true, ..self }
    }

    /// Checks whether the file is one to map.
    pub(crate) fn admit(&self, file: impl AsFd) -> Result<(), Failure> {
        if self.only_at_hand {
            backing::check(file).map_err(Failure::Os)?.map_err(|slow| Failure::Refused(slow.into()))?;
        }
        Ok(())
    }

    /// Takes so many bytes for one mapping, if they are counted.
    pub(crate) fn charge(&self, bytes: u64) -> Result<Option<Charge>, Failure> {
        let charge = self.quota.as_ref().map(|quota| quota.charge(bytes)).transpose();
        charge.map_err(|exhausted| Failure::Refused(exhausted.into()))
    }
}
