//! Models of work that comes to a worker, moves to another, is parked and ends. Loom runs them in every order
//! that the memory model allows, up to a number of preemptions.
//!
//! The loops around the mailbox and the peers are models of the real one ([`worker`], [`receiver`]). The
//! suppression of kicks is that of the real rings. A lost item or kick is a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-worker --release --lib model`
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod events;
mod receiver;
mod ring;
mod worker;

use crate::mailbox::{Mailbox, Placement, WorkItem};
use crate::peers::Peers;
use events::Events;
use kickless_device::{Leave, Position, Stopped, Update};
use kickless_sync::mpsc::{Receiver, Sender, channel};
use loom::thread;
use receiver::{FRAMES, FarSide, Receiver as Receive};
use ring::{END, Ring};
use std::sync::Arc;
use worker::{KEY, Worker, peers, placement};

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Makes a mailbox, and the events that its worker waits for.
fn mailbox() -> (Arc<Mailbox>, Arc<Events>) {
    let events = Arc::new(Events::default());
    (Arc::new(Mailbox::new(events.waker())), events)
}

/// Asks for an answer. The receiver is disconnected if the worker has ended.
fn ask(mailbox: &Mailbox) -> Receiver<()> {
    let (done, answer) = channel();
    let _ = mailbox.put(WorkItem::Update(KEY, Update::Poll, done));
    answer
}

/// Answers items until the worker is asked to end. Returns the number of answers.
fn answer_all(mailbox: &Mailbox, events: &Events) -> u32 {
    let mut answers = 0;
    loop {
        events.sleep();
        for item in mailbox.take() {
            match item {
                WorkItem::Update(_, _, done) => done.send(()).unwrap(),
                WorkItem::End => {
                    mailbox.close();
                    return answers;
                }
                _ => panic!("an item that the model never sends"),
            }
            answers += 1;
        }
    }
}

/// Starts a thread that asks once.
fn asker(mailbox: &Arc<Mailbox>) -> thread::JoinHandle<Option<()>> {
    let mailbox = mailbox.clone();
    thread::spawn(move || ask(&mailbox).recv().ok())
}

/// Makes a mailbox, a worker that answers its items, and a thread that asks.
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
        assert!(mailbox.put(WorkItem::End).is_ok());
        assert_eq!(worker.join().unwrap(), 3);
    });
}

/// An item before the end is answered. An item at the same time is answered, or its sender learns that there
/// is no answer.
#[test]
fn no_sender_waits_for_a_worker_that_ends() {
    check(2, || {
        let (mailbox, worker, asker) = answered();
        let before = ask(&mailbox);
        assert!(mailbox.put(WorkItem::End).is_ok());
        let after = ask(&mailbox);
        assert_eq!(before.recv().ok(), Some(()));
        after.recv().ok();
        let meanwhile = asker.join().unwrap();
        assert!(worker.join().unwrap() >= 1 + u32::from(meanwhile.is_some()));
        assert!(mailbox.put(WorkItem::End).is_err());
    });
}

/// A worker that has failed takes nothing more from its mailbox.
#[test]
fn no_sender_waits_for_a_worker_that_fails() {
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

/// Puts in a work item for the queue.
fn put<T>(peers: &Peers, placement: &Placement, item: impl FnOnce(Sender<T>) -> WorkItem) -> Receiver<T> {
    let (done, answer) = channel();
    let _ = peers.put(&placement.holder, item(done));
    answer
}

/// Two workers. The first has a queue.
struct Pair {
    peers: Arc<Peers>,
    placement: Placement,
    ring: Arc<Ring>,
    threads: [thread::JoinHandle<()>; 2],
}

impl Pair {
    fn start() -> Self {
        let ((peers, events), placement, ring) = (peers(), placement(), Arc::new(Ring::new(true)));
        let first = Worker::new(&peers, 0, &events[0], &ring).with_queue(placement.clone());
        let second = Worker::new(&peers, 1, &events[1], &ring);
        let threads = [thread::spawn(|| first.run()), thread::spawn(|| second.run())];
        Self { peers, placement, ring, threads }
    }

    fn move_to(&self, from: usize, to: usize) {
        let _ = self.peers.workers[from].mailbox.put(WorkItem::MoveAll(to));
    }

    /// Asks for two updates and a stop, and calls `between` after the first.
    fn ask(&self, between: impl FnOnce()) -> (Receiver<()>, Receiver<()>, Receiver<Stopped>) {
        let first = put(&self.peers, &self.placement, |done| WorkItem::Update(KEY, Update::Poll, done));
        between();
        let second =
            put(&self.peers, &self.placement, |done| WorkItem::Update(KEY, Update::Kick(None), done));
        (first, second, put(&self.peers, &self.placement, |done| WorkItem::Stop(KEY, Leave::Nothing, done)))
    }

    fn park(&self) -> Receiver<Position> {
        put(&self.peers, &self.placement, |done| WorkItem::Park(KEY, done))
    }

    fn unpark(&self) {
        self.peers.unpark(KEY, &self.placement);
    }

    fn end(&self, worker_id: usize) {
        let _ = self.peers.workers[worker_id].mailbox.put(WorkItem::End);
    }

    /// Returns the items of the queue in their order, once both workers have ended.
    fn join(self) -> Vec<u8> {
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.ring.items()
    }
}

/// The queue moves while work items come, and back if there is time. Each item is answered once, in order, by
/// the worker that has the queue.
#[test]
fn a_queue_that_moves_takes_its_work_items_along() {
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

/// The queue stays where it is if the other worker has ended.
#[test]
fn a_queue_that_cannot_move_is_not_lost() {
    check(2, || {
        let ((peers, events), placement, ring) = (peers(), placement(), Arc::new(Ring::new(true)));
        let worker = Worker::new(&peers, 0, &events[0], &ring).with_queue(placement.clone());
        peers.workers[1].mailbox.close();
        let worker = thread::spawn(|| worker.run());
        assert!(peers.workers[0].mailbox.put(WorkItem::MoveAll(1)).is_ok());
        assert_eq!(
            put(&peers, &placement, |done| WorkItem::Update(KEY, Update::Poll, done)).recv().ok(),
            Some(())
        );
        assert!(
            put(&peers, &placement, |done| WorkItem::Stop(KEY, Leave::Nothing, done)).recv().ok().is_some()
        );
        assert!(peers.workers[0].mailbox.put(WorkItem::End).is_ok());
        worker.join().unwrap();
    });
}

/// The same, but the workers end. Some items are not answered, and their senders learn of it. Answered items
/// come before unanswered ones.
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
            let items = pair.join();
            assert!([1, 2, 3].starts_with(&items), "{items:?}");
            assert!(stopped.is_none() || items.len() == 3);
        });
    }
}

/// The queue is to be parked while work items come and it moves, and goes on. Each item is answered once, in
/// order. If a stop comes first, the queue is not parked.
#[test]
fn a_queue_that_is_parked_keeps_its_work_items() {
    for moves in [false, true] {
        check(2, move || {
            let pair = Pair::start();
            let mut parked = None;
            let (first, second, stopped) = pair.ask(|| {
                if moves {
                    pair.move_to(0, 1);
                }
                parked = Some(pair.park());
            });
            pair.unpark();
            assert_eq!((first.recv().ok(), second.recv().ok()), (Some(()), Some(())));
            assert!(stopped.recv().ok().is_some());
            parked.unwrap().recv().ok();
            pair.end(0);
            pair.end(1);
            assert_eq!(pair.join(), [1, 2, 3]);
        });
    }
}

/// Work items that come after the answer wait until the queue goes on. Those before it are done by then.
#[test]
fn a_parked_queue_is_left_alone() {
    check(2, || {
        let pair = Pair::start();
        let (first, second, stopped) = pair.ask(|| {
            pair.move_to(0, 1);
            assert!(pair.park().recv().ok().is_some());
            assert_eq!(pair.ring.items(), [1]);
        });
        assert_eq!(pair.ring.items(), [1]);
        assert_eq!(first.recv().ok(), Some(()));
        pair.unpark();
        assert_eq!(second.recv().ok(), Some(()));
        assert!(stopped.recv().ok().is_some());
        pair.end(0);
        pair.end(1);
        assert_eq!(pair.join(), [1, 2, 3]);
    });
}

/// One thread parks the queue and lets it go on, before or after the answer, while another one asks.
#[test]
fn a_queue_that_is_parked_answers_another_thread() {
    for waits in [false, true] {
        check(2, move || {
            let ((peers, events), placement, ring) = (peers(), placement(), Arc::new(Ring::new(true)));
            let worker = Worker::new(&peers, 0, &events[0], &ring).with_queue(placement.clone());
            let worker = thread::spawn(|| worker.run());
            let asker = thread::spawn({
                let (peers, placement) = (peers.clone(), placement.clone());
                move || put(&peers, &placement, |done| WorkItem::Update(KEY, Update::Poll, done)).recv().ok()
            });
            let parked: Receiver<Position> = put(&peers, &placement, |done| WorkItem::Park(KEY, done));
            if waits {
                assert!(parked.recv().ok().is_some());
            }
            peers.unpark(KEY, &placement);
            assert_eq!(asker.join().unwrap(), Some(()));
            assert!(peers.workers[0].mailbox.put(WorkItem::End).is_ok());
            worker.join().unwrap();
            assert_eq!(ring.items(), [1]);
        });
    }
}

/// The workers end meanwhile. Each receiver is answered or disconnected.
#[test]
fn a_queue_that_is_parked_while_the_workers_end() {
    check(2, || {
        let pair = Pair::start();
        let (first, second, stopped) = pair.ask(|| {
            let parked = pair.park();
            pair.end(0);
            parked.recv().ok();
            pair.unpark();
        });
        let (first, second) = (first.recv().ok(), second.recv().ok());
        let stopped = stopped.recv().ok();
        assert!(first >= second, "{first:?} {second:?}");
        pair.end(1);
        let items = pair.join();
        assert!([1, 2, 3].starts_with(&items), "{items:?}");
        assert!(stopped.is_none() || items.len() == 3);
    });
}

/// The reason for which the queue leaves its worker.
#[derive(Clone, Copy)]
enum Leaves {
    /// It is stopped, and another thread continues it.
    Stopped,
    /// Its worker ends, and another thread continues it.
    Ended,
    /// It moves.
    Moved,
    /// It is parked, and another process continues it.
    Parked,
    /// It is parked and goes on. With `waits`, only after the answer.
    GoesOn { waits: bool },
}

/// A driver publishes requests, and kicks if asked to, while the worker polls, arms, and lets the queue go.
/// Its next owner polls once and then sleeps until there is a kick. If the kick for a remaining request does
/// not come, this is a deadlock. If the old worker touches the queue after it let go, this is a race. Loom
/// finds both.
fn leave(event_idx: bool, leaves: Leaves) {
    check(2, move || {
        let ((peers, events), placement, ring) = (peers(), placement(), Arc::new(Ring::new(event_idx)));
        let worker = Worker::new(&peers, 0, &events[0], &ring).with_queue(placement.clone());
        let goes_on = matches!(leaves, Leaves::GoesOn { .. });
        let worker = thread::spawn(move || if goes_on { worker.serve_until(END) } else { worker.run() });
        let driver = thread::spawn({
            let ring = ring.clone();
            move || ring.drive()
        });
        let next = Worker::new(&peers, 1, &events[1], &ring);
        let old = &peers.workers[0].mailbox;
        match leaves {
            Leaves::Stopped => {
                let stopped =
                    put(&peers, &placement, |done| WorkItem::Stop(KEY, Leave::Nothing, done)).recv().unwrap();
                assert_eq!(stopped.next_avail, ring.next());
                next.with_queue(placement).serve_until(END);
                assert!(old.put(WorkItem::End).is_ok());
                worker.join().unwrap();
            }
            Leaves::Ended => {
                assert!(old.put(WorkItem::End).is_ok());
                worker.join().unwrap();
                next.with_queue(placement).serve_until(END);
            }
            Leaves::Moved => {
                assert!(old.put(WorkItem::MoveAll(1)).is_ok());
                next.serve_until(END);
                assert!(old.put(WorkItem::End).is_ok());
                worker.join().unwrap();
            }
            Leaves::Parked => {
                let parked = put(&peers, &placement, |done| WorkItem::Park(KEY, done)).recv().unwrap();
                assert_eq!(parked.next_avail, ring.next());
                next.with_queue(placement.clone()).serve_until(END);
                assert!(old.put(WorkItem::End).is_ok());
                worker.join().unwrap();
            }
            Leaves::GoesOn { waits } => {
                let parked: Receiver<Position> = put(&peers, &placement, |done| WorkItem::Park(KEY, done));
                // The worker may have served everything, and ended.
                if waits && let Ok(position) = parked.recv() {
                    assert_eq!(position.next_avail, ring.next());
                }
                peers.unpark(KEY, &placement);
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

#[test]
fn no_kick_is_lost_when_a_queue_is_parked() {
    leave(false, Leaves::Parked);
    leave(true, Leaves::Parked);
}

#[test]
fn no_kick_is_lost_when_a_queue_goes_on() {
    for waits in [false, true] {
        leave(false, Leaves::GoesOn { waits });
        leave(true, Leaves::GoesOn { waits });
    }
}

/// A driver offers buffers, and kicks if asked to, while another process sends frames. It is a deadlock if
/// the worker sleeps on kicks or on the far side while it could carry a frame.
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
            // The stop waits neither for the other frame nor for a buffer, and the next worker has all of the
            // credit.
            let (done, answer) = channel();
            assert!(mailbox.put(WorkItem::Stop(KEY, Leave::Nothing, done)).is_ok());
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
