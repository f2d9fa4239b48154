//! Tests our driver with a back-end whose rings or features are invalid. Names each fault and the driver's
//! reaction.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::pin::Pin;
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use kickless_driver::{Choice, Completion, Disk, Error, Failure, Options, Request, UsedError};
use kickless_spec::blk::{BlkFeatures, Config};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::ProtocolFeatures;
use kickless_tests::block_on::block_on;
use kickless_tests::hostile_backend::faults::{RingFault, Rules};
use kickless_tests::hostile_backend::{HostileBackend, LIMIT, returns_in_time, with_causes};

/// The ring format and order.
#[derive(Clone, Copy, Debug)]
struct Shape {
    packed: bool,
    in_order: bool,
}

const SPLIT: Shape = Shape { packed: false, in_order: false };
const PACKED: Shape = Shape { packed: true, in_order: false };
const ALL: [Shape; 4] =
    [SPLIT, PACKED, Shape { in_order: true, ..SPLIT }, Shape { in_order: true, ..PACKED }];

fn options(backend: &HostileBackend, shape: Shape) -> Options {
    let choice = |on| if on { Choice::On } else { Choice::Off };
    Options {
        queues: 1,
        queue_size: 8,
        packed: choice(shape.packed),
        in_order: choice(shape.in_order),
        buffer_memory: 2 << 20,
        reconnect_limit: Duration::ZERO,
        // Only the threads of a test find a fault.
        reactor: false,
        ..Options::new(backend.socket())
    }
}

/// Connects a disk. The back-end completes its second request with a fault.
fn disk_with_fault(shape: Shape, fault: RingFault) -> (HostileBackend, Disk) {
    let backend = HostileBackend::start(Rules { ring: Some((1, fault)), ..Rules::default() }).unwrap();
    let disk = Disk::connect(options(&backend, shape)).unwrap();
    disk.write_at(&[7; 4096], 0).unwrap();
    (backend, disk)
}

/// Returns the driver's error for a fault in the completion of its second request. Checks that the queue
/// stops.
fn error_of(shape: Shape, fault: RingFault) -> UsedError {
    returns_in_time(move || {
        let (backend, disk) = disk_with_fault(shape, fault);
        // Requests that completed before the fault may still succeed.
        let error = (0..3).find_map(|_| disk.read_at(&mut [0; 4096], 0).err()).unwrap();
        assert!(matches!(error, Error::Dead(_)), "{error:?}");
        let error_of = match &*disk.failure().unwrap() {
            Error::InvalidUsed { queue: 0, source } => *source,
            other => panic!("{shape:?} {fault:?}: {other:?}"),
        };
        assert!(with_causes(&error).contains(&error_of.to_string()), "{}", with_causes(&error));
        assert!(matches!(disk.flush(), Err(Error::Dead(_))));
        assert!(disk.queue(0).poll(1, drop).is_err());
        let counters = disk.counters();
        assert_eq!(counters.submitted, counters.completed, "each request ended");
        drop(disk);
        assert_eq!(backend.faults(), [""; 0]);
        error_of
    })
}

#[test]
fn an_id_out_of_range_is_found() {
    for shape in ALL {
        assert_eq!(error_of(shape, RingFault::IdOutOfRange), UsedError::Id { id: 8 }, "{shape:?}");
    }
}

#[test]
fn an_id_not_in_flight_is_found() {
    for shape in ALL {
        assert!(matches!(error_of(shape, RingFault::IdNotInFlight), UsedError::Id { id: 0..8 }), "{shape:?}");
    }
}

#[test]
fn an_id_completed_twice_is_found() {
    for shape in ALL {
        assert!(matches!(error_of(shape, RingFault::Twice), UsedError::Id { id: 0..8 }), "{shape:?}");
    }
}

#[test]
fn a_length_beyond_the_buffers_is_found() {
    for shape in ALL {
        let error_of = error_of(shape, RingFault::TooLong);
        assert!(
            matches!(error_of, UsedError::Length { len: 4098, room: 4097, .. }),
            "{shape:?}: {error_of:?}"
        );
    }
}

#[test]
fn a_jump_of_the_used_index_is_found() {
    for shape in ALL.into_iter().filter(|shape| !shape.packed) {
        assert_eq!(error_of(shape, RingFault::IndexJump), UsedError::Index { from: 1, to: 10, size: 8 });
        assert_eq!(error_of(shape, RingFault::IndexBack), UsedError::Index { from: 1, to: 0, size: 8 });
    }
}

#[test]
fn a_completion_out_of_order_is_found() {
    returns_in_time(|| {
        // A split ring has no used element for the older request.
        let (_backend, disk) = disk_with_fault(Shape { in_order: true, ..SPLIT }, RingFault::OutOfOrder);
        assert_eq!(results(&disk, 2), [Err(Failure::Dead), Err(Failure::Dead)]);
        assert!(matches!(&*disk.failure().unwrap(), Error::InvalidUsed { source: UsedError::Id { .. }, .. }));
        // In a packed ring, this used descriptor completes both requests, but the older one has no status.
        let (_backend, disk) = disk_with_fault(Shape { in_order: true, ..PACKED }, RingFault::OutOfOrder);
        assert_eq!(results(&disk, 2), [Err(Failure::NoStatus), Err(Failure::NoStatus)]);
        // Without IN_ORDER this is no fault: the younger request completes first.
        for shape in [SPLIT, PACKED] {
            let (backend, disk) = disk_with_fault(shape, RingFault::OutOfOrder);
            let queue = disk.queue(0);
            let mut batch = reads(&disk, 2);
            queue.submit(&mut batch).unwrap();
            let mut done = Vec::new();
            queue.wait(2, Some(LIMIT), |completion| done.push(completion.token)).unwrap();
            assert_eq!(done, [1]);
            // Dropping a disk waits for the older request as long as the back-end runs.
            drop(backend);
        }
    });
}

fn reads(disk: &Disk, count: u64) -> Vec<Request> {
    (0..count).map(|token| Request::read(0, disk.buffer(512).unwrap()).token(token)).collect()
}

/// Returns the results of `count` reads in one batch.
fn results(disk: &Disk, count: usize) -> Vec<Result<(), Failure>> {
    let queue = disk.queue(0);
    let mut batch = reads(disk, count as u64);
    queue.submit(&mut batch).unwrap();
    let mut results = vec![None; count];
    let mut done = 0;
    while done < count {
        done += queue
            .wait(count, Some(LIMIT), |completion: Completion| {
                let before = results[completion.token as usize].replace(completion.result);
                assert_eq!(before, None, "completed twice");
            })
            .unwrap();
    }
    results.into_iter().map(Option::unwrap).collect()
}

#[test]
fn a_wrong_wrap_flag_completes_nothing() {
    returns_in_time(|| {
        let (backend, disk) = disk_with_fault(PACKED, RingFault::WrongWrap);
        let queue = disk.queue(0);
        let mut first = reads(&disk, 1);
        queue.submit(&mut first).unwrap();
        while backend.requests() < 2 {
            thread::yield_now();
        }
        let events = queue.events().unwrap();
        assert!(events.arm(), "a completion is ready");
        assert_eq!(queue.poll(1, drop).unwrap(), 0, "the request completed too early");
        // The next request completes both correctly.
        let mut second = vec![Request::read(0, disk.buffer(512).unwrap()).token(1)];
        queue.submit(&mut second).unwrap();
        let mut done = Vec::new();
        while done.len() < 2 {
            queue
                .wait(2, Some(LIMIT), |completion| done.push((completion.token, completion.result)))
                .unwrap();
        }
        assert_eq!(done, [(0, Ok(())), (1, Ok(()))]);
    });
}

#[test]
fn a_missing_or_unknown_status_fails_its_request() {
    returns_in_time(|| {
        for shape in ALL {
            for (fault, failure) in [
                (RingFault::NoStatus, Failure::NoStatus),
                (RingFault::Status(3), Failure::Status(3)),
                (RingFault::Status(254), Failure::Status(254)),
                (RingFault::Status(255), Failure::NoStatus),
                (RingFault::Status(1), Failure::Io),
                (RingFault::Status(2), Failure::Unsupported),
            ] {
                let (_backend, disk) = disk_with_fault(shape, fault);
                let error = disk.read_at(&mut [0; 4096], 0).unwrap_err();
                assert!(matches!(error, Error::Failed(named) if named == failure), "{error:?}");
                // Only this request fails. The next one has its own status.
                let mut read = [0; 4096];
                disk.read_at(&mut read, 0).unwrap();
                assert_eq!(read, [7; 4096]);
            }
        }
    });
}

#[test]
fn a_ring_error_is_reported() {
    returns_in_time(|| {
        let (_backend, disk) = disk_with_fault(SPLIT, RingFault::RingError);
        disk.read_at(&mut [0; 512], 0).unwrap_err();
        assert!(matches!(&*disk.failure().unwrap(), Error::RingError));
    });
}

#[test]
fn a_connection_closed_during_a_request_is_reported() {
    returns_in_time(|| {
        for shape in ALL {
            let (_backend, disk) = disk_with_fault(shape, RingFault::Closed);
            disk.read_at(&mut [0; 512], 0).unwrap_err();
            assert!(matches!(&*disk.failure().unwrap(), Error::Closed));
        }
        // With time to reconnect, the callers notice nothing.
        let backend =
            HostileBackend::start(Rules { ring: Some((1, RingFault::Closed)), ..Rules::default() }).unwrap();
        let disk = Disk::connect(Options { reconnect_limit: LIMIT, ..options(&backend, PACKED) }).unwrap();
        disk.write_at(&[7; 4096], 0).unwrap();
        let mut read = [0; 4096];
        disk.read_at(&mut read, 0).unwrap();
        assert_eq!((read, backend.connections()), ([7; 4096], 2));
    });
}

/// Each interface reports the fault to its caller once. The counters agree with the completions handed out.
#[test]
fn every_interface_reports_a_fault() {
    returns_in_time(|| {
        for shape in ALL {
            let (_backend, disk) = disk_with_fault(shape, RingFault::Twice);
            let queue = disk.queue(0);
            queue.submit(&mut reads(&disk, 4)).unwrap();
            let mut future = disk.start(Request::read(0, disk.buffer(512).unwrap()));
            assert!(Pin::new(&mut future).poll(&mut Context::from_waker(Waker::noop())).is_pending());
            let (mut counted, mut handed) = (0, Vec::new());
            let error = loop {
                match queue.wait(3, Some(LIMIT), |completion| handed.push(completion.token)) {
                    Ok(count) => counted += count,
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, Error::Dead(_)));
            handed.sort_unstable();
            assert_eq!((counted, handed), (4, vec![0, 1, 2, 3]), "{shape:?}");
            let finished = block_on(future);
            assert!(matches!(finished.result, Err(Error::Dead(_))), "{:?}", finished.result);
            assert_eq!(finished.data.len(), 512);
        }
    });
}

/// Returns the error of connecting to a back-end with these rules.
fn refusal(rules: Rules) -> Error {
    returns_in_time(move || {
        let backend = HostileBackend::start(rules).unwrap();
        let refused = Disk::connect(options(&backend, SPLIT)).map(drop).unwrap_err();
        assert_eq!(backend.faults(), [""; 0]);
        refused
    })
}

#[test]
fn missing_features_are_refused() {
    for (lacking, name) in [
        (Features::VERSION_1, "VIRTIO_F_VERSION_1"),
        (Features::PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES"),
    ] {
        let honest = Rules::default();
        let refused = refusal(Rules { features: honest.features - lacking, ..honest });
        assert!(matches!(refused, Error::NotOffered { what } if what == name), "{refused:?}");
    }
    let honest = Rules::default();
    let refused = refusal(Rules { protocol: honest.protocol - ProtocolFeatures::CONFIG, ..honest });
    assert!(matches!(refused, Error::NotOffered { what } if what.contains("configuration")), "{refused:?}");
}

/// The driver acknowledges only features that it knows and that the back-end offers; the back-end checks
/// the latter.
#[test]
fn the_driver_takes_only_offered_features() {
    returns_in_time(|| {
        // Bits 0 to 23 and from 50 on belong to the kind of device, and the driver refuses those of cards.
        let of_disks = Features::all().bits() & 0x3_ffff_ff00_0000 | BlkFeatures::all().bits();
        let features = Features::from_bits_retain(of_disks);
        let all = Rules { features, protocol: ProtocolFeatures::all(), ..Rules::default() };
        let needed = Rules {
            features: Features::VERSION_1 | Features::PROTOCOL_FEATURES,
            protocol: ProtocolFeatures::CONFIG,
            ..Rules::default()
        };
        for (rules, shape) in [(all.clone(), PACKED), (all, SPLIT), (needed, SPLIT)] {
            let offered = rules.features;
            let backend = HostileBackend::start(rules).unwrap();
            let disk = Disk::connect(options(&backend, shape)).unwrap();
            assert!(offered.contains(backend.acked()) && backend.acked() == disk.features());
            assert!(
                !backend.acked().contains(Features::ACCESS_PLATFORM)
                    && !backend.acked().contains(Features::LOG_ALL)
            );
            let mut read = [1; 512];
            disk.read_at(&mut read, 0).unwrap();
            assert_eq!(read, [0; 512]);
            drop(disk);
            assert_eq!(backend.faults(), [""; 0]);
        }
    });
}

#[test]
fn invalid_configurations_are_refused() {
    let wrong = |change: fn(&mut Config)| {
        let mut rules = Rules::default();
        change(&mut rules.config);
        match refusal(rules) {
            Error::ConfigField { field, value } => (field, value),
            other => panic!("{other:?}"),
        }
    };
    for size in [0, 3, 256, 513, 1 << 31] {
        let change: fn(&mut Config) = match size {
            0 => |config| config.blk_size = 0.into(),
            3 => |config| config.blk_size = 3.into(),
            256 => |config| config.blk_size = 256.into(),
            513 => |config| config.blk_size = 513.into(),
            _ => |config| config.blk_size = (1 << 31).into(),
        };
        assert_eq!(wrong(change), ("blk_size", size));
    }
    assert_eq!(wrong(|config| config.capacity = u64::MAX.into()), ("capacity", u64::MAX));
    assert_eq!(wrong(|config| config.size_max = 511.into()), ("size_max", 511));
}

/// These configurations are unusual but valid.
#[test]
fn unusual_configurations_work() {
    returns_in_time(|| {
        for change in [
            |config: &mut Config| config.seg_max = 0.into(),
            |config: &mut Config| config.num_queues = 0.into(),
            |config: &mut Config| config.num_queues = u16::MAX.into(),
            |config: &mut Config| config.size_max = 513.into(),
            |config: &mut Config| config.size_max = u32::MAX.into(),
        ] {
            let mut rules = Rules::default();
            change(&mut rules.config);
            let backend = HostileBackend::start(rules).unwrap();
            let disk = Disk::connect(options(&backend, SPLIT)).unwrap();
            disk.write_at(&[9; 8192], 512).unwrap();
            let mut read = [0; 8192];
            disk.read_at(&mut read, 512).unwrap();
            assert_eq!((disk.queues(), read), (1, [9; 8192]));
            assert_eq!(backend.faults(), [""; 0]);
        }
        // A disk of zero bytes has no byte to read.
        let mut rules = Rules::default();
        rules.config.capacity = 0.into();
        let backend = HostileBackend::start(rules).unwrap();
        let disk = Disk::connect(options(&backend, SPLIT)).unwrap();
        assert_eq!(disk.size().unwrap(), 0);
        assert!(matches!(disk.read_at(&mut [0; 512], 0), Err(Error::Invalid(_))));
        // A limit of no sectors in a discard means no limit, as for the length of a piece. Others are limits.
        for (max, limited) in [(0, false), (1, true)] {
            let mut rules = Rules::default();
            rules.features |= Features::from_bits_retain(BlkFeatures::DISCARD.bits());
            rules.config.max_discard_sectors = max.into();
            let backend = HostileBackend::start(rules).unwrap();
            let disk = Disk::connect(options(&backend, SPLIT)).unwrap();
            let refused = disk.run(Request::discard(0, 1024)).unwrap_err();
            let said = with_causes(&refused);
            assert_eq!(
                said.contains("the request has 1024 bytes, at most 512 are possible"),
                limited,
                "{said}"
            );
            assert_eq!(backend.requests(), u64::from(!limited));
        }
    });
}

#[test]
fn a_back_end_without_queues_is_refused() {
    let refused = refusal(Rules { queues: 0, ..Rules::default() });
    assert!(matches!(refused, Error::NotOffered { what: "a queue" }), "{refused:?}");
}
