//! How work comes to a worker, moves to another and ends, in every order that the memory model allows, up to a number of
//! preemptions.
//!
//! The loops around the mailbox and the peers are models of the real one ([`worker`], [`receiver`]), and the ring's suppression
//! is that of the rings. An item or a kick that is lost is a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-worker --release --lib model`
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod events;
mod receiver;
mod ring;
mod worker;

use crate::mailbox::{Item, Mailbox, Tenant};
use crate::peers::Peers;
use events::Events;
use kickless_device::{Stopped, Update};
use kickless_sync::mpsc::{Receiver, Sender, channel};
use loom::thread;
use receiver::{FRAMES, FarSide, Receiver as Receive};
use ring::{END, Ring};
use std::sync::Arc;
use worker::{KEY, Worker, peers, tenant};

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A mailbox, and what its worker waits for.
fn mailbox() -> (Arc<Mailbox>, Arc<Events>) {
    let events = Arc::new(Events::default());
    (Arc::new(Mailbox::new(events.waker())), events)
}

/// Asks for an answer; there is none if the worker has ended.
fn ask(mailbox: &Mailbox) -> Receiver<()> {
    let (done, answer) = channel();
    let _ = mailbox.put(Item::Update(KEY, Update::Look, done));
    answer
}

/// A worker that answers until it is to end; how many answers it gave.
fn answer_all(mailbox: &Mailbox, events: &Events) -> u32 {
    let mut answers = 0;
    loop {
        events.sleep();
        for item in mailbox.take() {
            match item {
                Item::Update(_, _, done) => done.send(()).unwrap(),
                Item::End => {
                    mailbox.close();
                    return answers;
                }
                _ => panic!("nobody put that in"),
            }
            answers += 1;
        }
    }
}

/// Somebody who asks once.
fn asker(mailbox: &Arc<Mailbox>) -> thread::JoinHandle<Option<()>> {
    let mailbox = mailbox.clone();
    thread::spawn(move || ask(&mailbox).recv().ok())
}

/// A mailbox, a worker that answers what comes to it, and somebody who asks.
fn answered() -> (Arc<Mailbox>, thread::JoinHandle<u32>, thread::JoinHandle<Option<()>>) {
    let (mailbox, events) = mailbox();
    let worker = thread::spawn({
        let mailbox = mailbox.clone();
        move || answer_all(&mailbox, &events)
    });
    let asker = asker(&mailbox);
    (mailbox, worker, asker)
}

#[test]
fn every_item_is_answered() {
    check(2, || {
        let (mailbox, worker, asker) = answered();
        let (first, second) = (ask(&mailbox), ask(&mailbox));
        assert_eq!((first.recv().ok(), second.recv().ok()), (Some(()), Some(())));
        assert_eq!(asker.join().unwrap(), Some(()));
        assert!(mailbox.put(Item::End).is_ok());
        assert_eq!(worker.join().unwrap(), 3);
    });
}

/// Who asks before the end is answered; who asks meanwhile is answered, or learns that there will be no answer.
#[test]
fn nobody_waits_for_a_worker_that_ends() {
    check(2, || {
        let (mailbox, worker, asker) = answered();
        let before = ask(&mailbox);
        assert!(mailbox.put(Item::End).is_ok());
        let after = ask(&mailbox);
        assert_eq!(before.recv().ok(), Some(()));
        after.recv().ok();
        let meanwhile = asker.join().unwrap();
        assert!(worker.join().unwrap() >= 1 + u32::from(meanwhile.is_some()));
        assert!(mailbox.put(Item::End).is_err());
    });
}

/// A worker that fails does not look at its mailbox any more.
#[test]
fn nobody_waits_for_a_worker_that_fails() {
    check(3, || {
        let (mailbox, _events) = mailbox();
        let worker = thread::spawn({
            let mailbox = mailbox.clone();
            move || mailbox.close()
        });
        let asker = asker(&mailbox);
        assert_eq!(ask(&mailbox).recv().ok(), None);
        assert_eq!(asker.join().unwrap(), None);
        worker.join().unwrap();
    });
}

/// Asks for something of the queue.
fn put<T>(peers: &Peers, tenant: &Tenant, item: impl FnOnce(Sender<T>) -> Item) -> Receiver<T> {
    let (done, answer) = channel();
    let _ = peers.put(&tenant.worker_id, item(done));
    answer
}

/// Two workers, of which the first has a queue.
struct Pair {
    peers: Arc<Peers>,
    tenant: Tenant,
    ring: Arc<Ring>,
    threads: [thread::JoinHandle<()>; 2],
}

impl Pair {
    fn start() -> Self {
        let ((peers, events), tenant, ring) = (peers(), tenant(), Arc::new(Ring::new(true)));
        let first = Worker::new(&peers, 0, &events[0], &ring).with_queue(tenant.clone());
        let second = Worker::new(&peers, 1, &events[1], &ring);
        let threads = [thread::spawn(|| first.run()), thread::spawn(|| second.run())];
        Self { peers, tenant, ring, threads }
    }

    fn move_to(&self, from: usize, to: usize) {
        let _ = self.peers.workers[from].mailbox.put(Item::MoveAll(to));
    }

    /// Two updates and a stop, with something else after the first.
    fn ask(&self, between: impl FnOnce()) -> (Receiver<()>, Receiver<()>, Receiver<Stopped>) {
        let first = put(&self.peers, &self.tenant, |done| Item::Update(KEY, Update::Look, done));
        between();
        let second = put(&self.peers, &self.tenant, |done| Item::Update(KEY, Update::Kick(None), done));
        (first, second, put(&self.peers, &self.tenant, |done| Item::Stop(KEY, done)))
    }

    fn end(&self, worker_id: usize) {
        let _ = self.peers.workers[worker_id].mailbox.put(Item::End);
    }

    /// What the queue was asked, in that order, once both workers have ended.
    fn join(self) -> Vec<u8> {
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.ring.asked()
    }
}

/// The queue moves while it is asked something, and back if there is time: each request is answered once, in order, by the
/// worker that has it.
#[test]
fn a_queue_that_moves_takes_along_what_it_was_asked() {
    for back in [false, true] {
        check(2, move || {
            let pair = Pair::start();
            let (first, second, stopped) = pair.ask(|| {
                pair.move_to(0, 1);
                if back {
                    pair.move_to(1, 0);
                }
            });
            assert_eq!((first.recv().ok(), second.recv().ok()), (Some(()), Some(())));
            assert!(stopped.recv().ok().is_some());
            pair.end(0);
            pair.end(1);
            assert_eq!(pair.join(), [1, 2, 3]);
        });
    }
}

/// It stays where it is if the other worker has ended.
#[test]
fn a_queue_that_cannot_move_is_not_lost() {
    check(2, || {
        let ((peers, events), tenant, ring) = (peers(), tenant(), Arc::new(Ring::new(true)));
        let worker = Worker::new(&peers, 0, &events[0], &ring).with_queue(tenant.clone());
        peers.workers[1].mailbox.close();
        let worker = thread::spawn(|| worker.run());
        assert!(peers.workers[0].mailbox.put(Item::MoveAll(1)).is_ok());
        assert_eq!(put(&peers, &tenant, |done| Item::Update(KEY, Update::Look, done)).recv().ok(), Some(()));
        assert!(put(&peers, &tenant, |done| Item::Stop(KEY, done)).recv().ok().is_some());
        assert!(peers.workers[0].mailbox.put(Item::End).is_ok());
        worker.join().unwrap();
    });
}

/// The same, but the workers end: some of it is not answered, and nobody waits for it. What is answered comes before what is not.
#[test]
fn a_queue_that_moves_while_the_workers_end() {
    for order in [[0, 1], [1, 0]] {
        check(2, move || {
            let pair = Pair::start();
            let (first, second, stopped) = pair.ask(|| {
                pair.move_to(0, 1);
                order.iter().for_each(|worker_id| pair.end(*worker_id));
            });
            let (first, second) = (first.recv().ok(), second.recv().ok());
            let stopped = stopped.recv().ok();
            assert!(first >= second, "{first:?} {second:?}");
            let asked = pair.join();
            assert!([1, 2, 3].starts_with(&asked), "{asked:?}");
            assert!(stopped.is_none() || asked.len() == 3);
        });
    }
}

/// How the queue leaves its worker.
#[derive(Clone, Copy)]
enum Leaves {
    /// It is stopped, and somebody else begins where it ended.
    Stopped,
    /// Its worker is to end, and somebody else begins then.
    Ended,
    /// It moves.
    Moved,
}

/// A driver publishes requests, and kicks if asked to, while the worker polls, arms, and lets the queue go. Whoever has it then looks once,
/// and after that sleeps until there is a kick: it is a deadlock if the kick for a request that is left does not come. That the old
/// worker touches the queue after it said that it has let go is a race, which loom finds.
fn leave(event_idx: bool, leaves: Leaves) {
    check(2, move || {
        let ((peers, events), tenant, ring) = (peers(), tenant(), Arc::new(Ring::new(event_idx)));
        let worker = Worker::new(&peers, 0, &events[0], &ring).with_queue(tenant.clone());
        let worker = thread::spawn(|| worker.run());
        let driver = thread::spawn({
            let ring = ring.clone();
            move || ring.drive()
        });
        let next = Worker::new(&peers, 1, &events[1], &ring);
        let old = &peers.workers[0].mailbox;
        match leaves {
            Leaves::Stopped => {
                let stopped = put(&peers, &tenant, |done| Item::Stop(KEY, done)).recv().unwrap();
                assert_eq!(stopped.next_avail, ring.next());
                next.with_queue(tenant).serve_until(END);
                assert!(old.put(Item::End).is_ok());
                worker.join().unwrap();
            }
            Leaves::Ended => {
                assert!(old.put(Item::End).is_ok());
                worker.join().unwrap();
                next.with_queue(tenant).serve_until(END);
            }
            Leaves::Moved => {
                assert!(old.put(Item::MoveAll(1)).is_ok());
                next.serve_until(END);
                assert!(old.put(Item::End).is_ok());
                worker.join().unwrap();
            }
        }
        driver.join().unwrap();
    });
}

#[test]
fn no_kick_is_lost_when_a_queue_is_stopped() {
    leave(false, Leaves::Stopped);
    leave(true, Leaves::Stopped);
}

#[test]
fn no_kick_is_lost_when_a_worker_ends() {
    leave(false, Leaves::Ended);
    leave(true, Leaves::Ended);
}

#[test]
fn no_kick_is_lost_when_a_queue_moves() {
    leave(false, Leaves::Moved);
    leave(true, Leaves::Moved);
}

/// A driver offers buffers, and kicks if asked to, while another process sends frames. It is a deadlock if the worker sleeps on
/// kicks or on the far side while it could carry a frame.
fn receive(event_idx: bool, stopped: bool) {
    check(2, move || {
        let (ring, far_side) = (Arc::new(Ring::new(event_idx)), Arc::<FarSide>::default());
        let (worker, mailbox) = Receive::new(&ring, &far_side);
        let driver = thread::spawn({
            let ring = ring.clone();
            move || ring.drive()
        });
        if !stopped {
            let worker = thread::spawn(|| worker.carry_all());
            (0..FRAMES).for_each(|_| far_side.send());
            worker.join().unwrap();
        } else {
            let worker = thread::spawn(|| worker.run());
            far_side.send();
            // The stop waits neither for the other frame nor for a buffer, and the next worker has all that was credit.
            let (done, answer) = channel();
            assert!(mailbox.put(Item::Stop(KEY, done)).is_ok());
            assert_eq!(answer.recv().unwrap().next_avail, ring.next());
            worker.join().unwrap();
            far_side.send();
            Receive::new(&ring, &far_side).0.carry_all();
        }
        assert_eq!(ring.next(), END);
        driver.join().unwrap();
    });
}

#[test]
fn a_receive_task_sleeps_through_no_frame_and_no_buffer() {
    receive(false, false);
    receive(true, false);
}

#[test]
fn a_receive_task_that_is_stopped_leaves_its_credit() {
    receive(false, true);
    receive(true, true);
}
