//! Cancels operations that would be done again, and operations in batches that no thread has begun.

use super::pool;
use crate::engine::Engine;
use crate::files::route::{Route, Routes};
use crate::files::shares::Shares;
use crate::operations::Operations;
use crate::operations::in_flight::InFlight;
use crate::{
    AlignedBuf, BackingFile, Buffers, EngineKind, EngineOptions, Errno, FileId, Op, OpKind, Owner, Token,
};
use kickless_memory::{Gpa, Iov, Map, Slot, UserAddr, View};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::sync::Arc;

const LEN: usize = 4096;
const WRITE: OpKind = OpKind::Write { durable: false };

fn engine(kind: EngineKind) -> Engine {
    Engine::open_with(EngineOptions::new(kind, 32)).unwrap()
}

/// Makes a file of an owner of its own, whose transfers all have this route.
fn register(engine: &mut Engine, file: File, route: Route) -> FileId {
    register_of(engine, file, route, Owner::unique())
}

fn register_of(engine: &mut Engine, file: File, route: Route, owner: Owner) -> FileId {
    let id = engine.register(&BackingFile::new(Arc::new(file), owner)).unwrap();
    engine.ops.files.set_routes(id.index, Routes::all(route));
    id
}

fn image(pages: usize) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len((pages * LEN) as u64).unwrap();
    file
}

fn guest() -> Arc<View> {
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, 1 << 20).unwrap();
    Arc::new(View::new(Map::new(vec![Slot::map(memory, 0, Gpa(0), UserAddr(0), 1 << 20).unwrap()]).unwrap()))
}

fn queue(engine: &mut Engine, file: FileId, kind: OpKind, page: u32, buffers: Buffers) {
    let op = Op { file, kind, offset: u64::from(page) * LEN as u64, buffers };
    engine.queue(op, Token { source: 0, slot: page }).unwrap();
}

/// Queues a page of guest memory, so that contiguous pages can be merged.
fn queue_page(engine: &mut Engine, file: FileId, kind: OpKind, view: &Arc<View>, page: u32) {
    let mut iov = Iov::default();
    iov.push(view, Gpa(u64::from(page) * 2 * LEN as u64), LEN as u32).unwrap();
    queue(engine, file, kind, page, Buffers::Guest(iov));
}

fn queue_own(engine: &mut Engine, file: FileId, page: u32) {
    queue(engine, file, OpKind::Read, page, Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap()));
}

/// Returns the results by the order of pages.
fn reap(engine: &mut Engine) -> Vec<(u32, Result<u32, Errno>)> {
    let mut done = Vec::new();
    engine.reap(&mut done);
    let mut results: Vec<_> = done.iter().map(|done| (done.token.slot, done.result)).collect();
    results.sort_by_key(|(page, _)| *page);
    results
}

/// Merged reads past the end of the file would be done again.
#[test]
fn merged_operations_are_not_done_again() {
    let view = guest();
    let ways = [
        (EngineKind::Uring, Route::Plain),
        (EngineKind::Aio, Route::Worker),
        (EngineKind::Uring, Route::Blocking),
        (EngineKind::Aio, Route::Blocking),
    ];
    for (kind, route) in ways {
        let mut engine = engine(kind);
        let id = register(&mut engine, image(4), route);
        engine.merge(id);
        (0..8).for_each(|page| queue_page(&mut engine, id, OpKind::Read, &view, page));
        engine.submit().unwrap();
        // The kernel has done them.
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let mut event = [PollFd::from_borrowed_fd(engine.event(), PollFlags::IN)];
        assert_eq!(poll(&mut event, Some(&limit)).unwrap(), 1);
        engine.cancel(id);
        let mut results = reap(&mut engine);
        while engine.in_flight() > 0 {
            engine.submit().unwrap();
            results.extend(reap(&mut engine));
        }
        let expected = |page| if page < 4 { Ok(LEN as u32) } else { Err(Errno::CANCELED) };
        assert_eq!(
            results,
            (0..8).map(|page| (page, expected(page))).collect::<Vec<_>>(),
            "{kind} {route:?}"
        );
    }
}

/// The kernel has refused them while others were queued. Some were merged, some carried `RWF_NOWAIT`.
#[test]
fn operations_to_be_queued_again_are_cancelled() {
    let view = guest();
    let refused = |path: &str, kind, route, merged: u32| {
        let mut engine = engine(EngineKind::Aio);
        let id = register(&mut engine, File::open(path).unwrap(), route);
        engine.merge(id);
        (0..merged).for_each(|page| queue_page(&mut engine, id, kind, &view, page));
        // This one is not contiguous, so the others are submitted first.
        queue_page(&mut engine, id, kind, &view, merged + 1);
        assert!(engine.ops.needs_requeue(), "{path}");
        engine.cancel(id);
        assert!(!engine.ops.needs_requeue() && engine.needs_turn());
        let results = reap(&mut engine);
        assert_eq!((results.len(), engine.in_flight()), (merged as usize + 1, 0));
        assert!(results.iter().all(|(_, result)| *result == Err(Errno::CANCELED)), "{results:?}");
    };
    refused("/proc/self/exe", WRITE, Route::Worker, 8);
    // The file does not accept the flag.
    refused("/proc/version", OpKind::Read, Route::NoWait, 8);
    refused("/proc/version", OpKind::Read, Route::NoWait, 1);
}

/// No thread does a cancelled transfer that would have had to wait.
#[test]
fn operations_that_would_wait_are_cancelled() {
    for (is_cancelled, results) in [(false, vec![]), (true, vec![Err(Errno::CANCELED)])] {
        let mut ops = Operations::new(Shares::new(8, 0, 0));
        let file = ops.files.insert(Arc::new(image(1)), Owner::unique()).0;
        let buffers = Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap());
        let op = Op { file, kind: OpKind::Read, offset: 0, buffers };
        let held = ops.files.hold(file).unwrap();
        let op_slot = ops.slots.insert(InFlight::new(Token::default(), held, op, true));
        if is_cancelled {
            ops.cancel(file);
        }
        let mut done = Vec::new();
        ops.complete(op_slot, Err(Errno::AGAIN), &mut done);
        assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), results);
        assert_eq!((ops.needs_requeue(), ops.in_flight()), (!is_cancelled, usize::from(!is_cancelled)));
    }
}

/// All threads hang, so a batch for `io_submit` waits for one. Operations of another file in the batch go on
/// later.
#[test]
fn batches_that_no_thread_has_begun_come_back() {
    let mut engine = Engine::open_with(EngineOptions::new(EngineKind::Aio, 1)).unwrap();
    // There is one thread, and slots for more.
    engine.ops = Operations::new(Shares::new(64, 0, 0));
    let owner = Owner::unique();
    let [id, other] = [(); 2].map(|()| register_of(&mut engine, image(8), Route::Offload, owner));
    let turn = |engine: &mut Engine| {
        engine.submit().unwrap();
        reap(engine)
    };
    pool(&engine).pool().occupy(0);
    (0..3).for_each(|page| queue_own(&mut engine, id, page));
    (4..6).for_each(|page| queue_own(&mut engine, other, page));
    assert_eq!(turn(&mut engine), []);
    queue_own(&mut engine, id, 3);
    queue(&mut engine, id, OpKind::Flush, 6, Buffers::None);
    assert_eq!(turn(&mut engine), []);
    queue(&mut engine, id, OpKind::Flush, 7, Buffers::None);
    engine.cancel(id);
    let (needs_turn, results, left) = (engine.needs_turn(), turn(&mut engine), engine.in_flight());
    pool(&engine).pool().free(0);
    assert_eq!(results, [0, 1, 2, 3, 6, 7].map(|page| (page, Err(Errno::CANCELED))));
    assert!(needs_turn && left == 2);
    let mut results = Vec::new();
    while engine.in_flight() > 0 {
        results.extend(turn(&mut engine));
    }
    results.sort_by_key(|(page, _)| *page);
    assert_eq!(results, [4, 5].map(|page| (page, Ok(LEN as u32))));
}
