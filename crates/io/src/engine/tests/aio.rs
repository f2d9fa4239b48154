//! Tests AIO, with threads beside it.

use super::{kernel_aio, pool};
use crate::engine::Engine;
use crate::files::route::{Route, Routes};
use crate::files::shares::Shares;
use crate::operations::Operations;
use crate::{
    AlignedBuf, BackingFile, Buffers, EngineKind, EngineOptions, Errno, FileId, Op, OpKind, Owner, Token,
};
use kickless_memory::{Gpa, Iov};
use kickless_testing::guest_memory;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

const LEN: usize = 4096;

fn queue(aio: &mut Engine, file: FileId, kind: OpKind, slot: u32) -> bool {
    let buffers = Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap());
    aio.queue(Op { file, kind, offset: 0, buffers }, Token { source: 0, slot }).is_ok()
}

#[test]
fn direct_files_by_the_kernel_and_others_by_threads() {
    let mut aio = Engine::open_with(EngineOptions::new(EngineKind::Aio, 8)).unwrap();
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(LEN as u64).unwrap();
    let through_cache = aio
        .register(&BackingFile::new(Arc::new(File::open(image.path()).unwrap()), Owner::unique()))
        .unwrap();
    assert!(queue(&mut aio, through_cache, OpKind::Read, 0));
    assert_eq!(
        (kernel_aio(&aio).unwrap().last(None), pool(&aio).in_flight(), aio.ops.files.room(through_cache)),
        (None, 1, 7)
    );
    assert_eq!(aio.in_flight(), 1);
    let direct = OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(image.path());
    let Ok(direct) = direct else { return println!("SKIPPED: no direct I/O where temporary files are") };
    let direct = aio.register(&BackingFile::new(Arc::new(direct), Owner::unique())).unwrap();
    assert!(queue(&mut aio, direct, OpKind::Read, 1));
    assert!(queue(&mut aio, direct, OpKind::Flush, 2));
    assert_eq!(
        (kernel_aio(&aio).unwrap().last(None), pool(&aio).in_flight(), aio.ops.files.room(direct)),
        (Some(1), 2, 5)
    );
    assert_eq!(aio.in_flight(), 3);
}

/// A thread's call that does not wait ends before `submit` returns, so completions of the batch do not
/// interrupt it. This must hold in some of many cases, because the host can keep the thread from running.
#[test]
fn a_prompt_call_of_a_thread_is_waited_for() {
    let mut aio = Engine::open_with(EngineOptions::new(EngineKind::Aio, 64)).unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(LEN as u64).unwrap();
    let file = aio.register(&BackingFile::new(file, Owner::unique())).unwrap();
    aio.ops.files.set_routes(0, Routes::all(Route::Offload));
    let prompt = (0..10_000).any(|_| {
        (0..32).for_each(|slot| assert!(queue(&mut aio, file, OpKind::Read, slot)));
        aio.submit().unwrap();
        let prompt = pool(&aio).has_submitted();
        let mut done = Vec::new();
        while aio.in_flight() > 0 {
            aio.submit().unwrap();
            aio.reap(&mut done);
        }
        assert!(done.len() == 32 && done.iter().all(|done| done.result == Ok(LEN as u32)));
        prompt
    });
    assert!(prompt);
}

/// The call is in flight until it has been reaped, and the worker does not sleep before.
#[test]
fn the_worker_reaps_a_refused_operation_before_it_sleeps() {
    let mut aio = Engine::open_with(EngineOptions::new(EngineKind::Aio, 8)).unwrap();
    let file = aio
        .register(&BackingFile::new(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()))
        .unwrap();
    aio.ops.files.set_routes(0, Routes::all(Route::Worker));
    assert!(queue(&mut aio, file, OpKind::Write { durable: false }, 3));
    aio.submit().unwrap();
    assert_eq!((aio.ops.slots.used(), kernel_aio(&aio).unwrap().in_flight()), (0, 0));
    assert!(aio.needs_turn());
    assert_eq!(aio.in_flight(), 1);
    let mut done = Vec::new();
    aio.reap(&mut done);
    assert_eq!(
        done.iter().map(|done| (done.token.slot, done.result)).collect::<Vec<_>>(),
        [(3, Err(Errno::BADF))]
    );
    assert!(!aio.needs_turn());
    assert_eq!(aio.in_flight(), 0);
}

/// Contiguous operations are merged, and one that is done again is not merged again.
#[test]
fn neighbours_are_one_operation() {
    let mut aio = Engine::open_with(EngineOptions::new(EngineKind::Aio, 16)).unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(4 * LEN as u64).unwrap();
    let file = aio.register(&BackingFile::new(file, Owner::unique())).unwrap();
    aio.ops.files.set_routes(0, Routes::all(Route::Worker));
    let view = guest_memory(1 << 20, 0);
    let read = |aio: &mut Engine, page: u32| {
        let mut iov = Iov::default();
        iov.push(&view, Gpa(u64::from(page) * 8192), LEN as u32).unwrap();
        let offset = u64::from(page) * LEN as u64;
        let op = Op { file, kind: OpKind::Read, offset, buffers: Buffers::Guest(iov) };
        aio.queue(op, Token { source: 0, slot: page }).unwrap();
    };
    for (merge, given) in [(false, 4), (true, 0)] {
        if merge {
            aio.merge(file);
        }
        (0..8).for_each(|page| read(&mut aio, page));
        assert_eq!(kernel_aio(&aio).unwrap().in_flight(), given);
        let mut done = Vec::new();
        while aio.in_flight() > 0 {
            aio.submit().unwrap();
            aio.reap(&mut done);
        }
        assert_eq!(done.len(), 8);
    }
    (0..8).for_each(|page| read(&mut aio, page));
    let mut done = Vec::new();
    let mut again = 0;
    while aio.in_flight() > 0 {
        aio.submit().unwrap();
        aio.reap(&mut done);
        again = again.max(kernel_aio(&aio).unwrap().staged());
        if again > 0 {
            break;
        }
    }
    assert_eq!((done.len(), again), (4, 4), "those behind the end are done again, each by itself");
}

/// The worker does not sleep while operations of a refused call must be done again.
#[test]
fn merged_transfers_that_are_refused() {
    let mut aio = Engine::open_with(EngineOptions::new(EngineKind::Aio, 16)).unwrap();
    let file = aio
        .register(&BackingFile::new(Arc::new(File::open("/proc/self/exe").unwrap()), Owner::unique()))
        .unwrap();
    aio.ops.files.set_routes(0, Routes::all(Route::Worker));
    aio.merge(file);
    let view = guest_memory(1 << 20, 0);
    for page in 0..8 {
        let mut iov = Iov::default();
        iov.push(&view, Gpa(page * 8192), LEN as u32).unwrap();
        let (offset, buffers) = (page * LEN as u64, Buffers::Guest(iov));
        let op = Op { file, kind: OpKind::Write { durable: false }, offset, buffers };
        aio.queue(op, Token { source: 0, slot: page as u32 }).unwrap();
    }
    let mut done = Vec::new();
    while aio.in_flight() > 0 {
        aio.submit().unwrap();
        assert!(aio.needs_turn());
        aio.reap(&mut done);
    }
    assert!(done.len() == 8 && done.iter().all(|done| done.result == Err(Errno::BADF)));
}

/// More operations are queued than the kernel has room for. The engine takes no more until some have been
/// reaped, and completes all that it took.
#[test]
fn a_full_context_makes_a_pause() {
    let mut aio = Engine::open_with(EngineOptions::new(EngineKind::Aio, 1)).unwrap();
    // A context of one has room for some hundred in fact. There are slots for more than that.
    aio.ops = Operations::new(Shares::new(4000, 0, 0));
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(LEN as u64).unwrap();
    let file = aio.register(&BackingFile::new(file, Owner::unique())).unwrap();
    aio.ops.files.set_routes(0, Routes::all(Route::Worker));
    let taken = (0..4000).take_while(|&slot| queue(&mut aio, file, OpKind::Read, slot)).count();
    assert!(taken < 4000, "there is no room for so many");
    assert!(kernel_aio(&aio).unwrap().needs_turn() && aio.needs_turn());
    assert_eq!(aio.ops.files.room(file), 0);
    let mut done = Vec::new();
    aio.reap(&mut done);
    assert!(!done.is_empty() && aio.ops.files.room(file) > 0);
    while aio.in_flight() > 0 {
        aio.submit().unwrap();
        aio.reap(&mut done);
    }
    assert_eq!(done.len(), taken);
    assert!(done.iter().all(|done| done.result == Ok(LEN as u32)));
}
