//! Disks through libraries. This file lists the libraries of a build.
//!
//! To add one, implement [`Library`] in a module of its own. Add it to [`AnyLibrary`] and to each `match`
//! below.

use crate::buffers::IoBuffers;
use crate::library::Library;
use crate::offload::{Offload, OffloadOp, OffloadState};
use crate::{DiskSpec, Error, IoContext, Options, Request, Step};
use std::sync::Arc;

use crate::nbd::Nbd;
#[cfg(feature = "rbd")]
use crate::rbd::Rbd;

/// A disk in another format than a raw image, or on another machine.
#[derive(Debug)]
pub struct LibraryDisk {
    library: AnyLibrary,
    offload: Arc<Offload>,
}

/// The library of a disk.
#[derive(Debug)]
enum AnyLibrary {
    Nbd(Nbd),
    #[cfg(feature = "rbd")]
    Rbd(Box<Rbd>),
}

impl AnyLibrary {
    /// Returns the library, for the control path.
    fn get(&self) -> &dyn Library {
        match self {
            Self::Nbd(nbd) => nbd,
            #[cfg(feature = "rbd")]
            Self::Rbd(rbd) => &**rbd,
        }
    }

    /// Submits an operation. This is the data path, so there is no dynamic dispatch.
    fn submit(&self, op: OffloadOp) {
        match self {
            Self::Nbd(nbd) => nbd.submit(op),
            #[cfg(feature = "rbd")]
            Self::Rbd(rbd) => rbd.submit(op),
        }
    }
}

impl LibraryDisk {
    /// Opens a disk of one of the kinds that need a library.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(spec: &DiskSpec, options: &Options) -> Result<Self, Error> {
        match spec {
            DiskSpec::Nbd(uri) => {
                let (nbd, offload) = Nbd::open(uri, options)?;
                Ok(Self { library: AnyLibrary::Nbd(nbd), offload })
            }
            #[cfg(feature = "rbd")]
            DiskSpec::Rbd(name) => {
                let (rbd, offload) = Rbd::open(name, options)?;
                Ok(Self { library: AnyLibrary::Rbd(Box::new(rbd)), offload })
            }
            other => Err(Error::NotBuilt(other.missing_feature().unwrap_or("for this disk"))),
        }
    }

    /// Returns the library, for the control path.
    pub(crate) fn library(&self) -> &dyn Library {
        self.library.get()
    }

    /// Returns the common part of all libraries' disks.
    #[inline]
    pub(crate) fn offload(&self) -> &Offload {
        &self.offload
    }

    /// Starts a request on these buffers.
    pub(crate) fn start(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
        request: Request,
    ) -> Step {
        self.offload.start(context, buffers, state, request, |op| self.library.submit(op))
    }

    /// Continues a request, if its operation has been answered.
    pub(crate) fn retry(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut OffloadState,
    ) -> Step {
        self.offload.drive(context, buffers, state, |op| self.library.submit(op))
    }
}
