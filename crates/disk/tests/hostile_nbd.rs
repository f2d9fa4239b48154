//! Tests the NBD client with servers that break the protocol, lack features, or come back with another
//! export.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{InFlight, TIMED_OUT, guest, open, options, spec, worker};
use kickless_disk::{Cache, Disk, Extent, IoError, Request, Step};
use kickless_io::Errno;
use kickless_memory::{Gpa, Marks};
use kickless_testing::hostile_nbd::*;
use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// An open fails soon and with a clear sentence, whatever bytes the server sends in the handshake.
#[test]
fn invalid_handshakes_fail_the_open() {
    let endless = answer(8, 4, &[]).repeat(100);
    let no_size = [GREETING, &answer(8, 1, &[]), &answer(7, 1, &[])].concat();
    let blocks = |body: &[u8]| answer(7, 3, &[&[0, 3], body].concat());
    let zero_blocks = [GREETING, &answer(8, 1, &[]), &blocks(&[0; 12])].concat();
    let short_blocks = [GREETING, &answer(8, 1, &[]), &blocks(&[1; 11])].concat();
    let tls = [GREETING, &answer(8, 0x8000_0005, &[]), &answer(7, 0x8000_0005, &[])].concat();
    let refusal = [GREETING, &answer(8, 1, &[]), &answer(7, 0x8000_0002, b"\x1b[31mgo away\n")].concat();
    let long =
        [GREETING, &[0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9, 0, 0, 0, 8, 0, 0, 0, 1], &[0xff; 4]]
            .concat();
    let without_go = [GREETING, &answer(8, 0x8000_0001, &[]), &answer(7, 0x8000_0001, &[])].concat();
    let long_refusal = [GREETING, &answer(8, 1, &[]), &answer(7, 0x8000_0002, &[b'x'; 1000])].concat();
    for (sent, needle) in [
        (b"SSH-2.0-OpenSSH".to_vec(), "not an NBD server"),
        (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53".to_vec(), "oldstyle"),
        (b"NBDMAGICIHAVEOPT\x00\x02".to_vec(), "does not know NBD_OPT_GO: use a newer server"),
        (without_go, "does not know NBD_OPT_GO: use a newer server"),
        (b"NBDMAGICxxxxxxxx".to_vec(), "not an NBD server"),
        (b"NBDMAG".to_vec(), "closed"),
        (GREETING.to_vec(), "closed"),
        ([GREETING, &[0; 20]].concat(), "an answer to another option"),
        ([GREETING, &endless].concat(), "too many answers"),
        (long, "too long"),
        (no_size, "without a size"),
        (zero_blocks, "block sizes are invalid"),
        (short_blocks, "block sizes have a wrong length"),
        (tls, "TLS"),
        (refusal, "go away"),
        (long_refusal, "xxxxx"),
    ] {
        let server = HostileNbd::start(1, move |_, stream| {
            let _ = stream.write_all(&sent);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let error = Disk::open(&spec(&server.uri()), &options(Cache::None, false)).unwrap_err().to_string();
        assert!(error.contains(needle) && !error.contains('\x1b') && error.len() < 500, "{error}");
    }
}

/// Reads 1024 bytes at 512. Checks the result of valid and invalid replies.
#[test]
fn replies_to_a_read() {
    let data = |at: u64, bytes: &[u8]| [&at.to_be_bytes()[..], bytes].concat();
    let hole = |at: u64, len: u32| [&at.to_be_bytes()[..], &len.to_be_bytes()].concat();
    let whole = move |c| chunk(1, 1, c, &data(512, &[5; 1024]));
    let (io, dead) = (Err(IoError::Os(Errno::IO)), TIMED_OUT);
    type Reply = Box<dyn Fn(u64) -> Vec<u8> + Send>;
    let mut cases: Vec<(bool, Result<(), IoError>, Reply)> = vec![
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
        (true, dead, Box::new(move |c| [chunk(0, 1, c, &data(512, &[])), whole(c)].concat())),
        // The bytes after the hole belong to its chunk. They are not the next chunk.
        (
            true,
            dead,
            Box::new(move |c| {
                chunk(0, 2, c, &[hole(512, 512), chunk(1, 1, c, &data(1024, &[5; 512]))].concat())
            }),
        ),
        (true, dead, Box::new(|c| chunk(1, 5, c, &[0; 12]))),
        (true, dead, Box::new(move |c| [chunk(0, 0, c, &[]), whole(c)].concat())),
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
    let errors = [
        (1, Errno::PERM),
        (22, Errno::INVAL),
        (75, Errno::OVERFLOW),
        (95, Errno::OPNOTSUPP),
        (99, Errno::IO),
    ];
    for (number, errno) in errors {
        cases.push((false, Err(IoError::Os(errno)), Box::new(move |c| simple(number, c, &[]))));
    }
    for (index, (structured, result, reply)) in cases.into_iter().enumerate() {
        let server = HostileNbd::start(1, move |_, stream| {
            greet(stream, &hello(structured));
            let request = read_request(stream).unwrap();
            let _ = stream.write_all(&reply(request.cookie));
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let disk = open(&spec(&server.uri()));
        let (got, bytes) = worker(&disk).read(512, 1024);
        assert_eq!(got, result, "case {index}");
        assert!(got.is_err() || bytes == [5; 1024], "case {index}");
        drop(disk);
    }
}

/// The request fails with the first error of several.
#[test]
fn the_first_error_of_a_request_counts() {
    let error = |number: u32, done, cookie| {
        chunk(done, 0x8001, cookie, &[&number.to_be_bytes()[..], &[0; 2]].concat())
    };
    for last_is_simple in [false, true] {
        let server = HostileNbd::start(1, move |_, stream| {
            greet(stream, &hello(true));
            let request = read_request(stream).unwrap();
            let last =
                if last_is_simple { simple(5, request.cookie, &[]) } else { error(5, 1, request.cookie) };
            stream.write_all(&[error(28, 0, request.cookie), last].concat()).unwrap();
            assert_eq!(read_request(stream).unwrap().command, DISCONNECT);
        });
        let disk = open(&spec(&server.uri()));
        assert_eq!(worker(&disk).write(0, &[1; 512], 0), Err(IoError::Os(Errno::NOSPC)));
    }
}

/// A durable request becomes two commands: itself and a flush.
#[test]
fn a_server_without_durable_writes() {
    let (sender, commands) = channel();
    let server = HostileNbd::start(1, move |_, stream| {
        greet(stream, &hello_of(false, SIZE, EXPORT_FLAGS | 1 << 5 | 1 << 6));
        sender.send(serve_requests(stream, 0)).unwrap();
    });
    let disk = open(&spec(&server.uri()));
    assert_eq!(InFlight::start(&disk, 0, 1).finish(), [Ok(())]);
    for (request, unmap) in
        [(Request::Discard { durable: true }, false), (Request::WriteZeroes { durable: true }, true)]
    {
        let mut worker = worker(&disk);
        // Empty extents cause no command.
        for len in [0, 8192, 0] {
            worker.io(0).extents_mut().push(Extent { offset: 0, len, unmap });
        }
        assert_eq!(worker.run(request), Ok(()));
    }
    drop(disk);
    let commands = commands.recv().unwrap();
    let commands: Vec<_> = commands.iter().map(|c| (c.flags, c.command, c.len)).collect();
    // A flush follows each command. The client disconnects at the end.
    let expected =
        [(WRITE, 4096), (FLUSH, 0), (TRIM, 8192), (FLUSH, 0), (ZEROES, 8192), (FLUSH, 0), (DISCONNECT, 0)];
    assert_eq!(commands, expected.map(|(command, len)| (0, command, len)));
}

/// A durable request is one command with the flag FUA.
#[test]
fn a_server_with_durable_writes() {
    const FUA: u16 = 1;
    const NO_HOLE: u16 = 2;
    let (sender, commands) = channel();
    let server = HostileNbd::start(1, move |_, stream| {
        greet(stream, &hello_of(false, SIZE, EXPORT_FLAGS | 1 << 3 | 1 << 5 | 1 << 6));
        sender.send(serve_requests(stream, 0)).unwrap();
    });
    let disk = open(&spec(&server.uri()));
    for durable in [false, true] {
        let view = guest(512);
        let mut writer = worker(&disk);
        writer.io(0).buffers_mut().push(&view, Gpa(0), 512).unwrap();
        assert_eq!(writer.run(Request::Write { offset: 0, durable }), Ok(()));
        for (request, unmap) in [
            (Request::Discard { durable }, false),
            (Request::WriteZeroes { durable }, true),
            (Request::WriteZeroes { durable }, false),
        ] {
            let mut worker = worker(&disk);
            worker.io(0).extents_mut().push(Extent { offset: 0, len: 512, unmap });
            assert_eq!(worker.run(request), Ok(()));
        }
    }
    drop(disk);
    let commands: Vec<_> = commands.recv().unwrap().iter().map(|c| (c.command, c.flags)).collect();
    let each = [(WRITE, 0), (TRIM, 0), (ZEROES, 0), (ZEROES, NO_HOLE)];
    let durable = each.map(|(command, flags)| (command, flags | FUA));
    assert_eq!(commands, [&each[..], &durable, &[(DISCONNECT, 0)]].concat());
}

/// A flush sends no command to a server without flushes, and succeeds. After the server was lost, it fails
/// once on each queue, because nothing was ever flushed.
#[test]
fn a_server_that_cannot_flush() {
    let (sender, commands) = channel();
    let server = HostileNbd::start(2, move |connection, stream| {
        greet(stream, &hello_of(false, SIZE, 1));
        if connection == 0 {
            let request = read_request(stream).unwrap();
            stream.write_all(&simple(0, request.cookie, &[])).unwrap();
            // The next write is not answered.
            assert_eq!(read_request(stream).unwrap().command, WRITE);
            return;
        }
        sender.send(serve_requests(stream, 0)).unwrap();
    });
    let disk = open(&spec(&server.export("", 60)));
    let mut queues = [(); 2].map(|()| worker(&disk));
    assert_eq!(queues[0].write(0, &[1; 512], 0), Ok(()));
    assert_eq!(queues[0].flush(), Ok(()));
    assert_eq!(InFlight::start(&disk, 0, 1).finish(), [Ok(())]);
    for queue in &mut queues {
        assert_eq!([queue.flush(), queue.flush()], [Err(IoError::Os(Errno::IO)), Ok(())]);
    }
    drop(queues);
    drop(disk);
    let commands: Vec<_> = commands.recv().unwrap().iter().map(|c| c.command).collect();
    assert_eq!(commands, [WRITE, DISCONNECT]);
}

/// A request fails if the server is lost each time it is sent, although the server always comes back.
#[test]
fn a_request_that_ends_every_connection_fails() {
    let server = HostileNbd::start(5, |_, stream| {
        greet(stream, &hello(false));
        read_request(stream).unwrap();
    });
    let (disk, start) = (open(&spec(&server.export("", 60))), Instant::now());
    assert_eq!(worker(&disk).read(0, 512).0, Err(IoError::Os(Errno::IO)));
    // The client may make the second connection at once. It waits before each further one.
    assert!(start.elapsed() >= Duration::from_secs(3));
}

/// The client waits between its connections to a server that is not ready.
#[test]
fn connections_to_a_server_that_is_not_ready_are_retried_with_pauses() {
    let server = HostileNbd::start(5, |connection, stream| match connection {
        0 => {
            greet(stream, &hello(false));
            read_request(stream).unwrap();
        }
        // The client closes a connection without a handshake after a while.
        1 => {
            let _ = stream.read_to_end(&mut Vec::new());
        }
        2 | 3 => {}
        _ => {
            greet(stream, &hello(false));
            serve_requests(stream, 5);
        }
    });
    let (disk, start) = (open(&spec(&server.export("", 60))), Instant::now());
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![5; 512]));
    assert!(start.elapsed() >= Duration::from_secs(5 + 3));
}

/// The client sends the rest of a request when the socket has room again.
#[test]
fn a_server_that_reads_late() {
    const LEN: usize = 512 << 10;
    let (resume, resumed) = channel();
    let server = HostileNbd::start(1, move |_, stream| {
        greet(stream, &hello_of(false, LEN as u64, EXPORT_FLAGS));
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        resumed.recv().unwrap();
        serve_requests(stream, 0);
    });
    let disk = open(&spec(&server.uri()));
    let (view, slots) = (guest(LEN as u64), 8);
    let mut worker = worker(&disk).with_slots(slots);
    for slot in 0..slots {
        worker.io(slot).buffers_mut().push(&view, Gpa(0), LEN as u32).unwrap();
        assert_eq!(worker.start(slot, Request::Write { offset: 0, durable: false }), Step::Busy);
    }
    // The socket fills up in this time. If it does not, the test checks less and passes.
    thread::sleep(Duration::from_millis(100));
    resume.send(()).unwrap();
    let mut ended = Vec::new();
    while ended.len() < slots {
        ended.extend(worker.turn());
    }
    assert!(ended.iter().all(|(_, result)| result.is_ok()), "{ended:?}");
}

/// Runs more requests than there are buffers, each longer than one buffer. All of them end, also when they
/// fail.
#[test]
fn requests_of_many_buffers_share_them() {
    const LEN: u64 = 640 << 10;
    const SLOTS: usize = 100;
    let server = HostileNbd::start(1, |_, stream| {
        greet(stream, &hello_of(false, LEN, EXPORT_FLAGS));
        let mut left = SLOTS * 3;
        while let Some(request) = read_request(stream) {
            let (error, len) = if left > 0 { (0, request.len as usize) } else { (5, 0) };
            left = left.saturating_sub(1);
            let _ = stream.write_all(&simple(error, request.cookie, &vec![3; len]));
        }
    });
    let disk = open(&spec(&server.uri()));
    let mut worker = worker(&disk).with_slots(SLOTS);
    let view = guest(LEN);
    for expected in [Ok(()), Err(IoError::Os(Errno::IO)), Err(IoError::Os(Errno::IO))] {
        for slot in 0..SLOTS {
            worker.io(slot).buffers_mut().clear(&mut Marks::off());
            worker.io(slot).buffers_mut().push(&view, Gpa(0), LEN as u32).unwrap();
            assert_eq!(worker.start(slot, Request::Read { offset: 0 }), Step::Busy);
        }
        let mut ended = Vec::new();
        while ended.len() < SLOTS {
            ended.extend(worker.turn());
        }
        assert!(ended.iter().all(|(_, result)| *result == expected), "{ended:?}");
    }
}

/// The client has 256 short requests in flight, as docs/disks.md says. The server answers in another order.
#[test]
fn many_short_requests_are_in_flight() {
    const SLOTS: usize = 256;
    let server = HostileNbd::start(1, |_, stream| {
        greet(stream, &hello(false));
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let requests: Vec<_> = (0..SLOTS).map_while(|_| read_request(stream)).collect();
        assert_eq!(requests.len(), SLOTS, "the client sent fewer requests at once");
        for request in requests.iter().rev() {
            stream.write_all(&simple(0, request.cookie, &vec![(request.at / 256) as u8; 256 * 2])).unwrap();
        }
        assert_eq!(read_request(stream).unwrap().command, DISCONNECT);
    });
    let disk = open(&spec(&server.uri()));
    let mut worker = worker(&disk).with_slots(SLOTS);
    let view = guest(512 * SLOTS as u64);
    for slot in 0..SLOTS {
        let at = 512 * slot as u64;
        worker.io(slot).buffers_mut().push(&view, Gpa(at), 512).unwrap();
        let offset = at % SIZE;
        assert_eq!(worker.start(slot, Request::Read { offset }), Step::Busy);
    }
    let mut left = SLOTS;
    while left > 0 {
        for (slot, result) in worker.turn() {
            let mut bytes = [0; 512];
            view.read(Gpa(512 * slot as u64), &mut bytes).unwrap();
            assert_eq!((result, bytes), (Ok(()), [(512 * slot as u64 % SIZE / 256) as u8; 512]));
            left -= 1;
        }
    }
}

/// Runs the handshake with and without structured replies. Checks the bytes that the client sends.
#[test]
fn handshakes() {
    const GO: u32 = 7;
    const STRUCTURED: u32 = 8;
    const ACK: u32 = 1;
    const INFO: u32 = 3;
    const UNKNOWN_OPTION: u32 = 0x8000_0001;
    let option = |number: u32, data: &[u8]| {
        [b"IHAVEOPT", &number.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let blocks = [&[0, 3][..], &512_u32.to_be_bytes(), &4096_u32.to_be_bytes(), &[0xff; 4]].concat();
    // The server sends the block sizes and information of unknown types.
    let infos = [
        answer(GO, INFO, &export_info(SIZE, EXPORT_FLAGS)),
        answer(GO, INFO, &blocks),
        answer(GO, INFO, &[0, 99, 1]),
        answer(GO, 4, b"?"),
        answer(GO, ACK, &[]),
    ]
    .concat();
    for (flags, kind, structured) in [(1, UNKNOWN_OPTION, false), (3, ACK, true)] {
        let greeting = [b"NBDMAGICIHAVEOPT", &[0, flags][..]].concat();
        let server_sends = [greeting, answer(STRUCTURED, kind, &[]), infos.clone()].concat();
        let client_sends =
            [vec![0, 0, 0, 1], option(STRUCTURED, &[]), option(GO, b"\0\0\0\x04disk\0\x01\0\x03")].concat();
        let server = HostileNbd::start(1, move |_, stream| {
            stream.write_all(&server_sends).unwrap();
            let mut received = vec![0; client_sends.len()];
            stream.read_exact(&mut received).unwrap();
            assert_eq!(received, client_sends, "structured: {structured}");
            let request = read_request(stream).unwrap();
            let data = [&request.at.to_be_bytes()[..], &[9; 512]].concat();
            let reply = if structured {
                chunk(1, 1, request.cookie, &data)
            } else {
                simple(0, request.cookie, &[9; 512])
            };
            stream.write_all(&reply).unwrap();
            assert_eq!(read_request(stream).unwrap().command, DISCONNECT);
        });
        let disk = open(&spec(&server.export("disk", 0)));
        assert_eq!(disk.size(), SIZE);
        assert_eq!(worker(&disk).read(1024, 512), (Ok(()), vec![9; 512]), "structured: {structured}");
    }
}

/// A server may come back with another export. The client uses it only if it is no smaller and lacks no
/// feature of the first one.
#[test]
fn servers_that_come_back_with_another_export() {
    let hello = |connection: usize| {
        let (size, flags) = [
            (SIZE, EXPORT_FLAGS | 1 << 5),
            (SIZE - 512, EXPORT_FLAGS | 1 << 5),
            (SIZE, 1 | 1 << 5),
            (SIZE, EXPORT_FLAGS),
            (SIZE, EXPORT_FLAGS | 1 << 5 | 1 << 1),
            (SIZE + 512, EXPORT_FLAGS | 1 << 5 | 1 << 6),
        ][connection];
        hello_of(false, size, flags)
    };
    let server = HostileNbd::start(6, move |connection, stream| {
        greet(stream, &hello(connection));
        match connection {
            0 => {
                read_request(stream).unwrap();
            }
            5 => {
                serve_requests(stream, 5);
            }
            // The client does not use this export.
            _ => {
                serve_requests(stream, connection as u8);
            }
        }
    });
    let disk = open(&spec(&server.export("", 60)));
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![5; 512]));
    assert_eq!((disk.size(), disk.limits().write_zeroes), (SIZE, None));
}

/// The client sends the requests of a lost server again in their first order. The protocol does not require
/// this.
#[test]
fn requests_are_sent_again_in_order() {
    const COUNT: usize = 16;
    let (sender, received) = channel();
    let server = HostileNbd::start(2, move |connection, stream| {
        greet(stream, &hello(false));
        if connection == 0 {
            // After these two, the client's slots are free in another order.
            for request in [(); 2].map(|()| read_request(stream).unwrap()) {
                stream.write_all(&simple(0, request.cookie, &[1; 4096])).unwrap();
            }
        }
        let requests: Vec<_> = (0..COUNT).map(|_| read_request(stream).unwrap()).collect();
        sender.send(requests.iter().map(|request| request.at).collect::<Vec<_>>()).unwrap();
        if connection == 1 {
            // Answers in reverse order.
            let replies = requests.iter().rev().flat_map(|request| simple(0, request.cookie, &[1; 4096]));
            stream.write_all(&replies.collect::<Vec<_>>()).unwrap();
            assert_eq!(read_request(stream).unwrap().command, DISCONNECT);
        }
    });
    let disk = open(&spec(&server.export("", 60)));
    assert_eq!(InFlight::start(&disk, 2, 0).finish(), [Ok(()); 2]);
    let mut requests = InFlight::start(&disk, COUNT, 0);
    assert_eq!(requests.finish(), [Ok(()); COUNT]);
    drop(requests);
    drop(disk);
    let expected: Vec<_> = (0..COUNT as u64).map(|i| i * 4096).collect();
    assert_eq!([received.recv().unwrap(), received.recv().unwrap()], [expected.clone(), expected]);
}

/// Acknowledged requests that change data and were not flushed may be lost with a server, so the next flush
/// fails. Failed requests do not count.
#[test]
fn requests_that_a_lost_server_may_have_lost() {
    let flags = EXPORT_FLAGS | 1 << 5 | 1 << 6;
    // The requests, the error in the server's answers, and the result of a flush after the server was lost.
    let io = Err(IoError::Os(Errno::IO));
    let cases = [
        (&[WRITE][..], 0, io),
        (&[TRIM], 0, io),
        (&[ZEROES], 0, io),
        (&[READ], 0, Ok(())),
        (&[WRITE, FLUSH], 0, Ok(())),
        (&[WRITE, FLUSH, WRITE], 0, io),
        (&[WRITE], 28, Ok(())),
    ];
    for (index, (requests, error, flushed)) in cases.into_iter().enumerate() {
        let count = requests.len();
        let server = HostileNbd::start(2, move |connection, stream| {
            greet(stream, &hello_of(false, SIZE, flags));
            if connection == 1 {
                return drop(serve_requests(stream, 0));
            }
            for _ in 0..count {
                let request = read_request(stream).unwrap();
                let len = if request.command == READ { request.len as usize } else { 0 };
                stream.write_all(&simple(error, request.cookie, &vec![0; len])).unwrap();
            }
        });
        let disk = open(&spec(&server.export("", 60)));
        let mut worker = worker(&disk);
        let expected = if error == 0 { Ok(()) } else { Err(IoError::Os(Errno::NOSPC)) };
        for &request in requests {
            worker.io(0).extents_mut().clear();
            let result = match request {
                READ => worker.read(0, 512).0,
                WRITE => worker.write(0, &[1; 512], 0),
                FLUSH => worker.flush(),
                request => {
                    worker.io(0).extents_mut().push(Extent { offset: 0, len: 512, unmap: false });
                    worker.run(match request {
                        TRIM => Request::Discard { durable: false },
                        _ => Request::WriteZeroes { durable: false },
                    })
                }
            };
            assert_eq!(result, expected, "case {index}");
        }
        // This read ends after the client has noticed the loss. A flush sent before that would only be sent
        // again.
        assert_eq!(worker.read(0, 512).0, Ok(()), "case {index}");
        assert_eq!(worker.flush(), flushed, "case {index}");
        assert_eq!(worker.flush(), Ok(()), "case {index}");
    }
}

#[test]
fn a_failed_flush_does_not_clear_the_loss() {
    let server = HostileNbd::start(2, move |connection, stream| {
        greet(stream, &hello(false));
        if connection == 1 {
            return drop(serve_requests(stream, 0));
        }
        for error in [0, 5] {
            let request = read_request(stream).unwrap();
            stream.write_all(&simple(error, request.cookie, &[])).unwrap();
        }
    });
    let disk = open(&spec(&server.export("", 60)));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[1; 512], 0), Ok(()));
    for _ in 0..2 {
        assert_eq!(worker.flush(), Err(IoError::Os(Errno::IO)));
        // This read ends after the client has noticed the loss.
        assert_eq!(worker.read(0, 512).0, Ok(()));
    }
    assert_eq!(worker.flush(), Ok(()));
}

/// A server with a page cache learns of lost writes once, and reports them in the answer to one flush. The
/// client reports them to each queue.
#[test]
fn each_queue_reports_a_flush_that_failed_at_the_server() {
    let server = HostileNbd::start(1, move |_, stream| {
        greet(stream, &hello(false));
        let requests = [(); 3].map(|()| read_request(stream).unwrap());
        // Answers in reverse order. The first request is answered last, with an error.
        for (request, error) in requests.iter().zip([5, 0, 0]).rev() {
            stream.write_all(&simple(error, request.cookie, &[])).unwrap();
        }
        serve_requests(stream, 0);
    });
    let disk = open(&spec(&server.uri()));
    let mut queues = [(); 3].map(|()| worker(&disk).with_slots(2));
    for (queue, slot) in [(0, 0), (1, 0), (1, 1)] {
        assert_eq!(queues[queue].start(slot, Request::Flush), Step::Busy);
    }
    let failed = Err(IoError::Os(Errno::IO));
    for (queue, count) in [(0, 1), (1, 2)] {
        let mut ended = Vec::new();
        while ended.len() < count {
            ended.extend(queues[queue].turn());
        }
        assert!(ended.iter().all(|(_, result)| *result == failed), "{queue}: {ended:?}");
    }
    assert_eq!(queues[2].flush(), failed);
    for queue in &mut queues {
        assert_eq!(queue.flush(), Ok(()));
    }
}

/// A flush covers the writes that were acknowledged before it was sent, and none that were acknowledged
/// later.
#[test]
fn a_flush_covers_only_earlier_writes() {
    for error in [0, 5] {
        let server = HostileNbd::start(2, move |connection, stream| {
            greet(stream, &hello(false));
            if connection == 1 {
                return drop(serve_requests(stream, 0));
            }
            // A flush and a write are in flight. The write is answered first.
            let [flush, write] = [(); 2].map(|()| read_request(stream).unwrap());
            assert_eq!([flush.command, write.command], [FLUSH, WRITE]);
            stream
                .write_all(&[simple(0, write.cookie, &[]), simple(error, flush.cookie, &[])].concat())
                .unwrap();
        });
        let disk = open(&spec(&server.export("", 60)));
        let mut flusher = worker(&disk);
        assert_eq!(flusher.start(0, Request::Flush), Step::Busy);
        let mut writer = worker(&disk);
        assert_eq!(writer.write(0, &[1; 512], 0), Ok(()));
        let mut ended = Vec::new();
        while ended.is_empty() {
            ended = flusher.turn();
        }
        assert_eq!(ended, [(0, if error == 0 { Ok(()) } else { Err(IoError::Os(Errno::IO)) })]);
        assert_eq!(writer.read(0, 512).0, Ok(()));
        assert_eq!(writer.flush(), Err(IoError::Os(Errno::IO)));
    }
}

/// Without FUA a durable write is a write and a flush. This flush reports the loss of the request's own write
/// only.
#[test]
fn the_flush_of_a_durable_write_covers_that_write_alone() {
    let failed = Err(IoError::Os(Errno::IO));
    let server = HostileNbd::start(3, move |connection, stream| {
        greet(stream, &hello(false));
        if connection == 2 {
            return drop(serve_requests(stream, 0));
        }
        // Closes each connection after the answer to its first write: a plain one, then a durable one.
        let mut requests = std::iter::repeat_with(|| read_request(stream).unwrap());
        let write = requests.find(|request| request.command == WRITE).unwrap();
        stream.write_all(&simple(0, write.cookie, &[])).unwrap();
    });
    let disk = open(&spec(&server.export("", 60)));
    let (mut queue, mut other) = (worker(&disk), worker(&disk));
    assert_eq!(queue.write(0, &[1; 512], 0), Ok(()));
    let durable = || InFlight::start(&disk, 0, 1).finish();
    assert_eq!(durable(), [failed], "the write is lost with its server");
    assert_eq!(durable(), [Ok(())]);
    assert_eq!([queue.flush(), other.flush()], [failed; 2]);
    assert_eq!(durable(), [Ok(())]);
    assert_eq!([queue.flush(), other.flush()], [Ok(()); 2]);
}

/// A server that comes back sends nothing, or its handshake too slowly.
#[test]
fn a_slow_handshake_of_a_returning_server_times_out() {
    const BYTE_EVERY: Duration = Duration::from_millis(20);
    for slowly in [false, true] {
        let server = HostileNbd::start(2, move |connection, stream| {
            if connection == 0 {
                greet(stream, &hello(false));
                read_request(stream).unwrap();
            } else if slowly {
                // The handshake is valid, but takes longer than the client waits.
                let hello = [GREETING, &answer(8, 4, &[0; 300]), &hello(false)[GREETING.len()..]].concat();
                for byte in hello {
                    thread::sleep(BYTE_EVERY);
                    if stream.write_all(&[byte]).is_err() {
                        return;
                    }
                }
                if read_handshake(stream).is_ok() {
                    serve_requests(stream, 0);
                }
            } else {
                let _ = stream.read_to_end(&mut Vec::new());
            }
        });
        let disk = open(&spec(&server.export("", 1)));
        assert_eq!(worker(&disk).read(0, 512).0, TIMED_OUT, "slowly: {slowly}");
    }
}

/// After requests have timed out, the next session waits for the server again.
#[test]
fn reload_waits_for_a_lost_server_again() {
    let mut server = HostileNbd::start(1, |_, stream| greet(stream, &hello(false)));
    let disk = open(&spec(&server.export("", 2)));
    assert_eq!(worker(&disk).read(0, 512).0, TIMED_OUT);
    // The client may have connected by itself before.
    server.start_again(100, |_, stream| {
        if try_greet(stream, &hello(false)).is_ok() {
            serve_requests(stream, 6);
        }
    });
    disk.reload(false).unwrap();
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![6; 512]));
}

#[test]
fn exports_have_identities_of_their_own() {
    let start = || {
        HostileNbd::start(3, |_, stream| {
            stream.write_all(&hello(false)).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        })
    };
    let (one, other) = (start(), start());
    let identity = |uri: String| open(&spec(&uri)).identity().to_owned();
    let all = [
        identity(one.export("a", 0)),
        identity(one.export("b", 0)),
        identity(one.export("a", 5)),
        identity(other.export("a", 0)),
    ];
    drop([identity(other.export("a", 1)), identity(other.export("a", 2))]);
    assert!(all.iter().all(|id| (1..=20).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())));
    assert!(all[0] == all[2] && all[0] != all[1] && all[0] != all[3], "{all:?}");
}

/// The client shuts a connection down that it gives up, and goes on after a limited time.
#[test]
fn a_server_that_keeps_a_lost_connection_does_not_stop_the_disk() {
    let mut lost = None;
    let server = HostileNbd::start(2, move |connection, stream| {
        greet(stream, &hello(false));
        if connection == 0 {
            assert_eq!(read_request(stream).unwrap().command, WRITE);
            // Nothing that a server says has this form.
            stream.write_all(&[0; 64]).unwrap();
            lost = Some(stream.try_clone().unwrap());
        } else {
            let mut rest = Vec::new();
            lost.take().unwrap().read_to_end(&mut rest).unwrap();
            assert!(rest.is_empty());
            let write = read_request(stream).unwrap();
            assert_eq!(write.command, WRITE);
            stream.write_all(&simple(0, write.cookie, &[])).unwrap();
            serve_requests(stream, 0);
        }
    });
    let disk = open(&spec(&server.export("", 60)));
    assert_eq!(worker(&disk).write(0, &[1; 512], 0), Ok(()));
}
