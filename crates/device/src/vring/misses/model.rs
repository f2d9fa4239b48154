//! A queue that waits for a translation, its session, and a stop, in every order that the memory model allows, up to a number of
//! preemptions.
//!
//! A queue that waits for ever is a deadlock, which loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-device --release --lib model`
#![allow(clippy::unwrap_used, reason = "tests")]

use super::Misses;
use kickless_io::Waker;
use kickless_memory::{Access, Iova, IovaRange, Miss};
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use std::sync::Arc;

const MISS: Miss = Miss { page: Iova(0), access: Access::READ };
const QUEUE: u16 = 0;

struct Shared {
    misses: Misses,
    /// The entry of the table.
    there: AtomicBool,
    /// The mailbox of the queue's worker: a look, or a stop.
    mail: Waker,
    stop: AtomicBool,
    /// The queue has done what it had to.
    done: AtomicBool,
}

fn shared() -> Arc<Shared> {
    Arc::new(Shared {
        misses: Misses::new(Waker::new().unwrap()),
        there: AtomicBool::new(false),
        mail: Waker::new().unwrap(),
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

impl Shared {
    /// Looks, asks, stands, and looks again when it is told to, until the translation is there or it is to stop. Whether it
    /// was there.
    fn run_queue(&self) -> bool {
        let found = loop {
            if self.stop.load(Ordering::Acquire) {
                break false;
            }
            if self.there.load(Ordering::Relaxed) {
                self.misses.resolved(QUEUE);
                break true;
            }
            self.misses.ask(QUEUE, &[MISS], &[page()]);
            self.mail.latch().wait();
            self.mail.clear();
        };
        self.done.store(true, Ordering::Release);
        // The session may wait for this; for it, a miss and the end are one event.
        self.misses.signal().wake();
        found
    }

    /// The front-end's update.
    fn tell(&self) {
        self.there.store(true, Ordering::Relaxed);
        for queue in self.misses.answered(page(), Access::BOTH) {
            assert_eq!(queue, QUEUE);
            self.mail.wake();
        }
    }
}

/// The front-end tells something unasked, just when it is asked for; and answers what it is asked.
#[test]
fn an_answer_is_never_missed() {
    check(|| {
        let shared = shared();
        let queue = thread::spawn({
            let shared = shared.clone();
            move || shared.run_queue()
        });
        shared.tell();
        loop {
            shared.misses.signal().latch().wait();
            let unsent = shared.misses.take_unsent();
            if unsent.is_empty() && shared.done.load(Ordering::Acquire) {
                break;
            }
            for (number, miss) in unsent {
                shared.tell();
                assert!(shared.misses.replied(number, &miss).is_none(), "it was answered");
            }
        }
        assert!(queue.join().unwrap());
    });
}

/// What the front-end has not got, it tells of its own accord later, just when the queue looks once more: the queue sees it, or is woken
/// by it. (It watches before it looks, as a ring does for its areas.)
#[test]
fn what_comes_unasked_is_never_missed() {
    check(|| {
        let shared = shared();
        let queue = thread::spawn({
            let shared = shared.clone();
            move || {
                shared.misses.watch(QUEUE, vec![page()]);
                while !shared.there.load(Ordering::Relaxed) {
                    shared.mail.latch().wait();
                    shared.mail.clear();
                }
                shared.misses.resolved(QUEUE);
            }
        });
        shared.tell();
        queue.join().unwrap();
        shared.tell();
        assert!(!shared.misses.is_pinned(IovaRange::ALL));
    });
}

/// Two queues miss the same page, or each its own. The same is sent once, or once more for who came after the answer to the first; and
/// each is told what became of it: that it is there, or that there is none.
#[test]
fn an_answer_for_two_reaches_both() {
    for (is_there, is_same) in [(false, true), (true, true), (false, false)] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let misses = Arc::new(Misses::new(Waker::new().unwrap()));
            let table = Arc::new(AtomicBool::new(false));
            let mails = Arc::new([(); 2].map(|()| (Waker::new().unwrap(), AtomicBool::new(false))));
            let done = Arc::new(AtomicUsize::new(0));
            let queues: Vec<_> = (0..2u16)
                .map(|queue| {
                    let (misses, table, mails) = (misses.clone(), table.clone(), mails.clone());
                    let done = done.clone();
                    thread::spawn(move || {
                        let (mail, refused) = &mails[usize::from(queue)];
                        let own = Miss { page: Iova(u64::from(queue) << 12), ..MISS };
                        let miss = if is_same { MISS } else { own };
                        while !table.load(Ordering::Relaxed) && !refused.load(Ordering::Relaxed) {
                            misses.ask(queue, &[miss], &[]);
                            mail.latch().wait();
                            mail.clear();
                        }
                        misses.resolved(queue);
                        // The second of them ends the session.
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
                            mails[usize::from(queue)].0.wake();
                        }
                    }
                    for queue in misses.replied(number, &miss).into_iter().flat_map(|refusal| refusal.queues)
                    {
                        assert!(!is_there);
                        mails[usize::from(queue)].1.store(true, Ordering::Relaxed);
                        mails[usize::from(queue)].0.wake();
                    }
                }
            }
            assert!((1..=2).contains(&sent));
            queues.into_iter().for_each(|queue| queue.join().unwrap());
        });
    }
}

/// The queue is stopped while it waits; the answer comes after that, and finds nobody.
#[test]
fn an_answer_that_comes_after_the_stop() {
    check(|| {
        let shared = shared();
        let queue = thread::spawn({
            let shared = shared.clone();
            move || shared.run_queue()
        });
        let asked = shared.misses.take_unsent();
        shared.stop.store(true, Ordering::Release);
        shared.mail.wake();
        assert!(!queue.join().unwrap());
        shared.misses.forget(QUEUE);
        assert!(shared.misses.take_unsent().is_empty(), "nothing is asked for a queue that has stopped");
        assert!(!shared.misses.is_pinned(IovaRange::ALL));
        shared.there.store(true, Ordering::Relaxed);
        assert!(shared.misses.answered(page(), Access::BOTH).is_empty());
        for (number, miss) in asked {
            assert_eq!(shared.misses.replied(number, &miss), None);
        }
    });
}
