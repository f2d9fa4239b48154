//! Tests engines on hosts that forbid io_uring, as the seccomp filters of container runtimes do.
//!
//! A filter cannot be removed, so each case runs in a child process: this program, with one test and a
//! variable.
#![allow(clippy::unwrap_used, unsafe_code, reason = "tests")]

use kickless_io::{
    AlignedBuf, BackingFile, Buffers, Completion, Engine, EngineKind, Errno, Error, FileId, Op, OpKind,
    Owner, Token, Waker, is_eventfd,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::env;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;

const CHILD: &str = "KICKLESS_TEST_FORBIDDEN";

/// Runs `case` in a child process whose only test is this one, called `name`.
fn in_a_child(name: &str, case: impl FnOnce()) {
    if env::var_os(CHILD).is_some() {
        return case();
    }
    let output = Command::new(env::current_exe().unwrap())
        .args([name, "--exact", "--test-threads=1", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}\n{stderr}");
}

/// Makes `call` fail with EPERM from now on, in this thread and those that it starts.
fn forbid(call: libc::c_long) {
    fail(call, vec![], libc::EPERM);
}

/// Makes `call` fail with `errno` from now on if one of `rules` holds, or always if there are none.
fn fail(call: libc::c_long, rules: Vec<SeccompRule>, errno: libc::c_int) {
    let filter = SeccompFilter::new(
        [(call, rules)].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno as u32),
        env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

fn queue_read(engine: &mut Engine, file: FileId, slot: u32) {
    let buffers = Buffers::Owned(AlignedBuf::new(4, 512).unwrap());
    engine.queue(Op { file, kind: OpKind::Read, offset: 0, buffers }, Token { source: 0, slot }).unwrap();
}

fn register(engine: &mut Engine) -> FileId {
    engine
        .register(&BackingFile::new(
            Arc::new(std::fs::File::open("/proc/self/exe").unwrap()),
            Owner::unique(),
        ))
        .unwrap()
}

fn assert_works(engine: &mut Engine) {
    let file = register(engine);
    queue_read(engine, file, 1);
    engine.submit().unwrap();
    let mut done: Vec<Completion> = Vec::new();
    while done.is_empty() {
        retry_on_intr(|| poll(&mut [PollFd::from_borrowed_fd(engine.event(), PollFlags::IN)], None)).unwrap();
        engine.reap(&mut done);
    }
    assert_eq!(done[0].result, Ok(4));
    assert!(matches!(&done[0].buffers, Buffers::Owned(buf) if buf[..] == *b"\x7fELF"));
}

/// Checks that `auto` works without io_uring, whose `step` fails, and gives the reason for its choice.
fn falls_back(step: &str) {
    let is_step = |error: &Error| {
        matches!(error, Error::Uring { step: failed, source }
        if *failed == step && source.kind() == std::io::ErrorKind::PermissionDenied)
    };
    let refused = Engine::open(EngineKind::Uring, 64).unwrap_err();
    assert!(is_step(&refused), "{refused}");

    let mut engine = Engine::open(EngineKind::Auto, 64).unwrap();
    assert_eq!(engine.name(), "aio");
    let reason = engine.reason().unwrap();
    assert!(is_step(reason), "{reason}");
    assert!(reason.to_string().contains(step));
    assert_works(&mut engine);

    // The other engines work without a reason.
    for kind in [EngineKind::Aio, EngineKind::Threads] {
        let mut engine = Engine::open(kind, 64).unwrap();
        assert!(engine.reason().is_none());
        assert_works(&mut engine);
    }
}

/// Checks that `auto` works with threads if Linux AIO is not available either, because `step` fails.
fn falls_back_on_threads(step: &str, kind: std::io::ErrorKind) {
    let refused = Engine::open(EngineKind::Aio, 64).unwrap_err();
    let is_step = |error: &Error| {
        matches!(error, Error::Aio { step: failed, source }
        if *failed == step && source.kind() == kind)
    };
    assert!(is_step(&refused), "{refused}");
    forbid(libc::SYS_io_uring_setup);
    let mut engine = Engine::open(EngineKind::Auto, 64).unwrap();
    assert_eq!(engine.name(), "threads");
    let reason = engine.reason().unwrap();
    assert!(matches!(reason, Error::Neither(_, no_aio) if is_step(no_aio)), "{reason}");
    assert!(reason.to_string().contains("io_uring_setup") && reason.to_string().contains(step), "{reason}");
    assert_works(&mut engine);
}

#[test]
fn aio_setup_is_forbidden() {
    in_a_child("aio_setup_is_forbidden", || {
        forbid(libc::SYS_io_setup);
        // Whether it is one is not known then.
        assert_eq!(is_eventfd(Waker::new().unwrap().as_fd()), None);
        falls_back_on_threads("io_submit", std::io::ErrorKind::PermissionDenied);
    });
}

#[test]
fn aio_submit_is_forbidden() {
    in_a_child("aio_submit_is_forbidden", || {
        forbid(libc::SYS_io_submit);
        falls_back_on_threads("io_submit", std::io::ErrorKind::PermissionDenied);
    });
}

/// Makes contexts for more than `most` operations unavailable from now on, as if other programs had used up
/// the system's limit. All programs share the real limit, so no test uses it up.
fn leave_aio_for(most: u64) {
    let more = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Gt, most).unwrap();
    fail(libc::SYS_io_setup, vec![SeccompRule::new(vec![more]).unwrap()], libc::EAGAIN);
}

/// An engine takes the remaining room. Without any, there is no engine.
#[test]
fn aio_is_used_up() {
    in_a_child("aio_is_used_up", || {
        leave_aio_for(40);
        let mut engine = Engine::open(EngineKind::Aio, 1024).unwrap();
        let file = register(&mut engine);
        assert!((8..=40).contains(&engine.room(file)), "{engine:?}");
        let depth = engine.room(file) as u32;
        let mut done = Vec::new();
        (0..depth).for_each(|slot| queue_read(&mut engine, file, slot));
        assert_eq!(engine.room(file), 0);
        while done.len() < depth as usize {
            engine.submit().unwrap();
            engine.reap(&mut done);
        }
        leave_aio_for(0);
        falls_back_on_threads("io_submit", std::io::ErrorKind::WouldBlock);
        let error = Engine::open(EngineKind::Aio, 64).unwrap_err().to_string();
        assert!(error.contains("fs.aio-max-nr"), "{error}");
        // Earlier operations go on.
        assert_works(&mut engine);
    });
}

/// A context for fewer than eight operations is not worth having, even where the system has one left.
#[test]
fn aio_has_room_for_too_few_operations() {
    in_a_child("aio_has_room_for_too_few_operations", || {
        // An engine that asks again and again fails too.
        // SAFETY: the call takes no pointer, and this program does not handle the signal.
        unsafe { libc::alarm(60) };
        let room = |depth| {
            let mut engine = Engine::open(EngineKind::Aio, depth).unwrap();
            let file = register(&mut engine);
            engine.room(file)
        };
        leave_aio_for(8);
        assert_eq!(room(100), 8);
        leave_aio_for(7);
        falls_back_on_threads("io_setup", std::io::ErrorKind::WouldBlock);
        // A request for no more than that succeeds.
        assert_eq!(room(7), 7);
    });
}

#[test]
fn setup_is_forbidden() {
    in_a_child("setup_is_forbidden", || {
        forbid(libc::SYS_io_uring_setup);
        falls_back("io_uring_setup");
    });
}

#[test]
fn enter_is_forbidden() {
    in_a_child("enter_is_forbidden", || {
        forbid(libc::SYS_io_uring_enter);
        falls_back("io_uring_enter");
    });
}

#[test]
fn restrictions_are_forbidden() {
    in_a_child("restrictions_are_forbidden", || {
        let restrict = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 11).unwrap();
        fail(libc::SYS_io_uring_register, vec![SeccompRule::new(vec![restrict]).unwrap()], libc::EPERM);
        falls_back("restrictions");
    });
}

/// A ring is made, and then may not be used. Nothing that is queued is lost.
#[test]
fn enter_becomes_forbidden() {
    in_a_child("enter_becomes_forbidden", || {
        let mut engine = Engine::open(EngineKind::Uring, 64).unwrap();
        assert_works(&mut engine);
        let file = register(&mut engine);
        forbid(libc::SYS_io_uring_enter);
        for round in 0..3 {
            for slot in 0..10 {
                queue_read(&mut engine, file, slot);
            }
            let error = engine.submit().unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "round {round}");
            assert!(engine.needs_turn());
            assert_eq!(engine.in_flight(), 10);
            let mut done = Vec::new();
            engine.reap(&mut done);
            let mut slots: Vec<_> = done.iter().map(|done| done.token.slot).collect();
            slots.sort_unstable();
            assert_eq!(slots, (0..10).collect::<Vec<_>>());
            assert!(done.iter().all(|done| done.result == Err(Errno::PERM)));
            assert!(
                done.iter().all(|done| matches!(&done.buffers, Buffers::Owned(buf) if buf[..] == [0; 4]))
            );
            assert_eq!((engine.in_flight(), engine.room(file), engine.needs_turn()), (0, 64, false));
        }
        // Nothing is in flight: the drop has nothing to wait for.
        queue_read(&mut engine, file, 11);
        drop(engine);
    });
}
