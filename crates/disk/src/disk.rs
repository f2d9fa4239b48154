//! One disk of several kinds. Puts the kinds together: what they share stands below them, and none names another.

use crate::buffers::IoBuffers;
use crate::control::DiskControl;
use crate::fault::{Admission, FaultInjector, Target};
use crate::io::{FaultyState, IoState};
use crate::lock::LockError;
use crate::{
    DiskSpec, Error, FaultRules, FileDisk, Io, IoError, Lane, LibraryDisk, Limits, LostWritesSeen,
    MemoryDisk, NullDisk, Options, Request, Resized, Step,
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

/// A disk with injected faults.
#[derive(Debug)]
pub struct FaultDisk {
    faults: FaultInjector,
    under: Disk,
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

    /// Returns what answers the control path.
    fn control(&self) -> &dyn DiskControl {
        match self {
            Self::File(file) => file,
            Self::Null(null) => null,
            Self::Memory(memory) => memory,
            Self::Library(library) => library.library(),
            Self::Fault(fault) => fault.under.control(),
        }
    }

    /// Returns the lost writes that a queue need not be told of when it starts, for the first time or again. The result goes into
    /// each [`Lane`] of that queue. No other queue that runs has the same number.
    pub fn lost_writes_seen(&self, queue: u16) -> LostWritesSeen {
        match self {
            Self::Library(library) => library.offload().lost_writes_seen(queue),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => LostWritesSeen::default(),
            Self::Fault(fault) => fault.under.lost_writes_seen(queue),
        }
    }

    /// Begins with a driver that has written nothing yet. Call it while no queue runs. The queues that start later are not told of lost
    /// writes that a queue of an earlier driver was told of.
    pub fn new_driver(&self) {
        match self {
            Self::Library(library) => library.offload().new_driver(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) => {}
            Self::Fault(fault) => fault.under.new_driver(),
        }
    }

    /// What it can do.
    pub fn limits(&self) -> &Limits {
        match self {
            Self::File(file) => file.limits(),
            Self::Null(null) => null.limits(),
            Self::Memory(memory) => memory.limits(),
            Self::Library(library) => library.offload().limits(),
            Self::Fault(fault) => fault.faults.limits(),
        }
    }

    /// Returns the disk's length in bytes: a multiple of 512, never zero. It can only grow.
    #[inline]
    pub fn size(&self) -> u64 {
        match self {
            Self::File(file) => file.size(),
            Self::Null(null) => null.size(),
            Self::Memory(memory) => memory.size(),
            Self::Library(library) => library.offload().size(),
            Self::Fault(fault) => fault.under.size(),
        }
    }

    /// Looks whether what lies behind it has become longer, and becomes as long.
    ///
    /// # Errors
    /// The file cannot be asked.
    pub fn look_at_size(&self) -> io::Result<Resized> {
        self.control().look_at_size()
    }

    /// Signalled when it is worth looking at its size; `None`: it does not tell.
    pub fn resized(&self) -> Option<&Waker> {
        self.control().resized()
    }

    /// The file behind it, for locking it.
    pub fn file(&self) -> Option<&File> {
        self.control().file()
    }

    /// The files of images under the one that is behind it, for locking them against writers. They can be others each time that the disk
    /// has been taken over.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn files_under(&self) -> io::Result<Vec<File>> {
        self.control().files_under()
    }

    /// Whether somebody else uses a disk that has a lock of its own, beside those of files: a cluster keeps it. Waits a moment for
    /// others to let go.
    ///
    /// # Errors
    /// They do not, or nobody knows.
    pub fn check_own_lock(&self) -> Result<(), LockError> {
        self.control().check_own_lock()
    }

    /// Takes the lock that the disk has of its own, if it has one. As [`Disk::check_own_lock`], but one who does not answer is waited
    /// for until it is certain that he cannot write any more, which takes up to a minute.
    ///
    /// # Errors
    /// Another has it, or it cannot be had. Nothing is held then.
    pub fn acquire_own_lock(&self) -> Result<(), LockError> {
        self.control().acquire_own_lock()
    }

    /// Gives the lock back that the disk has of its own. Waits for that within bounds.
    pub fn release_own_lock(&self) {
        self.control().release_own_lock();
    }

    /// Makes what was written visible to another host that opens the same file next, where the host's cache may hold it
    /// (`Cache::Writeback`). Waits for it.
    ///
    /// # Errors
    /// Some of it could not be written. The guest's flushes fail as well from then on.
    pub fn hand_over(&self) -> io::Result<()> {
        self.control().hand_over()
    }

    /// The counterpart of [`Disk::hand_over`]: what the host's cache holds of the file from before is read anew.
    ///
    /// # Errors
    /// What is there now is no image that can be used.
    pub fn take_over(&self) -> io::Result<()> {
        self.control().take_over()
    }

    /// Somebody waits for the requests in flight to end: those that may take for ever, because they are with somebody who does not
    /// answer, end within a bounded time, in failure if need be. What is posted later is not meant: whoever goes on with
    /// requests says it again.
    pub fn hurry(&self) {
        self.control().hurry();
    }

    /// Something that tells this disk from others on the host, of at most 20 printable ASCII characters: what
    /// GET_ID answers when the operator has chosen nothing.
    pub fn identity(&self) -> &str {
        self.control().identity()
    }

    /// Makes the disk known to a worker's engine. What it returns goes into each [`Lane`] with that engine.
    ///
    /// # Errors
    /// The engine cannot take the file.
    pub fn attach(&self, engine: &mut Engine) -> Result<Option<FileId>, Error> {
        match self {
            Self::File(file) => Ok(Some(file.attach(engine)?)),
            Self::Null(_) | Self::Memory(_) | Self::Library(_) => Ok(None),
            Self::Fault(fault) => fault.under.attach(engine),
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
        self.start_with(lane, &mut io.buffers, &mut io.state, request)
    }

    #[inline]
    fn start_with(
        &self,
        lane: &mut Lane<'_>,
        buffers: &mut IoBuffers,
        state: &mut IoState,
        request: Request,
    ) -> Step {
        match self {
            Self::File(file) => file.start(lane, buffers, state.file(), request),
            Self::Null(null) => null.start(buffers, request),
            Self::Memory(memory) => memory.start(lane, buffers, state.memory(), request),
            Self::Library(library) => library.start(lane, buffers, state.offload(), request),
            Self::Fault(fault) => fault.start(lane, buffers, state.faulty(), request),
        }
    }

    /// Goes on with a request, an operation of which has completed.
    #[inline]
    pub fn resume(&self, lane: &mut Lane<'_>, io: &mut Io, completion: Completion) -> Step {
        match self {
            Self::File(file) => file.resume(lane, &mut io.buffers, io.state.file(), completion),
            // They never have an operation in an engine.
            Self::Null(_) | Self::Memory(_) | Self::Library(_) => Step::Pending,
            Self::Fault(fault) => fault.resume(lane, &mut io.buffers, io.state.faulty(), completion),
        }
    }

    /// Returns how many bytes the caller's thread copies in one step at most ([`Step::More`]). `None`: it copies none, or all.
    pub fn step_bytes(&self) -> Option<u64> {
        match self {
            Self::Memory(_) => Some(crate::memory::STEP_BYTES),
            Self::Fault(fault) => fault.under.step_bytes(),
            Self::File(_) | Self::Null(_) | Self::Library(_) => None,
        }
    }

    /// Goes on with a request that got [`Step::Busy`], which may be too early and no harm, or [`Step::More`].
    #[inline]
    pub fn retry(&self, lane: &mut Lane<'_>, io: &mut Io) -> Step {
        self.retry_with(lane, &mut io.buffers, &mut io.state)
    }

    #[inline]
    fn retry_with(&self, lane: &mut Lane<'_>, buffers: &mut IoBuffers, state: &mut IoState) -> Step {
        match self {
            Self::File(file) => file.drive(lane, buffers, state.file()),
            // It is never busy.
            Self::Null(_) => Step::Busy,
            Self::Memory(memory) => memory.step(lane, buffers, state.memory()),
            Self::Library(library) => library.retry(lane, buffers, state.offload()),
            Self::Fault(fault) => fault.retry(lane, buffers, state.faulty()),
        }
    }
}

impl FaultDisk {
    /// Puts faults before a disk.
    ///
    /// # Errors
    /// The disk can have no such faults, or has some already, or there is no thread for the delays.
    pub fn new(rules: &FaultRules, under: Disk) -> Result<Self, Error> {
        let target = match &under {
            Disk::File(file) => Target::Operations { unit: file.unit() },
            Disk::Null(_) => Target::Requests { scheme: "null:" },
            Disk::Memory(_) => Target::Requests { scheme: "mem:" },
            Disk::Library(library) => Target::Requests { scheme: library.library().scheme() },
            // A request has one place for what is decided on it.
            Disk::Fault(_) => return Err(Error::FaultsTwice),
        };
        Ok(Self { faults: FaultInjector::new(rules, under.limits(), target)?, under })
    }

    fn start(
        &self,
        lane: &mut Lane<'_>,
        buffers: &mut IoBuffers,
        state: &mut FaultyState,
        request: Request,
    ) -> Step {
        let FaultyState { faults, under } = state;
        if let Disk::File(file) = &self.under {
            faults.begin(request);
            return file.start(&mut self.faults.outlet(lane, faults), buffers, under.file(), request);
        }
        self.faults.hold(faults, request);
        self.retry(lane, buffers, state)
    }

    fn resume(
        &self,
        lane: &mut Lane<'_>,
        buffers: &mut IoBuffers,
        state: &mut FaultyState,
        completion: Completion,
    ) -> Step {
        let FaultyState { faults, under } = state;
        // No other disk has operations.
        let Disk::File(file) = &self.under else { return Step::Pending };
        let completion = self.faults.completed(faults, completion, lane.marks);
        file.resume(&mut self.faults.outlet(lane, faults), buffers, under.file(), completion)
    }

    fn retry(&self, lane: &mut Lane<'_>, buffers: &mut IoBuffers, state: &mut FaultyState) -> Step {
        let FaultyState { faults, under } = state;
        if let Disk::File(file) = &self.under {
            return file.drive(&mut self.faults.outlet(lane, faults), buffers, under.file());
        }
        match self.faults.admit(faults, buffers, lane.waker) {
            None => self.under.retry_with(lane, buffers, under),
            Some(Admission::Start(request)) => self.under.start_with(lane, buffers, under, request),
            Some(Admission::Hold) => Step::Busy,
            Some(Admission::Fail(errno)) => {
                buffers.drop_extents();
                Step::Done(Err(IoError::Os(errno)))
            }
        }
    }
}
