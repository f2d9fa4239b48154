//! Cancels requests of files, which then start no further operation.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;

use common::{Worker, image, options};
use kickless_disk::{Cache, Disk, DiskSpec, Extent, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::Gpa;
use kickless_testing::guest_memory;

const ENGINES: [EngineKind; 3] = [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads];
const CANCELLED: Result<(), IoError> = Err(IoError::Os(Errno::CANCELED));
const PAGE: usize = 4096;

/// The kernel asks for a retry, or the engine has cancelled the operation. Only a request that was not
/// cancelled starts again.
#[test]
fn a_cancelled_request_is_not_retried() {
    let image = image(&[7; 2 * PAGE]);
    let faulty = format!("fault:eio@nth=1000:{}", image.path().display());
    for spec in [DiskSpec::File(image.path().into()), faulty.parse().unwrap()] {
        let disk = Disk::open(&spec, &options(Cache::Writeback, false)).unwrap();
        for kind in ENGINES {
            let mut worker = Worker::new(&disk, kind, 8);
            let view = guest_memory(PAGE as u64, 0);
            for errno in [Errno::AGAIN, Errno::CANCELED, Errno::INTR] {
                for is_cancelled in [true, false] {
                    for request in [Request::Read { offset: 0 }, Request::Flush] {
                        if request != Request::Flush {
                            worker.io(0).buffers_mut().push(&view, Gpa(0), PAGE as u32).unwrap();
                        }
                        worker.fail_next(errno);
                        assert_eq!(worker.start(0, request), Step::Pending);
                        if is_cancelled {
                            worker.cancel();
                        }
                        let expected = if is_cancelled { CANCELLED } else { Ok(()) };
                        assert_eq!(worker.finish(), expected, "{kind:?} {errno} {request:?}");
                        worker.io(0).buffers_mut().clear(&mut kickless_memory::Marks::off());
                    }
                }
            }
        }
    }
}

/// A request in several parts ends after the part that the kernel has, and does not start the next one.
#[test]
fn a_cancelled_request_ends_after_its_present_part() {
    for kind in ENGINES {
        let image = image(&[7; 16 * PAGE]);
        let spec = DiskSpec::File(image.path().into());
        let disk = Disk::open(&spec, &options(Cache::Writeback, false)).unwrap();
        let mut worker = Worker::new(&disk, kind, 8);
        for at in 0..8 {
            let (offset, len) = (2 * at * PAGE as u64, PAGE as u64);
            worker.io(0).extents_mut().push(Extent { offset, len, unmap: false });
        }
        assert_eq!(worker.start(0, Request::WriteZeroes { durable: false }), Step::Pending);
        worker.cancel();
        assert_eq!(worker.finish(), CANCELLED, "{kind:?}");
        let last = 14 * PAGE as u64;
        assert_eq!(worker.read(last, PAGE), (Ok(()), vec![7; PAGE]), "{kind:?}");
        // Later requests are not cancelled.
        assert_eq!(worker.write(last, &[1; PAGE], 0), Ok(()));
        // Nothing is in flight.
        worker.cancel();
        assert_eq!(worker.read(last, PAGE), (Ok(()), vec![1; PAGE]), "{kind:?}");
    }
}

/// A request waits because the kernel had no room for it. It ends at the next retry.
#[test]
fn a_request_that_waits_is_cancelled() {
    let image = image(&[7; PAGE]);
    let spec = DiskSpec::File(image.path().into());
    let disk = Disk::open(&spec, &options(Cache::Writeback, false)).unwrap();
    for kind in ENGINES {
        let mut worker = Worker::new(&disk, kind, 8);
        worker.fail_next(Errno::AGAIN);
        assert_eq!(worker.start(0, Request::Flush), Step::Pending);
        while worker.in_flight() > 0 {
            assert_eq!(worker.turn(), []);
        }
        worker.cancel();
        assert_eq!(worker.finish(), CANCELLED, "{kind:?}");
    }
}
