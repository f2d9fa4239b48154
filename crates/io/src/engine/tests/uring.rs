//! Tests io_uring, with kernel AIO beside it for files on which the ring is slow.

use super::{kernel_aio, ring};
use crate::aio::Aio;
use crate::engine::Engine;
use crate::files::route::takes_nowait;
use crate::files::route::{Route, Routes};
use crate::files::shares::Shares;
use crate::operations::Operations;
use crate::{
    AlignedBuf, BackingFile, Buffers, Completion, EngineKind, EngineOptions, Errno, FileId, Op, OpKind,
    Owner, Token,
};
use kickless_memory::{Gpa, Iov, View};
use kickless_testing::guest_memory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::sync::Arc;

const DEPTH: u32 = 200;
const LEN: usize = 4096;

fn options(depth: u32) -> EngineOptions {
    EngineOptions::new(EngineKind::Uring, depth)
}

/// Makes a file whose transfers the ring does, of any kind.
fn register(uring: &mut Engine, file: Arc<File>) -> FileId {
    let id = uring.register(&BackingFile::new(file, Owner::unique())).unwrap();
    uring.ops.files.set_routes(id.index, Routes::all(Route::Plain));
    id
}

fn engine() -> (Engine, FileId, Arc<File>) {
    let mut uring = Engine::open_with(options(DEPTH)).unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(u64::from(DEPTH) * LEN as u64).unwrap();
    let id = register(&mut uring, file.clone());
    // The route of a device on which io_uring is slow. The test sets it for a file, so it needs no such
    // device.
    assert!(uring.open_aio());
    uring.ops.files.set_routes(0, Routes::all(Route::Worker));
    (uring, id, file)
}

fn buffer(number: u32) -> Buffers {
    let mut buffer = AlignedBuf::new(LEN, LEN).unwrap();
    buffer.fill(number as u8);
    Buffers::Owned(buffer)
}

fn queue(uring: &mut Engine, file: FileId, kind: OpKind, number: u32, buffers: Buffers) {
    let op = Op { file, kind, offset: u64::from(number) * LEN as u64, buffers };
    assert!(uring.queue(op, Token { source: 0, slot: number }).is_ok());
}

/// Completes all operations in flight, and sleeps in between.
fn finish(uring: &mut Engine) -> Vec<Completion> {
    let mut done = Vec::new();
    uring.submit().unwrap();
    while uring.in_flight() > 0 {
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let mut event = [PollFd::from_borrowed_fd(uring.event(), PollFlags::IN)];
        assert!(uring.needs_turn() || poll(&mut event, Some(&limit)).unwrap() == 1, "nothing completes");
        uring.submit().unwrap();
        uring.reap(&mut done);
    }
    done
}

#[test]
fn every_transfer_by_kernel_aio() {
    let (mut uring, file, _) = engine();
    for number in 0..DEPTH {
        let durable = number % 2 == 0;
        queue(&mut uring, file, OpKind::Write { durable }, number, buffer(number));
    }
    assert!(
        uring
            .queue(Op { file, kind: OpKind::Read, offset: 0, buffers: buffer(0) }, Token::default())
            .is_err()
    );
    let done = finish(&mut uring);
    assert_eq!(done.len(), DEPTH as usize);
    assert!(done.iter().all(|completion| completion.result == Ok(LEN as u32)));

    queue(&mut uring, file, OpKind::Flush, 0, Buffers::None);
    assert_eq!(finish(&mut uring)[0].result, Ok(0));

    let view = guest_memory(1 << 20, 0);
    let mut iov = Iov::default();
    iov.push(&view, Gpa(0), 1024).unwrap();
    iov.push(&view, Gpa(8192), 3072).unwrap();
    queue(&mut uring, file, OpKind::Read, 7, Buffers::Guest(iov));
    queue(&mut uring, file, OpKind::Read, 9, buffer(0));
    for Completion { token, result, buffers } in finish(&mut uring) {
        assert_eq!(result, Ok(LEN as u32));
        let mut read = vec![0; LEN];
        match &buffers {
            Buffers::Guest(iov) => assert_eq!(iov.read(0, &mut read), LEN),
            Buffers::Owned(buffer) => read.copy_from_slice(buffer),
            Buffers::None => panic!("the buffers are lost"),
        }
        assert!(read.iter().all(|byte| u32::from(*byte) == token.slot), "{token:?}");
    }
    // Nothing is left that would wake the worker.
    let mut event = [PollFd::from_borrowed_fd(uring.event(), PollFlags::IN)];
    assert_eq!(poll(&mut event, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 0);
}

#[test]
fn refused_and_failed_transfers_by_kernel_aio() {
    let (mut uring, file, ours) = engine();
    queue(&mut uring, file, OpKind::Read, 0, buffer(0));
    let read_only = Arc::new(File::open("/proc/self/exe").unwrap());
    let other = register(&mut uring, read_only);
    uring.ops.files.set_routes(1, Routes::all(Route::Worker));
    queue(&mut uring, other, OpKind::Write { durable: false }, 1, buffer(0));
    queue(&mut uring, file, OpKind::Read, 2, buffer(0));
    uring.unregister(file);
    let mut results: Vec<_> = finish(&mut uring).iter().map(|c| (c.token.slot, c.result)).collect();
    results.sort_by_key(|(slot, _)| *slot);
    assert_eq!(results, [(0, Ok(LEN as u32)), (1, Err(Errno::BADF)), (2, Ok(LEN as u32))]);
    assert_eq!(Arc::strong_count(&ours), 1, "the engine keeps an unregistered file");
}

#[test]
fn dropped_with_transfers_in_kernel_aio() {
    let (mut uring, file, ours) = engine();
    for number in 0..DEPTH / 2 {
        queue(&mut uring, file, OpKind::Read, number, buffer(0));
    }
    uring.submit().unwrap();
    for number in 0..DEPTH / 2 {
        queue(&mut uring, file, OpKind::Read, number, buffer(0));
    }
    drop(uring);
    assert_eq!(Arc::strong_count(&ours), 1);
}

fn page(view: &Arc<View>, number: u64) -> Buffers {
    let mut iov = Iov::default();
    iov.push(view, Gpa(2 * number * LEN as u64), LEN as u32).unwrap();
    Buffers::Guest(iov)
}

#[test]
fn neighbours_are_one_operation() {
    let mut uring = Engine::open_with(options(DEPTH)).unwrap();
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(20 * LEN as u64).unwrap();
    let id = register(&mut uring, file);
    let view = guest_memory(1 << 20, 0);
    for (merge, waiting) in [(false, 4), (true, 1)] {
        if merge {
            uring.merge(id);
        }
        (0..8).for_each(|number| queue(&mut uring, id, OpKind::Read, number, page(&view, number.into())));
        assert_eq!(ring(&mut uring).0.staged().len(), waiting);
        assert_eq!(finish(&mut uring).len(), 8);
    }
    // It is not merged with one that the kernel knows.
    queue(&mut uring, id, OpKind::Read, 0, page(&view, 0));
    let (backend, ops) = ring(&mut uring);
    backend.push_staged(ops);
    queue(&mut uring, id, OpKind::Read, 1, page(&view, 1));
    assert_eq!(ring(&mut uring).0.staged().len(), 2);
    assert!(finish(&mut uring).iter().all(|done| done.result == Ok(LEN as u32)));
}

/// Operations for threads take places of the same share as those of the ring.
#[test]
fn jobs_of_threads_take_slots_of_the_engine() {
    let mut uring = Engine::open_with(options(DEPTH)).unwrap();
    let id = register(&mut uring, Arc::new(tempfile::tempfile().unwrap()));
    let discard = |uring: &mut Engine| {
        let kind = OpKind::Range { syscall: crate::RangeSyscall::DeviceDiscard, len: 512 };
        uring.queue(Op { file: id, kind, offset: 0, buffers: Buffers::None }, Token::default()).is_ok()
    };
    for _ in 0..2 {
        assert!((0..DEPTH).all(|_| discard(&mut uring)));
        assert!(!discard(&mut uring) && uring.ops.files.room(id) == 0);
        assert!(uring.needs_turn() && uring.in_flight() == DEPTH as usize);
        assert!(finish(&mut uring).iter().all(|done| done.result == Err(Errno::NOTTY)));
    }
}

/// Merged operations that are repeated run separately, on the route of their file.
#[test]
fn repeated_operations_keep_their_route() {
    for aio in [false, true] {
        let (mut uring, _, _) = engine();
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(4 * LEN as u64).unwrap();
        let id = register(&mut uring, file);
        if aio {
            uring.ops.files.set_routes(1, Routes::all(Route::Worker));
        }
        uring.merge(id);
        let view = guest_memory(1 << 20, 0);
        let read = |uring: &mut Engine| {
            (0..8).for_each(|number| queue(uring, id, OpKind::Read, number, page(&view, number.into())));
            assert!(uring.needs_turn());
            uring.submit().unwrap();
        };
        read(&mut uring);
        let mut done = Vec::new();
        while done.len() < 4 {
            uring.reap(&mut done);
        }
        let by_aio = kernel_aio(&uring).is_some_and(Aio::needs_turn);
        assert_eq!((by_aio, ring(&mut uring).0.staged().len()), if aio { (true, 0) } else { (false, 4) });
        assert!(finish(&mut uring).iter().all(|done| done.result == Ok(0)));
        // It is released with the engine.
        read(&mut uring);
        let released = view.map().slots()[0].mapping().released();
        drop((uring, view, done));
        assert!(released.is_unused(), "memory is left behind");
    }
}

/// The worker does not sleep while operations of a refused call must be done again.
#[test]
fn merged_transfers_that_kernel_aio_refuses() {
    let (mut uring, _, _) = engine();
    let read_only = register(&mut uring, Arc::new(File::open("/proc/self/exe").unwrap()));
    uring.ops.files.set_routes(1, Routes::all(Route::Worker));
    uring.merge(read_only);
    let view = guest_memory(1 << 20, 0);
    let write = OpKind::Write { durable: false };
    (0..8).for_each(|number| queue(&mut uring, read_only, write, number, page(&view, number.into())));
    let done = finish(&mut uring);
    assert!(done.len() == 8 && done.iter().all(|done| done.result == Err(Errno::BADF)));
}

/// Queues more operations than the kernel's context has room for.
#[test]
fn full_kernel_aio_makes_a_pause() {
    let mut uring = Engine::open_with(options(1)).unwrap();
    uring.ops = Operations::new(Shares::new(4000, 0, 0));
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(LEN as u64).unwrap();
    let id = register(&mut uring, file);
    assert!(uring.open_aio());
    uring.ops.files.set_routes(0, Routes::all(Route::Worker));
    let read = |uring: &mut Engine| {
        let op = Op { file: id, kind: OpKind::Read, offset: 0, buffers: buffer(0) };
        uring.queue(op, Token::default()).is_ok()
    };
    let taken = (0..2000).take_while(|_| read(&mut uring)).count();
    uring.submit().unwrap();
    assert!(uring.ops.files.room(id) == 0 && !read(&mut uring));
    assert_eq!(finish(&mut uring).len(), taken);
}

#[test]
fn files_on_which_the_ring_is_fast_stay_with_it() {
    let mut uring = Engine::open_with(options(1)).unwrap();
    uring.register(&BackingFile::new(Arc::new(tempfile::tempfile().unwrap()), Owner::unique())).unwrap();
    uring.register(&BackingFile::new(Arc::new(File::open("/dev/null").unwrap()), Owner::unique())).unwrap();
    assert!(kernel_aio(&uring).is_none());
    // tmpfs always uses its page cache, but this descriptor says that it is direct.
    let Ok(in_memory) = tempfile::NamedTempFile::new_in("/dev/shm") else { return };
    uring.register(&BackingFile::new(Arc::new(in_memory.reopen().unwrap()), Owner::unique())).unwrap();
    assert!(kernel_aio(&uring).is_none());
}

#[test]
fn a_file_in_memory_gets_kernel_aio() {
    let Ok(image) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        return println!("SKIPPED: no /dev/shm");
    };
    let mut direct = File::options();
    direct.read(true).write(true);
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut direct, libc::O_DIRECT);
    let Ok(direct) = direct.open(image.path()) else { return println!("SKIPPED: no direct I/O on tmpfs") };
    let mut uring = Engine::open_with(options(DEPTH)).unwrap();
    let id = uring.register(&BackingFile::new(Arc::new(direct), Owner::unique())).unwrap();
    assert!(kernel_aio(&uring).is_some());
    queue(&mut uring, id, OpKind::Write { durable: false }, 1, buffer(7));
    assert_eq!(finish(&mut uring)[0].result, Ok(LEN as u32));
    queue(&mut uring, id, OpKind::Read, 1, buffer(0));
    let Buffers::Owned(got) = finish(&mut uring).remove(0).buffers else { panic!("the buffer is lost") };
    assert!(got.iter().all(|byte| *byte == 7));
}

/// The first operations of a batch go to an idle ring while the others are staged.
#[test]
fn an_idle_ring_gets_operations_ahead_of_their_batch() {
    let mut uring = Engine::open_with(options(DEPTH)).unwrap();
    let file = register(&mut uring, Arc::new(File::open("/proc/self/exe").unwrap()));
    for (number, staged) in (1..).zip([1, 1, 1, 2, 1, 2, 3, 4]) {
        queue(&mut uring, file, OpKind::Read, number, buffer(0));
        assert_eq!(ring(&mut uring).0.staged().len(), staged, "after {number}");
    }
    assert_eq!(finish(&mut uring).len(), 8);
}

/// Submits merged reads past the end of a file. Each is done again by itself.
fn merged_reads_of_nothing(uring: &mut Engine, id: FileId, view: &Arc<View>) {
    uring.merge(id);
    (0..4).for_each(|number| queue(uring, id, OpKind::Read, number, page(view, number.into())));
    uring.submit().unwrap();
}

/// A transfer that is done again carries `RWF_NOWAIT` exactly if its route at that time asks for it.
#[test]
fn repeated_operations_carry_nowait_by_route() {
    let (mut uring, _, _) = engine();
    let file = Arc::new(tempfile::tempfile().unwrap());
    if !takes_nowait(&file) {
        eprintln!("skipped: the file system of the temporary directory does not take RWF_NOWAIT");
        return;
    }
    let id = register(&mut uring, file);
    let view = guest_memory(1 << 20, 0);
    for (before, after) in [(Route::Blocking, Route::NoWait), (Route::NoWait, Route::Plain)] {
        uring.ops.files.set_routes(1, Routes::all(before));
        merged_reads_of_nothing(&mut uring, id, &view);
        uring.ops.files.set_routes(1, Routes::all(after));
        let mut done = Vec::new();
        while ring(&mut uring).0.staged().is_empty() {
            uring.reap(&mut done);
        }
        let staged = ring(&mut uring).0.staged().clone();
        let nowait = |op_slot: &u32| uring.ops.slots.get_mut(*op_slot).unwrap().nowait;
        let told: Vec<_> = staged.iter().map(nowait).collect();
        assert_eq!(told, [after == Route::NoWait; 4]);
        assert_eq!(finish(&mut uring).len(), 4);
    }
}

/// Drops an engine whose threads have done transfers that must be done again, and a call of `io_submit` after
/// them.
#[test]
fn dropped_with_operations_that_threads_must_repeat() {
    let (mut uring, offloaded, _) = engine();
    uring.ops.files.set_routes(0, Routes::all(Route::Offload));
    let id = register(&mut uring, Arc::new(tempfile::tempfile().unwrap()));
    queue(&mut uring, id, OpKind::Read, 0, buffer(0));
    assert_eq!(finish(&mut uring).len(), 1, "a ring that was never used is not waited for");
    uring.ops.files.set_routes(1, Routes::all(Route::Blocking));
    merged_reads_of_nothing(&mut uring, id, &guest_memory(1 << 20, 0));
    // The transfers must be done before the call, or the test shows nothing.
    std::thread::sleep(std::time::Duration::from_millis(200));
    queue(&mut uring, offloaded, OpKind::Read, 0, buffer(0));
    uring.submit().unwrap();
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(uring);
        ended.send(()).unwrap();
    });
    end.recv_timeout(std::time::Duration::from_secs(30))
        .expect("the engine waits for an operation that never completes");
}

/// Operations of a device that hangs do not count as work of another device.
#[test]
fn the_first_operations_of_an_idle_device_go_early_beside_one_that_hangs() {
    let mut uring = Engine::open_with(options(DEPTH)).unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    let hung = register(&mut uring, Arc::new(File::from(std::os::fd::OwnedFd::from(reader))));
    let idle = register(&mut uring, Arc::new(File::open("/dev/zero").unwrap()));
    let staged = |uring: &mut Engine| ring(uring).0.staged().len();
    for number in 0..64 {
        queue(&mut uring, hung, OpKind::Read, number, buffer(0));
    }
    uring.submit().unwrap();
    assert_eq!(staged(&mut uring), 0);
    queue(&mut uring, idle, OpKind::Read, 64, buffer(0));
    assert_eq!(staged(&mut uring), 1);
    queue(&mut uring, idle, OpKind::Read, 65, buffer(0));
    assert_eq!(staged(&mut uring), 1, "the first has gone");
}
