//! Tests the stop of a task while one of its requests has no room to continue.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod echo;

use echo::{DEADLINE, Driver, options, start};
use kickless_device::{Context, Next, Polled, QueueTask, Vring};
use kickless_io::{BackingFile, Buffers, Completion, Engine, FileId, Op, OpKind, Owner, Token};
use kickless_virtqueue::Chain;
use kickless_worker::Poll;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// A task with one request at a time, of two steps. The second step waits for something that the next poll
/// finds.
struct TwoSteps {
    vring: Vring,
    chain: Chain,
    file: Option<FileId>,
    in_flight: bool,
    waits: bool,
    popped: Sender<()>,
}

impl TwoSteps {
    fn queue(&mut self, context: &mut Context<'_>) {
        let file = self.file.expect("it is attached");
        let op = Op { file, kind: OpKind::Flush, offset: 0, buffers: Buffers::None };
        context.engine.queue(op, Token { source: context.task, slot: 0 }).unwrap();
    }
}

impl QueueTask for TwoSteps {
    fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    fn attach(&mut self, engine: &mut Engine) -> io::Result<()> {
        let file: OwnedFd = memfd_create("disk", MemfdFlags::CLOEXEC)?;
        self.file = Some(
            engine
                .register(&BackingFile::new(Arc::new(File::from(file)), Owner::unique()))
                .map_err(io::Error::other)?,
        );
        Ok(())
    }

    fn detach(&mut self, engine: &mut Engine) {
        engine.unregister(self.file.take().expect("it is attached"));
    }

    fn poll(&mut self, context: &mut Context<'_>, budget: u32) -> Polled {
        if std::mem::take(&mut self.waits) {
            self.vring.push(self.chain.id, 0);
            self.in_flight = false;
        }
        let mut served = 0;
        if !self.in_flight && budget > 0 && self.vring.pop(&mut self.chain) {
            served = 1;
            self.in_flight = true;
            self.queue(context);
            let _ = self.popped.send(());
        }
        self.vring.publish();
        Polled { served, cost: served, next: Next::Idle }
    }

    fn complete(&mut self, _: &mut Context<'_>, completions: &mut Vec<Completion>) -> bool {
        completions.clear();
        self.waits = true;
        true
    }

    fn in_flight(&self) -> usize {
        self.in_flight.into()
    }
}

#[test]
fn the_waiting_request_completes_and_the_task_stops() {
    let pool = start(&options(1, Poll::Never));
    let executor = pool.executor(1);
    for _ in 0..200 {
        let (mut driver, vring) = Driver::new();
        let (popped, is_popped) = channel();
        driver.submit(1);
        let task =
            TwoSteps { vring, chain: Chain::default(), file: None, in_flight: false, waits: false, popped };
        let handle = executor.spawn(Box::new(task)).unwrap();
        is_popped.recv_timeout(DEADLINE).unwrap();
        // The stop comes before the completion, with it or after it.
        let stopped = handle.stop().recv_timeout(DEADLINE).expect("it never stopped");
        assert_eq!((stopped.next_avail, driver.used()), (1, 1));
    }
}
