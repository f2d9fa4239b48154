//! Exports of NBD servers: what they can do, what becomes of requests when they stop or go, and servers that lie.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![cfg(feature = "nbd")]

mod common;

use common::server::{KINDS, Kind, Server};
use common::{Random, Worker, guest, options};
use kickless_disk::{Cache, Disk, DiskSpec, Error, Extent, IoError, Request, Step};
use kickless_io::{EngineKind, Errno};
use kickless_memory::{Gpa, Marks, View};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LEN: u64 = 1 << 20;
const GONE: Result<(), IoError> = Err(IoError::Os(Errno::TIMEDOUT));

fn open(spec: &DiskSpec) -> Disk {
    Disk::open(spec, &options(Cache::None, false)).unwrap()
}

fn worker(disk: &Disk) -> Worker<'_> {
    Worker::new(disk, EngineKind::Threads, 4)
}

fn on_extent(worker: &mut Worker<'_>, request: Request, offset: u64, len: u64, unmap: bool) {
    worker.io(0).extents_mut().push(Extent { offset, len, unmap });
    assert_eq!(worker.run(request), Ok(()));
}

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
        on_extent(&mut worker, Request::WriteZeroes { durable: false }, 4096, 64 << 10, false);
        assert!(space(&server) >= full, "{kind:?}: the space was to be kept");
        on_extent(&mut worker, Request::WriteZeroes { durable: true }, 128 << 10, 128 << 10, true);
        on_extent(&mut worker, Request::Discard { durable: true }, 512 << 10, 256 << 10, false);
        assert!(space(&server) + (300 << 10) < full, "{kind:?}: no space was given back");
        let mut expected = contents.clone();
        for range in [4096..68 << 10, 128 << 10..256 << 10, 512 << 10..768 << 10] {
            expected[range].fill(0);
        }
        assert!(worker.read(0, LEN as usize) == (Ok(()), expected), "{kind:?}");
    }
}

/// What the server is asked is what the guest has been promised.
#[test]
fn durable_writes_and_flushes_reach_the_server_as_such() {
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
    let asked: Vec<&str> =
        log.lines().filter(|line| line.contains(" Write ") && !line.contains("...Write")).collect();
    assert_eq!(asked.len(), 2, "{log}");
    assert!(asked[0].contains("fua=0") && asked[1].contains("fua=1"), "{log}");
    assert_eq!(log.lines().filter(|line| line.contains(" Flush ")).count(), 1, "{log}");
}

#[test]
fn what_cannot_be_opened_says_why() {
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
    let nobody = format!("nbd+unix:///?socket={}", dir.path().join("none").display());
    refused(&DiskSpec::Nbd(nobody.parse().unwrap()), "cannot be used");
    let long = format!("nbd+unix:///?socket=/{}", "x".repeat(200));
    refused(&DiskSpec::Nbd(long.parse().unwrap()), "cannot be used");
}

/// Requests in flight on so many places.
struct InFlight<'a> {
    worker: Worker<'a>,
    view: Arc<View>,
    left: usize,
}

impl<'a> InFlight<'a> {
    /// Starts `reads` reads of a page each, and `writes` writes that are durable.
    fn start(disk: &'a Disk, reads: usize, writes: usize) -> Self {
        let all = reads + writes;
        let mut worker = worker(disk).with_slots(all);
        let view = guest(4096 * all as u64);
        for slot in 0..all {
            let offset = 4096 * slot as u64;
            worker.io(slot).buffers_mut().push(&view, Gpa(offset), 4096).unwrap();
            let request = if slot < reads {
                Request::Read { offset }
            } else {
                Request::Write { offset, durable: true }
            };
            assert_eq!(worker.start(slot, request), Step::Busy);
        }
        Self { worker, view, left: all }
    }

    /// Waits until all are over; how they ended.
    fn finish(&mut self) -> Vec<Result<(), IoError>> {
        let mut results = Vec::new();
        while results.len() < self.left {
            results.extend(self.worker.turn().into_iter().map(|(_, result)| result));
        }
        self.left = 0;
        results
    }
}

#[test]
fn requests_wait_for_a_server_that_stands_still() {
    let contents = Random(2).bytes(LEN);
    for kind in KINDS {
        let server = Server::start(kind, &contents, &[]);
        let disk = open(&server.spec("reconnect-delay=1"));
        server.stop();
        let mut requests = InFlight::start(&disk, 100, 20);
        // Longer than anything that would be waited for if it had gone.
        thread::sleep(Duration::from_millis(1500));
        server.go_on();
        assert!(requests.finish().iter().all(Result::is_ok), "{kind:?}");
        let mut read = vec![0; 100 * 4096];
        requests.view.read(Gpa(0), &mut read).unwrap();
        assert!(read == contents[..100 * 4096], "{kind:?}");
    }
}

#[test]
fn a_stop_does_not_wait_for_a_server_that_stands_still() {
    let server = Server::start(Kind::Nbdkit, &[1; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=1"));
    server.stop();
    let mut requests = InFlight::start(&disk, 3, 3);
    disk.hurry();
    assert_eq!(requests.finish(), [GONE; 6]);
    drop(requests);
    server.go_on();
    // Who comes next waits for it again, though only for a second each time.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        disk.take_over().unwrap();
        match worker(&disk).read(0, 512) {
            (Ok(()), bytes) => break assert_eq!(bytes, [1; 512]),
            (error, _) => assert!(error == GONE && Instant::now() < deadline, "{error:?}"),
        }
    }
}

/// Requests that wait for buffers which others have are not forgotten.
#[test]
fn a_stop_with_more_requests_than_buffers() {
    let server = Server::start(Kind::Nbdkit, &[1; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=1"));
    server.stop();
    let (slots, len) = (200, 64 << 10);
    let mut worker = worker(&disk).with_slots(slots);
    let view = guest(len);
    for slot in 0..slots {
        worker.io(slot).buffers_mut().push(&view, Gpa(0), len as u32).unwrap();
        assert_eq!(worker.start(slot, Request::Read { offset: 0 }), Step::Busy);
    }
    let mut over = Vec::new();
    while over.len() < slots {
        disk.hurry();
        over.extend(worker.turn());
    }
    assert!(over.iter().all(|(_, result)| *result == GONE));
    server.go_on();
}

/// Where all goes well, a stop is no reason for a request to fail.
#[test]
fn a_stop_of_a_server_that_answers() {
    let server = Server::start(Kind::Nbdkit, &[1; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=0"));
    let mut requests = InFlight::start(&disk, 64, 64);
    disk.hurry();
    assert!(requests.finish().iter().all(Result::is_ok));
}

#[test]
fn requests_fail_when_the_server_has_gone_and_work_when_it_is_back() {
    for kind in KINDS {
        let mut server = Server::start(kind, &[1; LEN as usize], &[]);
        let disk = open(&server.spec("reconnect-delay=1"));
        server.stop();
        let mut requests = InFlight::start(&disk, 10, 10);
        server.kill();
        assert_eq!(requests.finish(), [GONE; 20], "{kind:?}");
        // Now at once.
        assert_eq!(worker(&disk).read(0, 512).0, GONE, "{kind:?}");
        server.restart();
        let mut worker = worker(&disk);
        while worker.read(0, 512).0 == GONE {
            thread::yield_now();
        }
        assert_eq!(worker.write(512, &[7; 512], 0), Ok(()), "{kind:?}");
        assert_eq!(worker.read(0, 1024), (Ok(()), [[1; 512], [7; 512]].concat()), "{kind:?}");
    }
}

#[test]
fn a_server_that_is_started_again_gets_what_it_has_not_answered() {
    let contents = Random(3).bytes(LEN);
    for kind in KINDS {
        let mut server = Server::start(kind, &contents, &[]);
        let disk = open(&server.spec("reconnect-delay=60"));
        server.stop();
        let mut requests = InFlight::start(&disk, 50, 0);
        server.restart();
        assert!(requests.finish().iter().all(Result::is_ok), "{kind:?}");
        let mut read = vec![0; 50 * 4096];
        requests.view.read(Gpa(0), &mut read).unwrap();
        assert!(read == contents[..50 * 4096], "{kind:?}");
    }
}

/// Nobody knows whether what a server had not been asked to flush is there after it has gone.
#[test]
fn a_flush_fails_that_covers_writes_of_a_lost_server() {
    let mut server = Server::start(Kind::Nbdkit, &[0; LEN as usize], &[]);
    let disk = open(&server.spec("reconnect-delay=60"));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[1; 512], 0), Ok(()));
    assert_eq!(worker.flush(), Ok(()));
    server.restart();
    assert_eq!(worker.flush(), Ok(()), "all had been flushed");
    assert_eq!(worker.write(0, &[2; 512], 0), Ok(()));
    server.restart();
    assert_eq!(worker.read(0, 512).0, Ok(()));
    assert_eq!(worker.flush(), Err(IoError::Os(Errno::IO)));
    assert_eq!(worker.flush(), Ok(()), "it has been told once");
}

#[test]
fn faults_before_an_export() {
    let server = Server::start(Kind::Nbdkit, &[3; LEN as usize], &[]);
    let faulty = |rules: &str| {
        let spec = DiskSpec::Fault(rules.parse().unwrap(), Box::new(server.spec("")));
        Disk::open(&spec, &options(Cache::None, false))
    };
    let disk = faulty("eio@0-7,delay=5ms@write,reorder@flush").unwrap();
    let mut worker = worker(&disk);
    assert_eq!(worker.read(0, 512).0, Err(IoError::Os(Errno::IO)));
    assert_eq!(worker.write(4096, &[7; 4096], 0), Ok(()));
    assert_eq!(worker.flush(), Ok(()));
    assert_eq!(worker.read(4096, 1024), (Ok(()), vec![7; 1024]));
    for rules in ["short@1%", "eagain"] {
        assert!(matches!(faulty(rules), Err(Error::Fault { under: "nbd:", .. })));
    }
}

/// A server of ours that says what it is told to say.
struct Liar {
    _dir: TempDir,
    spec: DiskSpec,
    thread: Option<JoinHandle<()>>,
}

impl Liar {
    /// One that talks with each of `connections` in turn, and then is not there any more.
    fn start(connections: usize, talk: impl Fn(&mut UnixStream) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = thread::spawn(move || {
            for _ in 0..connections {
                let Ok((mut stream, _)) = listener.accept() else { return };
                talk(&mut stream);
            }
        });
        let uri = format!("nbd+unix:///?socket={}&reconnect-delay=0", path.display());
        Self { _dir: dir, spec: DiskSpec::Nbd(uri.parse().unwrap()), thread: Some(thread) }
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        let result = self.thread.take().unwrap().join();
        assert!(result.is_ok() || thread::panicking());
    }
}

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
const EXPORT_FLAGS: u16 = 1 | 1 << 2;

fn answer(option: u32, kind: u32, body: &[u8]) -> Vec<u8> {
    let (magic, len) = (0x0003_e889_0455_65a9_u64, body.len() as u32);
    [&magic.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), body].concat()
}

/// What a well-behaved server says until requests come, of a disk of 64 KiB.
fn hello(structured: bool) -> Vec<u8> {
    let size = [&[0, 0][..], &65536_u64.to_be_bytes(), &EXPORT_FLAGS.to_be_bytes()].concat();
    let first = answer(8, if structured { 1 } else { 0x8000_0001 }, &[]);
    [GREETING, &first, &answer(7, 3, &size), &answer(7, 1, &[])].concat()
}

/// Reads what the client says until it asks for an export.
fn hear_handshake(stream: &mut UnixStream) {
    // Flags, one option without data, one with: an empty name and no questions.
    stream.read_exact(&mut [0; 4 + 16 + 16 + 6]).unwrap();
}

/// Whatever a server says before it has said what its export is: a sentence, and soon.
#[test]
fn servers_that_lie_from_the_beginning() {
    let endless = answer(8, 4, &[]).repeat(100);
    let no_size = [GREETING, &answer(8, 1, &[]), &answer(7, 1, &[])].concat();
    let blocks = [&3_u16.to_be_bytes()[..], &4096_u32.to_be_bytes(), &[0; 8]].concat();
    let large = [GREETING, &answer(8, 1, &[]), &answer(7, 3, &blocks)].concat();
    let tls = [GREETING, &answer(8, 0x8000_0005, &[]), &answer(7, 0x8000_0005, &[])].concat();
    let said = [GREETING, &answer(8, 1, &[]), &answer(7, 0x8000_0002, b"\x1b[31mgo away\n")].concat();
    let long =
        [GREETING, &[0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9, 0, 0, 0, 8, 0, 0, 0, 1], &[0xff; 4]]
            .concat();
    for (talk, needle) in [
        (b"SSH-2.0-OpenSSH".to_vec(), "no NBD server"),
        (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53".to_vec(), "oldstyle"),
        (b"NBDMAGICxxxxxxxx".to_vec(), "no NBD server"),
        (b"NBDMAG".to_vec(), "closed"),
        (GREETING.to_vec(), "closed"),
        ([GREETING, &[0; 20]].concat(), "nothing that was asked"),
        ([GREETING, &endless].concat(), "without end"),
        (long, "too long"),
        (no_size, "without a size"),
        (large, "at least 4096 bytes"),
        (tls, "TLS"),
        (said, "go away"),
    ] {
        let liar = Liar::start(1, move |stream| {
            let _ = stream.write_all(&talk);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = Disk::open(&liar.spec, &options(Cache::None, false)).unwrap_err().to_string();
        assert!(error.contains(needle) && !error.contains('\x1b'), "{error}");
    }
}

fn chunk(flags: u16, kind: u16, cookie: u64, body: &[u8]) -> Vec<u8> {
    let magic = 0x668e_33ef_u32.to_be_bytes();
    let (flags, kind, len) = (flags.to_be_bytes(), kind.to_be_bytes(), (body.len() as u32).to_be_bytes());
    [&magic[..], &flags, &kind, &cookie.to_be_bytes(), &len, body].concat()
}

fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

/// What a server replies to a read of 1024 bytes at 512, and what becomes of that.
#[test]
fn servers_that_lie_in_reply() {
    let data = |at: u64, bytes: &[u8]| [&at.to_be_bytes()[..], bytes].concat();
    let hole = |at: u64, len: u32| [&at.to_be_bytes()[..], &len.to_be_bytes()].concat();
    let (io, dead) = (Err(IoError::Os(Errno::IO)), GONE);
    type Reply = Box<dyn Fn(u64) -> Vec<u8> + Send>;
    let cases: Vec<(bool, Result<(), IoError>, Reply)> = vec![
        (false, Ok(()), Box::new(|c| simple(0, c, &[5; 1024]))),
        (false, Err(IoError::Os(Errno::NOSPC)), Box::new(|c| simple(28, c, &[]))),
        (false, dead, Box::new(|c| simple(0, c + 1, &[5; 1024]))),
        (false, dead, Box::new(|c| simple(0, c ^ 1 << 32, &[5; 1024]))),
        (false, dead, Box::new(|_| vec![0; 64])),
        (false, dead, Box::new(|c| chunk(1, 0, c, &[]))),
        (true, dead, Box::new(|c| simple(0, c, &[5; 1024]))),
        // Two parts, the later one first.
        (
            true,
            Ok(()),
            Box::new(move |c| {
                [chunk(0, 1, c, &data(1024, &[5; 512])), chunk(1, 1, c, &data(512, &[5; 512]))].concat()
            }),
        ),
        (true, io, Box::new(|c| chunk(1, 0, c, &[]))),
        (true, io, Box::new(move |c| chunk(1, 1, c, &data(512, &[5; 512])))),
        (true, dead, Box::new(move |c| chunk(1, 1, c, &data(511, &[5; 512])))),
        (true, dead, Box::new(move |c| chunk(1, 1, c, &data(1024, &[5; 513])))),
        (true, dead, Box::new(move |c| chunk(1, 1, c, &data(u64::MAX, &[5; 512])))),
        (
            true,
            dead,
            Box::new(move |c| {
                [chunk(0, 1, c, &data(512, &[5; 1024])), chunk(1, 1, c, &data(512, &[5; 512]))].concat()
            }),
        ),
        (true, dead, Box::new(move |c| chunk(1, 2, c, &hole(512, u32::MAX)))),
        (true, dead, Box::new(|c| chunk(1, 1, c, &[0; 8]))),
        (true, dead, Box::new(|c| chunk(1, 5, c, &[0; 12]))),
        (true, dead, Box::new(|c| chunk(0, 0, c, &[]))),
        (true, dead, Box::new(|c| chunk(1, 0x8001, c, &[0; 5]))),
        (true, dead, Box::new(|c| chunk(1, 0x8001, c, &[0; 5000]))),
        (true, io, Box::new(|c| chunk(1, 0x8001, c, &[0; 6]))),
        (
            true,
            Err(IoError::Os(Errno::NOMEM)),
            Box::new(|c| {
                [
                    chunk(0, 0x8002, c, &[&[0, 0, 0, 12, 0, 3][..], b"abc", &[0; 8]].concat()),
                    chunk(1, 0, c, &[]),
                ]
                .concat()
            }),
        ),
        (true, dead, Box::new(|_| Vec::new())),
    ];
    for (index, (structured, result, reply)) in cases.into_iter().enumerate() {
        let liar = Liar::start(1, move |stream| {
            stream.write_all(&hello(structured)).unwrap();
            hear_handshake(stream);
            let mut request = [0; 28];
            stream.read_exact(&mut request).unwrap();
            let cookie = u64::from_be_bytes(request[8..16].try_into().unwrap());
            let _ = stream.write_all(&reply(cookie));
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let disk = open(&liar.spec);
        let (got, bytes) = worker(&disk).read(512, 1024);
        assert_eq!(got, result, "case {index}");
        assert!(got.is_err() || bytes == [5; 1024], "case {index}");
        drop(disk);
    }
}

/// Without the server's help a durable write is a write and a flush.
#[test]
fn a_server_without_durable_writes() {
    let (sender, commands) = std::sync::mpsc::channel();
    let liar = Liar::start(1, move |stream| {
        stream.write_all(&hello(false)).unwrap();
        hear_handshake(stream);
        let mut request = [0; 28];
        while stream.read_exact(&mut request).is_ok() {
            let cookie = u64::from_be_bytes(request[8..16].try_into().unwrap());
            let len = u32::from_be_bytes(request[24..].try_into().unwrap());
            stream.read_exact(&mut vec![0; len as usize]).unwrap();
            sender.send((request[5], request[7], len)).unwrap();
            let _ = stream.write_all(&simple(0, cookie, &[]));
        }
    });
    let disk = open(&liar.spec);
    let mut requests = InFlight::start(&disk, 0, 1);
    assert_eq!(requests.finish(), [Ok(())]);
    drop(requests);
    drop(disk);
    // No flags; a write, a flush, and good-bye.
    assert_eq!(commands.iter().collect::<Vec<_>>(), [(0, 1, 4096), (0, 3, 0), (0, 2, 0)]);
}

/// A request that kills one server after the other is given up, even if there is always another.
#[test]
fn a_request_that_no_server_survives() {
    let liar = Liar::start(5, |stream| {
        stream.write_all(&hello(false)).unwrap();
        hear_handshake(stream);
        let _ = stream.read_exact(&mut [0; 28]);
    });
    let DiskSpec::Nbd(uri) = &liar.spec else { unreachable!() };
    let patient = uri.to_string().replace("delay=0", "delay=60");
    let disk = open(&DiskSpec::Nbd(patient.parse().unwrap()));
    assert_eq!(worker(&disk).read(0, 512).0, Err(IoError::Os(Errno::IO)));
}
