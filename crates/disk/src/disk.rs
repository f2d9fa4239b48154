//! The disk, of any kind. This file joins the kinds: their common parts are below them, and no kind names
//! another.

mod handed;

use crate::buffers::{IoBuffers, TransferBuffers};
use crate::fault::{Admission, FaultInjector, Target};
use crate::image_file::Source;
use crate::io::{FaultyState, IoState};
use crate::qcow2::disk::Qcow2Disk;
use crate::{
    Attached, DiskControl, DiskSpec, Error, FaultRules, FileDisk, Io, IoContext, IoError, LibraryDisk,
    Limits, LostWritesSeen, MemoryDisk, NullDisk, Options, Request, Step,
};
use kickless_io::{Completion, Engine};
use kickless_opener::{Descriptors, descriptor_name};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::Path;

/// The storage behind a virtio-blk device. All workers that serve it share it.
///
/// It has the methods of [`DiskControl`] too, which do not depend on the kind.
#[derive(Debug)]
pub enum Disk {
    /// A raw image or a block device.
    File(FileDisk),
    /// A disk without contents.
    Null(NullDisk),
    /// RAM.
    Memory(MemoryDisk),
    /// Storage behind a library.
    Library(Box<LibraryDisk>),
    /// An image in QEMU's format.
    Qcow2(Box<Qcow2Disk>),
    /// One of the others, with faults. For tests.
    Fault(Box<FaultDisk>),
}

/// A disk with injected faults.
#[derive(Debug)]
pub struct FaultDisk {
    rules: FaultRules,
    faults: FaultInjector,
    under: Disk,
}

impl Disk {
    /// Opens a disk.
    ///
    /// If the length of an image is not a multiple of 512, the part of a sector at its end is lost, with a
    /// warning in the log. Later log lines of the disk belong to the span that is current here, on any
    /// thread.
    ///
    /// # Errors
    /// One sentence for the operator: the disk is missing, not allowed, not a disk, empty, or unusable for
    /// direct I/O.
    pub fn open(spec: &DiskSpec, options: &Options) -> Result<Self, Error> {
        Self::open_given(spec, options, &Descriptors::default())
    }

    /// Opens a disk as [`Disk::open`] does. The path `fd:NAME` of a raw or a `qcow2:` image stands for one of
    /// these descriptors, which is duplicated.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn open_given(spec: &DiskSpec, options: &Options, given: &Descriptors) -> Result<Self, Error> {
        Ok(match spec {
            DiskSpec::File(path) => {
                Self::File(with_source(path, given, |source| FileDisk::open_source(source, options))?)
            }
            DiskSpec::Null(size) => Self::Null(NullDisk::new(*size, options.read_only)?),
            DiskSpec::Memory(size) => Self::Memory(MemoryDisk::new(*size, options.read_only)?),
            DiskSpec::Qcow2(path) => {
                Self::Qcow2(Box::new(with_source(path, given, |source| Qcow2Disk::open(source, options))?))
            }
            DiskSpec::Nbd(_) | DiskSpec::Rbd(_) => Self::Library(Box::new(LibraryDisk::open(spec, options)?)),
            DiskSpec::Fault(rules, under) => {
                Self::Fault(Box::new(FaultDisk::new(rules, Self::open_given(under, options, given)?)?))
            }
        })
    }

    /// Returns the lost writes that a starting queue need not report.
    ///
    /// The result goes into each [`IoContext`] of that queue. No two running queues have the same number.
    pub fn lost_writes_seen(&self, queue: u16) -> LostWritesSeen {
        match self {
            Self::Library(library) => library.offload.lost_writes_seen(queue),
            Self::File(_) | Self::Null(_) | Self::Memory(_) | Self::Qcow2(_) => LostWritesSeen::default(),
            Self::Fault(fault) => fault.under.lost_writes_seen(queue),
        }
    }

    /// Begins with a fresh driver, which has written nothing yet. Called while no queue runs.
    ///
    /// Queues that start later do not report lost writes that a queue of an earlier driver has reported.
    pub fn new_driver(&self) {
        match self {
            Self::Library(library) => library.offload.new_driver(),
            Self::File(_) | Self::Null(_) | Self::Memory(_) | Self::Qcow2(_) => {}
            Self::Fault(fault) => fault.under.new_driver(),
        }
    }

    /// Returns the limits of the disk.
    pub fn limits(&self) -> &Limits {
        match self {
            Self::File(file) => file.limits(),
            Self::Null(null) => null.limits(),
            Self::Memory(memory) => memory.limits(),
            Self::Library(library) => library.offload.limits(),
            Self::Qcow2(qcow2) => qcow2.limits(),
            Self::Fault(fault) => fault.under.limits(),
        }
    }

    /// Returns the size in bytes: a multiple of 512, never zero. It only grows while a guest uses the disk.
    #[inline]
    pub fn size(&self) -> u64 {
        match self {
            Self::File(file) => file.size(),
            Self::Null(null) => null.size(),
            Self::Memory(memory) => memory.size(),
            Self::Library(library) => library.offload.size(),
            Self::Qcow2(qcow2) => qcow2.size(),
            Self::Fault(fault) => fault.under.size(),
        }
    }

    /// Opens the disk again if the image was made anew in another shape, or if `by_name` and its path names
    /// another file now. `None`: it is still the same. Called while no guest uses the disk.
    ///
    /// # Errors
    /// The other file cannot be used.
    pub(crate) fn replacement(&self, by_name: bool) -> Result<Option<Self>, Error> {
        Ok(match self {
            Self::File(file) if by_name => file.replacement()?.map(Self::File),
            Self::Qcow2(qcow2) => qcow2.replacement(by_name)?.map(|qcow2| Self::Qcow2(Box::new(qcow2))),
            Self::Fault(fault) => match fault.under.replacement(by_name)? {
                Some(under) => Some(Self::Fault(Box::new(FaultDisk::new(&fault.rules, under)?))),
                None => None,
            },
            Self::File(_) | Self::Null(_) | Self::Memory(_) | Self::Library(_) => None,
        })
    }

    /// Registers the disk with a worker's engine. The result goes into each [`IoContext`] with that engine.
    ///
    /// # Errors
    /// The engine cannot use the file; or the disk is a qcow2 image that is closed, because there was no
    /// [`DiskControl::reload`] since it was opened or since [`DiskControl::write_back`].
    pub fn attach(&self, engine: &mut Engine) -> Result<Attached, Error> {
        match self {
            Self::File(file) => Ok(Attached::of_file(file.attach(engine)?)),
            Self::Null(_) | Self::Memory(_) | Self::Library(_) => Ok(Attached::default()),
            Self::Qcow2(qcow2) => qcow2.attach(engine),
            Self::Fault(fault) => fault.under.attach(engine),
        }
    }

    /// Unregisters the disk from a worker's engine. Requests in flight go on.
    pub fn detach(&self, engine: &mut Engine, attached: Attached) {
        attached.unregister(engine);
    }

    /// Starts operations that the tables of images need, such as writes of changed tables. They count in
    /// [`Attached::in_flight`].
    ///
    /// Call it at the end of each poll and after each batch of completions, if [`Attached::is_due`]. The slot
    /// in the context has no meaning.
    pub fn submit_table_ops(&self, context: &mut IoContext<'_>) {
        match self {
            Self::Qcow2(qcow2) => qcow2.submit_table_ops(context, None),
            Self::Fault(fault) => {
                if let Self::Qcow2(qcow2) = &fault.under {
                    qcow2.submit_table_ops(context, Some(&fault.faults));
                }
            }
            _ => {}
        }
    }

    /// Takes the completion of such an operation. Its slot is [`TABLE_OP_SLOTS`](crate::TABLE_OP_SLOTS) or
    /// above.
    pub fn resume_table_op(&self, context: &mut IoContext<'_>, completion: Completion) {
        match self {
            Self::Qcow2(qcow2) => qcow2.resume_table_op(context, None, completion),
            Self::Fault(fault) => {
                if let Self::Qcow2(qcow2) = &fault.under {
                    qcow2.resume_table_op(context, Some(&fault.faults), completion);
                }
            }
            _ => {}
        }
    }

    /// Cancels the requests of a queue that stops by force. `attached` is the result of [`Disk::attach`] for
    /// the queue, and `requests` are all its requests.
    ///
    /// Each request still ends exactly once, with an error unless its last operation was done. An operation
    /// that the engine cannot cancel ([`Engine::cancel`]) goes on, and the request ends after it. A request
    /// that waits ([`Step::Busy`]) ends at its next retry. No request starts another operation, which this
    /// would not cancel. Operations for the tables ([`Attached::in_flight`]) end as well, and those that
    /// were not done go to other queues.
    pub fn cancel<'a>(
        &self,
        engine: &mut Engine,
        attached: &mut Attached,
        requests: impl Iterator<Item = &'a mut Io>,
    ) {
        // Other kinds of disks have no operations in an engine: see `limit_remote_waits`.
        if attached.file().is_some() {
            requests.for_each(|io| io.state.cancel());
            attached.cancel(engine);
        }
    }

    /// Prefetches data of a request into the processor's cache, which takes as long as another request.
    ///
    /// Returns `false` if there is nothing to prefetch, so that it makes no sense to start another request
    /// first.
    #[inline]
    pub fn prepare(&self, request: Request) -> bool {
        let Self::Memory(memory) = self else { return false };
        memory.prepare(request);
        true
    }

    /// Starts a request on the buffers in `io`.
    #[inline]
    pub fn start(&self, context: &mut IoContext<'_>, io: &mut Io, request: Request) -> Step {
        debug_assert!(!io.is_active(), "a request was started over another one");
        self.start_with(context, &mut io.buffers, &mut io.state, request)
    }

    #[inline]
    fn start_with(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut IoState,
        request: Request,
    ) -> Step {
        match self {
            Self::File(file) => file.start(context, buffers, state.file(), request),
            Self::Null(null) => null.start(buffers, request),
            Self::Memory(memory) => memory.start(context, buffers, state.memory(), request),
            Self::Library(library) => library.start(context, buffers, state.offload(), request),
            Self::Qcow2(qcow2) => qcow2.with_images(context, |images, context| {
                qcow2.start(images, context, buffers, state.qcow2(), request)
            }),
            Self::Fault(fault) => fault.start(context, buffers, state.faulty(), request),
        }
    }

    /// Continues a request after the completion of an operation.
    #[inline]
    pub fn resume(&self, context: &mut IoContext<'_>, io: &mut Io, completion: Completion) -> Step {
        match self {
            Self::File(file) => file.resume(context, &mut io.buffers, io.state.file(), completion),
            // These kinds have no operations in an engine.
            Self::Null(_) | Self::Memory(_) | Self::Library(_) => Step::Pending,
            Self::Qcow2(qcow2) => qcow2.with_images(context, |images, context| {
                let images = (images, qcow2.size());
                io.state.qcow2().step(images, context, &mut io.buffers, Some(completion))
            }),
            Self::Fault(fault) => fault.resume(context, &mut io.buffers, io.state.faulty(), completion),
        }
    }

    /// Returns the largest number of bytes that the caller's thread copies in one step ([`Step::More`]).
    /// `None`: it copies nothing, or everything at once.
    pub fn step_bytes(&self) -> Option<u64> {
        match self {
            Self::Memory(_) => Some(crate::memory::STEP_BYTES),
            Self::Qcow2(_) => Some(crate::qcow2::STEP_BYTES),
            Self::Fault(fault) => fault.under.step_bytes(),
            Self::File(_) | Self::Null(_) | Self::Library(_) => None,
        }
    }

    /// Continues a request after [`Step::Busy`] or [`Step::More`]. Calling it too early does no harm.
    #[inline]
    pub fn retry(&self, context: &mut IoContext<'_>, io: &mut Io) -> Step {
        self.retry_with(context, &mut io.buffers, &mut io.state)
    }

    #[inline]
    fn retry_with(&self, context: &mut IoContext<'_>, buffers: &mut IoBuffers, state: &mut IoState) -> Step {
        match self {
            Self::File(file) => file.retry(context, buffers, state.file()),
            // A null disk is never busy.
            Self::Null(_) => Step::Busy,
            Self::Memory(memory) => memory.step(context, buffers, state.memory()),
            Self::Library(library) => library.retry(context, buffers, state.offload()),
            Self::Qcow2(qcow2) => qcow2.with_images(context, |images, context| {
                state.qcow2().step((images, qcow2.size()), context, buffers, None)
            }),
            Self::Fault(fault) => fault.retry(context, buffers, state.faulty()),
        }
    }
}

impl Deref for Disk {
    type Target = dyn DiskControl;

    /// Returns the control path of this kind.
    fn deref(&self) -> &Self::Target {
        match self {
            Self::File(file) => file,
            Self::Null(null) => null,
            Self::Memory(memory) => memory,
            Self::Library(library) => &*library.library,
            Self::Qcow2(qcow2) => &**qcow2,
            Self::Fault(fault) => &*fault.under,
        }
    }
}

/// Opens the image for which `path` stands with `open`.
fn with_source<T>(
    path: &Path,
    given: &Descriptors,
    open: impl FnOnce(Source<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    match descriptor_name(path) {
        Some(name) => open(Source::Descriptor(path, given.duplicate(name)?.as_fd())),
        None => open(Source::Path(path)),
    }
}

impl FaultDisk {
    /// Adds faults to a disk.
    ///
    /// # Errors
    /// The disk cannot have such faults, or has some already, or the thread for delays cannot be started.
    pub fn new(rules: &FaultRules, under: Disk) -> Result<Self, Error> {
        let target = match &under {
            Disk::File(file) => Target::Operations { unit: file.unit() },
            Disk::Qcow2(qcow2) => Target::Operations { unit: qcow2.unit() },
            Disk::Null(_) => Target::Requests { scheme: "null:" },
            Disk::Memory(_) => Target::Requests { scheme: "mem:" },
            Disk::Library(library) => Target::Requests { scheme: library.library.scheme() },
            // A request has room for the faults of one disk only.
            Disk::Fault(_) => return Err(Error::FaultsTwice),
        };
        Ok(Self { rules: rules.clone(), faults: FaultInjector::new(rules, target)?, under })
    }

    fn start(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut FaultyState,
        request: Request,
    ) -> Step {
        let FaultyState { faults, under } = state;
        if let Disk::File(file) = &self.under {
            faults.begin(request);
            return file.start(&mut self.faults.sender(context, faults), buffers, under.file(), request);
        }
        if let Disk::Qcow2(qcow2) = &self.under {
            faults.begin(request);
            return qcow2.with_images(context, |images, context| {
                let sender = &mut self.faults.sender(context, faults);
                qcow2.start(images, sender, buffers, under.qcow2(), request)
            });
        }
        self.faults.hold(faults, request);
        self.retry(context, buffers, state)
    }

    fn resume(
        &self,
        context: &mut IoContext<'_>,
        buffers: &mut IoBuffers,
        state: &mut FaultyState,
        completion: Completion,
    ) -> Step {
        let FaultyState { faults, under } = state;
        let completion = self.faults.completed(faults, completion, context.marks);
        if let Disk::Qcow2(qcow2) = &self.under {
            return qcow2.with_images(context, |images, context| {
                let sender = &mut self.faults.sender(context, faults);
                under.qcow2().step((images, qcow2.size()), sender, buffers, Some(completion))
            });
        }
        // The others have no operations.
        let Disk::File(file) = &self.under else { return Step::Pending };
        file.resume(&mut self.faults.sender(context, faults), buffers, under.file(), completion)
    }

    fn retry(&self, context: &mut IoContext<'_>, buffers: &mut IoBuffers, state: &mut FaultyState) -> Step {
        let FaultyState { faults, under } = state;
        if let Disk::File(file) = &self.under {
            return file.retry(&mut self.faults.sender(context, faults), buffers, under.file());
        }
        if let Disk::Qcow2(qcow2) = &self.under {
            return qcow2.with_images(context, |images, context| {
                let sender = &mut self.faults.sender(context, faults);
                under.qcow2().step((images, qcow2.size()), sender, buffers, None)
            });
        }
        match self.faults.admit(faults, buffers, context.waker) {
            None => self.under.retry_with(context, buffers, under),
            Some(Admission::Start(request)) => self.under.start_with(context, buffers, under, request),
            Some(Admission::Hold) => Step::Busy,
            Some(Admission::Fail(errno)) => {
                buffers.drop_extents();
                Step::Done(Err(IoError::Os(errno)))
            }
        }
    }
}
