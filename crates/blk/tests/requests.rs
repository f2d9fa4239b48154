//! Tests every request, well-formed and malformed, through a real ring: its status, its effect, and that it
//! comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::{Device, Next, Operate};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_spec::blk::{self, BlkFeatures, Config, S_IOERR, S_OK, S_UNSUPP, SEGMENT_UNMAP};
use rig::{Data, ENGINES, FORMATS, Rig, Status, TestRequest, UNANSWERED, faulty, is_called, open};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::Arc;
use tempfile::NamedTempFile;
use zerocopy::IntoBytes;

const SECTORS: u64 = 2048;
const ALL: BlkFeatures = BlkFeatures::empty();

fn image() -> (NamedTempFile, DiskSpec) {
    let mut image = NamedTempFile::new().unwrap();
    let contents: Vec<u8> = (0..SECTORS * 512).map(|i| (i / 512 + i / 131_072 + 1) as u8).collect();
    image.write_all(&contents).unwrap();
    let spec = DiskSpec::File(image.path().into());
    (image, spec)
}

fn rig(disk: Disk, kind: EngineKind, packed: bool) -> Rig {
    Rig::start(&rig::blk(disk), kind, 64, packed, ALL)
}

/// Runs a test on each engine and ring format, on a file and on a disk in memory.
fn on_each(each: impl Fn(&mut Rig)) {
    for packed in FORMATS {
        for kind in ENGINES {
            let (_image, spec) = image();
            each(&mut rig(open(&spec), kind, packed));
        }
        each(&mut rig(open(&DiskSpec::Memory(SECTORS * 512)), EngineKind::Threads, packed));
    }
}

#[test]
fn reads_writes_flushes_and_names() {
    on_each(|rig| {
        let bytes: Vec<u8> = (0..8192).map(|i| (i / 7) as u8).collect();
        for cut in [usize::MAX, 512, 100] {
            let wrote = rig.run(TestRequest { cut, ..TestRequest::write(10, &bytes) });
            assert_eq!((wrote.status, wrote.used), (S_OK, 1));
            let read = rig.run(TestRequest { cut, ..TestRequest::read(10, 8192) });
            assert_eq!((read.status, read.used), (S_OK, 8193));
            assert!(read.data == bytes);
            assert_eq!(rig.status(TestRequest { cut, ..TestRequest::flush() }), S_OK);
            let id = rig.run(TestRequest { cut, ..TestRequest::new(blk::T_GET_ID, 0, &[], 20) });
            assert_eq!((id.status, &id.data[..4]), (S_OK, &b"rig\0"[..]));
        }
        // A request without data succeeds.
        assert_eq!(rig.status(TestRequest::read(SECTORS, 0)), S_OK);
        assert_eq!(rig.status(TestRequest::write(0, &[])), S_OK);
    });
}

#[test]
fn a_long_serial_is_cut() {
    let options = Options {
        serial: "a serial number of thirty bytes".into(),
        queues_max: 1,
        queue_size_max: 256,
        lock: false,
    };
    let device = Arc::new(Blk::new(open(&DiskSpec::Memory(SECTORS * 512)), options));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    for (room, used) in [(19, 20), (20, 21), (21, 20)] {
        let id = rig.run(TestRequest::new(blk::T_GET_ID, 0, &[], room));
        let len = room.min(20);
        assert_eq!((id.status, id.used), (S_OK, used), "{room}");
        assert_eq!(id.data[..len], b"a serial number of t"[..len]);
        assert!(id.data[len..].iter().all(|byte| *byte == 0xee));
    }
}

#[test]
fn zeroes_and_discards() {
    on_each(|rig| {
        let full = rig.contents(0..SECTORS);
        for (cut, flags) in [(usize::MAX, 0), (7, SEGMENT_UNMAP)] {
            let fill = TestRequest::write(0, &[9; 16384]);
            assert_eq!(rig.status(fill), S_OK);
            let ranges = [(1, 1, flags), (8, 0, 0), (4, 2, SEGMENT_UNMAP), (31, 1, 0)];
            let zeroed = rig.run(TestRequest { cut, ..TestRequest::on_ranges(blk::T_WRITE_ZEROES, &ranges) });
            assert_eq!((zeroed.status, zeroed.used), (S_OK, 1));
            let read = rig.contents(0..32);
            let zeroes: Vec<usize> = (0..32).filter(|i| read[i * 512..][..512] == [0; 512]).collect();
            assert_eq!(zeroes, [1, 4, 5, 31]);
        }
        assert_eq!(rig.status(TestRequest::on_ranges(blk::T_DISCARD, &[(64, 256, 0), (1024, 128, 0)])), S_OK);
        let read = rig.contents(0..SECTORS);
        for kept in [32..64, 320..1024, 1152..SECTORS as usize] {
            assert!(
                read[kept.start * 512..kept.end * 512] == full[kept.start * 512..kept.end * 512],
                "{kept:?}"
            );
        }
    });
}

#[test]
fn discards_give_space_back() {
    for kind in ENGINES {
        let (image, spec) = image();
        let mut rig = rig(open(&spec), kind, false);
        let before = fs::metadata(image.path()).unwrap().blocks();
        assert_eq!(rig.status(TestRequest::on_ranges(blk::T_DISCARD, &[(0, 512, 0), (1024, 512, 0)])), S_OK);
        let zeroed = TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(512, 256, SEGMENT_UNMAP), (768, 256, 0)]);
        assert_eq!(rig.status(zeroed), S_OK);
        let given_back = before - fs::metadata(image.path()).unwrap().blocks();
        assert!((1270..=1300).contains(&given_back), "{given_back} sectors");
    }
}

/// The operator changes the choice while the queue runs. The negotiated features stay as they are.
#[test]
fn without_discards_space_and_data_are_kept() {
    for kind in ENGINES {
        let (image, spec) = image();
        let device = rig::blk(open(&spec));
        let features = device.features();
        let may_unmap = || {
            let mut config = Config::default();
            device.read_config(0, config.as_mut_bytes());
            config.write_zeroes_may_unmap
        };
        let mut rig = Rig::start(&device, kind, 64, false, ALL);
        let blocks = || fs::metadata(image.path()).unwrap().blocks();
        let (before, full) = (blocks(), rig.contents(0..SECTORS));
        assert_eq!(may_unmap(), 1);
        device.set_discard(false);
        assert!(device.config_changes().unwrap().clear(), "the driver is not notified");
        device.set_discard(false);
        assert!(!device.config_changes().unwrap().clear());
        assert_eq!((may_unmap(), device.features()), (0, features));
        let discard = TestRequest::on_ranges(blk::T_DISCARD, &[(0, 512, 0), (1024, 512, 0)]);
        assert_eq!(rig.run(discard.clone()), rig::Answer { status: S_OK, data: Vec::new(), used: 1 });
        assert!(rig.contents(0..SECTORS) == full, "a discard changed the data");
        let zeroes = TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(512, 256, SEGMENT_UNMAP), (769, 255, 0)]);
        assert_eq!(rig.status(zeroes), S_OK);
        assert!(rig.contents(512..768) == [0; 256 * 512]);
        assert!(blocks() >= before, "{before} became {}", blocks());
        // A wrong request is refused as ever.
        let beyond = TestRequest::on_ranges(blk::T_DISCARD, &[(SECTORS, 1, 0)]);
        assert_eq!(rig.status(beyond), S_IOERR);
        device.set_discard(true);
        assert!(device.config_changes().unwrap().clear());
        assert_eq!((may_unmap(), rig.status(discard)), (1, S_OK));
        assert!(blocks() + 1000 < before, "{before} became {}", blocks());
    }
}

const OVER: u64 = u64::MAX / 512;

/// Returns malformed requests, each with its status.
fn malformed() -> Vec<(&'static str, TestRequest, u8)> {
    let with_status = |status| TestRequest { status, ..TestRequest::read(0, 512) };
    let with_header = |header: &[u8]| TestRequest { header: header.to_vec(), ..TestRequest::read(0, 512) };
    let data = |data, request| TestRequest { data, ..request };
    let (discard, zeroes) = (blk::T_DISCARD, blk::T_WRITE_ZEROES);
    let mut all = vec![
        (
            "no status",
            TestRequest { status: Status::Missing, ..TestRequest::write(0, &[1; 512]) },
            UNANSWERED,
        ),
        (
            "no status and no data",
            TestRequest { status: Status::Missing, ..TestRequest::flush() },
            UNANSWERED,
        ),
        (
            "status in the wrong direction",
            TestRequest { status: Status::Readable, ..TestRequest::write(0, &[1; 512]) },
            UNANSWERED,
        ),
        ("status outside of memory", with_status(Status::Outside), UNANSWERED),
        ("no header", with_header(&[]), S_IOERR),
        ("short header", with_header(&[0; 15]), S_IOERR),
        ("read of parts of sectors", TestRequest::read(0, 511), S_IOERR),
        ("write of parts of sectors", TestRequest::write(0, &[1; 513]), S_IOERR),
        ("read past the end", TestRequest::read(SECTORS, 512), S_IOERR),
        ("read across the end", TestRequest::read(SECTORS - 1, 1024), S_IOERR),
        ("write past the end", TestRequest::write(SECTORS, &[1; 512]), S_IOERR),
        ("write across the end", TestRequest::write(SECTORS - 1, &[1; 1024]), S_IOERR),
        ("data outside of memory", data(Data::Outside, TestRequest::read(0, 512)), S_IOERR),
        ("data that leaves memory", data(Data::Straddles, TestRequest::read(0, 1024)), S_IOERR),
        ("written data outside of memory", data(Data::Outside, TestRequest::write(0, &[1; 512])), S_IOERR),
        (
            "written data that leaves memory",
            data(Data::Straddles, TestRequest::write(0, &[1; 1024])),
            S_IOERR,
        ),
        ("name outside of memory", data(Data::Outside, TestRequest::new(blk::T_GET_ID, 0, &[], 20)), S_IOERR),
        ("unknown type", TestRequest::new(99, 0, &[], 512), S_UNSUPP),
        ("legacy type", TestRequest::new(2, 0, &[1; 512], 0), S_UNSUPP),
        ("lifetime", TestRequest::new(blk::T_GET_LIFETIME, 0, &[], 6), S_UNSUPP),
        ("erasure", TestRequest::on_ranges(blk::T_SECURE_ERASE, &[(0, 1, 0)]), S_UNSUPP),
        ("discard with unmap", TestRequest::on_ranges(discard, &[(0, 1, SEGMENT_UNMAP)]), S_UNSUPP),
    ];
    for sector in [OVER, OVER + 1, u64::MAX, 1 << 55, (1 << 55) - 1] {
        all.push(("overflow", TestRequest::read(sector, 512), S_IOERR));
        all.push(("overflow", TestRequest::write(sector, &[1; 512]), S_IOERR));
        all.push(("overflow", TestRequest::on_ranges(discard, &[(sector, 1, 0)]), S_IOERR));
        all.push(("overflow", TestRequest::on_ranges(zeroes, &[(0, 1, 0), (sector, 8, 0)]), S_IOERR));
    }
    for kind in [discard, zeroes] {
        all.extend([
            ("no segment", TestRequest::new(kind, 0, &[], 0), S_IOERR),
            ("part of a segment", TestRequest::new(kind, 0, &[0; 24], 0), S_IOERR),
            ("too many segments", TestRequest::on_ranges(kind, &[(0, 1, 0); 65]), S_IOERR),
            ("too long a segment", TestRequest::on_ranges(kind, &[(0, (1 << 21) + 1, 0)]), S_IOERR),
            ("segment past the end", TestRequest::on_ranges(kind, &[(SECTORS, 1, 0)]), S_IOERR),
            (
                "segment across the end",
                TestRequest::on_ranges(kind, &[(0, 1, 0), (SECTORS - 1, 2, 0)]),
                S_IOERR,
            ),
            ("unknown flag", TestRequest::on_ranges(kind, &[(0, 1, 2)]), S_UNSUPP),
            ("unknown flags", TestRequest::on_ranges(kind, &[(0, 1, 0), (0, 1, 0x8000_0000)]), S_UNSUPP),
            (
                "segments outside of memory",
                data(Data::Outside, TestRequest::on_ranges(kind, &[(0, 1, 0)])),
                S_IOERR,
            ),
            (
                "segments that leave memory",
                data(Data::Straddles, TestRequest::on_ranges(kind, &[(0, 1, 0); 4])),
                S_IOERR,
            ),
        ]);
    }
    all
}

#[test]
fn malformed_requests_get_their_status_and_have_no_effect() {
    for packed in FORMATS {
        for kind in ENGINES {
            let (image, spec) = image();
            let before = fs::read(image.path()).unwrap();
            let mut rig = rig(open(&spec), kind, packed);
            for (what, request, status) in malformed() {
                for cut in [usize::MAX, 64] {
                    let answer = rig.run(TestRequest { cut, ..request.clone() });
                    assert_eq!(answer.status, status, "{what}");
                    assert!(
                        answer.data.iter().all(|&b| b == 0xee || request.data != Data::There),
                        "{what}: data"
                    );
                    let prefix = request.len_in == 0 && status != UNANSWERED;
                    assert_eq!(answer.used, u32::from(prefix), "{what}");
                }
                assert_eq!(rig.status(TestRequest::read(0, 512)), S_OK, "after {what}");
            }
            assert!(fs::read(image.path()).unwrap() == before, "something was written");
        }
    }
}

/// The segments of a refused request must not become part of the next one.
#[test]
fn a_refused_request_has_no_later_effect() {
    let mut rig = rig(open(&DiskSpec::Memory(SECTORS * 512)), EngineKind::Threads, false);
    assert_eq!(rig.status(TestRequest::write(0, &[7; 8192])), S_OK);
    for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &[(0, 1, 0), (SECTORS, 1, 0)])), S_IOERR);
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &[(15, 1, 0)])), S_OK);
    }
    let part = TestRequest { data: Data::Straddles, cut: 512, ..TestRequest::read(0, 4096) };
    assert_eq!(rig.status(part), S_IOERR);
    assert_eq!(rig.errors(), 3);
    let read = rig.run(TestRequest::read(0, 8192));
    assert_eq!((read.status, read.used), (S_OK, 8193));
    assert!(read.data[..7680] == [7; 7680] && read.data[7680..] == [0; 512]);
}

/// A delayed request keeps its slot; later requests use others.
#[test]
fn a_delayed_request_delays_no_other() {
    let device = rig::blk(faulty("delay=20ms@nth=1", DiskSpec::Memory(SECTORS * 512)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    (0..3).for_each(|nth| _ = rig.send(TestRequest::read(nth, 512)));
    assert_eq!((rig.poll(), rig.last), (3, Next::Waiting));
    assert_eq!((rig.finish().len(), rig.last), (3, Next::Idle));
}

/// A queue that spins tries its waiting requests after a wake, and not in each poll.
#[test]
fn a_request_that_waits_is_tried_after_an_event() {
    let device = rig::blk(faulty("delay=1ms", DiskSpec::Memory(SECTORS * 512)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    for (answered, is_taken) in [(1, false), (2, true)] {
        rig.send(TestRequest::read(0, 512));
        assert_eq!((rig.poll(), rig.last), (1, Next::Waiting));
        rig.wait_woken();
        if is_taken {
            rig.take_wakes();
            rig.poll_spinning();
            assert_eq!((rig.answered(), rig.last), (answered - 1, Next::Waiting), "no event has come since");
            rig.poll();
        } else {
            rig.poll_spinning();
            rig.take_wakes();
        }
        assert_eq!((rig.answered(), rig.last), (answered, Next::Idle));
    }
}

/// The ring has room for one request, so a prepared request must start before the next one is popped.
#[test]
fn a_ring_of_one() {
    let device = rig::blk(open(&DiskSpec::Memory(SECTORS * 512)));
    for packed in FORMATS {
        let mut rig = Rig::start_as(&device, 0, (EngineKind::Threads, 4), packed, ALL, 1);
        for nth in 0..3 {
            rig.send(TestRequest::read(nth, 512));
            assert_eq!((rig.poll(), rig.last), (1, Next::Idle));
            assert_eq!(rig.finish().len(), 1);
        }
    }
}

/// A queue that leaves a worker's engine must leave neither the image nor the guest's memory in it.
#[test]
fn nothing_is_left_in_the_engine() {
    for kind in rig::ENGINES {
        let (image, spec) = image();
        let device = rig::blk(open(&spec));
        let mut rig = Rig::start(&device, kind, 8, false, ALL);
        assert_eq!(rig.status(TestRequest::read(0, 512)), S_OK);
        let opened = || {
            let all = fs::read_dir("/proc/self/fd")
                .unwrap()
                .filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
            all.filter(|path| path == image.path()).count()
        };
        // A file with buffered I/O, as on tmpfs, has a second description of the disk.
        assert!(opened() >= 2);
        let (engine, view) = rig.detach();
        let released = view.map().slots()[0].mapping().released();
        drop((view, device));
        assert_eq!(opened(), 1, "{kind}");
        assert!(released.is_unused(), "{kind}");
        drop(engine);
    }
}

/// A replaced view is dropped as soon as no request uses it.
#[test]
fn replaced_memory_is_released() {
    for kind in rig::ENGINES {
        let (_image, spec) = image();
        let mut rig = Rig::start(&rig::blk(open(&spec)), kind, 8, false, ALL);
        for nth in 0..4 {
            rig.send(TestRequest::read(nth, 512));
        }
        rig.finish();
        let before = Arc::downgrade(&rig.view);
        rig.change_memory();
        assert!(before.upgrade().is_none(), "{kind}");
        // The memory is replaced while requests are in flight.
        for nth in 0..4 {
            rig.send(TestRequest::read(nth, 512));
        }
        rig.poll();
        let before = Arc::downgrade(&rig.view);
        rig.change_memory();
        assert!(rig.finish().values().all(|answer| answer.status == S_OK));
        assert!(before.upgrade().is_none(), "{kind}");
    }
}

/// A completion is shown and the driver called at once, not at the next poll. The queue also says that a
/// request waits for room.
#[test]
fn completions_are_shown_at_once() {
    for kind in ENGINES {
        let (_image, spec) = image();
        let mut rig = Rig::start(&rig::blk(open(&spec)), kind, 2, false, ALL);
        let calls = rig.calls();
        rig.send(TestRequest::read(0, 512));
        rig.poll();
        assert!(!is_called(&calls));
        assert_eq!(rig.complete(), (1, false), "{kind}");
        assert!(is_called(&calls), "{kind}");
        (0..3).for_each(|nth| _ = rig.send(TestRequest::read(nth, 512)));
        rig.poll();
        let (answers, waits) = rig.complete();
        assert!(answers > 0 && waits, "{kind}");
        assert_eq!(rig.finish().len(), 4);
    }
}

/// A request costs one, and one more for each 4096 bytes. A poll ends when its budget is used.
#[test]
fn large_requests_cost_more() {
    let (_image, spec) = image();
    for (len, served) in [(512, 8), (4096, 4), (16384, 2), (32768, 1)] {
        let mut rig = rig(open(&spec), EngineKind::Threads, false);
        (0..10).for_each(|nth| _ = rig.send(TestRequest::read(nth * 64, len)));
        assert_eq!((rig.poll_with(8), rig.last), (served, Next::More), "{len}");
        // A budget of 0 takes no new requests.
        assert_eq!((rig.poll_with(0), rig.last), (0, Next::Idle));
        assert_eq!(rig.finish().len(), 10);
    }
}

/// A long chain costs time even if it is malformed.
#[test]
fn refused_chains_cost_their_descriptors() {
    for (descriptors, served) in [(10, 8), (62, 4), (126, 3)] {
        let mut rig = rig(open(&DiskSpec::Memory(1 << 20)), EngineKind::Threads, false);
        for _ in 0..8 {
            let mut request = TestRequest::new(99, 0, &[], descriptors);
            request.cut = 1;
            // The header has one descriptor instead of sixteen.
            request.header = request.header[..1].to_vec();
            rig.send(request);
        }
        assert_eq!((rig.poll_with(8), rig.last), (served, Next::More), "{descriptors}");
    }
}

/// Segments within the disk may still be longer or more than the configuration space allows.
#[test]
fn segments_have_a_greatest_length_and_number() {
    let device = rig::blk(open(&DiskSpec::Memory(1 << 30)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    let mut space = Config::default();
    device.read_config(0, space.as_mut_bytes());
    for (kind, most, segments) in [
        (blk::T_DISCARD, space.max_discard_sectors.get(), space.max_discard_seg.get()),
        (blk::T_WRITE_ZEROES, space.max_write_zeroes_sectors.get(), space.max_write_zeroes_seg.get()),
    ] {
        let all = vec![(0, 1, 0); segments as usize + 1];
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &all[1..])), S_OK, "{kind}");
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &all)), S_IOERR, "{kind}");
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &[(0, most, 0)])), S_OK, "{kind}");
        assert_eq!(
            rig.status(TestRequest::on_ranges(kind, &[(0, 8, 0), (0, most + 1, 0)])),
            S_IOERR,
            "{kind}"
        );
    }
}

/// Without a status buffer, the status is the last byte that the device may write.
#[test]
fn a_read_without_a_status_buffer_lacks_a_byte_of_data() {
    let (_image, spec) = image();
    let mut rig = rig(open(&spec), EngineKind::Threads, false);
    let answer = rig.run(TestRequest { status: Status::Missing, ..TestRequest::read(0, 512) });
    assert_eq!((answer.status, answer.used), (UNANSWERED, 0));
    assert!(answer.data[..511] == [0xee; 511] && answer.data[511] == S_IOERR);
}

#[test]
fn read_only_disks_are_not_written() {
    let (image, spec) = image();
    let before = fs::read(image.path()).unwrap();
    let disk = Disk::open(&spec, &kickless_disk::Options { read_only: true, ..Default::default() }).unwrap();
    let mut rig = rig(disk, EngineKind::Threads, false);
    for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &[(0, 1, 0)])), S_IOERR, "{kind}");
    }
    assert_eq!(rig.status(TestRequest::write(0, &[9; 512])), S_IOERR);
    assert_eq!(rig.status(TestRequest::flush()), S_OK);
    assert_eq!(rig.status(TestRequest::read(0, 512)), S_OK);
    assert!(fs::read(image.path()).unwrap() == before);
}

#[test]
fn types_that_were_not_negotiated_are_refused() {
    for (kind, feature) in
        [(blk::T_DISCARD, BlkFeatures::DISCARD), (blk::T_WRITE_ZEROES, BlkFeatures::WRITE_ZEROES)]
    {
        let device = rig::blk(open(&DiskSpec::Memory(SECTORS * 512)));
        let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, feature);
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &[(0, 1, 0)])), S_UNSUPP);
        let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
        assert_eq!(rig.status(TestRequest::on_ranges(kind, &[(0, 1, 0)])), S_OK);
    }
}

/// The flushes of this disk fail, which shows the requests that flush.
#[test]
fn without_a_write_cache_all_writes_are_durable() {
    let requests = [
        TestRequest::on_ranges(blk::T_DISCARD, &[(0, 8, 0)]),
        TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8, 0)]),
        TestRequest::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8, SEGMENT_UNMAP)]),
    ];
    for kind in ENGINES {
        let (_image, spec) = image();
        let device = rig::blk(faulty("eio@flush", spec));
        let mut rig = Rig::start(&device, kind, 8, false, ALL);
        assert_eq!(rig.status(TestRequest::flush()), S_IOERR);
        for request in &requests {
            // The cache mode changes while the queue runs.
            for (writeback, status) in [(true, S_OK), (false, S_IOERR), (true, S_OK)] {
                rig.set_writeback(writeback);
                assert_eq!(rig.status(request.clone()), status, "{writeback}");
            }
        }
        let mut rig = Rig::start(&device, kind, 8, false, BlkFeatures::FLUSH);
        for request in &requests {
            assert_eq!(rig.status(request.clone()), S_IOERR);
        }
    }
}

/// The engine is smaller than the ring, so the device leaves requests in the ring.
#[test]
fn a_full_engine_stops_the_queue_and_nothing_is_lost() {
    for packed in FORMATS {
        for kind in ENGINES {
            let (_image, spec) = image();
            let mut rig = Rig::start(&rig::blk(open(&spec)), kind, 2, packed, ALL);
            for sector in 0..80 {
                rig.send(TestRequest::read(sector, 512));
            }
            // One request waits for room, and nothing else is popped.
            assert_eq!((rig.poll(), rig.last), (3, Next::Blocked));
            assert_eq!((rig.poll(), rig.last), (0, Next::Blocked));
            let answers = rig.finish();
            assert_eq!(answers.len(), 80);
            assert!(answers.values().all(|answer| answer.status == S_OK));
        }
    }
}

/// The kernel refuses with EAGAIN: the queue behaves as with a full engine.
#[test]
fn a_refusal_stops_the_queue_until_something_completes() {
    for kind in ENGINES {
        let (_image, spec) = image();
        let device = rig::blk(faulty("eagain@nth=1,eagain@30%", spec));
        let mut rig = Rig::start(&device, kind, 64, false, ALL);
        let first = rig.send(TestRequest::read(0, 512));
        // Runs until the kernel has refused the request.
        while !rig.engine.needs_turn() {
            rig.run_once();
        }
        for sector in 1..80 {
            rig.send(TestRequest::read(sector, 512));
        }
        assert_eq!((rig.poll(), rig.last), (0, Next::Blocked));
        let answers = rig.finish();
        assert_eq!((answers.len(), answers[&first].status), (80, S_OK));
        assert!(answers.values().all(|answer| answer.status == S_OK));
    }
}

/// The image is truncated and removed under load: requests fail, and the device goes on.
#[test]
fn a_file_that_disappears_under_load() {
    for kind in ENGINES {
        let (image, spec) = image();
        disappears(&mut rig(open(&spec), kind, false), || {
            image.as_file().set_len(0).unwrap();
            fs::remove_file(image.path()).unwrap();
        });
    }
}

/// The file behind a block device is truncated under load.
#[test]
fn a_device_that_disappears_under_load() {
    for kind in ENGINES {
        let (image, _) = image();
        let losetup = |arguments: &[&str]| Command::new("losetup").args(arguments).output();
        let device = match losetup(&["--find", "--show", image.path().to_str().unwrap()]) {
            Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap(),
            other => return println!("SKIPPED: no loop device: {other:?}"),
        };
        let device = device.trim();
        let disk = open(&DiskSpec::File(device.into()));
        disappears(&mut rig(disk, kind, false), || {
            image.as_file().set_len(0).unwrap();
            assert!(losetup(&["--set-capacity", device]).unwrap().status.success());
            // The device is removed when its last user closes it.
            assert!(losetup(&["--detach", device]).unwrap().status.success());
        });
    }
}

fn disappears(rig: &mut Rig, disappear: impl FnOnce()) {
    let send = |rig: &mut Rig, count: u64| {
        let asked = (0..count).map(|i| rig.send(TestRequest::read(i * 51 % SECTORS, 512)));
        asked.collect::<Vec<_>>().len()
    };
    send(rig, 40);
    assert!(rig.finish().values().all(|answer| answer.status == S_OK));
    let asked = send(rig, 100);
    rig.run_once();
    disappear();
    assert_eq!(rig.finish().len(), asked);
    send(rig, 40);
    for answer in rig.finish().values() {
        assert_eq!(answer.status, S_IOERR);
    }
    for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
        let status = rig.status(TestRequest::on_ranges(kind, &[(0, 8, 0)]));
        assert!([S_OK, S_IOERR].contains(&status), "{kind}: {status}");
    }
}

/// The image grows while a queue runs.
#[test]
fn a_disk_grows_and_never_shrinks() {
    for kind in ENGINES {
        let (image, spec) = image();
        let device = rig::blk(open(&spec));
        device.open().unwrap();
        let mut rig = Rig::start(&device, kind, 8, false, ALL);
        let capacity = || {
            let mut sectors = [0; 8];
            device.read_config(0, &mut sectors);
            u64::from_le_bytes(sectors)
        };
        let resize = |sectors: u64| {
            image.as_file().set_len(sectors * 512).unwrap();
            device.refresh();
        };
        assert_eq!((rig.status(TestRequest::read(SECTORS, 512)), capacity()), (S_IOERR, SECTORS));
        resize(2 * SECTORS);
        assert!(device.config_changes().unwrap().clear(), "the driver is not notified");
        assert_eq!(capacity(), 2 * SECTORS);
        assert_eq!(rig.status(TestRequest::write(2 * SECTORS - 1, &[3; 512])), S_OK);
        assert_eq!(rig.contents(2 * SECTORS - 1..2 * SECTORS), [3; 512]);
        assert_eq!(rig.status(TestRequest::on_ranges(blk::T_DISCARD, &[(SECTORS, SECTORS as u32, 0)])), S_OK);
        assert_eq!(rig.status(TestRequest::read(2 * SECTORS, 512)), S_IOERR);
        resize(2 * SECTORS);
        resize(SECTORS / 2);
        assert!(!device.config_changes().unwrap().clear());
        assert_eq!((capacity(), rig.status(TestRequest::read(SECTORS, 512))), (2 * SECTORS, S_IOERR));
        assert_eq!(rig.status(TestRequest::read(0, 512)), S_OK);
    }
}

/// While no queue runs, another process makes the image larger.
#[test]
fn opening_the_image_reads_its_size() {
    let (image, spec) = image();
    let device = rig::blk(open(&spec));
    device.open().unwrap();
    device.close().unwrap();
    image.as_file().set_len(2 * SECTORS * 512).unwrap();
    device.open().unwrap();
    let mut sectors = [0; 8];
    device.read_config(0, &mut sectors);
    assert_eq!(u64::from_le_bytes(sectors), 2 * SECTORS);
    assert!(device.config_changes().unwrap().clear());
}
