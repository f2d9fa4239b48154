//! The disk of a device that another process gives.

use kickless_device::Handed;
use kickless_disk::{Disk, DiskSpec};
use kickless_handover::v1;

/// A disk that another process gives and still uses, and the configuration space that its guest has read.
#[derive(Debug)]
pub struct HandedDisk {
    /// The disk.
    pub disk: Disk,
    pub(crate) config_space: Vec<u8>,
}

/// The reason for which a disk cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum HandedError {
    /// The state is not one of a disk.
    #[error("the state of the disk cannot be used: {0}")]
    State(#[from] kickless_handover::Error),
    /// The disk cannot be used.
    #[error(transparent)]
    Disk(#[from] kickless_disk::Error),
    /// The guest knows the disk with other properties.
    #[error(
        "the disk has another size or other limits than its guest knows (byte {at} of its configuration)"
    )]
    Differs {
        /// The first byte of the configuration space that differs.
        at: usize,
    },
}

impl HandedDisk {
    /// Makes the disk that another process gives.
    ///
    /// # Errors
    /// The state is that of another disk, or the disk cannot be used.
    pub fn new(
        spec: &DiskSpec,
        options: &kickless_disk::Options,
        handed: Handed<'_>,
    ) -> Result<Self, HandedError> {
        let Handed { state, given } = handed;
        let v1::Disk { config_space, medium } = state.read()?;
        let config_space = given.bytes(config_space)?.to_vec();
        Ok(Self { disk: Disk::of_handed(spec, options, medium, given)?, config_space })
    }
}
