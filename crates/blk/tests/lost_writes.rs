//! Which queues are told of lost writes, when queues stop and start and drivers come and go.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::Device;
use kickless_io::EngineKind;
use kickless_spec::blk::{S_IOERR, S_OK};
use kickless_testing::hostile_nbd::{HostileNbd, greet, hear, hello, simple};
use rig::{Ask, Rig, blk, open};
use std::io::Write;

/// Each flush that the server itself fails is a loss.
#[test]
fn queues_that_start_again_are_told_what_they_were_not_told() {
    let server = HostileNbd::start(1, |_, stream| {
        greet(stream, &hello(false));
        for error in [5, 0, 0, 5, 0, 5, 0, 5, 0, 5, 0] {
            let asked = hear(stream).unwrap();
            stream.write_all(&simple(error, asked.cookie, &[])).unwrap();
        }
    });
    let device = blk(open(&server.uri().parse().unwrap()));
    // Starts a queue, which stops after one flush.
    let flush = |queue| Rig::start_queue(&device, queue, EngineKind::Threads).status(Ask::flush());
    assert_eq!(flush(0), S_IOERR);
    assert_eq!([flush(1), flush(1)], [S_IOERR, S_OK]);
    assert_eq!(flush(0), S_IOERR);
    // A front-end that looks like a new one, but its driver goes on.
    device.reset();
    device.restore_unknown();
    assert_eq!(flush(1), S_IOERR);
    assert_eq!(flush(0), S_IOERR);
    device.reset();
    assert_eq!(flush(1), S_OK, "another machine");
    assert_eq!(flush(0), S_IOERR);
    device.reset_driver();
    assert_eq!(flush(1), S_OK, "a fresh driver behind the same front-end");
    assert_eq!(flush(0), S_IOERR);
    // A driver that comes from another process may have been here before.
    device.reset();
    device.load(b"blk1\x01").unwrap();
    assert_eq!(flush(1), S_IOERR);
}
