//! Tests what an NBD disk does when it passes from one owner to the next: it is flushed and given up, and
//! taken over by a new connection.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{open, spec, worker};
use kickless_disk::{Disk, IoError, Resized};
use kickless_io::Errno;
use kickless_testing::hostile_nbd::*;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
const FAILED: Result<(), IoError> = Err(IoError::Os(Errno::IO));

/// Accepts more connections than any test makes.
const MANY: usize = 1000;

/// Serves a connection until its end. Returns the commands that it got.
fn serve(stream: &mut UnixStream, byte: u8) -> Vec<u16> {
    if try_greet(stream, &hello(false)).is_err() {
        return Vec::new();
    }
    serve_requests(stream, byte).iter().map(|request| request.command).collect()
}

/// Answers one request without data.
fn answer_one(stream: &mut UnixStream, error: u32) -> u16 {
    let request = read_request(stream).unwrap();
    stream.write_all(&simple(error, request.cookie, &[])).unwrap();
    request.command
}

fn said(disk: &Disk) -> String {
    disk.write_back().unwrap_err().to_string()
}

/// The server has all writes on stable storage, and the disk has no connection that could carry another.
#[test]
fn a_disk_is_flushed_and_disconnected_when_it_is_given_up() {
    let (sender, commands) = channel();
    let server = HostileNbd::start(MANY, move |_, stream| sender.send(serve(stream, 0)).unwrap());
    let disk = open(&spec(&server.uri()));
    for (write, expected) in [(true, &[WRITE, FLUSH, DISCONNECT][..]), (false, &[READ, DISCONNECT])] {
        let mut worker = worker(&disk);
        let result = if write { worker.write(0, &[1; 512], 0) } else { worker.read(0, 512).0 };
        assert_eq!(result, Ok(()));
        disk.write_back().unwrap();
        assert_eq!(commands.recv_timeout(LONG).unwrap(), expected);
        assert_eq!(worker.read(0, 512).0, Err(IoError::Os(Errno::BADF)));
        // There is nothing left to flush.
        disk.write_back().unwrap();
        disk.reload(false).unwrap();
    }
}

/// Such a disk has nothing to lose. It waits for no server.
#[test]
fn a_disk_without_unflushed_writes_is_given_up_without_its_server() {
    for requests in [&[READ][..], &[WRITE, FLUSH]] {
        let server = HostileNbd::start(1, move |_, stream| {
            greet(stream, &hello(false));
            for _ in requests {
                let request = read_request(stream).unwrap();
                let len = if request.command == READ { request.len as usize } else { 0 };
                stream.write_all(&simple(0, request.cookie, &vec![0; len])).unwrap();
            }
        });
        let disk = open(&spec(&server.export("", 3600)));
        let mut worker = worker(&disk);
        for &request in requests {
            let result = match request {
                READ => worker.read(0, 512).0,
                WRITE => worker.write(0, &[1; 512], 0),
                _ => worker.flush(),
            };
            assert_eq!(result, Ok(()));
        }
        // With writes to flush, this would wait for the server, and fail.
        disk.write_back().unwrap();
    }
}

/// The next owner could not report the loss. So the disk stays until a queue has reported it.
#[test]
fn a_disk_whose_server_lost_writes_stays_until_the_guest_knows() {
    let mut server = HostileNbd::start(1, |_, stream| {
        greet(stream, &hello(false));
        assert_eq!(answer_one(stream, 0), WRITE);
    });
    let disk = open(&spec(&server.export("", 60)));
    let [mut one, mut two] = [(); 2].map(|()| worker(&disk));
    assert_eq!(one.write(0, &[1; 512], 0), Ok(()));
    server.start_again(MANY, |_, stream| drop(serve(stream, 0)));
    disk.reload(false).unwrap();
    assert!(said(&disk).contains("may have lost writes"));
    assert_eq!([one.flush(), one.flush()], [FAILED, Ok(())]);
    // One report is enough.
    disk.write_back().unwrap();
    disk.reload(false).unwrap();
    assert_eq!(two.flush(), FAILED);
}

/// A new guest that may read the lost data gets the report too.
#[test]
fn a_loss_that_no_guest_knows_stays_for_the_next_guest() {
    let server = HostileNbd::start(MANY, |connection, stream| {
        if connection > 0 {
            return drop(serve(stream, 0));
        }
        greet(stream, &hello(false));
        assert_eq!([0, 5].map(|error| answer_one(stream, error)), [WRITE, FLUSH]);
        serve_requests(stream, 0);
    });
    let disk = open(&spec(&server.uri()));
    assert_eq!(worker(&disk).write(0, &[1; 512], 0), Ok(()));
    assert!(said(&disk).contains("has not flushed"));
    disk.new_driver();
    assert!(said(&disk).contains("may have lost writes"));
    let mut next = worker(&disk);
    assert_eq!(next.flush(), FAILED);
    assert_eq!(next.flush(), Ok(()));
    disk.write_back().unwrap();
}

/// A server that hangs delays the end of an owner for a limited time. Nothing is lost if it goes on.
#[test]
fn a_disk_whose_server_hangs_stays_until_it_is_flushed() {
    let (resume, resumed) = channel();
    let server = HostileNbd::start(1, move |_, stream| {
        greet(stream, &hello(false));
        assert_eq!(answer_one(stream, 0), WRITE);
        let flush = read_request(stream).unwrap();
        resumed.recv().unwrap();
        stream.write_all(&simple(0, flush.cookie, &[])).unwrap();
        serve_requests(stream, 0);
    });
    let disk = open(&spec(&server.uri()));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[1; 512], 0), Ok(()));
    assert!(disk.write_back().is_err());
    resume.send(()).unwrap();
    assert_eq!(worker.flush(), Ok(()));
    disk.write_back().unwrap();
}

/// A server without shared caches may answer an old connection with old data.
#[test]
fn each_owner_has_a_connection_of_its_own() {
    let server = HostileNbd::start(MANY, |connection, stream| drop(serve(stream, connection as u8)));
    let disk = open(&spec(&server.uri()));
    for owner in 1..4 {
        disk.reload(false).unwrap();
        assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![owner; 512]));
        // An owner may also leave without a trace: a migration that is cancelled before it has begun.
        if owner % 2 == 0 {
            disk.write_back().unwrap();
        }
    }
}

/// The next owner sees a larger export, and never a smaller one than the disk.
#[test]
fn an_owner_takes_the_size_of_the_export() {
    let server = HostileNbd::start(MANY, |connection, stream| {
        let size = [SIZE, SIZE + 4096, SIZE, SIZE + 4096][connection];
        greet(stream, &hello_of(false, size, EXPORT_FLAGS));
        serve_requests(stream, 7);
    });
    let disk = open(&spec(&server.uri()));
    assert_eq!((disk.refresh_size().unwrap(), disk.size()), (Resized::Same, SIZE));
    disk.reload(false).unwrap();
    assert_eq!(disk.refresh_size().unwrap(), Resized::Grown { from: SIZE, to: SIZE + 4096 });
    assert_eq!(worker(&disk).read(SIZE, 4096), (Ok(()), vec![7; 4096]));
    let error = disk.reload(false).unwrap_err().to_string();
    assert!(error.contains("the export is smaller"), "{error}");
    assert_eq!(worker(&disk).read(0, 512).0, Err(IoError::Os(Errno::BADF)));
    disk.reload(false).unwrap();
    assert_eq!(worker(&disk).read(SIZE, 4096), (Ok(()), vec![7; 4096]));
}

/// A ring starts, and its requests wait.
#[test]
fn a_server_that_is_away_delays_requests_and_no_start() {
    let mut server = HostileNbd::start(1, |_, stream| greet(stream, &hello(false)));
    let disk = open(&spec(&server.export("", 60)));
    server.start_again(0, |_, _| {});
    disk.reload(false).unwrap();
    server.start_again(MANY, |_, stream| drop(serve(stream, 3)));
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![3; 512]));
}
