//! Behaviour that all engines must share.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_io::{
    AlignedBuf, BackingFile, Buffers, Completion, Engine, EngineKind, Errno, FileId, Op, OpKind, Owner,
    RangeSyscall, Token,
};
use kickless_memory::{Gpa, Iov, Map, Marks, Slot, UserAddr, View};
use kickless_testing::guest_memory;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, fallocate, fstatfs, ftruncate, memfd_create};
use rustix::io::retry_on_intr;
use rustix::pipe::pipe;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use tempfile::NamedTempFile;

/// Runs each test on each engine.
macro_rules! on_each_engine {
    ($($name:ident)*) => {
        mod uring { $(#[test] fn $name() { super::$name(kickless_io::EngineKind::Uring); })* }
        mod aio { $(#[test] fn $name() { super::$name(kickless_io::EngineKind::Aio); })* }
        mod threads { $(#[test] fn $name() { super::$name(kickless_io::EngineKind::Threads); })* }
    };
}

on_each_engine! {
    written_bytes_are_read
    only_the_window_is_transferred
    guest_memory_in_segments
    more_segments_than_one_call_takes
    nothing_to_transfer
    reads_at_the_end_are_short_and_past_it_empty
    a_full_engine_returns_the_operation
    a_batch_longer_than_the_submission_ring
    errors_belong_to_one_operation
    more_files_than_the_kernel_knows_by_index
    a_file_unregistered_early_is_used_to_the_end
    the_event_stays_readable_until_reaped
    opened_on_one_thread_and_used_on_another
    dropped_with_operations_in_flight
    ranges_of_a_file
    ranges_of_a_device
    a_stalled_engine_takes_nothing_for_a_while
    merged_transfers_complete_separately
    dropped_with_merged_operations
}

fn open(kind: EngineKind, depth: u32) -> Engine {
    Engine::open(kind, depth).unwrap()
}

const WRITE: OpKind = OpKind::Write { durable: false };
const DURABLE: OpKind = OpKind::Write { durable: true };

/// Returns a byte that depends on its offset.
fn byte_at(offset: usize) -> u8 {
    (offset ^ offset >> 8 ^ offset >> 16) as u8
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(byte_at).collect()
}

/// Makes a file. For Linux AIO it is open for direct I/O on tmpfs, which then accepts any alignment. Without
/// such a file system, AIO's threads are tested.
fn image(kind: EngineKind, contents: &[u8]) -> (NamedTempFile, Arc<File>) {
    let aio = kind == EngineKind::Aio;
    let in_memory = aio.then(|| NamedTempFile::new_in("/dev/shm").ok()).flatten();
    let mut image = in_memory.unwrap_or_else(|| NamedTempFile::new().unwrap());
    image.write_all(contents).unwrap();
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let on_tmpfs = fstatfs(image.as_file()).unwrap().f_type as u64 == 0x0102_1994;
    let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(image.path());
    let file = match direct {
        Ok(file) if aio && on_tmpfs => file,
        _ => options.open(image.path()).unwrap(),
    };
    (image, Arc::new(file))
}

fn owned(bytes: &[u8]) -> Buffers {
    let mut buf = AlignedBuf::new(bytes.len(), 512).unwrap();
    buf.copy_from_slice(bytes);
    Buffers::Owned(buf)
}

fn bytes(completion: &Completion) -> &[u8] {
    match &completion.buffers {
        Buffers::Owned(buf) => buf,
        other => panic!("not the buffers that went in: {other:?}"),
    }
}

fn token(slot: u32) -> Token {
    Token { source: 7, slot }
}

fn queue(engine: &mut Engine, slot: u32, file: FileId, kind: OpKind, offset: u64, buffers: Buffers) {
    engine.queue(Op { file, kind, offset, buffers }, token(slot)).unwrap();
}

/// Waits for the event. A completion interrupts the call, and may arrive during the next one.
fn poll_event(engine: &Engine, timeout: Option<&Timespec>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(engine.event(), PollFlags::IN)];
    retry_on_intr(|| poll(&mut fds, timeout)).unwrap() == 1
}

fn is_readable(engine: &Engine) -> bool {
    poll_event(engine, Some(&Timespec::default()))
}

/// Works and sleeps as a worker does, until this many have completed.
fn finish(engine: &mut Engine, count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    loop {
        engine.submit().unwrap();
        engine.reap(&mut done);
        if done.len() >= count {
            assert_eq!(done.len(), count);
            return done;
        }
        if !engine.needs_turn() {
            assert!(poll_event(engine, None));
        }
    }
}

/// Does one operation from start to end.
fn run(engine: &mut Engine, file: FileId, kind: OpKind, offset: u64, buffers: Buffers) -> Completion {
    queue(engine, 1, file, kind, offset, buffers);
    let done = finish(engine, 1).pop().unwrap();
    assert_eq!(done.token, token(1));
    assert_eq!(engine.in_flight(), 0);
    done
}

fn read(engine: &mut Engine, file: FileId, offset: u64, len: usize) -> (Result<u32, Errno>, Vec<u8>) {
    let done = run(engine, file, OpKind::Read, offset, owned(&vec![0; len]));
    (done.result, bytes(&done).to_vec())
}

fn iov(view: &Arc<View>, ranges: impl IntoIterator<Item = (u64, u32)>) -> Iov {
    let mut iov = Iov::default();
    for (gpa, len) in ranges {
        iov.push(view, Gpa(gpa), len).unwrap();
    }
    iov
}

fn written_bytes_are_read(kind: EngineKind) {
    let mut engine = open(kind, 8);
    assert_eq!(engine.name(), kind.to_string());
    assert!(engine.reason().is_none());
    let (_image, file) = image(kind, &[0; 64 << 10]);
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    for (offset, write) in [(0, WRITE), (4096, DURABLE), (60 << 10, WRITE)] {
        let sent = pattern(4096);
        let done = run(&mut engine, id, write, offset, owned(&sent));
        assert_eq!(done.result, Ok(4096));
        assert_eq!(bytes(&done), sent);
        assert_eq!(run(&mut engine, id, OpKind::Flush, 0, Buffers::None).result, Ok(0));
        assert_eq!(read(&mut engine, id, offset, 4096), (Ok(4096), sent));
    }
    assert_eq!(read(&mut engine, id, 8192, 512), (Ok(512), vec![0; 512]));
    assert_eq!(file.metadata().unwrap().len(), 64 << 10);
}

fn only_the_window_is_transferred(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &[0xee; 4096]);
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    let mut buf = AlignedBuf::new(4096, 4096).unwrap();
    buf.copy_from_slice(&pattern(4096));
    buf.set_window(512..1536);
    let done = run(&mut engine, id, WRITE, 1024, Buffers::Owned(buf));
    assert_eq!(done.result, Ok(1024));
    let mut expected = vec![0xee; 4096];
    expected[1024..2048].copy_from_slice(&pattern(4096)[512..1536]);
    assert_eq!(read(&mut engine, id, 0, 4096), (Ok(4096), expected));

    let Buffers::Owned(mut buf) = done.buffers else { panic!("not the buffer that went in") };
    assert_eq!(buf.window(), 512..1536);
    buf.fill(1);
    buf.set_window(4000..4096);
    let done = run(&mut engine, id, OpKind::Read, 0, Buffers::Owned(buf));
    assert_eq!(done.result, Ok(96));
    assert_eq!(bytes(&done)[..4000], [1; 4000]);
    assert_eq!(bytes(&done)[4000..], [0xee; 96]);
}

fn guest_memory_in_segments(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(4096));
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    let view = guest_memory(64 << 10, 0);
    // One segment; several, which begin anywhere and are not in order.
    for ranges in [vec![(0x1000, 2048)], vec![(0x5003, 1000), (0x2001, 7), (0x9000, 1041)]] {
        let done = run(&mut engine, id, OpKind::Read, 100, Buffers::Guest(iov(&view, ranges.clone())));
        assert_eq!(done.result, Ok(2048));
        let Buffers::Guest(mut back) = done.buffers else { panic!("not the buffers that went in") };
        assert_eq!(back.len(), 2048, "a transfer takes nothing off");
        let mut got = vec![0; 2048];
        assert_eq!(back.read(0, &mut got), 2048);
        assert_eq!(got, pattern(4096)[100..2148]);

        // Only the remaining bytes are written back.
        back.advance(48, &mut Marks::off());
        let done = run(&mut engine, id, DURABLE, 4096, Buffers::Guest(back));
        assert_eq!(done.result, Ok(2000));
        assert_eq!(read(&mut engine, id, 4096, 2000), (Ok(2000), pattern(4096)[148..2148].to_vec()));
    }
}

fn more_segments_than_one_call_takes(kind: EngineKind) {
    const SEGMENTS: u64 = 2500;
    let mut engine = open(kind, 8);
    let len = SEGMENTS * 16;
    let (_image, file) = image(kind, &pattern(len as usize));
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    let view = guest_memory((SEGMENTS * 32).next_multiple_of(4096), 0);
    let segments = || iov(&view, (0..SEGMENTS).map(|i| (i * 32, 16)));
    for op in [OpKind::Read, WRITE] {
        let mut left = segments();
        let (mut at, mut parts) = (0, 0);
        while !left.is_empty() {
            let offset = if op == WRITE { len + at } else { at };
            let done = run(&mut engine, id, op, offset, Buffers::Guest(left));
            let n = u64::from(done.result.unwrap());
            assert!(n > 0 && n <= 1024 * 16);
            let Buffers::Guest(back) = done.buffers else { panic!("not the buffers that went in") };
            left = back;
            left.advance(n, &mut Marks::off());
            at += n;
            parts += 1;
        }
        assert_eq!((at, parts), (len, 3));
    }
    let mut got = vec![0; len as usize];
    segments().read(0, &mut got);
    assert_eq!(got, pattern(len as usize));
    file.read_exact_at(&mut got, len).unwrap();
    assert_eq!(got, pattern(len as usize));
}

fn nothing_to_transfer(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(512));
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    for op in [OpKind::Read, WRITE] {
        assert_eq!(run(&mut engine, id, op, 0, Buffers::None).result, Ok(0));
        assert_eq!(run(&mut engine, id, op, 0, Buffers::Guest(Iov::default())).result, Ok(0));
        let mut buf = AlignedBuf::new(512, 512).unwrap();
        buf.set_window(0..0);
        assert_eq!(run(&mut engine, id, op, 0, Buffers::Owned(buf)).result, Ok(0));
    }
    assert_eq!(read(&mut engine, id, 0, 512), (Ok(512), pattern(512)));
    // A turn without work.
    assert!(finish(&mut engine, 0).is_empty());
    assert!(!engine.needs_turn());
}

fn reads_at_the_end_are_short_and_past_it_empty(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(1000));
    let id = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    let (result, got) = read(&mut engine, id, 600, 512);
    assert_eq!(result, Ok(400));
    assert_eq!(got[..400], pattern(1000)[600..]);
    assert_eq!(got[400..], [0; 112]);
    assert_eq!(read(&mut engine, id, 1000, 512), (Ok(0), vec![0; 512]));
    assert_eq!(read(&mut engine, id, 1 << 40, 512), (Ok(0), vec![0; 512]));
}

fn a_full_engine_returns_the_operation(kind: EngineKind) {
    const DEPTH: u32 = 4;
    let mut engine = open(kind, DEPTH);
    let contents = pattern(512 * 100);
    let (_image, file) = image(kind, &contents);
    let id = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    assert_eq!((engine.room(id), engine.in_flight()), (4, 0));
    let (mut next, mut seen) = (0, HashSet::new());
    while seen.len() < 100 {
        while next < 100 {
            let op = Op {
                file: id,
                kind: OpKind::Read,
                offset: u64::from(next) * 512,
                buffers: owned(&[next as u8; 512]),
            };
            if let Err(back) = engine.queue(op, token(next)) {
                // The whole operation, which was not done.
                assert_eq!((back.file, back.kind, back.offset), (id, OpKind::Read, u64::from(next) * 512));
                assert!(matches!(back.buffers, Buffers::Owned(buf) if buf[..] == [next as u8; 512]));
                break;
            }
            next += 1;
            assert_eq!(engine.room(id) + engine.in_flight(), DEPTH as usize);
        }
        assert!(engine.needs_turn());
        assert!(engine.room(id) == 0 || next == 100);
        let count = engine.in_flight();
        for done in finish(&mut engine, count) {
            assert!(seen.insert(done.token.slot), "completed twice");
            assert_eq!(done.result, Ok(512));
            let start = done.token.slot as usize * 512;
            assert_eq!(bytes(&done), &contents[start..start + 512]);
        }
        assert_eq!((engine.room(id), engine.in_flight()), (4, 0));
        assert!(!engine.needs_turn());
    }
}

fn a_batch_longer_than_the_submission_ring(kind: EngineKind) {
    const COUNT: u32 = 700;
    let mut engine = open(kind, COUNT);
    let (_image, file) = image(kind, &[]);
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    let contents = pattern(COUNT as usize * 512);
    for (i, sector) in (0..).zip(contents.chunks(512)) {
        let mut op = Op { file: id, kind: WRITE, offset: u64::from(i) * 512, buffers: owned(sector) };
        // There is no room while the kernel's own thread has not taken what is in the ring.
        while let Err(back) = engine.queue(op, token(i)) {
            op = back;
            engine.submit().unwrap();
        }
    }
    assert_eq!(engine.room(id), 0);
    let done = finish(&mut engine, COUNT as usize);
    assert!(done.iter().all(|done| done.result == Ok(512)));
    let slots: HashSet<_> = done.iter().map(|done| done.token.slot).collect();
    assert_eq!(slots.len(), COUNT as usize);
    let mut got = vec![0; contents.len()];
    file.read_exact_at(&mut got, 0).unwrap();
    assert!(got == contents);
}

fn errors_belong_to_one_operation(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (image, file) = image(kind, &pattern(512));
    let good = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    let read_only = engine
        .register(&BackingFile::new(Arc::new(File::open(image.path()).unwrap()), Owner::unique()))
        .unwrap();
    let gone = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    engine.unregister(gone);
    // Its index goes to another file, and its identity does not.
    let other = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    assert_ne!(gone, other);
    engine.unregister(gone);

    queue(&mut engine, 0, read_only, WRITE, 0, owned(&[0; 512]));
    queue(&mut engine, 1, gone, OpKind::Read, 0, owned(&[0; 512]));
    queue(&mut engine, 2, gone, DURABLE, 0, owned(&[0; 512]));
    queue(&mut engine, 3, gone, OpKind::Flush, 0, Buffers::None);
    queue(&mut engine, 4, good, OpKind::Read, 1 << 63, owned(&[0; 512]));
    queue(&mut engine, 5, good, OpKind::Read, 0, owned(&[0; 512]));
    queue(&mut engine, 6, other, OpKind::Read, 0, owned(&[0; 512]));
    queue(&mut engine, 7, read_only, OpKind::Read, 0, owned(&[0; 512]));
    let mut done = finish(&mut engine, 8);
    done.sort_by_key(|done| done.token.slot);
    let results: Vec<_> = done.iter().map(|done| done.result).collect();
    let bad = Err(Errno::BADF);
    assert_eq!(results, [bad, bad, bad, bad, Err(Errno::INVAL), Ok(512), Ok(512), Ok(512)]);
    for done in &done[5..] {
        assert_eq!(bytes(done), pattern(512));
    }
    // The buffers come back with any result.
    assert_eq!(bytes(&done[1]), [0; 512]);
}

fn more_files_than_the_kernel_knows_by_index(kind: EngineKind) {
    let mut engine = open(kind, 200);
    let images: Vec<_> = (0..100u8).map(|i| image(kind, &[i; 512])).collect();
    let ids: Vec<_> = images
        .iter()
        .map(|(_, file)| engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap())
        .collect();
    let check = |engine: &mut Engine, ids: &[FileId]| {
        for (i, &id) in ids.iter().enumerate() {
            queue(engine, i as u32, id, OpKind::Read, 0, owned(&[0xff; 512]));
        }
        for done in finish(engine, ids.len()) {
            assert_eq!(done.result, Ok(512));
            assert_eq!(bytes(&done), [done.token.slot as u8; 512]);
        }
    };
    check(&mut engine, &ids);
    // In another order, so that nearly all get another slot.
    for &id in &ids {
        engine.unregister(id);
    }
    assert!(images.iter().all(|(_, file)| Arc::strong_count(file) == 1));
    let mut again: Vec<_> = images
        .iter()
        .rev()
        .map(|(_, file)| engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap())
        .collect();
    again.reverse();
    check(&mut engine, &again);
}

fn a_file_unregistered_early_is_used_to_the_end(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_first_image, first) = image(kind, &[1; 512]);
    let (_second_image, second) = image(kind, &[2; 512]);
    let id = engine.register(&BackingFile::new(first.clone(), Owner::unique())).unwrap();
    queue(&mut engine, 1, id, OpKind::Read, 0, owned(&[0; 512]));
    engine.unregister(id);
    let next = engine.register(&BackingFile::new(second.clone(), Owner::unique())).unwrap();
    queue(&mut engine, 2, next, OpKind::Read, 0, owned(&[0; 512]));
    queue(&mut engine, 3, id, OpKind::Read, 0, owned(&[0; 512]));
    engine.submit().unwrap();
    engine.unregister(next);
    assert!(Arc::strong_count(&first) > 1 && Arc::strong_count(&second) > 1);

    let mut done = finish(&mut engine, 3);
    done.sort_by_key(|done| done.token.slot);
    assert_eq!((done[0].result, bytes(&done[0])), (Ok(512), &[1; 512][..]));
    assert_eq!((done[1].result, bytes(&done[1])), (Ok(512), &[2; 512][..]));
    assert_eq!(done[2].result, Err(Errno::BADF));
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1));
}

fn the_event_stays_readable_until_reaped(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(4096));
    let id = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    let sleep = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&sleep, engine.event(), epoll::EventData::new_u64(9), epoll::EventFlags::IN).unwrap();
    let mut done = Vec::new();
    for round in 1..=20 {
        assert!(!is_readable(&engine));
        queue(&mut engine, round, id, OpKind::Read, 0, owned(&[0; 4096]));
        queue(&mut engine, round, id, OpKind::Read, 512, owned(&[0; 512]));
        engine.submit().unwrap();
        while done.len() < 2 {
            let mut woken = Vec::with_capacity(2);
            // Twice, because the reason of the first is still there.
            for _ in 0..2 {
                woken.clear();
                retry_on_intr(|| epoll::wait(&sleep, spare_capacity(&mut woken), None)).unwrap();
                assert_eq!(woken.iter().map(|event| event.data.u64()).collect::<Vec<_>>(), [9]);
            }
            // A thread may have been busy with an earlier job.
            engine.submit().unwrap();
            engine.reap(&mut done);
        }
        done.clear();
    }
    assert!(!is_readable(&engine));
}

fn opened_on_one_thread_and_used_on_another(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(512));
    let id = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    queue(&mut engine, 1, id, OpKind::Read, 0, owned(&[0; 512]));
    thread::spawn(move || {
        assert_eq!(finish(&mut engine, 1)[0].result, Ok(512));
        assert_eq!(read(&mut engine, id, 0, 512), (Ok(512), pattern(512)));
    })
    .join()
    .unwrap();
}

fn dropped_with_operations_in_flight(kind: EngineKind) {
    const COUNT: usize = 64;
    let view = guest_memory(COUNT as u64 * 4096, 0);
    let released = view.map().slots()[0].mapping().released();
    let (_image, file) = image(kind, &[]);
    let mut engine = open(kind, 2 * COUNT as u32);
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    for i in 0..COUNT as u64 {
        view.map().write(Gpa(i * 4096), &[i as u8 + 1; 4096]).unwrap();
        queue(&mut engine, 0, id, WRITE, i * 4096, Buffers::Guest(iov(&view, [(i * 4096, 4096)])));
    }
    engine.submit().unwrap();
    // Only queued, so it is never done, and is discarded.
    for _ in 0..COUNT {
        queue(&mut engine, 0, id, WRITE, 0, Buffers::Guest(iov(&view, [(0, 4096)])));
    }
    assert_eq!(engine.in_flight(), 2 * COUNT);
    drop(view);
    drop(engine);
    // Nothing uses the guest's memory or the file any more, and the started operations are done.
    assert!(released.is_unused());
    assert_eq!(Arc::strong_count(&file), 1);
    let mut got = vec![0; COUNT * 4096];
    file.read_exact_at(&mut got, 0).unwrap();
    assert!(got.chunks(4096).enumerate().all(|(i, page)| page.iter().all(|&b| b == i as u8 + 1)));
}

fn on_range(
    engine: &mut Engine,
    file: FileId,
    syscall: RangeSyscall,
    offset: u64,
    len: u64,
) -> Result<u32, Errno> {
    run(engine, file, OpKind::Range { syscall, len }, offset, Buffers::None).result
}

fn ranges_of_a_file(kind: EngineKind) {
    const LEN: usize = 1 << 20;
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(LEN));
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    let blocks = file.metadata().unwrap().blocks();
    let mut expected = pattern(LEN);

    expected[4096..LEN / 2].fill(0);
    assert_eq!(on_range(&mut engine, id, RangeSyscall::PunchHole, 4096, LEN as u64 / 2 - 4096), Ok(0));
    assert!(file.metadata().unwrap().blocks() < blocks, "no space was freed");
    // The engine reports the result of the file system.
    let zeroed = fallocate(&file, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 0, 512).map(|()| 0);
    assert_eq!(on_range(&mut engine, id, RangeSyscall::ZeroRange, LEN as u64 / 2 + 512, 1024), zeroed);
    if zeroed.is_ok() {
        expected[..512].fill(0);
        expected[LEN / 2 + 512..][..1024].fill(0);
    }
    assert!(read(&mut engine, id, 0, LEN) == (Ok(LEN as u32), expected));
    // Past the end there is nothing, and a file does not grow by this.
    assert_eq!(on_range(&mut engine, id, RangeSyscall::PunchHole, 2 << 20, 4096), Ok(0));
    assert_eq!(file.metadata().unwrap().len(), LEN as u64);

    for call in [RangeSyscall::DeviceDiscard, RangeSyscall::DeviceZeroes] {
        assert!(on_range(&mut engine, id, call, 0, 4096).is_err(), "{call:?} of a file");
    }
    engine.unregister(id);
    let calls = [
        RangeSyscall::PunchHole,
        RangeSyscall::ZeroRange,
        RangeSyscall::DeviceDiscard,
        RangeSyscall::DeviceZeroes,
    ];
    for call in calls {
        assert_eq!(on_range(&mut engine, id, call, 0, 4096), Err(Errno::BADF), "{call:?}");
    }
    assert_eq!(Arc::strong_count(&file), 1);
}

fn ranges_of_a_device(kind: EngineKind) {
    const LEN: usize = 1 << 20;
    let mut engine = open(kind, 8);
    let (backing, _) = image(EngineKind::Threads, &pattern(LEN));
    let output = Command::new("losetup").args(["--find", "--show"]).arg(backing.path()).output();
    let device = match output {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap(),
        other => return println!("SKIPPED: no loop device: {other:?}"),
    };
    let file = Arc::new(OpenOptions::new().read(true).write(true).open(device.trim()).unwrap());
    // The file is closed with its last descriptor.
    assert!(Command::new("losetup").args(["--detach", device.trim()]).status().unwrap().success());
    let id = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    assert_eq!(on_range(&mut engine, id, RangeSyscall::DeviceZeroes, 512, 1024), Ok(0));
    let mut expected = pattern(LEN);
    expected[512..1536].fill(0);
    assert!(read(&mut engine, id, 0, LEN) == (Ok(LEN as u32), expected));
    let blocks = backing.as_file().metadata().unwrap().blocks();
    assert_eq!(on_range(&mut engine, id, RangeSyscall::DeviceDiscard, 64 << 10, 512 << 10), Ok(0));
    assert!(backing.as_file().metadata().unwrap().blocks() < blocks, "no space was freed");
    assert_eq!(on_range(&mut engine, id, RangeSyscall::DeviceDiscard, LEN as u64, 4096), Err(Errno::INVAL));
}

fn a_stalled_engine_takes_nothing_for_a_while(kind: EngineKind) {
    let mut engine = open(kind, 8);
    let (_image, file) = image(kind, &pattern(512));
    let id = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
    let op = || Op { file: id, kind: OpKind::Read, offset: 0, buffers: owned(&[0; 512]) };
    engine.pause(id);
    assert_eq!((engine.room(id), engine.in_flight(), engine.needs_turn()), (0, 0, true));
    assert!(engine.queue(op(), token(1)).is_err());
    // The pause ends after a moment, although nothing completes.
    while engine.room(id) == 0 {
        engine.submit().unwrap();
    }
    assert_eq!(engine.room(id), 8);
    // The pause ends at once when an operation completes.
    assert!(engine.queue(op(), token(1)).is_ok());
    engine.submit().unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        engine.pause(id);
        engine.reap(&mut done);
    }
    assert!(engine.room(id) == 8 && !engine.needs_turn());
}

/// Pages of a file, of which the middle one's memory is missing, or that are not all in the file.
fn merged_transfers_complete_separately(kind: EngineKind) {
    const PAGES: u64 = 8;
    let mut engine = open(kind, 16);
    let contents = pattern(PAGES as usize * 4096 - 1024);
    let (_image, file) = image(kind, &contents);
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    engine.merge(id);
    let view = guest_memory(64 * 4096, 0);
    // Past the end, reads and writes fault, although the map has memory there.
    let hole = memfd_create("hole", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&hole, 4096).unwrap();
    let slot = Slot::map(&hole, 0, Gpa(0), UserAddr(0), 4096).unwrap();
    let bad = Arc::new(View::new(Map::new(vec![slot]).unwrap()));
    ftruncate(&hole, 0).unwrap();
    for (op, broken) in [(OpKind::Read, None), (OpKind::Read, Some(3)), (WRITE, None), (DURABLE, Some(3))] {
        for page in 0..PAGES {
            let buffers =
                if broken == Some(page) { iov(&bad, [(0, 4096)]) } else { iov(&view, [(page * 8192, 4096)]) };
            queue(&mut engine, page as u32, id, op, page * 4096, Buffers::Guest(buffers));
        }
        let mut done = finish(&mut engine, PAGES as usize);
        done.sort_by_key(|done| done.token.slot);
        for (page, done) in (0..).zip(&done) {
            let expected = match (op, broken) {
                (_, Some(broken)) if broken == page => Err(Errno::FAULT),
                (OpKind::Read, _) if page == PAGES - 1 => Ok(3072),
                _ => Ok(4096),
            };
            assert_eq!(done.result, expected, "{op:?} {broken:?}: {page}");
            let Buffers::Guest(iov) = &done.buffers else { panic!("not the buffers that went in") };
            assert_eq!(iov.len(), 4096);
            if let (OpKind::Read, Ok(len)) = (op, expected) {
                let (mut got, at) = (vec![0; len as usize], page as usize * 4096);
                iov.read(0, &mut got);
                assert_eq!(got, contents[at..at + got.len()]);
            }
        }
        // Restores the file's length.
        file.set_len(PAGES * 4096 - 1024).unwrap();
    }
}

fn dropped_with_merged_operations(kind: EngineKind) {
    let view = guest_memory(64 * 4096, 0);
    let released = view.map().slots()[0].mapping().released();
    let (_image, file) = image(kind, &pattern(64 * 4096));
    let mut engine = open(kind, 128);
    let id = engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
    engine.merge(id);
    for _ in 0..2 {
        for page in 0..64 {
            queue(
                &mut engine,
                0,
                id,
                OpKind::Read,
                page * 4096,
                Buffers::Guest(iov(&view, [(page * 4096, 4096)])),
            );
        }
        engine.submit().unwrap();
        // The file ends before the last of them, so some would have to be done again, and none is.
        file.set_len(60 * 4096).unwrap();
    }
    drop((view, engine));
    assert!(released.is_unused());
    assert_eq!(Arc::strong_count(&file), 1);
}

/// A read that the kernel cannot complete before a write: only io_uring reads from a pipe.
mod pending {
    use super::*;

    fn engine_and_pipe() -> (Engine, FileId, File) {
        let (read, write) = pipe().unwrap();
        let mut engine = open(EngineKind::Uring, 8);
        let id = engine.register(&BackingFile::new(Arc::new(File::from(read)), Owner::unique())).unwrap();
        (engine, id, File::from(write))
    }

    #[test]
    fn wakes_a_sleeper() {
        let (mut engine, id, mut write) = engine_and_pipe();
        queue(&mut engine, 3, id, OpKind::Read, 0, owned(&[0; 5]));
        let mut done = Vec::new();
        engine.submit().unwrap();
        engine.reap(&mut done);
        assert!(done.is_empty() && !engine.needs_turn());
        assert!(!is_readable(&engine));
        assert_eq!(engine.in_flight(), 1);
        engine.unregister(id);
        let peer = thread::spawn(move || write.write_all(b"hello").unwrap());
        let done = finish(&mut engine, 1);
        assert_eq!((done[0].result, bytes(&done[0])), (Ok(5), &b"hello"[..]));
        peer.join().unwrap();
    }

    #[test]
    fn holds_up_the_drop() {
        let (mut engine, id, mut write) = engine_and_pipe();
        queue(&mut engine, 3, id, OpKind::Read, 0, owned(&[0; 5]));
        engine.submit().unwrap();
        let written = Arc::new(AtomicBool::new(false));
        let peer = {
            let written = written.clone();
            thread::spawn(move || {
                written.store(true, Ordering::Release);
                write.write_all(b"hello").unwrap();
            })
        };
        drop(engine);
        assert!(written.load(Ordering::Acquire));
        peer.join().unwrap();
    }
}
