//! Disks through libraries. This file lists the libraries of a build.
//!
//! To add one, implement [`Library`] in a module of its own, and add it to [`LibraryDisk::open`].

use crate::buffers::IoBuffers;
use crate::library::Library;
use crate::nbd::Nbd;
use crate::offload::{Offload, OffloadState};
#[cfg(feature = "rbd")]
use crate::rbd::Rbd;
use crate::{DiskSpec, Error, IoContext, NbdUri, Options, Request, Step};
use kickless_handover::{Given, v1};
use std::sync::Arc;

/// A disk in another format than a raw image, or on another machine.
#[derive(Debug)]
pub struct LibraryDisk {
    /// Each operation makes one dynamic call here, and then a round trip to another machine.
    pub(crate) library: Box<dyn Library>,
    pub(crate) offload: Arc<Offload>,
}

impl LibraryDisk {
    /// Opens a disk of one of the kinds that need a library.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(spec: &DiskSpec, options: &Options) -> Result<Self, Error> {
        let (library, offload): (Box<dyn Library>, _) = match spec {
            DiskSpec::Nbd(uri) => {
                let (nbd, offload) = Nbd::open(uri, options)?;
                (Box::new(nbd), offload)
            }
            #[cfg(feature = "rbd")]
            DiskSpec::Rbd(name) => {
                let (rbd, offload) = Rbd::open(name, options)?;
                (Box::new(rbd), offload)
            }
            other => return Err(Error::NotBuilt(other.missing_feature().unwrap_or("for this disk"))),
        };
        Ok(Self { library, offload })
    }

    /// Makes a disk with the connection of another process.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn of_handed(
        uri: &NbdUri,
        options: &Options,
        nbd: v1::Nbd,
        given: &mut Given,
    ) -> Result<Self, Error> {
        let (nbd, offload) = Nbd::of_handed(uri, options, nbd, given)?;
        Ok(Self { library: Box::new(nbd), offload })
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
