//! Tests parcels: which task a worker offers them to, and what it does for a task that takes frames.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Driver, options, start};
use kickless_device::{
    Context, Executor, Limit, Limiter, Limits, Next, Offered, PARCEL_HEAD_LEN, Parcel, Polled, QueueTask,
    Rate, TaskHandle, TaskLocation, Update, Vring,
};
use kickless_io::Engine;
use kickless_memory::View;
use kickless_testing::eventually;
use kickless_virtqueue::Chain;
use kickless_virtqueue::device::SingleChain;
use kickless_worker::{Poll, WorkerPool};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// The part of a task that its test sees.
#[derive(Default)]
struct Seen {
    /// Each location that the task had, in order.
    locations: Mutex<Vec<Option<TaskLocation>>>,
    /// The calls of `take_parcel`.
    offers: AtomicU32,
    /// The polls, and what the last one found in its context.
    polls: AtomicU32,
    served_others: AtomicU32,
    /// The task has a request in flight.
    in_flight: AtomicBool,
    /// Each poll returns [`Next::More`]. Otherwise it returns [`Next::Idle`] if the ring is empty, and
    /// [`Next::Quiet`] if it has chains.
    wants_more: AtomicBool,
}

impl Seen {
    fn location(&self) -> Option<TaskLocation> {
        self.locations.lock().unwrap().last().copied().flatten()
    }

    fn offers(&self) -> u32 {
        self.offers.load(Ordering::SeqCst)
    }

    /// Waits until the task has been polled again.
    fn wait_polled(&self) {
        let before = self.polls.load(Ordering::SeqCst);
        eventually("no poll", || self.polls.load(Ordering::SeqCst) > before + 1);
    }
}

/// An offer: the task's number, and the frames for each of several parcels.
type Offer = (u32, Vec<usize>);

/// A task that offers parcels if it is told to, and takes them. It pops nothing in its own polls.
struct Card {
    vring: Vring,
    chain: Chain,
    seen: Arc<Seen>,
    /// The name in parcels for this task.
    name: usize,
    /// The name in parcels that this task offers, the offers, and the receiver of what became of each. A task
    /// without these offers nothing.
    sends: Option<(usize, Receiver<Offer>, Sender<Vec<u32>>)>,
}

impl QueueTask for Card {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, _: &mut Engine) -> io::Result<()> {
        assert_eq!(self.seen.location(), None);
        Ok(())
    }

    fn detach(&mut self, _: &mut Engine) {
        assert_eq!(self.seen.location(), None);
    }

    fn poll(&mut self, context: &mut Context<'_>, _: u32) -> Polled {
        assert_eq!(context.neighbours.is_some(), self.sends.is_some());
        assert_eq!(self.seen.location().map(|location| location.task), Some(context.task));
        self.seen.served_others.store(context.served_others, Ordering::SeqCst);
        self.seen.polls.fetch_add(1, Ordering::SeqCst);
        if let Some((to, offers, answers)) = &self.sends
            && let Ok((task, parcels)) = offers.try_recv()
        {
            let neighbours = context.neighbours.as_mut().unwrap();
            let offer = |count| {
                let (heads, chains) =
                    (vec![[0; PARCEL_HEAD_LEN]; count], vec![SingleChain::default(); count]);
                let frames = Offered::Singles(&chains);
                let parcel = Parcel { to: *to, view: &View::default(), heads: &heads, frames };
                neighbours.offer(task, &parcel)
            };
            answers.send(parcels.into_iter().map(offer).collect()).unwrap();
        }
        let next = match self.seen.wants_more.load(Ordering::SeqCst) {
            true => Next::More,
            false if self.vring.has_work() => Next::Quiet,
            false => Next::Idle,
        };
        Polled { served: 0, cost: 0, next }
    }

    fn in_flight(&self) -> usize {
        self.seen.in_flight.load(Ordering::SeqCst).into()
    }

    fn set_location(&mut self, location: Option<TaskLocation>) {
        self.seen.locations.lock().unwrap().push(location);
    }

    fn offers_parcels(&self) -> bool {
        self.sends.is_some()
    }

    fn take_parcel(&mut self, parcel: &Parcel<'_>) -> u32 {
        self.seen.offers.fetch_add(1, Ordering::SeqCst);
        let mut taken = 0;
        while parcel.to == self.name && taken < parcel.heads.len() as u32 && self.vring.pop(&mut self.chain) {
            self.vring.push(self.chain.id, 0);
            taken += 1;
        }
        taken
    }
}

const SENDER: usize = 1;
const TAKER: usize = 2;

/// The taker of parcels, and its driver.
struct Taker {
    driver: Driver,
    seen: Arc<Seen>,
    handle: Box<dyn TaskHandle>,
}

fn card(name: usize, sends: Option<(usize, Receiver<Offer>, Sender<Vec<u32>>)>) -> (Driver, Arc<Seen>, Card) {
    let ((driver, vring), seen) = (Driver::new(), Arc::<Seen>::default());
    let card = Card { vring, chain: Chain::default(), seen: seen.clone(), name, sends };
    (driver, seen, card)
}

impl Taker {
    /// Starts a taker whose ring has this many chains.
    fn start(executor: &dyn Executor, chains: u16) -> Self {
        let (mut driver, seen, card) = card(TAKER, None);
        driver.submit(chains);
        let handle = executor.spawn(Box::new(card)).unwrap();
        look(&*handle);
        Self { driver, seen, handle }
    }

    fn number(&self) -> u32 {
        self.seen.location().unwrap().task
    }

    fn drain_calls(&self) -> bool {
        rustix::io::read(&self.driver.call, &mut [0; 8]).is_ok()
    }
}

/// A task that always wants more never leaves, and its pool would not end.
impl Drop for Taker {
    fn drop(&mut self) {
        self.seen.wants_more.store(false, Ordering::SeqCst);
    }
}

/// A task that offers parcels.
struct Offerer {
    seen: Arc<Seen>,
    handle: Box<dyn TaskHandle>,
    offers: Sender<Offer>,
    answers: Receiver<Vec<u32>>,
}

impl Offerer {
    /// Starts a task whose parcels are for the task with this name.
    fn start(executor: &dyn Executor, to: usize) -> Self {
        let ((offers, theirs), (answer, answers)) = (channel(), channel());
        let (_driver, seen, card) = card(SENDER, Some((to, theirs, answer)));
        let handle = executor.spawn(Box::new(card)).unwrap();
        look(&*handle);
        Self { seen, handle, offers, answers }
    }

    /// Offers parcels with these numbers of frames to a task. Returns how many each took.
    fn offer(&self, task: u32, parcels: &[usize]) -> Vec<u32> {
        self.offers.send((task, parcels.to_vec())).unwrap();
        // It sleeps if the worker does not poll.
        self.handle.update(Update::Poll);
        self.answers.recv_timeout(DEADLINE).expect("the sender was not polled")
    }
}

fn pool(workers: usize, poll: Poll) -> (Arc<WorkerPool>, Arc<dyn Executor>) {
    let pool = start(&options(workers, poll));
    let executor = pool.executor(1);
    (pool, executor)
}

/// Waits until all earlier updates are in force.
fn look(handle: &dyn TaskHandle) {
    handle.update(Update::Poll).recv_timeout(DEADLINE).unwrap();
}

#[test]
fn frames_that_were_taken_are_published_and_counted() {
    let (_pool, executor) = pool(1, Poll::Always);
    let (taker, sender) = (Taker::start(&*executor, 10), Offerer::start(&*executor, TAKER));
    let counters = taker.driver.counters.clone();
    assert!(taker.drain_calls(), "the call at the start of the ring");
    taker.driver.ask_for_a_call(0);
    assert_eq!(sender.offer(taker.number(), &[3, 0, 4]), [3, 0, 4]);
    // The worker publishes after the poll that has answered.
    eventually("not published", || taker.driver.used() == 7);
    eventually("no call", || taker.drain_calls());
    eventually("not counted", || counters.polls_with_work.get() == 1);
    assert_eq!(counters.requests.get(), 7);
    // Requests of the task itself are no requests of others.
    taker.seen.wait_polled();
    sender.seen.wait_polled();
    let served_others = |seen: &Seen| seen.served_others.load(Ordering::SeqCst);
    assert_eq!((served_others(&taker.seen), served_others(&sender.seen)), (0, 7));
    assert_eq!(sender.offer(taker.number(), &[5, 5]), [3, 0]);
    eventually("not published", || taker.driver.used() == 10);
    assert_eq!(sender.offer(taker.number(), &[1]), [0], "no chains are left");
    assert_eq!(taker.handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 10);
    assert_eq!((counters.requests.get(), counters.polls_with_work.get()), (10, 2));
}

/// Only the polls of a task charge the limits of its device.
#[test]
fn a_task_with_limits_is_offered_nothing() {
    let (pool, executor) = pool(1, Poll::Always);
    let limiter = Arc::<Limiter>::default();
    let taker = Taker::start(&*pool.limited_executor(1, limiter.clone()), 10);
    let sender = Offerer::start(&*executor, TAKER);
    let limit = Limit { sustained: Rate { per_second: 1_000_000, burst: 1000 }, peak: Rate::default() };
    limiter.set(&Limits { requests: [limit; 3], ..Limits::default() });
    assert_eq!(sender.offer(taker.number(), &[3]), [0]);
    assert_eq!(taker.seen.offers(), 0);
    limiter.set(&Limits::default());
    assert_eq!(sender.offer(taker.number(), &[3]), [3]);
}

#[test]
fn numbers_without_another_task_are_refused() {
    let (_pool, executor) = pool(1, Poll::Always);
    // The numbers of these are below and above that of the sender.
    let gone = Taker::start(&*executor, 10);
    let sender = Offerer::start(&*executor, SENDER);
    let above = Taker::start(&*executor, 10);
    let (own, number) = (sender.seen.location().unwrap().task, gone.number());
    let first = gone.seen.location();
    for absent in [own, above.number() + 1, u32::MAX] {
        assert_eq!(sender.offer(absent, &[1]), [0], "{absent}");
    }
    assert_eq!((sender.seen.offers(), gone.seen.offers(), above.seen.offers()), (0, 0, 0));
    // The tasks that exist are asked, and refuse a parcel for another name.
    assert_eq!(sender.offer(number, &[1]), [0]);
    assert_eq!(sender.offer(above.number(), &[1]), [0]);
    assert_eq!((gone.seen.offers(), above.seen.offers()), (1, 1));
    gone.handle.stop().recv_timeout(DEADLINE).unwrap();
    assert_eq!(*gone.seen.locations.lock().unwrap(), [first, None]);
    assert_eq!(sender.offer(number, &[1]), [0]);
    assert_eq!(gone.seen.offers(), 1);
}

#[test]
fn a_sleeping_task_is_not_asked() {
    let (pool, executor) = pool(1, Poll::Never);
    // The one sleeps on its far side, the other on kicks.
    let takers = [Taker::start(&*executor, 10), Taker::start(&*executor, 0)];
    let sender = Offerer::start(&*executor, TAKER);
    // This one is always polled, so there are neighbours whenever the sender is.
    let busy = Taker::start(&*executor, 0);
    busy.seen.wants_more.store(true, Ordering::SeqCst);
    look(&*busy.handle);
    for taker in &takers {
        for _ in 0..20 {
            look(&*taker.handle);
            pool.pass().iter().for_each(|passed| passed.recv_timeout(DEADLINE).unwrap());
            assert_eq!(sender.offer(taker.number(), &[1]), [0]);
        }
        assert_eq!((taker.seen.offers(), taker.driver.used()), (0, 0));
        taker.seen.wants_more.store(true, Ordering::SeqCst);
        look(&*taker.handle);
        taker.seen.wait_polled();
        let taken = sender.offer(taker.number(), &[1]);
        assert_eq!((taken, taker.seen.offers()), (vec![u32::from(taker.driver.avail > 0)], 1));
        taker.seen.wants_more.store(false, Ordering::SeqCst);
    }
}

#[test]
fn a_leaving_task_is_not_asked() {
    for wants_more in [false, true] {
        let (_pool, executor) = pool(1, Poll::Always);
        let (taker, sender) = (Taker::start(&*executor, 10), Offerer::start(&*executor, TAKER));
        taker.seen.in_flight.store(true, Ordering::SeqCst);
        // It stays on the poll list if it wants more, and waits otherwise.
        taker.seen.wants_more.store(wants_more, Ordering::SeqCst);
        assert_eq!(sender.offer(taker.number(), &[1]), [1]);
        let stopping = taker.handle.stop();
        look(&*sender.handle);
        assert_eq!(sender.offer(taker.number(), &[1]), [0]);
        assert_eq!(taker.seen.offers(), 1);
        taker.seen.in_flight.store(false, Ordering::SeqCst);
        taker.seen.wants_more.store(false, Ordering::SeqCst);
        look(&*taker.handle);
        assert_eq!(stopping.recv_timeout(DEADLINE).unwrap().next_avail, 1);
        assert_eq!(sender.offer(0, &[1]), [0]);
    }
}

#[test]
fn a_task_that_has_moved_takes_parcels_on_its_new_worker_only() {
    let (pool, executor) = pool(2, Poll::Always);
    let taker = Taker::start(&*executor, 10);
    let there = Offerer::start(&*executor, TAKER);
    let here = Offerer::start(&*executor, TAKER);
    let first = taker.seen.location().unwrap();
    let worker_of = |offerer: &Offerer| offerer.seen.location().unwrap().worker_id;
    let workers = [first.worker_id, first.worker_id + 1];
    assert_eq!([worker_of(&here), worker_of(&there)], workers);
    assert_eq!(here.offer(first.task, &[1]), [1]);
    assert_eq!(there.offer(first.task, &[1]), [0], "another worker");
    // It cannot move yet, and pops nothing.
    taker.seen.in_flight.store(true, Ordering::SeqCst);
    taker.seen.wants_more.store(true, Ordering::SeqCst);
    pool.move_all(0, 1);
    eventually("the sender moves", || {
        here.seen.location().is_some_and(|location| location.worker_id == workers[1])
    });
    let beside = loop {
        let offerer = Offerer::start(&*executor, TAKER);
        if worker_of(&offerer) == workers[0] {
            break offerer;
        }
    };
    assert_eq!(beside.offer(first.task, &[1]), [0], "it is leaving");
    taker.seen.in_flight.store(false, Ordering::SeqCst);
    taker.seen.wants_more.store(false, Ordering::SeqCst);
    look(&*taker.handle);
    eventually("the task moves", || taker.driver.counters.moves.get() == 1);
    let second = taker.seen.location().unwrap();
    assert_eq!(*taker.seen.locations.lock().unwrap(), [Some(first), None, Some(second)]);
    assert_eq!(second.worker_id, workers[1]);
    assert_eq!(beside.offer(first.task, &[1]), [0], "it is gone");
    assert_eq!(beside.offer(second.task, &[1]), [0], "it is on another worker");
    assert_eq!(taker.seen.offers(), 1);
    for offerer in [&there, &here] {
        assert_eq!(offerer.offer(second.task, &[1]), [1]);
    }
    assert_eq!(taker.handle.stop().recv_timeout(DEADLINE).unwrap().next_avail, 3);
}
