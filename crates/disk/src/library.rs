//! Disks through libraries, one face for all of them.

use crate::lock::LockError;
use crate::lost_writes::LostWritesSeen;
use crate::offload::{Offload, OffloadOp};
use crate::{DiskSpec, Error, Io, Lane, Limits, Options, Request, Resized, Step};
use kickless_io::Waker;
use std::fs::File;
use std::io;

/// A disk in another format than a raw image, or on another machine.
#[derive(Debug)]
pub struct LibraryDisk {
    library: Library,
    offload: Offload,
}

/// What does the work. There may be none, where all features are off.
#[derive(Debug)]
enum Library {
    #[cfg(feature = "qcow2")]
    Qcow2(crate::qcow2::Qcow2),
    #[cfg(feature = "nbd")]
    Nbd(crate::nbd::Nbd),
    #[cfg(feature = "rbd")]
    Rbd(crate::rbd::Rbd),
}

impl LibraryDisk {
    /// Opens a disk of one of the kinds that need a library.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(crate) fn open(spec: &DiskSpec, options: &Options) -> Result<Self, Error> {
        let (library, offload) = match spec {
            #[cfg(feature = "qcow2")]
            DiskSpec::Qcow2(path) => {
                let (qcow2, offload) = crate::qcow2::Qcow2::open(path, options)?;
                (Library::Qcow2(qcow2), offload)
            }
            #[cfg(feature = "nbd")]
            DiskSpec::Nbd(uri) => {
                let (nbd, offload) = crate::nbd::Nbd::open(uri, options)?;
                (Library::Nbd(nbd), offload)
            }
            #[cfg(feature = "rbd")]
            DiskSpec::Rbd(name) => {
                let (rbd, offload) = crate::rbd::Rbd::open(name, options)?;
                (Library::Rbd(rbd), offload)
            }
            spec => return Err(Error::NotBuilt(spec.missing_feature().unwrap_or("of this kind"))),
        };
        Ok(Self { library, offload })
    }

    pub(crate) fn lost_writes_seen(&self, queue: u16) -> LostWritesSeen {
        self.offload.lost_writes_seen(queue)
    }

    pub(crate) fn new_driver(&self) {
        self.offload.new_driver();
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.offload.limits()
    }

    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.offload.size()
    }

    /// What it is called before its colon.
    pub(crate) fn name(&self) -> &'static str {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => "qcow2:",
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => "nbd:",
            #[cfg(feature = "rbd")]
            Library::Rbd(_) => "rbd:",
        }
    }

    pub(crate) fn identity(&self) -> &str {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(ref qcow2) => qcow2.identity(),
            #[cfg(feature = "nbd")]
            Library::Nbd(ref nbd) => nbd.identity(),
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.identity(),
        }
    }

    /// The file that is to be locked.
    pub(crate) fn file(&self) -> Option<&File> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(ref qcow2) => Some(qcow2.file()),
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => None,
            #[cfg(feature = "rbd")]
            Library::Rbd(_) => None,
        }
    }

    /// Files that are only read, but that others are not to write to.
    pub(crate) fn under(&self) -> io::Result<Vec<File>> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(ref qcow2) => qcow2.under(),
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => Ok(Vec::new()),
            #[cfg(feature = "rbd")]
            Library::Rbd(_) => Ok(Vec::new()),
        }
    }

    pub(crate) fn hand_over(&self) -> io::Result<()> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(ref qcow2) => qcow2.hand_over(),
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => Ok(()),
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.hand_over(),
        }
    }

    pub(crate) fn take_over(&self) -> io::Result<()> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(ref qcow2) => qcow2.take_over(),
            #[cfg(feature = "nbd")]
            Library::Nbd(ref nbd) => {
                nbd.take_over();
                Ok(())
            }
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.take_over(),
        }
    }

    /// Looks at what has been heard of its size.
    pub(crate) fn look_at_size(&self) -> Resized {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => Resized::Same,
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => Resized::Same,
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => {
                let bytes = rbd.bytes();
                let to = bytes - bytes % crate::SECTOR;
                let from = self.offload.grow(to);
                match to {
                    _ if to > from => Resized::Grown { from, to },
                    _ if to < from => Resized::Shrunk { from, to: bytes },
                    _ => Resized::Same,
                }
            }
        }
    }

    /// Signalled when there is something to look at.
    pub(crate) fn resized(&self) -> Option<&Waker> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => None,
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => None,
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => Some(rbd.resized()),
        }
    }

    pub(crate) fn check_lock(&self) -> Result<(), LockError> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => Ok(()),
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => Ok(()),
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.check_lock(),
        }
    }

    pub(crate) fn acquire_lock(&self) -> Result<(), LockError> {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => Ok(()),
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => Ok(()),
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.acquire(),
        }
    }

    pub(crate) fn release_lock(&self) {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => {}
            #[cfg(feature = "nbd")]
            Library::Nbd(_) => {}
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.release(),
        }
    }

    pub(crate) fn hurry(&self) {
        match self.library {
            // Its file is on this machine.
            #[cfg(feature = "qcow2")]
            Library::Qcow2(_) => {}
            #[cfg(feature = "nbd")]
            Library::Nbd(ref nbd) => nbd.hurry(),
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.hurry(),
        }
    }

    fn submit(&self, op: OffloadOp) {
        match self.library {
            #[cfg(feature = "qcow2")]
            Library::Qcow2(ref qcow2) => qcow2.submit(op),
            #[cfg(feature = "nbd")]
            Library::Nbd(ref nbd) => nbd.submit(op),
            #[cfg(feature = "rbd")]
            Library::Rbd(ref rbd) => rbd.submit(op),
        }
    }

    pub(crate) fn start(&self, lane: &mut Lane<'_>, io: &mut Io, request: Request) -> Step {
        self.offload.start(lane, io, request, |op| self.submit(op))
    }

    /// Goes on with a request, if what was posted for it has been answered.
    pub(crate) fn retry(&self, lane: &mut Lane<'_>, io: &mut Io) -> Step {
        self.offload.drive(lane, io, |op| self.submit(op))
    }
}
