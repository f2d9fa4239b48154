//! Models of the dirty log, in every order that the memory model allows.
//!
//! They test the functions that [`kickless_memory::Marks`] uses, on words that loom watches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p kickless-memory --release --test log_loom`
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_memory::log::{MarkBatch, Words};
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// A bitmap of one word, which its owner can withdraw.
struct Bitmap {
    word: AtomicU64,
    gone: AtomicBool,
}

impl Bitmap {
    fn new(bits: u64) -> Self {
        Self { word: AtomicU64::new(bits), gone: AtomicBool::new(false) }
    }

    /// Does steps H1 and H2 of the argument in `kickless_memory::log`.
    fn harvest(&self) -> u64 {
        let bits = self.word.swap(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        bits
    }
}

impl Words for Bitmap {
    fn load(&self, _: u64) -> u64 {
        // Relaxed: this load cannot see the store of `true` if messages order all accesses before that store.
        assert!(!self.gone.load(Ordering::Relaxed), "written after it was taken back");
        self.word.load(Ordering::Relaxed)
    }

    fn or(&self, _: u64, bits: u64) -> u64 {
        self.word.fetch_or(bits, Ordering::Relaxed)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A page, with one word for its data.
#[derive(Default)]
struct Page(AtomicU64);

impl Page {
    fn write(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn copy(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

fn mark(batch: &mut MarkBatch, log: &Bitmap, bits: u64) {
    assert!(batch.add(0, bits));
    batch.commit(log);
}

/// The front-end harvests while a worker writes one page again and again. The last copy has the last write,
/// even if the bit is already set.
#[test]
fn no_write_is_lost() {
    for bits in [0, 1] {
        loom::model(move || {
            let shared = Arc::new((Bitmap::new(bits), Page::default()));
            let worker = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (log, page) = &*shared;
                    let mut batch = MarkBatch::default();
                    for value in 1..=2 {
                        page.write(value);
                        mark(&mut batch, log, 1);
                    }
                })
            };
            let (log, page) = &*shared;
            let mut copy = 0;
            for _ in 0..2 {
                if log.harvest() & 1 != 0 {
                    copy = page.copy();
                }
            }
            worker.join().unwrap();
            if log.harvest() & 1 != 0 {
                copy = page.copy();
            }
            assert_eq!(copy, 2);
        });
    }
}

/// A driver that has seen the used index finds the published data in a harvest: the previous one or the next
/// one.
#[test]
fn published_data_is_marked() {
    for bits in [0, 1] {
        loom::model(move || {
            let shared = Arc::new((Bitmap::new(bits), Page::default(), AtomicU64::new(0)));
            let worker = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (log, page, used) = &*shared;
                    page.write(1);
                    mark(&mut MarkBatch::default(), log, 1);
                    used.store(1, Ordering::Release);
                })
            };
            let (log, page, used) = &*shared;
            let mut copy = 0;
            if log.harvest() & 1 != 0 {
                copy = page.copy();
            }
            if used.load(Ordering::Acquire) == 1 {
                if log.harvest() & 1 != 0 {
                    copy = page.copy();
                }
                assert_eq!(copy, 1);
            }
            worker.join().unwrap();
        });
    }
}

/// Memory is removed while a request writes to it. The writes are marked when the request releases the
/// mapping.
#[test]
fn writes_to_removed_memory_are_marked_before_its_release() {
    for bits in [0, 1] {
        loom::model(move || {
            let shared = Arc::new((Bitmap::new(bits), Page::default(), Mutex::new(false)));
            let worker = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (log, page, released) = &*shared;
                    page.write(1);
                    mark(&mut MarkBatch::default(), log, 1);
                    *released.lock().unwrap() = true;
                })
            };
            let (log, page, released) = &*shared;
            let mut copy = 0;
            if log.harvest() & 1 != 0 {
                copy = page.copy();
            }
            if *released.lock().unwrap() {
                if log.harvest() & 1 != 0 {
                    copy = page.copy();
                }
                assert_eq!(copy, 1);
            }
            worker.join().unwrap();
        });
    }
}

/// The fence of the decision about calls also serves for the mark of the used index, which follows it.
#[test]
fn one_fence_serves_the_call_and_the_mark() {
    loom::model(|| {
        let shared = Arc::new((Bitmap::new(1), Page::default()));
        let worker = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (log, used) = &*shared;
                let mut batch = MarkBatch::default();
                used.0.store(1, Ordering::Release);
                fence(Ordering::SeqCst);
                assert!(batch.add(0, 1));
                batch.commit_fenced(log);
            })
        };
        let (log, used) = &*shared;
        let mut copy = 0;
        if log.harvest() & 1 != 0 {
            copy = used.copy();
        }
        worker.join().unwrap();
        if log.harvest() & 1 != 0 {
            copy = used.copy();
        }
        assert_eq!(copy, 1);
    });
}

/// Two workers mark different bits of one word while the front-end takes the word. No bit is lost.
#[test]
fn workers_share_a_word() {
    loom::model(|| {
        let shared = Arc::new((Bitmap::new(0), [Page::default(), Page::default()]));
        let workers: Vec<_> = (0..2usize)
            .map(|at| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (log, pages) = &*shared;
                    pages[at].write(1);
                    mark(&mut MarkBatch::default(), log, 1 << at);
                })
            })
            .collect();
        let (log, pages) = &*shared;
        let mut copies = [0; 2];
        let mut harvest = || {
            let bits = log.harvest();
            for (at, copy) in copies.iter_mut().enumerate().filter(|(at, _)| bits & 1 << at != 0) {
                *copy = pages[at].copy();
            }
        };
        harvest();
        for worker in workers {
            worker.join().unwrap();
        }
        harvest();
        assert_eq!(copies, [1, 1]);
    });
}

/// SET_LOG_BASE arrives while a worker marks. The worker does not write the old log after the answer. Each
/// write is in one of the two logs.
#[test]
fn an_old_log_is_unused_when_its_change_is_answered() {
    loom::model(|| {
        let logs = Arc::new([Bitmap::new(0), Bitmap::new(0)]);
        let pages = Arc::new([Page::default(), Page::default()]);
        // A worker's mailbox, and the answer to its message.
        let (asked, answered) = (Arc::new(Mutex::new(false)), Arc::new(Mutex::new(false)));
        let worker = {
            let (logs, pages, asked, answered) =
                (logs.clone(), pages.clone(), asked.clone(), answered.clone());
            thread::spawn(move || {
                let (mut batch, mut current) = (MarkBatch::default(), 0);
                for (at, page) in pages.iter().enumerate() {
                    if *asked.lock().unwrap() {
                        // As `Marks::set_view`.
                        batch.commit(&logs[current]);
                        current = 1;
                        *answered.lock().unwrap() = true;
                    }
                    page.write(1);
                    assert!(batch.add(0, 1 << at));
                    if at == 1 {
                        batch.commit(&logs[current]);
                    }
                }
            })
        };
        *asked.lock().unwrap() = true;
        let mut found = 0;
        if *answered.lock().unwrap() {
            found |= logs[0].harvest();
            logs[0].gone.store(true, Ordering::Relaxed);
        }
        worker.join().unwrap();
        if !logs[0].gone.load(Ordering::Relaxed) {
            found |= logs[0].harvest();
        }
        found |= logs[1].harvest();
        assert_eq!(found, 0b11);
        assert!(pages.iter().all(|page| page.copy() == 1));
    });
}
