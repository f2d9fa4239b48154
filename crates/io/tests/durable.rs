//! Tests that the kernel flushes the device for durable writes, and for no others. The kernel counts the
//! flushes of a loop device.
#![allow(clippy::unwrap_used, reason = "tests")]

use kickless_io::{BackingFile, Buffers, Engine, EngineKind, Op, OpKind, Owner, Token};
use kickless_memory::{Gpa, Iov};
use kickless_testing::{LoopDevice, guest_memory};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::retry_on_intr;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use tempfile::NamedTempFile;

fn run(engine: &mut Engine, op: Op) {
    engine.queue(op, Token { source: 0, slot: 0 }).unwrap();
    let mut done = Vec::new();
    loop {
        engine.submit().unwrap();
        engine.reap(&mut done);
        if let Some(done) = done.pop() {
            assert!(done.result.is_ok(), "{:?}", done.result);
            return;
        }
        if !engine.needs_turn() {
            let mut fds = [PollFd::from_borrowed_fd(engine.event(), PollFlags::IN)];
            retry_on_intr(|| poll(&mut fds, None)).unwrap();
        }
    }
}

#[test]
fn durable_writes_are_flushed_and_others_are_not() {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(64 << 10).unwrap();
    let device = match LoopDevice::new(image, &[]) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device: {why}"),
    };
    let view = guest_memory(64 << 10, 0);
    for kind in [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads] {
        for flags in [OFlags::DIRECT, OFlags::empty()] {
            let mut open_options = OpenOptions::new();
            open_options.read(true).write(true).custom_flags(flags.bits() as i32);
            let file = Arc::new(open_options.open(device.path()).unwrap());
            let mut engine = Engine::open(kind, 8).unwrap();
            let file = engine.register(&BackingFile::new(file, Owner::unique())).unwrap();
            for segments in [1, 3] {
                for durable in [false, true] {
                    let before = device.flushes();
                    let mut iov = Iov::default();
                    (0..segments).for_each(|nth| iov.push(&view, Gpa(nth * 8192), 4096).unwrap());
                    let (write, buffers) = (OpKind::Write { durable }, Buffers::Guest(iov));
                    run(&mut engine, Op { file, kind: write, offset: 4096, buffers });
                    assert_eq!(device.flushes() > before, durable, "{kind} {flags:?} {segments}");
                }
            }
            let before = device.flushes();
            run(&mut engine, Op { file, kind: OpKind::Flush, offset: 0, buffers: Buffers::None });
            assert!(device.flushes() > before, "{kind} {flags:?}");
        }
    }
}
