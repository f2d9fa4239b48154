//! Our driver against a back-end that lies in its messages, or says nothing, or tampers with what it was handed.

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
use kickless_tests::hostile_backend::lies::{AnswerLie, RingLie, Rules};
use kickless_tests::hostile_backend::{HostileBackend, LIMIT, ends, whole};
use kickless_vhost_user::Header;
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, ftruncate, memfd_create};

/// The messages of the handshake that are answered.
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

fn backend(answers: &[(Code, AnswerLie)]) -> HostileBackend {
    let mut rules = Rules { answers: answers.to_vec(), ..Rules::default() };
    if answers.iter().any(|(code, _)| *code == Code::SetMemTable) {
        rules.protocol.remove(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
    }
    HostileBackend::start(rules).unwrap()
}

/// What connecting comes to if the answer to such a message is a lie.
fn refusal(code: Code, lie: AnswerLie) -> Error {
    let backend = backend(&[(code, lie)]);
    Disk::connect(options(&backend)).map(drop).unwrap_err()
}

#[test]
fn an_answer_that_is_none() {
    ends(|| {
        for code in HANDSHAKE.into_iter().chain([Code::SetMemTable]) {
            for lie in AnswerLie::ANY {
                let error = refusal(code, lie);
                let named = matches!(error, Error::Protocol { request, .. } if request == code.name());
                let named = named
                    || (lie == AnswerLie::Long
                        && matches!(error, Error::WrongAnswer { request } if request == code.name()));
                assert!(named, "{code} {lie:?}: {}", whole(&error));
                let words = match lie {
                    AnswerLie::Closed => "closed the connection",
                    AnswerLie::Half => "closed the connection after 6 bytes",
                    AnswerLie::OfAnother => "the reply is to request",
                    AnswerLie::Version => "protocol version",
                    AnswerLie::Huge => "4097 bytes announced",
                    AnswerLie::Request => "expected a reply",
                    AnswerLie::Fd => "1 file descriptors, expected 0",
                    AnswerLie::Fds => "more than 8 file descriptors",
                    _ => code.name(),
                };
                assert!(whole(&error).contains(words), "{code} {lie:?}: {}", whole(&error));
            }
        }
    });
}

#[test]
fn an_answer_that_says_no() {
    ends(|| {
        let questions =
            [Code::GetFeatures, Code::GetProtocolFeatures, Code::GetQueueNum, Code::GetMaxMemSlots];
        let orders = HANDSHAKE.into_iter().filter(|code| !questions.contains(code));
        for code in orders.chain([Code::SetMemTable]) {
            let error = refusal(code, AnswerLie::Refused);
            assert!(matches!(error, Error::Refused { request } if request == code.name()), "{error:?}");
        }
    });
}

#[test]
fn configuration_of_another_length() {
    ends(|| {
        let error = refusal(Code::GetConfig, AnswerLie::Less);
        assert!(matches!(error, Error::ConfigTooShort { len: 20, needs: 60 }), "{error:?}");
        for lie in [AnswerLie::More, AnswerLie::Long, AnswerLie::Offset] {
            let error = refusal(Code::GetConfig, lie);
            assert!(matches!(error, Error::WrongAnswer { request: "GET_CONFIG" }), "{error:?}");
        }
    });
}

#[test]
fn no_answer_at_all() {
    ends(|| {
        thread::scope(|scope| {
            for code in HANDSHAKE {
                scope.spawn(move || {
                    let backend = backend(&[(code, AnswerLie::Silence)]);
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
        // Nor is anybody let in.
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

/// What sends a message.
type Call = fn(&Disk, &OwnedFd) -> Result<(), Error>;

/// Messages after the handshake. A no is passed on, and the disk lives; a lie kills it.
#[test]
fn answers_to_a_disk_in_use() {
    ends(|| {
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
            backend.rules().answers = vec![(code, AnswerLie::Refused)];
            let error = call(&disk, &file).unwrap_err();
            assert!(matches!(error, Error::Refused { request } if request == code.name()), "{error:?}");
            disk.write_at(&[1; 512], 0).unwrap();
            assert!(disk.failure().is_none());
            backend.rules().answers = vec![(code, AnswerLie::OfAnother)];
            let error = call(&disk, &file).unwrap_err();
            assert!(
                matches!(error, Error::Dead(_)) && whole(&error).contains(code.name()),
                "{}",
                whole(&error)
            );
            assert!(matches!(disk.write_at(&[1; 512], 0), Err(Error::Dead(_))));
        }
        // A disk that is closed cares for no answer, but does not wait for ever.
        for lie in AnswerLie::ANY.into_iter().chain([AnswerLie::Silence, AnswerLie::Refused]) {
            let backend = backend(&[(Code::GetVringBase, lie)]);
            let options = Options { reply_timeout: Duration::from_secs(1), ..options(&backend) };
            let disk = Disk::connect(options).unwrap();
            disk.write_at(&[1; 512], 0).unwrap();
            drop(disk);
        }
    });
}

/// The back-end comes back, and goes again at one message of the handshake, until it does not.
#[test]
fn a_connection_that_closes_at_each_message() {
    ends(|| {
        for code in HANDSHAKE.into_iter().chain([Code::SetProtocolFeatures]) {
            for lie in [AnswerLie::Closed, AnswerLie::Half] {
                let backend =
                    HostileBackend::start(Rules { ring: Some((1, RingLie::Closed)), ..Rules::default() })
                        .unwrap();
                let disk = Disk::connect(Options { reconnect_limit: LIMIT, ..options(&backend) }).unwrap();
                disk.write_at(&[3; 4096], 0).unwrap();
                backend.rules().answers = vec![(code, lie)];
                thread::scope(|scope| {
                    scope.spawn(|| {
                        let mut read = [0; 4096];
                        disk.read_at(&mut read, 0).unwrap();
                        assert_eq!(read, [3; 4096]);
                    });
                    let honest = code == Code::SetProtocolFeatures && lie == AnswerLie::Half;
                    while backend.connections() < if honest { 2 } else { 4 } {
                        thread::sleep(Duration::from_millis(1));
                    }
                    backend.rules().answers.clear();
                });
                drop(disk);
                assert_eq!(backend.faults(), [""; 0]);
            }
        }
        // For as long as there is time.
        let backend =
            HostileBackend::start(Rules { ring: Some((1, RingLie::Closed)), ..Rules::default() }).unwrap();
        let limit = Duration::from_millis(200);
        let disk = Disk::connect(Options { reconnect_limit: limit, ..options(&backend) }).unwrap();
        disk.write_at(&[3; 512], 0).unwrap();
        backend.rules().answers = vec![(Code::SetVringAddr, AnswerLie::Closed)];
        let error = disk.read_at(&mut [0; 512], 0).unwrap_err();
        assert!(whole(&error).contains("SET_VRING_ADDR"), "{}", whole(&error));
        assert!(matches!(&*disk.failure().unwrap(), Error::Gone { .. }));
    });
}

/// A message on the back-end's own channel.
fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { request, flags: 1 | flags, size: payload.len() as u32 };
    [&header.to_bytes(), payload].concat()
}

#[test]
fn rubbish_on_the_back_ends_channel() {
    ends(|| {
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
            // More than is read of it, or answered, at once.
            message(99, FLAG_NEED_REPLY, &[7; 64]).repeat(20_000),
        ];
        for (number, rubbish) in cases.into_iter().enumerate() {
            let backend = Arc::new(backend(&[]));
            let disk = Disk::connect(options(&backend)).unwrap();
            let theirs = backend.clone();
            // It may be closed under it.
            let speaker = thread::spawn(move || drop(theirs.say(&rubbish)));
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
            backend.hang_up();
            disk.write_at(&[1; 512], 0).unwrap();
            assert!(disk.failure().is_none(), "case {number}");
            assert_eq!(disk.config_changes(), 0, "case {number}");
        }
    });
}

/// Tells of a change of the configuration space until the driver has heard.
fn change(backend: &HostileBackend, disk: &Disk) {
    let before = disk.config_changes();
    backend.say(&message(BackendRequest::ConfigChangeMsg.raw(), 0, &[])).unwrap();
    let deadline = Instant::now() + LIMIT;
    while disk.config_changes() == before {
        assert!(Instant::now() < deadline, "it does not hear");
        disk.queue(0).wait(1, Some(Duration::from_millis(1)), drop).unwrap();
    }
}

#[test]
fn a_change_to_what_cannot_be() {
    ends(|| {
        let backend = backend(&[]);
        let disk = Disk::connect(options(&backend)).unwrap();
        backend.rules().config.capacity = 16.into();
        change(&backend, &disk);
        assert_eq!(disk.size().unwrap(), 8192);
        assert!(matches!(disk.read_at(&mut [0; 512], 8192), Err(Error::Invalid(_))));
        // Many at once are no more than one.
        backend.say(&message(BackendRequest::ConfigChangeMsg.raw(), 0, &[]).repeat(1000)).unwrap();
        disk.write_at(&[1; 512], 0).unwrap();
        backend.rules().config.blk_size = 3.into();
        change(&backend, &disk);
        let error = disk.size().unwrap_err();
        assert!(whole(&error).contains("blk_size is 3"), "{}", whole(&error));
        assert!(matches!(&*disk.failure().unwrap(), Error::ConfigField { field: "blk_size", value: 3 }));
    });
}

/// A request that was sent when more was allowed is not sent to one that allows less.
#[test]
fn limits_that_shrink_between_connections() {
    ends(|| {
        let backend =
            HostileBackend::start(Rules { ring: Some((0, RingLie::Silence)), ..Rules::default() }).unwrap();
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
        // It goes, and comes back, without doing what it had not done.
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
fn memory_that_is_cut_short() {
    ends(|| {
        let backend = backend(&[]);
        let disk = Disk::connect(options(&backend)).unwrap();
        disk.write_at(&[1; 512], 0).unwrap();
        let memory = &backend.handed().unwrap()[0];
        // If it could, the next access would kill this test.
        assert_eq!(ftruncate(memory, 0), Err(rustix::io::Errno::PERM));
        assert_eq!(ftruncate(memory, 1 << 40), Err(rustix::io::Errno::PERM));
        disk.write_at(&[2; 512], 0).unwrap();
    });
}

/// A thread that submits does not wait for a back-end that has filled the counter of kicks, gone on filling it, and made
/// writes wait: as long as that lives, not only until it goes.
#[test]
fn a_kick_that_is_made_to_wait_does_not() {
    for packed in [Choice::Off, Choice::On] {
        ends(move || {
            let backend =
                HostileBackend::start(Rules { ring: Some((0, RingLie::Silence)), ..Rules::default() })
                    .unwrap();
            let shape = Options { packed, event_idx: Choice::Off, queue_size: 64, ..options(&backend) };
            let disk = Disk::connect(shape).unwrap();
            let queue = disk.queue(0);
            queue.submit(&mut vec![Request::read(0, disk.buffer(512).unwrap())]).unwrap();
            while backend.requests() == 0 {
                thread::yield_now();
            }
            let handed = backend.handed().unwrap();
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
fn descriptors_that_are_made_to_wait() {
    ends(|| {
        let backend = backend(&[]);
        let disk = Disk::connect(options(&backend)).unwrap();
        for fd in &backend.handed().unwrap()[1..] {
            fcntl_setfl(fd, OFlags::empty()).unwrap();
        }
        let call = &backend.handed().unwrap()[1];
        for round in 0..50u8 {
            disk.write_at(&[round; 512], 0).unwrap();
            disk.queue(0).wait(1, Some(Duration::from_millis(1)), drop).unwrap();
            // More calls than can be counted.
            rustix::io::write(call, &(u64::MAX / 2).to_ne_bytes()).unwrap();
            let _ = disk.counters();
        }
        drop(disk);
        // Nothing waits for a back-end that goes with the counter full.
        let backend =
            HostileBackend::start(Rules { ring: Some((0, RingLie::Silence)), ..Rules::default() }).unwrap();
        let disk = Disk::connect(options(&backend)).unwrap();
        let mut first = vec![Request::read(0, disk.buffer(512).unwrap())];
        disk.queue(0).submit(&mut first).unwrap();
        while backend.requests() == 0 {
            thread::yield_now();
        }
        let kick = &backend.handed().unwrap()[3];
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
