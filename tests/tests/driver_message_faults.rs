//! Tests our driver with a back-end that sends invalid messages, does not answer, or changes the descriptors
//! it received.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kickless_driver::{Choice, Disk, Error, Failure, Options, Request};
use kickless_spec::vhost_user::{
    BackendRequest, FLAG_NEED_REPLY, FLAG_REPLY, FrontendRequest as Code, ProtocolFeatures,
};
use kickless_tests::hostile_backend::faults::{AnswerFault, RingFault, Rules};
use kickless_tests::hostile_backend::{HostileBackend, LIMIT, returns_in_time, with_causes};
use kickless_vhost_user::Header;
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, ftruncate, memfd_create};

/// Messages of the handshake that have an answer.
const HANDSHAKE: [Code; 16] = [
    Code::GetFeatures,
    Code::GetProtocolFeatures,
    Code::SetOwner,
    Code::SetFeatures,
    Code::GetQueueNum,
    Code::GetMaxMemSlots,
    Code::SetBackendReqFd,
    Code::GetConfig,
    Code::AddMemReg,
    Code::SetVringNum,
    Code::SetVringBase,
    Code::SetVringAddr,
    Code::SetVringCall,
    Code::SetVringErr,
    Code::SetVringKick,
    Code::SetVringEnable,
];

fn options(backend: &HostileBackend) -> Options {
    Options {
        queues: 1,
        queue_size: 8,
        buffer_memory: 2 << 20,
        reconnect_limit: Duration::ZERO,
        ..Options::new(backend.socket())
    }
}

fn backend(answers: &[(Code, AnswerFault)]) -> HostileBackend {
    let mut rules = Rules { answers: answers.to_vec(), ..Rules::default() };
    if answers.iter().any(|(code, _)| *code == Code::SetMemTable) {
        rules.protocol.remove(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
    }
    HostileBackend::start(rules).unwrap()
}

/// Returns the error of connecting if the answer to `code` is a fault.
fn refusal(code: Code, fault: AnswerFault) -> Error {
    let backend = backend(&[(code, fault)]);
    Disk::connect(options(&backend)).map(drop).unwrap_err()
}

#[test]
fn invalid_answers_are_reported() {
    returns_in_time(|| {
        for code in HANDSHAKE.into_iter().chain([Code::SetMemTable]) {
            for fault in AnswerFault::ANY {
                let error = refusal(code, fault);
                let named = matches!(error, Error::Protocol { request, .. } if request == code.name());
                let named = named
                    || (fault == AnswerFault::Long
                        && matches!(error, Error::WrongAnswer { request } if request == code.name()));
                assert!(named, "{code} {fault:?}: {}", with_causes(&error));
                let words = match fault {
                    AnswerFault::Closed => "closed the connection",
                    AnswerFault::Half => "closed the connection after 6 bytes",
                    AnswerFault::OfAnother => "the reply is to request",
                    AnswerFault::Version => "protocol version",
                    AnswerFault::Huge => "4097 bytes announced",
                    AnswerFault::Request => "expected a reply",
                    AnswerFault::Fd => "1 file descriptors, expected 0",
                    AnswerFault::Fds => "more than 8 file descriptors",
                    _ => code.name(),
                };
                assert!(with_causes(&error).contains(words), "{code} {fault:?}: {}", with_causes(&error));
            }
        }
    });
}

#[test]
fn refusals_are_reported() {
    returns_in_time(|| {
        let questions =
            [Code::GetFeatures, Code::GetProtocolFeatures, Code::GetQueueNum, Code::GetMaxMemSlots];
        let orders = HANDSHAKE.into_iter().filter(|code| !questions.contains(code));
        for code in orders.chain([Code::SetMemTable]) {
            let error = refusal(code, AnswerFault::Refused);
            assert!(matches!(error, Error::Refused { request } if request == code.name()), "{error:?}");
        }
    });
}

#[test]
fn a_configuration_of_another_length_is_refused() {
    returns_in_time(|| {
        let error = refusal(Code::GetConfig, AnswerFault::Less);
        assert!(matches!(error, Error::ConfigTooShort { len: 20, needs: 60 }), "{error:?}");
        for fault in [AnswerFault::More, AnswerFault::Long, AnswerFault::Offset] {
            let error = refusal(Code::GetConfig, fault);
            assert!(matches!(error, Error::WrongAnswer { request: "GET_CONFIG" }), "{error:?}");
        }
    });
}

#[test]
fn a_missing_answer_times_out() {
    returns_in_time(|| {
        thread::scope(|scope| {
            for code in HANDSHAKE {
                scope.spawn(move || {
                    let backend = backend(&[(code, AnswerFault::Silence)]);
                    let limit = Duration::from_secs(2);
                    let options = Options { reply_timeout: limit, ..options(&backend) };
                    let error = Disk::connect(options).map(drop).unwrap_err();
                    assert!(
                        matches!(error, Error::NoAnswer { request, limit: named } if request == code.name() && named == limit),
                        "{code}: {error:?}"
                    );
                });
            }
        });
        // No process accepts the connection.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("full.sock");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            let socket = rustix::net::socket_with(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::NONBLOCK,
                None,
            );
            let socket = UnixStream::from(socket.unwrap());
            match rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()) {
                Ok(()) => waiting.push(socket),
                Err(error) => break error,
            }
        };
        assert_eq!(full, rustix::io::Errno::AGAIN);
        let options = Options { connect_timeout: Duration::from_millis(50), ..Options::new(&path) };
        let error = Disk::connect(options).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Connect { path: named, .. } if *named == path), "{error:?}");
    });
}

/// A method that sends a message.
type Call = fn(&Disk, &OwnedFd) -> Result<(), Error>;

/// Changes the answers to messages after the handshake. A refusal is returned and the disk lives on. A fault
/// kills the disk.
#[test]
fn wrong_answers_to_a_disk_in_use() {
    returns_in_time(|| {
        let file = memfd_create("mine", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 20).unwrap();
        let calls: [(Code, Call); 3] = [
            (Code::SetConfig, |disk, _| disk.set_writeback(false)),
            (Code::AddMemReg, |disk, file| disk.register(file, 0, 1 << 20).map(drop)),
            (Code::RemMemReg, |disk, file| disk.unregister(disk.register(file, 0, 1 << 20)?)),
        ];
        for (code, call) in calls {
            let backend = backend(&[]);
            let disk = Disk::connect(options(&backend)).unwrap();
            backend.rules().answers = vec![(code, AnswerFault::Refused)];
            let error = call(&disk, &file).unwrap_err();
            assert!(matches!(error, Error::Refused { request } if request == code.name()), "{error:?}");
            disk.write_at(&[1; 512], 0).unwrap();
            assert!(disk.failure().is_none());
            backend.rules().answers = vec![(code, AnswerFault::OfAnother)];
            let error = call(&disk, &file).unwrap_err();
            assert!(
                matches!(error, Error::Dead(_)) && with_causes(&error).contains(code.name()),
                "{}",
                with_causes(&error)
            );
            assert!(matches!(disk.write_at(&[1; 512], 0), Err(Error::Dead(_))));
        }
        // Closing a disk ignores the answer, and does not wait for it forever.
        for fault in AnswerFault::ANY.into_iter().chain([AnswerFault::Silence, AnswerFault::Refused]) {
            let backend = backend(&[(Code::GetVringBase, fault)]);
            let options = Options { reply_timeout: Duration::from_secs(1), ..options(&backend) };
            let disk = Disk::connect(options).unwrap();
            disk.write_at(&[1; 512], 0).unwrap();
            drop(disk);
        }
    });
}

/// The back-end closes the connection at one message of the handshake after the other, until it completes
/// one.
#[test]
fn connecting_survives_a_close_at_each_message() {
    returns_in_time(|| {
        for code in HANDSHAKE.into_iter().chain([Code::SetProtocolFeatures]) {
            for fault in [AnswerFault::Closed, AnswerFault::Half] {
                let backend =
                    HostileBackend::start(Rules { ring: Some((1, RingFault::Closed)), ..Rules::default() })
                        .unwrap();
                let disk = Disk::connect(Options { reconnect_limit: LIMIT, ..options(&backend) }).unwrap();
                disk.write_at(&[3; 4096], 0).unwrap();
                backend.rules().answers = vec![(code, fault)];
                thread::scope(|scope| {
                    scope.spawn(|| {
                        let mut read = [0; 4096];
                        disk.read_at(&mut read, 0).unwrap();
                        assert_eq!(read, [3; 4096]);
                    });
                    let honest = code == Code::SetProtocolFeatures && fault == AnswerFault::Half;
                    while backend.connections() < if honest { 2 } else { 4 } {
                        thread::sleep(Duration::from_millis(1));
                    }
                    backend.rules().answers.clear();
                });
                drop(disk);
                assert_eq!(backend.faults(), [""; 0]);
            }
        }
        // The driver tries again until its time is over.
        let backend =
            HostileBackend::start(Rules { ring: Some((1, RingFault::Closed)), ..Rules::default() }).unwrap();
        let limit = Duration::from_millis(200);
        let disk = Disk::connect(Options { reconnect_limit: limit, ..options(&backend) }).unwrap();
        disk.write_at(&[3; 512], 0).unwrap();
        backend.rules().answers = vec![(Code::SetVringAddr, AnswerFault::Closed)];
        let error = disk.read_at(&mut [0; 512], 0).unwrap_err();
        assert!(with_causes(&error).contains("SET_VRING_ADDR"), "{}", with_causes(&error));
        assert!(matches!(&*disk.failure().unwrap(), Error::Gone { .. }));
    });
}

/// Encodes a message for the back-end's own channel.
fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { request, flags: 1 | flags, size: payload.len() as u32 };
    [&header.to_bytes(), payload].concat()
}

#[test]
fn invalid_messages_of_the_back_end_are_harmless() {
    returns_in_time(|| {
        let change = BackendRequest::ConfigChangeMsg.raw();
        let cases: Vec<Vec<u8>> = vec![
            message(99, 0, &[]),
            message(99, FLAG_NEED_REPLY, &[1; 100]),
            message(0, FLAG_NEED_REPLY, &[]),
            message(u32::MAX, FLAG_NEED_REPLY, &[]),
            message(change, FLAG_NEED_REPLY, &[0; 8]),
            message(change, FLAG_REPLY, &[]),
            message(change, 2, &[]),
            message(BackendRequest::VringErr.raw(), 0, &[0; 8]),
            message(BackendRequest::ShmemMap.raw(), FLAG_NEED_REPLY, &[0xff; 40]),
            message(BackendRequest::SharedObjectLookup.raw(), 0, &[0; 16]),
            Header { request: change, flags: 1, size: 4097 }.to_bytes().to_vec(),
            vec![0xff; 5000],
            message(change, 0, &[])[..5].to_vec(),
            // This is more than the driver reads or answers at once.
            message(99, FLAG_NEED_REPLY, &[7; 64]).repeat(20_000),
        ];
        for (number, rubbish) in cases.into_iter().enumerate() {
            let backend = Arc::new(backend(&[]));
            let disk = Disk::connect(options(&backend)).unwrap();
            let theirs = backend.clone();
            // The channel may close meanwhile.
            let speaker = thread::spawn(move || drop(theirs.send_on_channel(&rubbish)));
            for round in 0..20u8 {
                disk.write_at(&[round; 512], 0).unwrap();
                let mut read = [0; 512];
                disk.read_at(&mut read, 0).unwrap();
                assert_eq!(read, [round; 512]);
            }
            while !speaker.is_finished() {
                disk.queue(0).wait(1, Some(Duration::from_millis(1)), drop).unwrap();
            }
            speaker.join().unwrap();
            backend.close_channel();
            disk.write_at(&[1; 512], 0).unwrap();
            assert!(disk.failure().is_none(), "case {number}");
            assert_eq!(disk.config_changes(), 0, "case {number}");
        }
    });
}

/// Announces changes of the configuration space until the driver notices one.
fn change(backend: &HostileBackend, disk: &Disk) {
    let before = disk.config_changes();
    backend.send_on_channel(&message(BackendRequest::ConfigChangeMsg.raw(), 0, &[])).unwrap();
    let deadline = Instant::now() + LIMIT;
    while disk.config_changes() == before {
        assert!(Instant::now() < deadline, "the driver does not notice the change");
        disk.queue(0).wait(1, Some(Duration::from_millis(1)), drop).unwrap();
    }
}

#[test]
fn a_change_to_an_invalid_configuration_kills_the_disk() {
    returns_in_time(|| {
        let backend = backend(&[]);
        let disk = Disk::connect(options(&backend)).unwrap();
        backend.rules().config.capacity = 16.into();
        change(&backend, &disk);
        assert_eq!(disk.size().unwrap(), 8192);
        assert!(matches!(disk.read_at(&mut [0; 512], 8192), Err(Error::Invalid(_))));
        // Many messages have the same effect as one.
        backend
            .send_on_channel(&message(BackendRequest::ConfigChangeMsg.raw(), 0, &[]).repeat(1000))
            .unwrap();
        disk.write_at(&[1; 512], 0).unwrap();
        backend.rules().config.blk_size = 3.into();
        change(&backend, &disk);
        let error = disk.size().unwrap_err();
        assert!(with_causes(&error).contains("blk_size is 3"), "{}", with_causes(&error));
        assert!(matches!(&*disk.failure().unwrap(), Error::ConfigField { field: "blk_size", value: 3 }));
    });
}

/// The driver does not send a request again to a back-end with smaller limits.
#[test]
fn limits_may_shrink_between_connections() {
    returns_in_time(|| {
        let backend =
            HostileBackend::start(Rules { ring: Some((0, RingFault::Silence)), ..Rules::default() }).unwrap();
        let disk =
            Disk::connect(Options { reconnect_limit: LIMIT, queue_size: 64, ..options(&backend) }).unwrap();
        let queue = disk.queue(0);
        let pieces = (0..30).map(|_| disk.buffer(512).unwrap()).collect::<Vec<_>>();
        let mut batch =
            vec![Request::write(0, pieces), Request::write(0, disk.buffer(512).unwrap()).token(1)];
        queue.submit(&mut batch).unwrap();
        backend.rules().config.size_max = 512.into();
        backend.rules().config.seg_max = 1.into();
        change(&backend, &disk);
        assert_eq!(disk.len_max().unwrap(), 512);
        // The back-end closes the connection and serves the next one; the request has not completed.
        backend.drop_connection();
        let mut results = Vec::new();
        while results.len() < 2 {
            queue.wait(2, Some(LIMIT), |done| results.push((done.token, done.result))).unwrap();
        }
        results.sort_by_key(|(token, _)| *token);
        assert_eq!(results, [(0, Err(Failure::Dead)), (1, Ok(()))]);
        assert_eq!(backend.faults(), [""; 0]);
    });
}

#[test]
fn the_back_end_cannot_truncate_memory() {
    returns_in_time(|| {
        let backend = backend(&[]);
        let disk = Disk::connect(options(&backend)).unwrap();
        disk.write_at(&[1; 512], 0).unwrap();
        let memory = &backend.received_fds().unwrap()[0];
        // If this worked, the next access would kill the test.
        assert_eq!(ftruncate(memory, 0), Err(rustix::io::Errno::PERM));
        assert_eq!(ftruncate(memory, 1 << 40), Err(rustix::io::Errno::PERM));
        disk.write_at(&[2; 512], 0).unwrap();
    });
}

/// A thread that submits must not wait for a back-end that keeps the counter of kicks full and clears
/// O_NONBLOCK, while the back-end runs or after it.
#[test]
fn a_full_kick_counter_does_not_block() {
    for packed in [Choice::Off, Choice::On] {
        returns_in_time(move || {
            let backend =
                HostileBackend::start(Rules { ring: Some((0, RingFault::Silence)), ..Rules::default() })
                    .unwrap();
            let shape = Options { packed, event_idx: Choice::Off, queue_size: 64, ..options(&backend) };
            let disk = Disk::connect(shape).unwrap();
            let queue = disk.queue(0);
            queue.submit(&mut vec![Request::read(0, disk.buffer(512).unwrap())]).unwrap();
            while backend.requests() == 0 {
                thread::yield_now();
            }
            let handed = backend.received_fds().unwrap();
            let kick = &handed[3];
            let over = AtomicBool::new(false);
            let fill = || {
                fcntl_setfl(kick, OFlags::NONBLOCK).unwrap();
                let _ = rustix::io::write(kick, &(u64::MAX - 1).to_ne_bytes());
                let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
                fcntl_setfl(kick, OFlags::empty()).unwrap();
            };
            fill();
            thread::scope(|scope| {
                let before = disk.counters().kicks;
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        fill();
                    }
                });
                for _ in 0..20 {
                    queue.submit(&mut vec![Request::read(0, disk.buffer(512).unwrap())]).unwrap();
                }
                over.store(true, Ordering::Relaxed);
                assert_eq!(disk.counters().kicks, before + 20);
            });
            assert_eq!((disk.queue(0).in_flight(), disk.failure().is_none()), (21, true));
            backend.drop_connection();
            let mut ended = 0;
            while ended < 21 {
                ended += queue.wait(21, Some(LIMIT), |done| assert!(done.result.is_err())).unwrap();
            }
        });
    }
}

#[test]
fn blocking_descriptors_do_not_block_the_driver() {
    returns_in_time(|| {
        let backend = backend(&[]);
        let disk = Disk::connect(options(&backend)).unwrap();
        for fd in &backend.received_fds().unwrap()[1..] {
            fcntl_setfl(fd, OFlags::empty()).unwrap();
        }
        let call = &backend.received_fds().unwrap()[1];
        for round in 0..50u8 {
            disk.write_at(&[round; 512], 0).unwrap();
            disk.queue(0).wait(1, Some(Duration::from_millis(1)), drop).unwrap();
            // Adds more calls than the counter can hold.
            rustix::io::write(call, &(u64::MAX / 2).to_ne_bytes()).unwrap();
            let _ = disk.counters();
        }
        drop(disk);
        // A back-end that ends with a full counter delays no thread.
        let backend =
            HostileBackend::start(Rules { ring: Some((0, RingFault::Silence)), ..Rules::default() }).unwrap();
        let disk = Disk::connect(options(&backend)).unwrap();
        let mut first = vec![Request::read(0, disk.buffer(512).unwrap())];
        disk.queue(0).submit(&mut first).unwrap();
        while backend.requests() == 0 {
            thread::yield_now();
        }
        let kick = &backend.received_fds().unwrap()[3];
        fcntl_setfl(kick, OFlags::NONBLOCK).unwrap();
        rustix::io::write(kick, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        fcntl_setfl(kick, OFlags::empty()).unwrap();
        let kicked = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut second = vec![Request::read(0, disk.buffer(512).unwrap())];
                disk.queue(0).submit(&mut second).unwrap();
                kicked.store(true, Ordering::Release);
            });
            while disk.queue(0).in_flight() < 2 {
                thread::yield_now();
            }
            assert_eq!(disk.queue(0).poll(1, drop).unwrap(), 0);
            backend.drop_connection();
            let mut ended = 0;
            while ended < 2 {
                ended += disk.queue(0).wait(2, Some(LIMIT), |done| assert!(done.result.is_err())).unwrap();
            }
        });
        assert!(kicked.into_inner());
    });
}
