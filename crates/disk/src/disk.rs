//! One disk of several kinds.

use crate::lock::LockError;
use crate::{
    DiskSpec, Error, FaultDisk, FileDisk, Io, Lane, LibraryDisk, Limits, LostWritesSeen, MemoryDisk,
    NullDisk, Options, Request, Resized, Step,
};
use kickless_io::{Completion, Engine, FileId, Waker};
use std::fs::File;
use std::io;

/// What lies behind a virtio-blk device. Shared by all workers that serve it.
#[derive(Debug)]
pub enum Disk {
    /// A raw image or a block device.
    File(FileDisk),
    /// Nothing.
    Null(NullDisk),
    /// RAM.
    Memory(MemoryDisk),
    /// What a library makes of a file or has elsewhere.
    Library(Box<LibraryDisk>),
    /// One of the others, with faults. For tests.
    Fault(Box<FaultDisk>),
}

impl Disk {
    /// Opens a disk.
    ///
    /// An image whose length is no multiple of 512 loses the part of a sector at its end, with a warning in
    /// the log. Lines that the disk logs later, from whatever thread, belong to the span that is current here.
    ///
    /// # Errors
    /// One sentence for the operator: missing, not allowed, no disk, empty, or not fit for direct I/O.
    pub fn open(spec: &DiskSpec, options: &Options) -> Result<Self, Error> {
        Ok(match spec {
            DiskSpec::File(path) => Self::File(FileDisk::open(path, options)?),
            DiskSpec::Null(size) => Self::Null(NullDisk::new(*size, options.read_only)?),
            DiskSpec::Memory(size) => Self::Memory(MemoryDisk::new(*size, options.read_only)?),
            DiskSpec::Qcow2(_) | DiskSpec::Nbd(_) | DiskSpec::Rbd(_) => {
                Self::Library(Box::new(LibraryDisk::open(spec, options)?))
            }
            DiskSpec::Fault(rules, under) => {
                Self::Fault(Box::new(FaultDisk::new(rules, Self::open(under, options)?)?))
            }
        })
    }

    /// Returns the lost writes that a queue need not be told of when it starts, for the first time or again. The result goes into
    /// each [`Lane`] of that queue. No other queue that runs has the same number.
    pub fn lost_writes_seen(&self, queue: u16) -> LostWritesSeen {
        match self {
            Self::Library(library) => library.lost_writes_seen(queue),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => LostWritesSeen::default(),
            Self::Fault(fault) => fault.under().lost_writes_seen(queue),
        }
    }

    /// Begins with a driver that has written nothing yet. Call it while no queue runs. The queues that start later are not told of lost
    /// writes that a queue of an earlier driver was told of.
    pub fn new_driver(&self) {
        match self {
            Self::Library(library) => library.new_driver(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => {}
            Self::Fault(fault) => fault.under().new_driver(),
        }
    }

    /// What it can do.
    pub fn limits(&self) -> &Limits {
        match self {
            Self::File(file) => file.limits(),
            Self::Null(null) => null.limits(),
            Self::Memory(memory) => memory.limits(),
            Self::Library(library) => library.limits(),
            Self::Fault(fault) => fault.limits(),
        }
    }

    /// Bytes; a multiple of 512, never zero. It can only grow.
    #[inline]
    pub fn size(&self) -> u64 {
        match self {
            Self::File(file) => file.size(),
            Self::Null(null) => null.size(),
            Self::Memory(memory) => memory.size(),
            Self::Library(library) => library.size(),
            Self::Fault(fault) => fault.under().size(),
        }
    }

    /// Looks whether what lies behind it has become longer, and becomes as long.
    ///
    /// # Errors
    /// The file cannot be asked.
    pub fn look_at_size(&self) -> io::Result<Resized> {
        match self {
            Self::File(file) => file.look_at_size(),
            Self::Null(_) | Self::Memory(_) => Ok(Resized::Same),
            Self::Library(library) => Ok(library.look_at_size()),
            Self::Fault(fault) => fault.under().look_at_size(),
        }
    }

    /// Signalled when it is worth looking at its size; `None`: it does not tell.
    pub fn resized(&self) -> Option<&Waker> {
        match self {
            Self::Library(library) => library.resized(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => None,
            Self::Fault(fault) => fault.under().resized(),
        }
    }

    /// The file behind it, for locking it.
    pub fn file(&self) -> Option<&File> {
        match self {
            Self::File(file) => Some(file.file()),
            Self::Library(library) => library.file(),
            Self::Null(_) | Self::Memory(_) => None,
            Self::Fault(fault) => fault.under().file(),
        }
    }

    /// The files of images under the one that is behind it, for locking them against writers. They can be others each time that the disk
    /// has been taken over.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn files_under(&self) -> io::Result<Vec<File>> {
        match self {
            Self::Library(library) => library.under(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => Ok(Vec::new()),
            Self::Fault(fault) => fault.under().files_under(),
        }
    }

    /// Whether somebody else uses a disk that has a lock of its own, beside those of files: a cluster keeps it. Waits a moment for
    /// others to let go.
    ///
    /// # Errors
    /// They do not, or nobody knows.
    pub fn check_own_lock(&self) -> Result<(), LockError> {
        match self {
            Self::Library(library) => library.check_lock(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => Ok(()),
            Self::Fault(fault) => fault.under().check_own_lock(),
        }
    }

    /// Takes the lock that the disk has of its own, if it has one. As [`Disk::check_own_lock`], but one who does not answer is waited
    /// for until it is certain that he cannot write any more, which takes up to a minute.
    ///
    /// # Errors
    /// Another has it, or it cannot be had. Nothing is held then.
    pub fn acquire_own_lock(&self) -> Result<(), LockError> {
        match self {
            Self::Library(library) => library.acquire_lock(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => Ok(()),
            Self::Fault(fault) => fault.under().acquire_own_lock(),
        }
    }

    /// Gives the lock back that the disk has of its own. Waits for that within bounds.
    pub fn release_own_lock(&self) {
        match self {
            Self::Library(library) => library.release_lock(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => {}
            Self::Fault(fault) => fault.under().release_own_lock(),
        }
    }

    /// Makes what was written visible to another host that opens the same file next, where the host's cache may hold it
    /// (`Cache::Writeback`). Waits for it.
    ///
    /// # Errors
    /// Some of it could not be written. The guest's flushes fail as well from then on.
    pub fn hand_over(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.hand_over(),
            Self::Library(library) => library.hand_over(),
            Self::Null(_) | Self::Memory(_) => Ok(()),
            Self::Fault(fault) => fault.under().hand_over(),
        }
    }

    /// The counterpart of [`Disk::hand_over`]: what the host's cache holds of the file from before is read anew.
    ///
    /// # Errors
    /// What is there now is no image that can be used.
    pub fn take_over(&self) -> io::Result<()> {
        match self {
            Self::File(file) => {
                file.take_over();
                Ok(())
            }
            Self::Library(library) => library.take_over(),
            Self::Null(_) | Self::Memory(_) => Ok(()),
            Self::Fault(fault) => fault.under().take_over(),
        }
    }

    /// Somebody waits for the requests in flight to end: those that may take for ever, because they are with somebody who does not
    /// answer, end within a bounded time, in failure if need be. What is posted later is not meant: whoever goes on with
    /// requests says it again.
    pub fn hurry(&self) {
        match self {
            Self::Library(library) => library.hurry(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => {}
            Self::Fault(fault) => fault.under().hurry(),
        }
    }

    /// Something that tells this disk from others on the host, of at most 20 printable ASCII characters: what
    /// GET_ID answers when the operator has chosen nothing.
    pub fn identity(&self) -> &str {
        match self {
            Self::File(file) => file.identity(),
            Self::Null(_) => "kickless-null",
            Self::Memory(_) => "kickless-mem",
            Self::Library(library) => library.identity(),
            Self::Fault(fault) => fault.under().identity(),
        }
    }

    /// Makes the disk known to a worker's engine. What it returns goes into each [`Lane`] with that engine.
    ///
    /// # Errors
    /// The engine cannot take the file.
    pub fn attach(&self, engine: &mut Engine) -> Result<Option<FileId>, Error> {
        match self {
            Self::File(file) => Ok(Some(file.attach(engine)?)),
            Self::Null(_) | Self::Memory(_) | Self::Library(_) => Ok(None),
            Self::Fault(fault) => fault.under().attach(engine),
        }
    }

    /// The worker's engine needs the disk no more. What is in flight goes on.
    pub fn detach(&self, engine: &mut Engine, file: Option<FileId>) {
        if let Some(file) = file {
            engine.unregister(file);
        }
    }

    /// Has what a request needs fetched into the processor's cache, which takes as long as another request does. `false`: there
    /// is nothing to fetch, and no use in starting another one first.
    #[inline]
    pub fn prepare(&self, request: Request) -> bool {
        let Self::Memory(memory) = self else { return false };
        memory.prepare(request);
        true
    }

    /// Starts a request on the buffers that are in `io`.
    #[inline]
    pub fn start(&self, lane: &mut Lane<'_>, io: &mut Io, request: Request) -> Step {
        debug_assert!(!io.is_active(), "a request was started over another one");
        match self {
            Self::File(file) => file.start(lane, io, request),
            Self::Null(null) => null.start(io, request),
            Self::Memory(memory) => memory.start(lane, io, request),
            Self::Library(library) => library.start(lane, io, request),
            Self::Fault(fault) => fault.start(lane, io, request),
        }
    }

    /// Goes on with a request, an operation of which has completed.
    #[inline]
    pub fn resume(&self, lane: &mut Lane<'_>, io: &mut Io, completion: Completion) -> Step {
        match self {
            Self::File(file) => file.resume(lane, io, completion),
            // They never have an operation in an engine.
            Self::Null(_) | Self::Memory(_) | Self::Library(_) => Step::Pending,
            Self::Fault(fault) => fault.resume(lane, io, completion),
        }
    }

    /// Returns how many bytes the caller's thread copies in one step at most ([`Step::More`]). `None`: it copies none, or all.
    pub fn step_bytes(&self) -> Option<u64> {
        match self {
            Self::Memory(_) => Some(crate::memory::STEP_BYTES),
            Self::Fault(fault) => fault.under().step_bytes(),
            Self::File(_) | Self::Null(_) | Self::Library(_) => None,
        }
    }

    /// Goes on with a request that got [`Step::Busy`], which may be too early and no harm, or [`Step::More`].
    #[inline]
    pub fn retry(&self, lane: &mut Lane<'_>, io: &mut Io) -> Step {
        match self {
            Self::File(file) => file.drive(lane, io),
            // It is never busy.
            Self::Null(_) => Step::Busy,
            Self::Memory(memory) => memory.step(lane, io),
            Self::Library(library) => library.retry(lane, io),
            Self::Fault(fault) => fault.retry(lane, io),
        }
    }
}
