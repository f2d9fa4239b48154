//! Faults on purpose, for tests: around a disk of any other kind.
//!
//! A file's faults hit its operations, on their way to the engine and back, so that what the file makes of an error, a short
//! transfer or "again" is what it makes of a real one. A disk without operations, which answers at once, has its requests hit.

mod dice;
mod timer;

use crate::FaultRules;
use crate::buffers::IoBuffers;
use crate::lane::Outlet;
use crate::spec::fault_rules::{Effect, OperationKind};
use crate::{Error, Extent, IoError, Lane, Limits, Request, Step};
use dice::{Dice, Subject};
use kickless_io::{AlignedBuf, Buffers, Completion, Errno, OpKind, Waker};
use kickless_memory::{Iov, Marks};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use timer::Timer;

/// An operation that is to be overtaken waits so long for another at most.
const OVERTAKEN_WITHIN: Duration = Duration::from_millis(5);

/// Decides which operations or requests of a disk fail, and sends something else in their stead. It knows nothing of the disk but
/// its limits and what faults can hit there.
#[derive(Debug)]
pub(crate) struct FaultInjector {
    limits: Limits,
    /// Bytes that the parts of an operation are multiples of.
    unit: u64,
    state: Mutex<State>,
    timer: Timer,
}

/// What the faults of a disk can hit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// The operations on their way to an engine. Offsets and lengths are multiples of `unit`.
    Operations { unit: u64 },
    /// The requests of a disk of this kind, which has no operations.
    Requests { scheme: &'static str },
}

/// What becomes of a request before it reaches a disk without operations.
#[derive(Debug)]
pub(crate) enum Admission {
    /// It starts now.
    Start(Request),
    /// It has failed.
    Fail(Errno),
    /// Not yet: a waker is signalled later.
    Hold,
}

/// What all workers share. Locked for each operation.
#[derive(Debug)]
struct State {
    dice: Dice,
    /// Operations that nothing holds up any more.
    passed: u64,
}

/// What is done to one request.
#[derive(Debug, Default)]
pub(crate) struct FaultState {
    /// The request that is held up before it reaches the disk.
    held: Option<Request>,
    /// What kind of request it is, where its operations do not tell.
    kind: Option<OperationKind>,
    /// What was decided on the next operation, until it is on its way.
    verdict: Option<Verdict>,
    /// What is in the engine in its stead.
    stand_in: Option<StandIn>,
}

impl FaultState {
    /// Begins with another request.
    pub(crate) fn begin(&mut self, request: Request) {
        *self = Self { kind: Some(kind_of(request)), ..Self::default() };
    }

    /// Returns whether a request is held up before it reaches the disk.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

/// What was decided on an operation.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    Pass,
    Fail(Errno),
    /// A part of this many bytes.
    Short(u64),
    /// Not before this time.
    Wait(Instant),
    /// Not before another one than these has passed, or this time.
    Overtaken(u64, Instant),
}

/// What an engine does instead of an operation.
#[derive(Debug)]
enum StandIn {
    /// Nothing, to be reported as this error.
    Failure(Errno, Buffers),
    /// A part of it, with a buffer of ours.
    Part(Iov, OpKind),
}

impl FaultInjector {
    /// Prepares the faults of a disk with these limits.
    ///
    /// # Errors
    /// The disk can have no such faults, or there is no thread for the delays.
    pub(crate) fn new(rules: &FaultRules, under: &Limits, target: Target) -> Result<Self, Error> {
        if let Target::Requests { scheme } = target
            && let Some(fault) = rules.rules.iter().find_map(|rule| rule.effect.of_operations())
        {
            return Err(Error::Fault { fault, under: scheme });
        }
        // A request has no parts.
        let unit = if let Target::Operations { unit } = target { unit.max(1) } else { u64::MAX };
        let state = Mutex::new(State { dice: Dice::new(rules), passed: 0 });
        let limits = Limits { lifetime: rules.lifetime.or(under.lifetime), ..under.clone() };
        Ok(Self { limits, unit, state, timer: Timer::start().map_err(Error::Timer)? })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds up a request of a disk without operations, until [`FaultInjector::admit`] lets it pass.
    pub(crate) fn hold(&self, faults: &mut FaultState, request: Request) {
        faults.begin(request);
        faults.held = Some(request);
    }

    /// Decides on the request that is held up. `None`: there is none, it has reached the disk.
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
            Verdict::Wait(_) | Verdict::Overtaken(..) => return Some(Admission::Hold),
            Verdict::Fail(errno) => Admission::Fail(errno),
            Verdict::Pass | Verdict::Short(_) => Admission::Start(request),
        };
        *faults = FaultState::default();
        Some(admission)
    }

    /// Returns the way of a request's operations to the engine, past the faults.
    pub(crate) fn outlet<'a, 'l>(
        &'a self,
        lane: &'a mut Lane<'l>,
        faults: &'a mut FaultState,
    ) -> FaultOutlet<'a, 'l> {
        FaultOutlet { injector: self, lane, faults }
    }

    /// Turns the completion of what was sent instead of an operation into the completion of that operation.
    pub(crate) fn completed(
        &self,
        faults: &mut FaultState,
        mut completion: Completion,
        marks: &mut Marks,
    ) -> Completion {
        match faults.stand_in.take() {
            Some(StandIn::Failure(errno, buffers)) => {
                completion.result = Err(errno);
                completion.buffers = buffers;
            }
            Some(StandIn::Part(mut iov, kind)) => {
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

    /// What becomes of an operation now. Rolled for once; a wait that is over is a pass.
    fn decide(&self, faults: &mut FaultState, subject: Subject<'_>, waker: &Waker) -> Verdict {
        let mut state = self.state();
        let verdict = match faults.verdict.take() {
            None => self.rolled(&mut state, subject, waker),
            Some(Verdict::Wait(due)) if Instant::now() >= due => Verdict::Pass,
            Some(Verdict::Overtaken(passed, due)) if state.passed > passed || Instant::now() >= due => {
                Verdict::Pass
            }
            Some(verdict) => verdict,
        };
        faults.verdict = Some(verdict);
        if !matches!(verdict, Verdict::Wait(_) | Verdict::Overtaken(..)) {
            state.passed += 1;
        }
        verdict
    }

    fn rolled(&self, state: &mut State, subject: Subject<'_>, waker: &Waker) -> Verdict {
        let later = |time: Duration| {
            let due = Instant::now() + time;
            self.timer.wake_at(due, waker);
            due
        };
        match state.dice.roll(subject) {
            None => Verdict::Pass,
            Some(Effect::Error(errno)) => Verdict::Fail(errno),
            Some(Effect::Delay(range)) => {
                let span = (*range.end() - *range.start()).as_micros() as u64;
                let more = Duration::from_micros(state.dice.random() % (span + 1));
                Verdict::Wait(later(*range.start() + more))
            }
            Some(Effect::Reorder) => Verdict::Overtaken(state.passed, later(OVERTAKEN_WITHIN)),
            Some(Effect::Short) => {
                match subject.len().div_ceil(self.unit) {
                    // It has no part.
                    0 | 1 => Verdict::Pass,
                    units => Verdict::Short(self.unit * (1 + state.dice.random() % (units - 1))),
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
        Request::SecureErase => OperationKind::Erase,
    }
}

/// The way of operations to an engine past the faults.
pub(crate) struct FaultOutlet<'a, 'l> {
    injector: &'a FaultInjector,
    lane: &'a mut Lane<'l>,
    faults: &'a mut FaultState,
}

impl FaultOutlet<'_, '_> {
    /// Sends something else, and keeps what is needed to tell the file of what it asked for.
    fn send_instead(
        &mut self,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
        stand_in: StandIn,
    ) -> Result<(), (Step, Buffers)> {
        let sent = self.lane.send(kind, offset, buffers);
        match sent {
            Ok(()) => {
                self.faults.stand_in = Some(stand_in);
                Ok(())
            }
            Err((step, _)) => Err((
                step,
                match stand_in {
                    StandIn::Failure(_, buffers) => buffers,
                    StandIn::Part(iov, _) => Buffers::Guest(iov),
                },
            )),
        }
    }

    fn send_part(
        &mut self,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
        len: usize,
    ) -> Result<(), (Step, Buffers)> {
        match buffers {
            Buffers::None => self.lane.send(kind, offset, buffers),
            Buffers::Owned(mut buffer) => {
                let start = buffer.window().start;
                buffer.set_window(start..start + len);
                self.lane.send(kind, offset, Buffers::Owned(buffer))
            }
            Buffers::Guest(iov) => {
                let Ok(mut part) = AlignedBuf::new(len, rustix::param::page_size()) else {
                    return Err((Step::Done(Err(IoError::Os(Errno::NOMEM))), Buffers::Guest(iov)));
                };
                if kind != OpKind::Read {
                    iov.read(0, &mut part);
                }
                self.send_instead(kind, offset, Buffers::Owned(part), StandIn::Part(iov, kind))
            }
        }
    }
}

impl Outlet for FaultOutlet<'_, '_> {
    fn send(&mut self, kind: OpKind, offset: u64, buffers: Buffers) -> Result<(), (Step, Buffers)> {
        let len = match (&buffers, kind) {
            (_, OpKind::Range { len, .. }) => len,
            (Buffers::None, _) => 0,
            (Buffers::Guest(iov), _) => iov.len(),
            (Buffers::Owned(buffer), _) => buffer.window().len() as u64,
        };
        let kind_of = match kind {
            OpKind::Read => OperationKind::Read,
            // Zeroes are written where the host has no call for them.
            OpKind::Write { .. } => match self.faults.kind {
                Some(OperationKind::Zeroes) => OperationKind::Zeroes,
                _ => OperationKind::Write,
            },
            OpKind::Flush => OperationKind::Flush,
            OpKind::Range { .. } => self.faults.kind.unwrap_or(OperationKind::Discard),
        };
        let subject = Subject { kind: kind_of, extents: &[Extent { offset, len, unmap: false }] };
        let sent = match self.injector.decide(self.faults, subject, self.lane.waker) {
            Verdict::Pass => self.lane.send(kind, offset, buffers),
            Verdict::Wait(_) | Verdict::Overtaken(..) => return Err((Step::Busy, buffers)),
            Verdict::Short(len) => self.send_part(kind, offset, buffers, len as usize),
            // A read of nothing fails in its stead: the error comes the way that errors come.
            Verdict::Fail(errno) => {
                self.send_instead(OpKind::Read, 0, Buffers::None, StandIn::Failure(errno, buffers))
            }
        };
        if sent.is_ok() {
            self.faults.verdict = None;
        }
        sent
    }

    fn waker(&self) -> &Waker {
        self.lane.waker
    }

    fn marks(&mut self) -> &mut Marks {
        self.lane.marks
    }

    fn stall(&mut self) {
        self.lane.stall();
    }
}
