//! Faults on purpose: a disk of its own for tests, around any other.
//!
//! A file's faults hit its operations, on their way to the engine and back, so that what the file makes of an error, a short
//! transfer or "again" is what it makes of a real one. A disk without operations, which answers at once, has its requests hit.

mod dice;
mod timer;

use crate::FaultRules;
use crate::io::Phase;
use crate::lane::Outlet;
use crate::spec::fault_rules::{Effect, OperationKind};
use crate::{Disk, Error, Extent, FileDisk, Io, IoError, Lane, Limits, Request, Step};
use dice::{Dice, Subject};
use kickless_io::{AlignedBuf, Buffers, Completion, Errno, OpKind, Waker};
use kickless_memory::{Iov, Marks};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use timer::Timer;

/// An operation that is to be overtaken waits so long for another at most.
const OVERTAKEN_WITHIN: Duration = Duration::from_millis(5);

/// A disk with injected faults.
#[derive(Debug)]
pub struct FaultDisk {
    under: Disk,
    limits: Limits,
    state: Mutex<State>,
    timer: Timer,
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
pub(crate) struct Held {
    /// What to start when the way is free, where it is the request that is held up.
    request: Option<Request>,
    /// What kind of request it is, where its operations do not tell.
    kind: Option<OperationKind>,
    /// What was decided on the next operation, until it is on its way.
    verdict: Option<Verdict>,
    /// What is in the engine in its stead.
    stand_in: Option<StandIn>,
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

impl FaultDisk {
    /// Puts faults before a disk.
    ///
    /// # Errors
    /// It can have no such faults, or there is no thread for the delays.
    pub fn new(rules: &FaultRules, under: Disk) -> Result<Self, Error> {
        let at_once = match &under {
            Disk::Null(_) => Some("null:"),
            Disk::Memory(_) => Some("mem:"),
            Disk::Library(library) => Some(library.name()),
            // A request has one place for what is decided on it.
            Disk::Fault(_) => return Err(Error::FaultsTwice),
            Disk::File(_) => None,
        };
        if let Some(under) = at_once
            && let Some(fault) = rules.rules.iter().find_map(|rule| rule.effect.of_operations())
        {
            return Err(Error::Fault { fault, under });
        }
        let state = Mutex::new(State { dice: Dice::new(rules), passed: 0 });
        let lifetime = rules.lifetime.or(under.limits().lifetime);
        let limits = Limits { lifetime, ..under.limits().clone() };
        Ok(Self { under, limits, state, timer: Timer::start().map_err(Error::Timer)? })
    }

    /// The disk that has the faults.
    pub(crate) fn under(&self) -> &Disk {
        &self.under
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn start(&self, lane: &mut Lane<'_>, io: &mut Io, request: Request) -> Step {
        io.held = Some(Box::new(Held { kind: Some(kind_of(request)), ..Held::default() }));
        if let Disk::File(file) = &self.under {
            return self.past(lane, io, |outlet, io| file.start(outlet, io, request));
        }
        if let Some(held) = &mut io.held {
            held.request = Some(request);
        }
        io.phase = Phase::Held;
        self.retry(lane, io)
    }

    pub(crate) fn retry(&self, lane: &mut Lane<'_>, io: &mut Io) -> Step {
        match &self.under {
            Disk::File(file) => self.past(lane, io, |outlet, io| file.drive(outlet, io)),
            under => self.at_once(under, lane, io),
        }
    }

    /// Starts a request of a disk that answers at once, if nothing holds it up.
    fn at_once(&self, under: &Disk, lane: &mut Lane<'_>, io: &mut Io) -> Step {
        let Io { held, work, buffers, .. } = &mut *io;
        let Some((held, request)) =
            held.as_mut().and_then(|held| held.request.map(|request| (held, request)))
        else {
            return under.retry(lane, io);
        };
        let one;
        let extents = match request {
            Request::Read { offset } | Request::Write { offset, .. } => {
                one = [Extent { offset, len: buffers.len(), unmap: false }];
                &one[..]
            }
            Request::Flush => &[],
            _ => work.as_ref().map_or(&[][..], |work| &work.extents),
        };
        match self.decide(held, Subject { kind: kind_of(request), extents }, lane.waker) {
            Verdict::Wait(_) | Verdict::Overtaken(..) => return Step::Busy,
            Verdict::Fail(errno) => return io.finish(Err(IoError::Os(errno))),
            Verdict::Pass | Verdict::Short(_) => {}
        }
        io.held = None;
        io.phase = Phase::Idle;
        under.start(lane, io, request)
    }

    pub(crate) fn resume(&self, lane: &mut Lane<'_>, io: &mut Io, mut completion: Completion) -> Step {
        let stand_in = io.held.as_mut().and_then(|held| held.stand_in.take());
        match stand_in {
            Some(StandIn::Failure(errno, buffers)) => {
                completion.result = Err(errno);
                completion.buffers = buffers;
            }
            Some(StandIn::Part(mut iov, kind)) => {
                if let (Buffers::Owned(part), Ok(bytes), OpKind::Read) =
                    (&completion.buffers, completion.result, kind)
                {
                    iov.write(0, &part[..(bytes as usize).min(part.len())], lane.marks);
                }
                completion.buffers = Buffers::Guest(iov);
            }
            None => {}
        }
        match &self.under {
            Disk::File(file) => self.past(lane, io, |outlet, io| file.resume(outlet, io, completion)),
            under => under.resume(lane, io, completion),
        }
    }

    /// Runs a step of a file whose operations come past the faults.
    fn past(
        &self,
        lane: &mut Lane<'_>,
        io: &mut Io,
        step: impl FnOnce(&mut Past<'_, '_>, &mut Io) -> Step,
    ) -> Step {
        let mut held = io.held.take().unwrap_or_default();
        let step = step(&mut Past { disk: self, lane, held: &mut held }, io);
        io.held = Some(held);
        step
    }

    /// What becomes of an operation now. Rolled for once; a wait that is over is a pass.
    fn decide(&self, held: &mut Held, subject: Subject<'_>, waker: &Waker) -> Verdict {
        let mut state = self.state();
        let verdict = match held.verdict.take() {
            None => self.rolled(&mut state, subject, waker),
            Some(Verdict::Wait(due)) if Instant::now() >= due => Verdict::Pass,
            Some(Verdict::Overtaken(passed, due)) if state.passed > passed || Instant::now() >= due => {
                Verdict::Pass
            }
            Some(verdict) => verdict,
        };
        held.verdict = Some(verdict);
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
                let len = subject.len();
                let unit = if let Disk::File(file) = &self.under { FileDisk::unit(file) } else { len };
                match len.div_ceil(unit.max(1)) {
                    // It has no part.
                    0 | 1 => Verdict::Pass,
                    units => Verdict::Short(unit * (1 + state.dice.random() % (units - 1))),
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

/// The way to an engine past the faults.
struct Past<'a, 'l> {
    disk: &'a FaultDisk,
    lane: &'a mut Lane<'l>,
    held: &'a mut Held,
}

impl Past<'_, '_> {
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
                self.held.stand_in = Some(stand_in);
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

impl Outlet for Past<'_, '_> {
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
            OpKind::Write { .. } => match self.held.kind {
                Some(OperationKind::Zeroes) => OperationKind::Zeroes,
                _ => OperationKind::Write,
            },
            OpKind::Flush => OperationKind::Flush,
            OpKind::Range { .. } => self.held.kind.unwrap_or(OperationKind::Discard),
        };
        let subject = Subject { kind: kind_of, extents: &[Extent { offset, len, unmap: false }] };
        let sent = match self.disk.decide(self.held, subject, self.lane.waker) {
            Verdict::Pass => self.lane.send(kind, offset, buffers),
            Verdict::Wait(_) | Verdict::Overtaken(..) => return Err((Step::Busy, buffers)),
            Verdict::Short(len) => self.send_part(kind, offset, buffers, len as usize),
            // A read of nothing fails in its stead: the error comes the way that errors come.
            Verdict::Fail(errno) => {
                self.send_instead(OpKind::Read, 0, Buffers::None, StandIn::Failure(errno, buffers))
            }
        };
        if sent.is_ok() {
            self.held.verdict = None;
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
