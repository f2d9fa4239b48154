//! Tests that a file system that hangs does not affect other devices of an engine.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use kickless_io::{
    AlignedBuf, BackingFile, Buffers, Completion, Engine, EngineKind, EngineOptions, FileId, Op, OpKind,
    Owner, RangeSyscall, Token,
};
use kickless_testing::FileSystem;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

const LEN: usize = 4096;
const DEPTH: u32 = 64;
const WRITE: OpKind = OpKind::Write { durable: false };
const DURABLE: OpKind = OpKind::Write { durable: true };
const PUNCH: OpKind = OpKind::Range { syscall: RangeSyscall::PunchHole, len: LEN as u64 };
/// The time after which an operation counts as hanging.
const LIMIT: Duration = Duration::from_secs(60);

/// Makes a file of 32 written blocks, opened with these flags.
fn file(path: &Path, direct: bool) -> Arc<File> {
    std::fs::write(path, [1; 32 * LEN]).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
    let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
    Arc::new(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap())
}

fn op(file: FileId, kind: OpKind, block: u64) -> Op {
    let buffers = match kind {
        OpKind::Read | OpKind::Write { .. } => Buffers::Owned(AlignedBuf::new(LEN, LEN).unwrap()),
        OpKind::Flush | OpKind::Range { .. } => Buffers::None,
    };
    Op { file, kind, offset: block * LEN as u64, buffers }
}

/// Queues as many operations as the engine takes. Returns their number.
fn fill(engine: &mut Engine, file: FileId, kind: OpKind, source: u32) -> usize {
    let mut taken = 0;
    while engine.queue(op(file, kind, taken as u64 % 32), Token { source, slot: taken as u32 }).is_ok() {
        taken += 1;
    }
    engine.submit().unwrap();
    taken
}

/// Submits, sleeps and reaps once.
fn turn(engine: &mut Engine, done: &mut Vec<Completion>) {
    engine.submit().unwrap();
    engine.reap(done);
    if !engine.needs_turn() {
        let mut event = [PollFd::from_borrowed_fd(engine.event(), PollFlags::IN)];
        let _ = poll(&mut event, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
    }
}

/// Does operations of each kind on a file, more at a time than its owner has threads. One write goes to the
/// block that the previous round has punched, whose space is no longer allocated.
fn works(engine: &mut Engine, file: FileId, others: &mut Vec<Completion>) {
    let kinds =
        [(OpKind::Read, 2), (WRITE, 2), (OpKind::Flush, 2), (DURABLE, 2), (PUNCH, 2), (WRITE, 1), (WRITE, 2)];
    for round in 0..20 {
        for (slot, (kind, ahead)) in (0..).zip(kinds) {
            engine.queue(op(file, kind, round + ahead), Token { source: 99, slot }).unwrap();
        }
        let mut left = kinds.len();
        while left > 0 {
            let mut done = Vec::new();
            turn(engine, &mut done);
            for completion in done {
                if completion.token.source == 99 {
                    assert!(completion.result.is_ok(), "{completion:?}");
                    left -= 1;
                } else {
                    others.push(completion);
                }
            }
        }
    }
}

/// Disks of a frozen file system hang one after the other, each with as many operations in flight as allowed.
/// Each time, the other disks, through the cache and past it, do the same as before.
fn neighbours_go_on(kind: EngineKind) {
    let file_system = match FileSystem::mount() {
        Ok(file_system) => file_system,
        Err(why) => return println!("SKIPPED: no file system that can be frozen: {why}"),
    };
    let images = tempfile::tempdir().unwrap();
    let hung: Vec<_> = [(true, WRITE), (false, WRITE), (true, OpKind::Flush), (true, PUNCH), (true, DURABLE)]
        .into_iter()
        .enumerate()
        .map(|(number, (direct, kind))| (file(&file_system.path().join(number.to_string()), direct), kind))
        .collect();
    // Written and not synced, so that a flush has something to do.
    std::os::unix::fs::FileExt::write_all_at(&*hung[2].0, AlignedBuf::new(LEN, LEN).unwrap().as_ref(), 0)
        .unwrap();
    let near: Vec<_> =
        [true, false].map(|direct| file(&images.path().join(direct.to_string()), direct)).into();
    // On a thread of its own, because a call that waits would not return here.
    let (frozen, is_frozen) = channel();
    let (answer, answers) = channel();
    let worker = thread::spawn(move || {
        let mut engine =
            Engine::open_with(EngineOptions { owners: 16, ..EngineOptions::new(kind, DEPTH) }).unwrap();
        let mut register =
            |file: &Arc<File>| engine.register(&BackingFile::new(file.clone(), Owner::unique())).unwrap();
        let near: Vec<_> = near.iter().map(&mut register).collect();
        let hung: Vec<_> = hung.iter().map(|(file, kind)| (register(file), *kind)).collect();
        let (mut done, mut taken) = (Vec::new(), 0);
        is_frozen.recv().unwrap();
        for (number, (file, kind)) in (0..).zip(&hung) {
            taken += fill(&mut engine, *file, *kind, number);
            for near in &near {
                works(&mut engine, *near, &mut done);
            }
            answer.send(number).unwrap();
        }
        while done.len() < taken {
            turn(&mut engine, &mut done);
        }
        done
    });
    let thaw = file_system.freeze().unwrap();
    frozen.send(()).unwrap();
    for number in 0..5 {
        assert_eq!(answers.recv_timeout(LIMIT), Ok(number), "the neighbours of hung files hang");
    }
    drop(thaw);
    let done = worker.join().unwrap();
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    let of = |source| done.iter().filter(|done| done.token.source == source).count();
    assert!(of(0) >= DEPTH as usize, "a device that hangs first has all that is common");
}

macro_rules! on_each_engine {
    ($($name:ident: $kind:expr;)*) => { $(#[test] fn $name() { neighbours_go_on($kind); })* };
}

on_each_engine! {
    uring: EngineKind::Uring;
    aio: EngineKind::Aio;
    threads: EngineKind::Threads;
}
