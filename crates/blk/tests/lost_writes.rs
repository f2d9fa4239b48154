//! Tests which queues report lost writes, when queues stop and start and drivers change.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_device::{Device, Driver};
use kickless_io::EngineKind;
use kickless_spec::blk::{S_IOERR, S_OK};
use kickless_testing::hostile_nbd::{HostileNbd, greet, hello, read_request, simple};
use rig::{Rig, TestRequest, blk, open};
use std::io::Write;

/// A flush that the server itself fails counts as a loss.
#[test]
fn restarted_queues_report_losses_not_reported_yet() {
    let server = HostileNbd::start(1, |_, stream| {
        greet(stream, &hello(false));
        for error in [5, 0, 0, 5, 0, 5, 0, 5, 0, 5, 0] {
            let request = read_request(stream).unwrap();
            stream.write_all(&simple(error, request.cookie, &[])).unwrap();
        }
    });
    let device = blk(open(&server.uri().parse().unwrap()));
    // Runs a queue for a single flush.
    let flush = |queue| Rig::start_queue(&device, queue, EngineKind::Threads).status(TestRequest::flush());
    assert_eq!(flush(0), S_IOERR);
    assert_eq!([flush(1), flush(1)], [S_IOERR, S_OK]);
    assert_eq!(flush(0), S_IOERR);
    // The front-end looks new, but its driver goes on.
    device.reset(Driver::Fresh);
    device.reset(Driver::Unknown);
    assert_eq!(flush(1), S_IOERR);
    assert_eq!(flush(0), S_IOERR);
    device.reset(Driver::Fresh);
    assert_eq!(flush(1), S_OK, "a new machine");
    assert_eq!(flush(0), S_IOERR);
    device.reset(Driver::SameFrontEnd);
    assert_eq!(flush(1), S_OK, "a fresh driver behind the same front-end");
    assert_eq!(flush(0), S_IOERR);
    // A driver that comes from another process may have used this one before.
    device.reset(Driver::Fresh);
    device.load(b"blk1\x01").unwrap();
    assert_eq!(flush(1), S_IOERR);
}
