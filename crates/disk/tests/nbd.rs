//! Tests exports of real NBD servers: their features, and requests while a server is stopped, killed or back.
//! `hostile_nbd.rs` tests servers that break the protocol.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::server::{KINDS, Kind, Server};
use common::{InFlight, TIMED_OUT, guest, open, options, run_on_extent, worker};
use kickless_disk::{Cache, Disk, DiskSpec, Error, IoError, Request, Step};
use kickless_io::Errno;
use kickless_memory::{Gpa, Marks};
use kickless_testing::Random;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

const LEN: u64 = 1 << 20;

/// Returns the bytes that the server's image takes on its file system.
fn space(server: &Server) -> u64 {
    fs::metadata(server.image()).unwrap().blocks() * 512
}

#[test]
fn discards_and_zeroes() {
    let contents = Random(1).bytes(LEN);
    for kind in KINDS {
        let server = Server::start(kind, &contents, &[]);
        let disk = open(&server.spec(""));
        let limits = disk.limits();
        assert!(limits.discard.is_some() && limits.write_zeroes.is_some() && limits.zeroes_may_unmap);
        assert_eq!(disk.size(), LEN);
        let mut worker = worker(&disk);
        let full = space(&server);
        run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, 4096, 64 << 10, false);
        assert!(space(&server) >= full, "{kind:?}: zeroes without unmap freed space");
        run_on_extent(&mut worker, Request::WriteZeroes { durable: true }, 128 << 10, 128 << 10, true);
        run_on_extent(&mut worker, Request::Discard { durable: true }, 512 << 10, 256 << 10, false);
        assert!(space(&server) + (300 << 10) < full, "{kind:?}: no space was freed");
        let mut expected = contents.clone();
        for range in [4096..68 << 10, 128 << 10..256 << 10, 512 << 10..768 << 10] {
            expected[range].fill(0);
        }
        assert!(worker.read(0, LEN as usize) == (Ok(()), expected), "{kind:?}");
    }
}

/// Reads in the log of the server which commands it received.
#[test]
fn durable_writes_and_flushes_reach_the_server() {
    let server = Server::start(Kind::Nbdkit, &[0; 65536], &["--filter=log", "logfile=log"]);
    let disk = open(&server.spec(""));
    let mut worker = worker(&disk);
    let view = guest(4096);
    for durable in [false, true] {
        worker.io(0).buffers_mut().push(&view, Gpa(0), 512).unwrap();
        assert_eq!(worker.run(Request::Write { offset: 512, durable }), Ok(()));
        worker.io(0).buffers_mut().clear(&mut Marks::off());
    }
    assert_eq!(worker.flush(), Ok(()));
    let log = fs::read_to_string(server.file("log")).unwrap();
    let writes: Vec<&str> =
        log.lines().filter(|line| line.contains(" Write ") && !line.contains("...Write")).collect();
    assert_eq!(writes.len(), 2, "{log}");
    assert!(writes[0].contains("fua=0") && writes[1].contains("fua=1"), "{log}");
    assert_eq!(log.lines().filter(|line| line.contains(" Flush ")).count(), 1, "{log}");
}

#[test]
fn errors_of_an_open_say_the_reason() {
    let read_only = Server::start(Kind::Nbdkit, &[1; 65536], &["--readonly"]);
    let refused = |spec: &DiskSpec, needle: &str| {
        let error = Disk::open(spec, &options(Cache::None, false)).unwrap_err();
        assert!(error.to_string().contains(needle), "{error}");
        error
    };
    refused(&read_only.spec(""), "--read-only");
    let disk = Disk::open(&read_only.spec(""), &options(Cache::None, true)).unwrap();
    assert_eq!((disk.limits().discard, disk.limits().write_zeroes), (None, None));
    let mut reader = worker(&disk);
    assert_eq!(reader.read(512, 512), (Ok(()), vec![1; 512]));
    assert_eq!(reader.write(0, &[0; 512], 0), Err(IoError::ReadOnly));

    let server = Server::start(Kind::Qemu, &[1; 65536], &[]);
    let other = server.uri("").replace("/disk", "/none");
    refused(&DiskSpec::Nbd(other.parse().unwrap()), "no such export");
    let empty = Server::start(Kind::Nbdkit, &[], &[]);
    assert!(matches!(refused(&empty.spec(""), "0 bytes"), Error::Size(0)));
    let dir = tempfile::tempdir().unwrap();
    let no_server = format!("nbd+unix:///?socket={}", dir.path().join("none").display());
    refused(&DiskSpec::Nbd(no_server.parse().unwrap()), "cannot be used");
    let long = format!("nbd+unix:///?socket=/{}", "x".repeat(200));
    refused(&DiskSpec::Nbd(long.parse().unwrap()), "cannot be used");
}

#[test]
fn requests_wait_for_a_server_that_is_paused() {
    let contents = Random(2).bytes(LEN);
    for kind in KINDS {
        let server = Server::start(kind, &contents, &[]);
        let disk = open(&server.spec("reconnect-delay=1"));
        server.pause();
        let mut requests = InFlight::start(&disk, 100, 20);
        // Longer than requests would wait for a lost server.
        thread::sleep(Duration::from_millis(1500));
        server.resume();
        assert!(requests.finish().iter().all(Result::is_ok), "{kind:?}");
        let mut read = vec![0; 100 * 4096];
        requests.view.read(Gpa(0), &mut read).unwrap();
        assert!(read == contents[..100 * 4096], "{kind:?}");
    }
}

#[test]
fn a_stop_does_not_wait_for_a_server_that_is_paused() {
    // nbdkit 1.32 may abort when two of its threads answer on a connection that has been closed.
    let server = Server::start(Kind::Qemu, &[1; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=1"));
    server.pause();
    let mut requests = InFlight::start(&disk, 3, 3);
    disk.limit_remote_waits();
    assert_eq!(requests.finish(), [TIMED_OUT; 6]);
    drop(requests);
    server.resume();
    // The next session waits for the server again, a second for each request.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        disk.reload(false).unwrap();
        match worker(&disk).read(0, 512) {
            (Ok(()), bytes) => break assert_eq!(bytes, [1; 512]),
            (error, _) => assert!(error == TIMED_OUT && Instant::now() < deadline, "{error:?}"),
        }
    }
}

/// A stop also ends the requests that wait for a buffer.
#[test]
fn a_stop_with_more_requests_than_buffers() {
    let server = Server::start(Kind::Nbdkit, &[1; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=1"));
    server.pause();
    let (slots, len) = (200, 64 << 10);
    let mut worker = worker(&disk).with_slots(slots);
    let view = guest(len);
    for slot in 0..slots {
        worker.io(slot).buffers_mut().push(&view, Gpa(0), len as u32).unwrap();
        assert_eq!(worker.start(slot, Request::Read { offset: 0 }), Step::Busy);
    }
    let mut ended = Vec::new();
    while ended.len() < slots {
        disk.limit_remote_waits();
        ended.extend(worker.turn());
    }
    assert!(ended.iter().all(|(_, result)| *result == TIMED_OUT));
    server.resume();
}

/// Requests do not fail in a stop while the server answers.
#[test]
fn a_stop_with_a_server_that_answers() {
    let server = Server::start(Kind::Nbdkit, &[1; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=0"));
    let mut requests = InFlight::start(&disk, 64, 64);
    disk.limit_remote_waits();
    assert!(requests.finish().iter().all(Result::is_ok));
}

#[test]
fn requests_fail_while_the_server_is_lost_and_work_when_it_is_back() {
    for kind in KINDS {
        let mut server = Server::start(kind, &[1; LEN as usize], &[]);
        let disk = open(&server.spec("reconnect-delay=1"));
        server.pause();
        let mut requests = InFlight::start(&disk, 10, 10);
        server.kill();
        assert_eq!(requests.finish(), [TIMED_OUT; 20], "{kind:?}");
        // The next request fails at once.
        assert_eq!(worker(&disk).read(0, 512).0, TIMED_OUT, "{kind:?}");
        server.restart();
        let mut worker = worker(&disk);
        while worker.read(0, 512).0 == TIMED_OUT {
            thread::yield_now();
        }
        assert_eq!(worker.write(512, &[7; 512], 0), Ok(()), "{kind:?}");
        assert_eq!(worker.read(0, 1024), (Ok(()), [[1; 512], [7; 512]].concat()), "{kind:?}");
    }
}

#[test]
fn a_restarted_server_gets_the_unanswered_requests_again() {
    let contents = Random(3).bytes(LEN);
    for kind in KINDS {
        let mut server = Server::start(kind, &contents, &[]);
        let disk = open(&server.spec("reconnect-delay=60"));
        server.pause();
        let mut requests = InFlight::start(&disk, 50, 0);
        server.restart();
        assert!(requests.finish().iter().all(Result::is_ok), "{kind:?}");
        let mut read = vec![0; 50 * 4096];
        requests.view.read(Gpa(0), &mut read).unwrap();
        assert!(read == contents[..50 * 4096], "{kind:?}");
    }
}

/// Writes that a lost server acknowledged and did not flush may be lost with it.
#[test]
fn a_flush_fails_if_a_lost_server_had_unflushed_writes() {
    let mut server = Server::start(Kind::Nbdkit, &[0; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=60"));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[1; 512], 0), Ok(()));
    assert_eq!(worker.flush(), Ok(()));
    server.restart();
    assert_eq!(worker.flush(), Ok(()), "nothing was unflushed");
    assert_eq!(worker.write(0, &[2; 512], 0), Ok(()));
    server.restart();
    assert_eq!(worker.read(0, 512).0, Ok(()));
    assert_eq!(worker.flush(), Err(IoError::Os(Errno::IO)));
    assert_eq!(worker.flush(), Ok(()), "the loss was reported before");
}

/// A driver sees the results of each queue apart. So the first flush of each queue reports a loss.
#[test]
fn each_queue_reports_writes_that_a_server_lost() {
    let mut server = Server::start(Kind::Nbdkit, &[0; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=60"));
    let mut queues = [(); 3].map(|()| worker(&disk).with_slots(4));
    let (failed, one_page) = (Err(IoError::Os(Errno::IO)), [1; 4096]);
    assert_eq!(queues[0].write(0, &one_page, 0), Ok(()));
    server.pause();
    // These are in flight when the server is killed, and are sent again to the next one.
    for queue in &mut queues[..2] {
        for slot in 0..4 {
            assert_eq!(queue.start(slot, Request::Flush), Step::Busy);
        }
    }
    server.restart();
    for queue in &mut queues[..2] {
        let mut ended = Vec::new();
        while ended.len() < 4 {
            ended.extend(queue.turn());
        }
        assert!(ended.iter().all(|(_, result)| *result == failed), "{ended:?}");
    }
    // Next come a queue that had nothing in flight, one that starts later, and one of the next driver.
    assert_eq!(queues[2].flush(), failed);
    assert_eq!(worker(&disk).flush(), failed);
    disk.new_driver();
    assert_eq!(worker(&disk).flush(), Ok(()));
    for queue in &mut queues {
        assert_eq!(queue.flush(), Ok(()), "its loss was reported before");
    }
    // The next server has no flush in flight when it is killed.
    assert_eq!(queues[1].write(0, &one_page, 0), Ok(()));
    server.restart();
    for queue in &mut queues {
        assert_eq!([queue.flush(), queue.flush()], [failed, Ok(())]);
    }
}

/// A server with large blocks gets whole ones only. A guest sees what it sees of an image on such a file
/// system. The part of a block at the end cannot be reached.
#[test]
fn a_server_with_large_blocks_gets_whole_blocks() {
    let contents = Random(5).bytes(LEN + 512);
    let policy = ["--filter=blocksize-policy", "blocksize-error-policy=error", "blocksize-minimum=4096"];
    let server = Server::start(Kind::Nbdkit, &contents, &policy);
    let disk = open(&server.spec(""));
    assert_eq!(disk.size(), LEN);
    let (limits, granularity) = (disk.limits(), disk.limits().discard.unwrap().alignment);
    assert_eq!(
        (limits.block_size, limits.physical_block_exp, limits.min_io_size, granularity),
        (512, 3, 8, 8)
    );
    let (mut worker, mut expected) = (worker(&disk), contents);
    for (offset, len) in [(512, 512), (3584, 1024), (0, 4096), (512, 300 << 10), (LEN - 512, 512)] {
        let bytes = Random(offset).bytes(len);
        assert_eq!(worker.write(offset, &bytes, 0), Ok(()), "{offset}");
        expected[offset as usize..][..len as usize].copy_from_slice(&bytes);
        assert_eq!(worker.read(offset, len as usize), (Ok(()), bytes), "{offset}");
    }
    // Zeroes are exact. A discard leaves the parts of blocks as they are.
    run_on_extent(&mut worker, Request::WriteZeroes { durable: true }, 512, 16 << 10, true);
    expected[512..][..16 << 10].fill(0);
    run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, (64 << 10) + 512, 512, false);
    expected[(64 << 10) + 512..][..512].fill(0);
    run_on_extent(&mut worker, Request::Discard { durable: true }, (128 << 10) + 512, 16 << 10, false);
    expected[132 << 10..144 << 10].fill(0);
    assert!(worker.read(0, LEN as usize) == (Ok(()), expected[..LEN as usize].to_vec()));
    assert!(fs::read(server.image()).unwrap() == expected);
}

/// Longer requests go in pieces.
#[test]
fn a_server_with_short_requests_gets_short_ones() {
    let contents = Random(6).bytes(LEN);
    let policy = ["--filter=blocksize-policy", "blocksize-error-policy=error", "blocksize-maximum=64K"];
    let server = Server::start(Kind::Nbdkit, &contents, &policy);
    let disk = open(&server.spec(""));
    let mut worker = worker(&disk);
    assert!(worker.read(0, LEN as usize) == (Ok(()), contents));
    let bytes = Random(7).bytes(LEN);
    assert_eq!(worker.write(0, &bytes, 0), Ok(()));
    assert!(fs::read(server.image()).unwrap() == bytes);
    for request in [Request::WriteZeroes { durable: false }, Request::Discard { durable: false }] {
        run_on_extent(&mut worker, request, 0, LEN, true);
    }
    assert!(fs::read(server.image()).unwrap() == vec![0; LEN as usize]);
}

#[test]
fn faults_apply_to_an_export() {
    let server = Server::start(Kind::Nbdkit, &[3; LEN as usize], &[]);
    let faulty = |rules: &str| {
        let spec = DiskSpec::Fault(rules.parse().unwrap(), Box::new(server.spec("")));
        Disk::open(&spec, &options(Cache::None, false))
    };
    let disk = faulty("eio@0-7,delay=5ms@write,delay=1ms@flush").unwrap();
    let mut worker = worker(&disk);
    assert_eq!(worker.read(0, 512).0, Err(IoError::Os(Errno::IO)));
    assert_eq!(worker.write(4096, &[7; 4096], 0), Ok(()));
    assert_eq!(worker.flush(), Ok(()));
    assert_eq!(worker.read(4096, 1024), (Ok(()), vec![7; 1024]));
    for rules in ["short@1%", "eagain"] {
        assert!(matches!(faulty(rules), Err(Error::Fault { under: "nbd:", .. })));
    }
}
