use super::*;
use crate::Poll;
use crate::mailbox::{Holder, Mailbox, Placement, WorkItem};
use crate::peers::Peers;
use kickless_device::{Clock, Polled, QueueTask, Update, Vring};
use kickless_io::{
    BackingFile, Buffers, Completion, Engine, EngineKind, FileId, Op, OpKind, Owner, Token, Waker,
};
use kickless_memory::Gpa;
use kickless_sync::Mutex;
use kickless_testing::{GuestRing, guest_memory};
use kickless_virtqueue::device::Options;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

#[test]
fn naps_end_together_if_that_shortens_none_by_more_than_half() {
    for other in [0, 100, 149, 200, 300, Nanos::MAX] {
        assert_eq!(shared_end(100, 200, other), 200, "{other}");
    }
    assert_eq!([150, 199].map(|other| shared_end(100, 200, other)), [150, 199]);
}

/// A task that waits.
struct Waiting {
    vring: Vring,
    /// The number of its polls and of its completions.
    polls: Arc<AtomicU32>,
    /// The number of its polls that try all requests that wait.
    full_polls: Arc<AtomicU32>,
    completions: Arc<AtomicU32>,
    /// Gets its waker at each poll.
    wakers: Sender<Waker>,
    next: Next,
    /// The task tries to have an operation on a file of its own in the engine.
    wants_engine: bool,
    file: Option<FileId>,
    in_flight: usize,
}

impl QueueTask for Waiting {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, engine: &mut Engine) -> io::Result<()> {
        let file = BackingFile::new(Arc::new(File::open("/dev/null")?), Owner::unique());
        self.file = engine.register(&file).ok();
        Ok(())
    }

    fn poll(&mut self, context: &mut Context<'_>, _: u32) -> Polled {
        self.polls.fetch_add(1, Ordering::Relaxed);
        self.full_polls.fetch_add(context.far_side_due.into(), Ordering::Relaxed);
        let _ = self.wakers.send(context.waker.clone());
        if self.wants_engine
            && self.in_flight == 0
            && let Some(file) = self.file
        {
            let op = Op { file, kind: OpKind::Flush, offset: 0, buffers: Buffers::None };
            let queued = context.engine.queue(op, Token { source: context.task, slot: 0 });
            self.in_flight = usize::from(queued.is_ok());
        }
        Polled { served: 0, cost: 0, next: self.next }
    }

    fn complete(&mut self, _: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        self.completions.fetch_add(completions.len() as u32, Ordering::Relaxed);
        (self.in_flight, self.wants_engine) = (0, false);
        completions.clear();
        false
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

pub(crate) struct Probe {
    polls: Arc<AtomicU32>,
    full_polls: Arc<AtomicU32>,
    completions: Arc<AtomicU32>,
    wakers: Receiver<Waker>,
    ring: GuestRing,
}

/// A worker whose turns the test makes.
pub(crate) struct Rig {
    pub(crate) worker: EventLoop,
    tasks: Vec<Probe>,
}

impl Rig {
    /// Makes a worker without tasks, whose engine has room for one operation at a time.
    pub(crate) fn new() -> Self {
        Self::with(Poll::Never)
    }

    fn with(poll: Poll) -> Self {
        let mailbox = Arc::new(Mailbox::new(Waker::of_worker().unwrap()));
        let peers = Arc::new(Peers::new(Clock::start(), vec![mailbox]));
        let engine = Engine::open(EngineKind::Threads, 1).unwrap();
        let worker = EventLoop::new(peers, 0, engine, poll).unwrap();
        Self { worker, tasks: Vec::new() }
    }

    /// Adds a task of a device. Returns its number.
    pub(crate) fn add(&mut self, device: u64, next: Next, wants_engine: bool) -> u32 {
        let view = guest_memory(2 * GuestRing::BUFFERS, GuestRing::USER);
        let ring = GuestRing::new(view, Options::new(8, true, false).unwrap());
        let (sender, wakers) = channel();
        let parts = ring.parts();
        let (full_polls, completions) = (Arc::default(), Arc::default());
        let probe = Probe { polls: Arc::default(), full_polls, completions, wakers, ring };
        let task = Waiting {
            vring: Vring::new(parts).unwrap(),
            polls: probe.polls.clone(),
            full_polls: probe.full_polls.clone(),
            completions: probe.completions.clone(),
            wakers: sender,
            next,
            wants_engine,
            file: None,
            in_flight: 0,
        };
        let placement = Placement {
            device,
            weight: Arc::new(AtomicU32::new(1)),
            limiter: Arc::default(),
            home: None,
            holder: Arc::new(Mutex::new(Holder::Worker(0))),
        };
        let number = self.tasks.len() as u32;
        self.tasks.push(probe);
        self.worker.handle(WorkItem::Spawn(number.into(), placement, Box::new(task)));
        number
    }

    /// Runs the part of a turn that concerns tasks, until no task is on the list.
    pub(crate) fn run(&mut self) {
        let mut rounds = 0;
        while !self.worker.scheduler.is_empty() {
            self.worker.visit_scheduled(self.worker.clock.now());
            rounds += 1;
            assert!(rounds < 100, "a task stays on the list");
        }
    }

    /// Ends the operations that the engine has, and no others.
    fn complete(&mut self, number: u32) {
        let entry = self.worker.entries[number as usize].as_mut().unwrap();
        assert_eq!(entry.task.in_flight(), 1);
        self.worker.submit_and_wait();
        self.worker.complete();
        if self.worker.engine.has_sources_with_room() {
            self.worker.wake_with_room();
        }
    }

    /// Changes a task.
    pub(crate) fn update(&mut self, number: u32, update: Update) {
        self.worker.handle(WorkItem::Update(number.into(), update, kickless_sync::mpsc::channel().0));
    }

    /// Makes a chain available.
    pub(crate) fn submit(&mut self, number: u32) {
        let map = self.tasks[number as usize].ring.view.map();
        map.write(Gpa(GuestRing::AVAIL + 2), &1u16.to_le_bytes()).unwrap();
    }

    /// Returns the number of kicks of a task that the worker has counted.
    pub(crate) fn counted_kicks(&mut self, number: u32) -> u64 {
        self.worker.entries[number as usize].as_mut().unwrap().task.vring().counters().kicks.get()
    }

    /// Wakes a task, as another thread does.
    fn wake(&mut self, number: u32) {
        let waker = self.tasks[number as usize].wakers.try_iter().last().expect("it was not polled");
        waker.wake();
        assert!(self.worker.mailbox.waker().clear());
        self.worker.wake_woken();
    }

    pub(crate) fn polls(&self) -> Vec<u32> {
        self.tasks.iter().map(|task| task.polls.load(Ordering::Relaxed)).collect()
    }
}

impl EventLoop {
    /// Starts the queued operations, and waits until the engine reports an end of one.
    fn submit_and_wait(&mut self) {
        self.engine.submit().unwrap();
        let mut events = [PollFd::from_borrowed_fd(self.engine.event(), PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut events, Some(&limit)).unwrap(), 1, "nothing completes");
        self.engine_ready = true;
    }
}

#[test]
fn a_completion_wakes_its_own_task_and_no_other_that_waits() {
    for next in [Next::Blocked, Next::Waiting] {
        let mut rig = Rig::new();
        let busy = rig.add(1, next, true);
        // Tasks of other devices, and one of the same.
        for device in 0..64 {
            rig.add(1 + device % 8, next, false);
        }
        rig.run();
        let before = rig.polls();
        rig.complete(busy);
        rig.run();
        let after = rig.polls();
        assert_eq!(rig.tasks[0].completions.load(Ordering::Relaxed), 1);
        assert_eq!(after[0], before[0] + 1, "it may go on");
        assert_eq!(after[1..], before[1..], "{next:?}");
    }
}

#[test]
fn a_waker_wakes_its_own_task() {
    for next in [Next::Blocked, Next::Waiting] {
        let mut rig = Rig::new();
        for device in 0..70 {
            rig.add(device, next, false);
        }
        rig.run();
        for woken in [3, 69, 0, 3] {
            let mut expected = rig.polls();
            rig.wake(woken);
            rig.run();
            expected[woken as usize] += 1;
            assert_eq!(rig.polls(), expected, "{next:?}");
        }
    }
}

/// While tasks spin, their requests are tried again after a wake, a completion, and now and then.
#[test]
fn requests_that_wait_cost_a_spinning_worker_little() {
    let mut rig = Rig::with(Poll::Always);
    let busy = rig.add(0, Next::Waiting, true);
    for device in 1..4 {
        rig.add(device, Next::Waiting, false);
    }
    let full_polls = |rig: &Rig| -> Vec<u32> {
        rig.tasks.iter().map(|task| task.full_polls.load(Ordering::Relaxed)).collect()
    };
    let start = rig.worker.clock.now();
    let spin = |rig: &mut Rig, now| (0..20).for_each(|_| rig.worker.visit_scheduled(now));
    spin(&mut rig, start);
    assert_eq!(full_polls(&rig), [1; 4]);
    assert!(rig.polls().iter().all(|polls| *polls >= 20), "{:?}", rig.polls());
    rig.wake(2);
    spin(&mut rig, start);
    assert_eq!(full_polls(&rig), [1, 1, 2, 1]);
    rig.complete(busy);
    spin(&mut rig, start);
    assert_eq!(full_polls(&rig), [2, 1, 2, 1]);
    spin(&mut rig, start + RETRY_INTERVAL);
    assert_eq!(full_polls(&rig), [3, 2, 3, 2]);
}

/// The wake comes while the task is polled, or before: the worker takes the mark when the task waits.
#[test]
fn a_wake_before_the_task_waits_is_not_lost() {
    let mut rig = Rig::new();
    let number = rig.add(1, Next::Blocked, false);
    let waker = rig.worker.mailbox.waker().of_task(number);
    waker.wake();
    rig.run();
    assert_eq!(rig.polls(), [1]);
    assert!(rig.worker.mailbox.waker().clear());
    rig.worker.wake_woken();
    rig.run();
    assert_eq!(rig.polls(), [2]);
}

/// An operation of one device takes the engine's only place. Tasks of other devices wait for it.
#[test]
fn room_in_the_engine_wakes_one_task_for_each_place() {
    let mut rig = Rig::new();
    let busy = rig.add(0, Next::Blocked, true);
    rig.run();
    let waiting: Vec<u32> = (1..9).map(|device| rig.add(device, Next::Blocked, true)).collect();
    rig.run();
    assert_eq!(rig.polls(), [1; 9]);
    let mut holder = busy;
    for expected in waiting {
        let before: u32 = rig.polls().iter().sum();
        rig.complete(holder);
        rig.run();
        // The one whose operation has ended, and the one that has the place now.
        assert_eq!(rig.polls().iter().sum::<u32>(), before + 2);
        let entry = rig.worker.entries[expected as usize].as_mut().unwrap();
        assert_eq!(entry.task.in_flight(), 1, "it was not its turn");
        holder = expected;
    }
}

/// A source that is told of room may not want it any more. The worker does not sleep before it has told the
/// next one.
#[test]
fn room_that_a_task_does_not_take_is_for_the_next_one() {
    let mut rig = Rig::new();
    let holder = rig.add(0, Next::Idle, true);
    rig.run();
    let (_, waiting) = (rig.add(1, Next::Idle, true), rig.add(2, Next::Blocked, true));
    rig.run();
    let before = rig.polls()[waiting as usize];
    rig.complete(holder);
    rig.run();
    assert!(rig.polls()[waiting as usize] == before && rig.worker.has_unseen_work());
    rig.worker.wake_with_room();
    rig.run();
    assert_eq!(rig.polls()[waiting as usize], before + 1);
    assert!(!rig.worker.has_unseen_work());
}

/// A limiter that asks for a nanosecond does not have the worker search its naps all the time.
#[test]
fn a_throttled_task_is_left_alone_for_a_while() {
    assert_eq!(throttled_until(100, 1), 100 + THROTTLED_MIN);
    assert_eq!(throttled_until(100, 1_000_000), 1_000_100);
    let mut rig = Rig::new();
    let number = rig.add(1, Next::Throttled { wait_ns: 3_600_000_000_000 }, false);
    rig.run();
    let until = rig.worker.next_nap;
    rig.worker.wake_naps(until - 1);
    assert!(rig.worker.scheduler.is_empty());
    rig.worker.wake_naps(until);
    rig.worker.visit_scheduled(until);
    assert_eq!(rig.polls()[number as usize], 2);
}

#[test]
fn only_an_eager_task_on_the_list_keeps_the_core_for_its_device() {
    let auto = Poll::Auto { latency: Duration::from_micros(100), kick_price: Duration::ZERO };
    let cases =
        [(1, true, true, true), (1, false, true, false), (1, true, false, false), (2, true, true, false)];
    for (device, is_eager, is_listed, keeps) in cases {
        let mut rig = Rig::with(auto);
        let [first, second] = [rig.add(1, Next::Idle, false), rig.add(device, Next::Idle, false)];
        let host = rig.worker.host_probe.host;
        let policy = &mut rig.worker.entries[first as usize].as_mut().unwrap().policy;
        // A request every 5 us, until the policy knows that naps would be cheaper.
        let is_known = (0..2_000).any(|count| {
            policy.empty(5_000 * count, &host, false);
            policy.found(5_000 * count + 4_000, 1);
            policy.keeps_core()
        });
        assert!(is_known);
        if !is_eager {
            policy.set(Poll::Never);
        }
        if !is_listed {
            rig.worker.scheduler = Default::default();
            let flows = [1, device].map(|device| rig.worker.scheduler.join(device, 1));
            for (number, flow) in [first, second].into_iter().zip(flows) {
                rig.worker.entries[number as usize].as_mut().unwrap().flow = flow;
            }
        }
        let flow = rig.worker.entries[second as usize].as_ref().unwrap().flow;
        assert_eq!(rig.worker.keeps_core_for(flow), keeps, "device {device}, {is_eager}, {is_listed}");
    }
}
