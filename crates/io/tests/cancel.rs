//! Cancels operations in each state, on every engine.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_io::{
    AlignedBuf, BackingFile, Buffers, Completion, CompletionMode, Engine, EngineKind, EngineOptions, Errno,
    FileId, Op, OpKind, Owner, Token,
};
use kickless_memory::{Gpa, Iov, Map, Slot, UserAddr, View};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::pipe::pipe;
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

const COUNT: u32 = 32;
const LEN: usize = 512;

fn engine(options: EngineOptions) -> Engine {
    Engine::open_with(EngineOptions { depth: 2 * COUNT, ..options }).unwrap()
}

fn ways() -> impl Iterator<Item = EngineOptions> {
    let kinds = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads].into_iter();
    let ways = kinds.flat_map(|kind| {
        [CompletionMode::Worker, CompletionMode::Thread]
            .map(|completion| EngineOptions { completion, ..EngineOptions::new(kind, 0) })
    });
    ways.chain([EngineOptions { sqpoll: true, ..EngineOptions::new(EngineKind::Uring, 0) }])
}

fn register(engine: &mut Engine, file: Arc<File>) -> FileId {
    engine.register(&BackingFile::new(file, Owner::unique())).unwrap()
}

fn read(engine: &mut Engine, file: FileId, slot: u32, buffers: Buffers) {
    let offset = u64::from(slot % COUNT) * LEN as u64;
    engine.queue(Op { file, kind: OpKind::Read, offset, buffers }, Token { source: 0, slot }).unwrap();
}

/// A sector of guest memory, so that neighbours can be merged.
fn sector(view: &Arc<View>, slot: u32) -> Buffers {
    let mut iov = Iov::default();
    iov.push(view, Gpa(u64::from(slot) * 2 * LEN as u64), LEN as u32).unwrap();
    Buffers::Guest(iov)
}

fn guest() -> Arc<View> {
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, 1 << 20).unwrap();
    Arc::new(View::new(Map::new(vec![Slot::map(memory, 0, Gpa(0), UserAddr(0), 1 << 20).unwrap()]).unwrap()))
}

fn turn(engine: &mut Engine, done: &mut Vec<Completion>) {
    engine.submit().unwrap();
    engine.reap(done);
    std::thread::yield_now();
}

/// A file through the page cache, and where there can be one a file on tmpfs that is open for direct I/O.
fn files() -> Vec<(tempfile::NamedTempFile, Arc<File>)> {
    let sectors: Vec<u8> = (0..COUNT as usize * LEN).map(|at| (at / LEN) as u8).collect();
    let mut cached = tempfile::NamedTempFile::new().unwrap();
    cached.write_all(&sectors).unwrap();
    let file = Arc::new(cached.reopen().unwrap());
    let mut files = vec![(cached, file)];
    if let Ok(mut image) = tempfile::NamedTempFile::new_in("/dev/shm") {
        image.write_all(&sectors).unwrap();
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(image.path());
        files.extend(direct.ok().map(|file| (image, Arc::new(file))));
    }
    files
}

/// Whatever can be cancelled, each operation completes once, and those on another file as if nothing had been
/// cancelled.
#[test]
fn each_operation_completes_once() {
    let view = guest();
    for (_image, file) in files() {
        for way in ways() {
            for (merge, submit) in [(false, false), (false, true), (true, false), (true, true)] {
                let mut engine = engine(way);
                let [id, other] = [(); 2].map(|()| register(&mut engine, file.clone()));
                engine.merge(id, merge);
                for slot in 0..COUNT {
                    read(&mut engine, id, slot, sector(&view, slot));
                }
                for slot in COUNT..2 * COUNT {
                    read(&mut engine, other, slot, sector(&view, slot));
                }
                if submit {
                    engine.submit().unwrap();
                }
                engine.cancel(id);
                let (mut done, mut seen) = (Vec::new(), HashSet::new());
                while engine.in_flight() > 0 {
                    turn(&mut engine, &mut done);
                }
                for Completion { token: Token { slot, .. }, result, buffers } in done {
                    assert!(seen.insert(slot), "{slot} completes twice");
                    let Buffers::Guest(iov) = buffers else { panic!("the buffers are lost") };
                    let mut got = [0; LEN];
                    iov.read(0, &mut got);
                    match result {
                        Ok(512) => assert_eq!(got, [(slot % COUNT) as u8; LEN], "{slot}"),
                        Err(Errno::CANCELED | Errno::INTR) => assert!(slot < COUNT, "{slot}"),
                        other => panic!("{slot}: {other:?}"),
                    }
                }
                assert_eq!((seen.len() as u32, engine.room(id) as u32), (2 * COUNT, 2 * COUNT));
            }
        }
    }
}

/// An operation that was only queued is not done.
#[test]
fn what_was_not_started_is_cancelled() {
    for way in ways() {
        let (_image, file) = files().remove(0);
        let mut engine = engine(way);
        let id = register(&mut engine, file);
        read(&mut engine, id, 0, Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap()));
        engine.unregister(id);
        engine.cancel(id);
        assert!(engine.needs_turn());
        let mut done = Vec::new();
        engine.reap(&mut done);
        assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Err(Errno::CANCELED)]);
        assert_eq!(engine.in_flight(), 0);
    }
}

/// io_uring ends a read that waits for a pipe, and the engine can be dropped.
#[test]
fn what_waits_in_the_ring_is_cancelled() {
    for way in ways().filter(|way| way.kind == EngineKind::Uring && way.completion == CompletionMode::Worker)
    {
        let (reader, _writer) = pipe().unwrap();
        let mut engine = engine(way);
        let id = register(&mut engine, Arc::new(File::from(reader)));
        read(&mut engine, id, 0, Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap()));
        let mut done = Vec::new();
        turn(&mut engine, &mut done);
        assert!(done.is_empty());
        // The kernel's own thread may not have taken it yet.
        while done.is_empty() {
            engine.cancel(id);
            turn(&mut engine, &mut done);
        }
        assert!(matches!(done[0].result, Err(Errno::CANCELED | Errno::INTR)), "{done:?}");
    }
}
