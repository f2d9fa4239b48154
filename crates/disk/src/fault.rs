//! Injected faults, for tests, around a disk of any other kind.
//!
//! Faults of a file affect its operations on their way to the engine and back. So the file treats them like
//! real errors, short transfers and EAGAIN. A disk without operations answers at once, so faults affect its
//! requests.

mod selector;
mod timer;

use crate::FaultRules;
use crate::buffers::IoBuffers;
use crate::op_sender::{OpSender, Sent};
use crate::spec::fault_rules::{Effect, OperationKind};
use crate::{Error, Extent, IoError, Request, Step};
use kickless_io::{AlignedBuf, Buffers, Completion, Errno, OpKind, Waker};
use kickless_memory::{Iov, Marks};
use kickless_sync::lock;
use selector::{FaultSelector, Subject};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use timer::Timer;

/// Decides which operations or requests of a disk fail, and sends substitutes for them. It knows only what
/// faults can affect there.
#[derive(Debug)]
pub(crate) struct FaultInjector {
    /// The parts of an operation are multiples of this many bytes.
    unit: u64,
    /// Locked for each operation of all workers.
    selector: Mutex<FaultSelector>,
    timer: Timer,
}

/// The objects that the faults of a disk affect.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// Operations on their way to an engine. Offsets and lengths are multiples of `unit`.
    Operations { unit: u64 },
    /// Requests of a disk of this kind, which has no operations.
    Requests { scheme: &'static str },
}

/// The decision on a request before it reaches a disk without operations.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The request starts now.
    Start(Request),
    /// The request fails.
    Fail(Errno),
    /// The request waits. A waker is signalled later.
    Hold,
}

/// The faults of one request.
#[derive(Debug, Default)]
pub(crate) struct FaultState {
    /// The request that is held up before it reaches the disk.
    held: Option<Request>,
    /// The kind of the request, because its operations do not always show it.
    kind: Option<OperationKind>,
    /// The decision on the next operation, until that is sent.
    verdict: Option<Verdict>,
    /// The substitute that is in the engine.
    substitute: Option<Substitute>,
}

impl FaultState {
    /// Begins with a new request.
    pub(crate) fn begin(&mut self, request: Request) {
        *self = Self { kind: Some(kind_of(request)), ..Self::default() };
    }

    /// Returns whether a request is held up before it reaches the disk.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

/// The decision on an operation.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    Pass,
    Fail(Errno),
    /// Transfer only this many bytes.
    Short(u64),
    /// Wait until this time.
    Wait(Instant),
}

/// The substitute for an operation.
#[derive(Debug)]
enum Substitute {
    /// No operation at all, reported as this error.
    Failure(Errno, Buffers),
    /// A part of the operation, with a buffer of the injector.
    Part(Iov, OpKind),
}

impl FaultInjector {
    /// Prepares the faults of a disk.
    ///
    /// # Errors
    /// The disk cannot have such faults, or the thread for delays cannot be started.
    pub(crate) fn new(rules: &FaultRules, target: Target) -> Result<Self, Error> {
        if let Target::Requests { scheme } = target
            && let Some(fault) = rules.rules.iter().find_map(|rule| rule.effect.of_operations())
        {
            return Err(Error::Fault { fault, under: scheme });
        }
        // A request has no parts.
        let unit = if let Target::Operations { unit } = target { unit.max(1) } else { u64::MAX };
        let selector = Mutex::new(FaultSelector::new(rules));
        Ok(Self { unit, selector, timer: Timer::start().map_err(Error::Timer)? })
    }

    /// Holds up a request of a disk without operations, until [`FaultInjector::admit`] lets it pass.
    pub(crate) fn hold(&self, faults: &mut FaultState, request: Request) {
        faults.begin(request);
        faults.held = Some(request);
    }

    /// Decides on the request that is held up. Returns `None` if there is none.
    pub(crate) fn admit(
        &self,
        faults: &mut FaultState,
        buffers: &IoBuffers,
        waker: &Waker,
    ) -> Option<Admission> {
        let request = faults.held?;
        let one;
        let extents = match request {
            Request::Read { offset } | Request::Write { offset, .. } => {
                one = [Extent { offset, len: buffers.guest.len(), unmap: false }];
                &one[..]
            }
            Request::Flush => &[],
            _ => &buffers.extents,
        };
        let subject = Subject { kind: kind_of(request), extents };
        let admission = match self.decide(faults, subject, waker) {
            Verdict::Wait(_) => return Some(Admission::Hold),
            Verdict::Fail(errno) => Admission::Fail(errno),
            Verdict::Pass | Verdict::Short(_) => Admission::Start(request),
        };
        *faults = FaultState::default();
        Some(admission)
    }

    /// Returns the sender of a request's operations, which injects the faults.
    pub(crate) fn sender<'a, S: OpSender>(
        &'a self,
        under: &'a mut S,
        faults: &'a mut FaultState,
    ) -> FaultSender<'a, S> {
        FaultSender { injector: self, under, faults, layer: 0 }
    }

    /// Converts the completion of a substitute into the completion of the original operation.
    pub(crate) fn completed(
        &self,
        faults: &mut FaultState,
        mut completion: Completion,
        marks: &mut Marks,
    ) -> Completion {
        match faults.substitute.take() {
            Some(Substitute::Failure(errno, buffers)) => {
                completion.result = Err(errno);
                completion.buffers = buffers;
            }
            Some(Substitute::Part(mut iov, kind)) => {
                if let (Buffers::Owned(part), Ok(bytes), OpKind::Read) =
                    (&completion.buffers, completion.result, kind)
                {
                    iov.write(0, &part[..(bytes as usize).min(part.len())], marks);
                }
                completion.buffers = Buffers::Guest(iov);
            }
            None => {}
        }
        completion
    }

    /// Decides on an operation. The rules are consulted once; a wait that has ended becomes a pass.
    fn decide(&self, faults: &mut FaultState, subject: Subject<'_>, waker: &Waker) -> Verdict {
        let verdict = match faults.verdict.take() {
            None => self.decide_first(subject, waker),
            Some(Verdict::Wait(due)) if Instant::now() >= due => Verdict::Pass,
            Some(verdict) => verdict,
        };
        faults.verdict = Some(verdict);
        verdict
    }

    fn decide_first(&self, subject: Subject<'_>, waker: &Waker) -> Verdict {
        let mut selector = lock(&self.selector);
        match selector.select(subject) {
            None => Verdict::Pass,
            Some(Effect::Error(errno)) => Verdict::Fail(errno),
            Some(Effect::Delay(range)) => {
                let span = (*range.end() - *range.start()).as_micros() as u64;
                let more = Duration::from_micros(selector.random() % (span + 1));
                let due = Instant::now() + *range.start() + more;
                self.timer.wake_at(due, waker);
                Verdict::Wait(due)
            }
            Some(Effect::Short) => {
                match subject.len().div_ceil(self.unit) {
                    // It has only one part.
                    0 | 1 => Verdict::Pass,
                    units => Verdict::Short(self.unit * (1 + selector.random() % (units - 1))),
                }
            }
        }
    }
}

fn kind_of(request: Request) -> OperationKind {
    match request {
        Request::Read { .. } => OperationKind::Read,
        Request::Write { .. } => OperationKind::Write,
        Request::Flush => OperationKind::Flush,
        Request::Discard { .. } => OperationKind::Discard,
        Request::WriteZeroes { .. } => OperationKind::Zeroes,
    }
}

/// Sends operations to an engine, with faults.
pub(crate) struct FaultSender<'a, S> {
    injector: &'a FaultInjector,
    under: &'a mut S,
    faults: &'a mut FaultState,
    /// The layer of the current operation.
    layer: usize,
}

impl<S: OpSender> FaultSender<'_, S> {
    /// Sends a substitute, and keeps what is needed to report the original operation.
    fn send_instead(&mut self, kind: OpKind, offset: u64, buffers: Buffers, substitute: Substitute) -> Sent {
        let sent = self.under.send_to(self.layer, kind, offset, buffers);
        match sent {
            Ok(()) => {
                self.faults.substitute = Some(substitute);
                Ok(())
            }
            Err((step, _)) => Err((
                step,
                match substitute {
                    Substitute::Failure(_, buffers) => buffers,
                    Substitute::Part(iov, _) => Buffers::Guest(iov),
                },
            )),
        }
    }

    fn send_part(&mut self, kind: OpKind, offset: u64, buffers: Buffers, len: usize) -> Sent {
        match buffers {
            Buffers::None => self.under.send_to(self.layer, kind, offset, buffers),
            Buffers::Owned(mut buffer) => {
                let start = buffer.window().start;
                buffer.set_window(start..start + len);
                self.under.send_to(self.layer, kind, offset, Buffers::Owned(buffer))
            }
            Buffers::Guest(iov) => {
                let Ok(mut part) = AlignedBuf::new(len, rustix::param::page_size()) else {
                    return Err((Step::Done(Err(IoError::Os(Errno::NOMEM))), Buffers::Guest(iov)));
                };
                if kind != OpKind::Read {
                    iov.read(0, &mut part);
                }
                self.send_instead(kind, offset, Buffers::Owned(part), Substitute::Part(iov, kind))
            }
        }
    }
}

impl<S: OpSender> OpSender for FaultSender<'_, S> {
    fn send_to(&mut self, layer: usize, kind: OpKind, offset: u64, buffers: Buffers) -> Sent {
        self.layer = layer;
        let len = match (&buffers, kind) {
            (_, OpKind::Range { len, .. }) => len,
            (Buffers::None, _) => 0,
            (Buffers::Guest(iov), _) => iov.len(),
            (Buffers::Owned(buffer), _) => buffer.window().len() as u64,
        };
        let kind_of = match kind {
            OpKind::Read => OperationKind::Read,
            // The file writes zeroes if the host has no call for them.
            OpKind::Write { .. } => match self.faults.kind {
                Some(OperationKind::Zeroes) => OperationKind::Zeroes,
                _ => OperationKind::Write,
            },
            OpKind::Flush => OperationKind::Flush,
            OpKind::Range { .. } => self.faults.kind.unwrap_or(OperationKind::Discard),
        };
        let subject = Subject { kind: kind_of, extents: &[Extent { offset, len, unmap: false }] };
        let sent = match self.injector.decide(self.faults, subject, self.under.waker()) {
            Verdict::Pass => self.under.send_to(self.layer, kind, offset, buffers),
            Verdict::Wait(_) => return Err((Step::Busy, buffers)),
            Verdict::Short(len) => self.send_part(kind, offset, buffers, len as usize),
            // An empty read fails instead, so that the error is reported like any other.
            Verdict::Fail(errno) => {
                self.send_instead(OpKind::Read, 0, Buffers::None, Substitute::Failure(errno, buffers))
            }
        };
        if sent.is_ok() {
            self.faults.verdict = None;
        }
        sent
    }

    fn waker(&self) -> &Waker {
        self.under.waker()
    }

    fn marks(&mut self) -> &mut Marks {
        self.under.marks()
    }

    fn pause_layer(&mut self, layer: usize) {
        self.under.pause_layer(layer);
    }
}
