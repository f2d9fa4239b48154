//! A model of a queue that waits for a translation, its session, and a stop. Loom runs it in every order that
//! the memory model allows, up to a number of preemptions.
//!
//! A queue that waits for ever is a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-device --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use super::IotlbMisses;
use kickless_io::Waker;
use kickless_memory::{Access, Iova, IovaRange, Miss};
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use std::sync::Arc;

const MISS: Miss = Miss { page: Iova(0), access: Access::READ };
const QUEUE: u16 = 0;

struct Session {
    misses: IotlbMisses,
    /// The translation is in the table.
    translated: AtomicBool,
    /// The mailbox of the queue's worker. It brings an update or a stop.
    queue_waker: Waker,
    stop: AtomicBool,
    /// The queue has ended.
    done: AtomicBool,
}

fn session() -> Arc<Session> {
    Arc::new(Session {
        misses: IotlbMisses::new(Waker::new().unwrap()),
        translated: AtomicBool::new(false),
        queue_waker: Waker::new().unwrap(),
        stop: AtomicBool::new(false),
        done: AtomicBool::new(false),
    })
}

fn page() -> IovaRange {
    IovaRange::new(Iova(0), 4096)
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

impl Session {
    /// Runs a queue: looks in the table, asks, and waits for an update, until the translation is there or the
    /// queue is stopped. Returns whether the translation was there.
    fn run_queue(&self) -> bool {
        let found = loop {
            if self.stop.load(Ordering::Acquire) {
                break false;
            }
            if self.translated.load(Ordering::Relaxed) {
                self.misses.resolved(QUEUE);
                break true;
            }
            self.misses.ask(QUEUE, &[MISS], &[page()]);
            self.queue_waker.latch().wait();
            self.queue_waker.clear();
        };
        self.done.store(true, Ordering::Release);
        // The session may wait for this. It waits for a miss and for the end with the same waker.
        self.misses.signal().wake();
        found
    }

    /// Adds the translation to the table, as the front-end's update does.
    fn tell(&self) {
        self.translated.store(true, Ordering::Relaxed);
        for queue in self.misses.answered(page(), Access::BOTH) {
            assert_eq!(queue, QUEUE);
            self.queue_waker.wake();
        }
    }
}

/// The front-end sends a translation unasked at the moment at which the queue asks for it, and answers what
/// it is asked.
#[test]
fn an_answer_is_never_missed() {
    check(|| {
        let session = session();
        let queue = thread::spawn({
            let session = session.clone();
            move || session.run_queue()
        });
        session.tell();
        loop {
            session.misses.signal().latch().wait();
            let unsent = session.misses.take_unsent();
            if unsent.is_empty() && session.done.load(Ordering::Acquire) {
                break;
            }
            for (number, miss) in unsent {
                session.tell();
                assert!(session.misses.replied(number, &miss).is_none(), "it was answered");
            }
        }
        assert!(queue.join().unwrap());
    });
}

/// The front-end refuses a translation and sends it later, at the moment at which the queue checks once more.
/// The queue sees it, or is woken by it. (The queue watches before it looks, as a ring does for its areas.)
#[test]
fn an_unasked_translation_is_never_missed() {
    check(|| {
        let session = session();
        let queue = thread::spawn({
            let session = session.clone();
            move || {
                session.misses.watch(QUEUE, vec![page()]);
                while !session.translated.load(Ordering::Relaxed) {
                    session.queue_waker.latch().wait();
                    session.queue_waker.clear();
                }
                session.misses.resolved(QUEUE);
            }
        });
        session.tell();
        queue.join().unwrap();
        session.tell();
        assert!(!session.misses.is_pinned(IovaRange::ALL));
    });
}

/// Two queues miss the same page, or each its own. The same page is sent once, or once more for a queue that
/// asks after the answer to the first. Each queue learns whether the translation exists.
#[test]
fn an_answer_for_two_reaches_both() {
    for (is_there, is_same) in [(false, true), (true, true), (false, false)] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let misses = Arc::new(IotlbMisses::new(Waker::new().unwrap()));
            let table = Arc::new(AtomicBool::new(false));
            let queue_wakers = Arc::new([(); 2].map(|()| (Waker::new().unwrap(), AtomicBool::new(false))));
            let done = Arc::new(AtomicUsize::new(0));
            let queues: Vec<_> = (0..2u16)
                .map(|queue| {
                    let (misses, table, queue_wakers) = (misses.clone(), table.clone(), queue_wakers.clone());
                    let done = done.clone();
                    thread::spawn(move || {
                        let (queue_waker, refused) = &queue_wakers[usize::from(queue)];
                        let own = Miss { page: Iova(u64::from(queue) << 12), ..MISS };
                        let miss = if is_same { MISS } else { own };
                        while !table.load(Ordering::Relaxed) && !refused.load(Ordering::Relaxed) {
                            misses.ask(queue, &[miss], &[]);
                            queue_waker.latch().wait();
                            queue_waker.clear();
                        }
                        misses.resolved(queue);
                        // The second queue ends the session.
                        if done.fetch_add(1, Ordering::AcqRel) == 1 {
                            misses.signal().wake();
                        }
                    })
                })
                .collect();
            let mut sent = 0;
            loop {
                misses.signal().latch().wait();
                let unsent = misses.take_unsent();
                if unsent.is_empty() && done.load(Ordering::Acquire) == 2 {
                    break;
                }
                sent += unsent.len();
                for (number, miss) in unsent {
                    if is_there {
                        table.store(true, Ordering::Relaxed);
                        for queue in misses.answered(page(), Access::BOTH) {
                            queue_wakers[usize::from(queue)].0.wake();
                        }
                    }
                    for queue in misses.replied(number, &miss).into_iter().flat_map(|refusal| refusal.queues)
                    {
                        assert!(!is_there);
                        queue_wakers[usize::from(queue)].1.store(true, Ordering::Relaxed);
                        queue_wakers[usize::from(queue)].0.wake();
                    }
                }
            }
            assert!((1..=2).contains(&sent));
            queues.into_iter().for_each(|queue| queue.join().unwrap());
        });
    }
}

/// The queue is stopped while it waits. The answer comes later, and is ignored.
#[test]
fn an_answer_that_comes_after_the_stop() {
    check(|| {
        let session = session();
        let queue = thread::spawn({
            let session = session.clone();
            move || session.run_queue()
        });
        let asked = session.misses.take_unsent();
        session.stop.store(true, Ordering::Release);
        session.queue_waker.wake();
        assert!(!queue.join().unwrap());
        session.misses.forget(QUEUE);
        assert!(session.misses.take_unsent().is_empty(), "nothing is asked for a queue that has stopped");
        assert!(!session.misses.is_pinned(IovaRange::ALL));
        session.translated.store(true, Ordering::Relaxed);
        assert!(session.misses.answered(page(), Access::BOTH).is_empty());
        for (number, miss) in asked {
            assert_eq!(session.misses.replied(number, &miss), None);
        }
    });
}
