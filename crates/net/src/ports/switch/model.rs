//! Models of an inbox that several rings send to. Loom runs them in every order that the memory model allows.
//!
//! A lost wake is a deadlock, which loom finds. A frame is in one place: with its sender as dropped, or
//! with the receiver.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-net --release --lib switch::model::`
#![allow(clippy::unwrap_used, reason = "tests")]

use crate::frame::loop_queue::{Batch, HEADER, LoopQueue, Near};
use kickless_device::{Neighbours, Parcel, TaskLocation};
use kickless_io::Waker;
use kickless_sync::{Arc, Mutex, lock, loom};
use loom::thread;

const LEN: usize = HEADER + 14;

/// Sends one frame. Returns the number of frames that were dropped.
fn send(queue: &LoopQueue, number: u8) -> usize {
    let mut batch = Batch::default();
    batch.push(LEN).fill(number);
    queue.send(&mut batch)
}

/// Takes all frames. The next ones wake the receiver if there are none.
fn take(queue: &LoopQueue) -> Vec<u8> {
    let mut batch = Batch::default();
    queue.receive(&mut batch);
    if batch.len() == 0 {
        queue.wake_receiver();
    }
    (0..batch.len()).map(|number| batch.frame(number, number * LEN).unwrap()[0]).collect()
}

#[test]
fn a_sleeping_receiver_gets_the_frames_of_all_senders() {
    loom::model(|| {
        let queue = Arc::new(LoopQueue::default());
        let waker = Waker::new().unwrap();
        queue.set_receiver(Some(waker.clone()));
        let senders = [1, 2].map(|number| {
            let queue = queue.clone();
            thread::spawn(move || assert_eq!(send(&queue, number), 0))
        });
        let mut taken = Vec::new();
        while taken.len() < 2 {
            let frames = take(&queue);
            if frames.is_empty() {
                waker.latch().wait();
                waker.clear();
            }
            taken.extend(frames);
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
    });
}

/// A sender on the receiver's worker wakes it without a signal, beside a sender on another one.
#[test]
fn a_near_sender_wakes_the_receiver_for_all() {
    struct Worker(bool);
    impl Neighbours for Worker {
        fn offer(&mut self, _: u32, _: &Parcel<'_>) -> u32 {
            0
        }

        fn wake(&mut self, task: u32) {
            assert_eq!(task, 3);
            self.0 = true;
        }
    }
    loom::model(|| {
        let queue = Arc::new(LoopQueue::default());
        let waker = Waker::new().unwrap();
        queue.set_receiver(Some(waker.clone()));
        queue.set_location(Some(TaskLocation { worker_id: 1, task: 3 }));
        let far = queue.clone();
        let far = thread::spawn(move || assert_eq!(send(&far, 2), 0));
        let mut taken = take(&queue);
        let mut near = Near::default();
        near.worker_id = Some(1);
        let mut batch = Batch::default();
        batch.push(LEN).fill(1);
        assert_eq!(queue.send_from(&mut near, &mut batch).dropped, 0);
        let mut worker = Worker(false);
        near.wake(Some(&mut worker));
        let mut is_awake = worker.0 || !taken.is_empty();
        while taken.len() < 2 {
            if !std::mem::take(&mut is_awake) {
                waker.latch().wait();
                waker.clear();
            }
            let frames = take(&queue);
            is_awake = !frames.is_empty();
            taken.extend(frames);
        }
        far.join().unwrap();
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
    });
}

#[test]
fn a_stop_drops_a_frame_or_its_sender_does() {
    loom::model(|| {
        let queue = Arc::new(LoopQueue::default());
        queue.set_receiver(Some(Waker::new().unwrap()));
        let sender = {
            let queue = queue.clone();
            thread::spawn(move || send(&queue, 1))
        };
        let before = take(&queue).len();
        queue.set_receiver(None);
        let stopped = take(&queue).len();
        queue.set_receiver(Some(Waker::new().unwrap()));
        let dropped = sender.join().unwrap();
        let after = take(&queue).len();
        assert_eq!(stopped, 0, "a frame for a receiver that has stopped");
        assert!(before + after + dropped <= 1);
    });
}

/// A sender chooses among queues without their locks, while the ring of one stops and starts again. It may
/// find the queue open that has just stopped.
#[test]
fn a_queue_stops_after_it_was_chosen() {
    loom::model(|| {
        let queue = Arc::new(LoopQueue::default());
        queue.set_receiver(Some(Waker::new().unwrap()));
        let sender = {
            let queue = queue.clone();
            thread::spawn(move || if queue.is_open() { send(&queue, 1) } else { 1 })
        };
        queue.set_receiver(None);
        let stopped = take(&queue).len();
        queue.set_receiver(Some(Waker::new().unwrap()));
        let dropped = sender.join().unwrap();
        assert_eq!(stopped, 0, "a frame for a receiver that has stopped");
        assert!(take(&queue).len() + dropped <= 1);
        assert!(queue.is_open());
    });
}

/// Two cards send to one another, and both stop.
#[test]
fn two_cards_stop_at_the_same_time() {
    loom::model(|| {
        let queues = Arc::new([LoopQueue::default(), LoopQueue::default()]);
        for queue in queues.iter() {
            queue.set_receiver(Some(Waker::new().unwrap()));
        }
        let cards = [0, 1].map(|own: usize| {
            let queues = queues.clone();
            thread::spawn(move || {
                let dropped = send(&queues[1 - own], 1);
                let taken = take(&queues[own]).len();
                queues[own].set_receiver(None);
                (dropped, taken)
            })
        });
        let [(dropped_0, taken_0), (dropped_1, taken_1)] = cards.map(|card| card.join().unwrap());
        assert!(dropped_0 + taken_1 <= 1 && dropped_1 + taken_0 <= 1);
        assert!(queues.iter().all(|queue| take(queue).is_empty() && !queue.is_open()));
    });
}

/// A receive task moves to the worker of a sender. The sender finds it there only when it is, and what goes
/// directly is behind the frames that went to the inbox before.
#[test]
fn a_frame_that_goes_directly_is_behind_those_in_the_inbox() {
    loom::model(|| {
        const OWN: u32 = 0;
        let queue = Arc::new(LoopQueue::default());
        queue.set_receiver(Some(Waker::new().unwrap()));
        queue.set_location(Some(TaskLocation { worker_id: 1, task: 3 }));
        // The receive task on its way: the frames that it has taken.
        let mailbox = Arc::new(Mutex::new(None));
        let other = {
            let (queue, mailbox) = (queue.clone(), mailbox.clone());
            thread::spawn(move || {
                let taken = take(&queue);
                queue.set_location(None);
                *lock(&mailbox) = Some(taken);
            })
        };
        let mut here: Option<Vec<u8>> = None;
        for number in 1..=3 {
            match queue.task_on(OWN) {
                Some(task) if !queue.has_frames() => {
                    assert_eq!(task, 7);
                    here.as_mut().unwrap().push(number);
                }
                _ => assert_eq!(send(&queue, number), 0),
            }
            if here.is_none()
                && let Some(taken) = lock(&mailbox).take()
            {
                queue.set_location(Some(TaskLocation { worker_id: OWN, task: 7 }));
                here = Some(taken);
            } else if number == 2
                && let Some(taken) = &mut here
            {
                taken.extend(take(&queue));
            }
        }
        other.join().unwrap();
        let mut taken = here.unwrap_or_else(|| lock(&mailbox).take().unwrap());
        taken.extend(take(&queue));
        taken.extend(take(&queue));
        assert_eq!(taken, [1, 2, 3]);
    });
}
