//! Cancels operations in each state, on every engine.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_io::{
    AlignedBuf, BackingFile, Buffers, Completion, Engine, EngineKind, Errno, FileId, Op, OpKind, Owner, Token,
};
use kickless_memory::{Gpa, Iov, View};
use kickless_testing::guest_memory;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::pipe;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::thread;

const COUNT: u32 = 32;
const LEN: usize = 512;

const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];

fn engine(kind: EngineKind) -> Engine {
    Engine::open(kind, 2 * COUNT).unwrap()
}

fn register(engine: &mut Engine, file: Arc<File>) -> FileId {
    engine.register(&BackingFile::new(file, Owner::unique())).unwrap()
}

fn read(engine: &mut Engine, file: FileId, slot: u32, buffers: Buffers) {
    let offset = u64::from(slot % COUNT) * LEN as u64;
    engine.queue(Op { file, kind: OpKind::Read, offset, buffers }, Token { source: 0, slot }).unwrap();
}

/// Queues a sector of guest memory, so that contiguous sectors can be merged.
fn sector(view: &Arc<View>, slot: u32) -> Buffers {
    let mut iov = Iov::default();
    iov.push(view, Gpa(u64::from(slot) * 2 * LEN as u64), LEN as u32).unwrap();
    Buffers::Guest(iov)
}

fn turn(engine: &mut Engine, done: &mut Vec<Completion>) {
    engine.submit().unwrap();
    engine.reap(done);
    thread::yield_now();
}

/// Makes a file through the page cache and, if possible, a file on tmpfs that is open for direct I/O.
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

/// Each operation completes once, cancelled or not, and those on another file as if nothing had been
/// cancelled.
#[test]
fn each_operation_completes_once() {
    let view = guest_memory(1 << 20, 0);
    for (_image, file) in files() {
        for kind in ENGINES {
            for (merge, submit) in [(false, false), (false, true), (true, false), (true, true)] {
                let mut engine = engine(kind);
                let [id, other] = [(); 2].map(|()| register(&mut engine, file.clone()));
                if merge {
                    engine.merge(id);
                }
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
                        Err(Errno::CANCELED) => assert!(slot < COUNT, "{slot}"),
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
fn operations_that_were_not_started_are_cancelled() {
    for kind in ENGINES {
        let (_image, file) = files().remove(0);
        let mut engine = engine(kind);
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

/// Reads this many sectors from an empty pipe, by both identities of it.
fn read_pipe(engine: &mut Engine, files: [FileId; 2]) {
    for (file, slots) in files.into_iter().zip([0..COUNT, COUNT..COUNT + 2]) {
        for slot in slots {
            read(engine, file, slot, Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap()));
        }
    }
    engine.submit().unwrap();
}

/// io_uring ends reads that wait for a pipe, and those of another file go on.
#[test]
fn waiting_reads_in_the_ring_are_cancelled() {
    let (reader, writer) = pipe().unwrap();
    let reader = Arc::new(File::from(reader));
    let mut engine = engine(EngineKind::Uring);
    let files = [(); 2].map(|()| register(&mut engine, reader.clone()));
    read_pipe(&mut engine, files);
    engine.cancel(files[0]);
    let mut done = Vec::new();
    while done.len() < COUNT as usize {
        turn(&mut engine, &mut done);
    }
    assert!(done.iter().all(|done| done.result == Err(Errno::CANCELED)), "{done:?}");
    assert!(done.iter().all(|done| done.token.slot < COUNT));
    File::from(writer).write_all(&[7; 2 * LEN]).unwrap();
    done.clear();
    while engine.in_flight() > 0 {
        turn(&mut engine, &mut done);
    }
    assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Ok(LEN as u32); 2]);
}

/// A read of a pipe that several operations are merged into ends for all of them.
#[test]
fn merged_reads_in_the_ring_are_cancelled() {
    let view = guest_memory(1 << 20, 0);
    let (reader, _writer) = pipe().unwrap();
    let mut engine = engine(EngineKind::Uring);
    let id = register(&mut engine, Arc::new(File::from(reader)));
    engine.merge(id);
    (0..COUNT).for_each(|slot| read(&mut engine, id, slot, sector(&view, slot)));
    engine.submit().unwrap();
    engine.cancel(id);
    let mut done = Vec::new();
    while engine.in_flight() > 0 {
        turn(&mut engine, &mut done);
    }
    assert_eq!(done.len(), COUNT as usize);
    assert!(done.iter().all(|done| done.result == Err(Errno::CANCELED)), "{done:?}");
}

/// A request to cancel does not find a later operation in the same slot.
#[test]
fn operations_queued_later_go_on() {
    let (reader, writer) = pipe().unwrap();
    let mut writer = File::from(writer);
    let mut engine = engine(EngineKind::Uring);
    let id = register(&mut engine, Arc::new(File::from(reader)));
    let buffers = || Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap());
    for _ in 0..20 {
        writer.write_all(&[1; LEN]).unwrap();
        read(&mut engine, id, 0, buffers());
        engine.submit().unwrap();
        let event = PollFd::from_borrowed_fd(engine.event(), PollFlags::IN);
        poll(&mut [event], None).unwrap();
        engine.cancel(id);
        let mut done = Vec::new();
        while done.is_empty() {
            engine.reap(&mut done);
        }
        assert_eq!(done[0].result, Ok(LEN as u32));
        done.clear();
        read(&mut engine, id, 1, buffers());
        // If the request had been made, it would have ended the operation.
        (0..20).for_each(|_| turn(&mut engine, &mut done));
        writer.write_all(&[1; LEN]).unwrap();
        while engine.in_flight() > 0 {
            turn(&mut engine, &mut done);
        }
        assert_eq!(done.iter().map(|done| done.result).collect::<Vec<_>>(), [Ok(LEN as u32)]);
    }
}

/// The worker makes no call that cancels, because it could wait for the ring's lock.
#[test]
fn no_call_waits_for_a_cancel() {
    let (reader, _writer) = pipe().unwrap();
    let worker = thread::spawn(move || {
        let mut engine = engine(EngineKind::Uring);
        let id = register(&mut engine, Arc::new(File::from(reader)));
        read(&mut engine, id, 0, Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap()));
        engine.submit().unwrap();
        let filter = SeccompFilter::new(
            [(libc::SYS_io_uring_register, vec![])].into(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::EPERM as u32),
            std::env::consts::ARCH.try_into().unwrap(),
        );
        seccompiler::apply_filter(&BpfProgram::try_from(filter.unwrap()).unwrap()).unwrap();
        engine.cancel(id);
        let mut done = Vec::new();
        while done.is_empty() {
            turn(&mut engine, &mut done);
        }
        done[0].result
    });
    assert_eq!(worker.join().unwrap(), Err(Errno::CANCELED));
}
