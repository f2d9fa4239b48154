//! Every request and every way to get one wrong, through a real ring: its status, what it does, and that it comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::{Device, Next};
use kickless_disk::{Disk, DiskSpec};
use kickless_io::{EngineKind, EngineOptions};
use kickless_spec::blk::{self, BlkFeatures, Config, S_IOERR, S_OK, S_UNSUPP, SEGMENT_UNMAP};
use rig::{Ask, Data, ENGINES, FORMATS, Rig, Status, UNANSWERED, faulty, is_called, open};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
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

/// On each engine and ring format, on a file and on a disk in memory.
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
            let wrote = rig.run(Ask { cut, ..Ask::write(10, &bytes) });
            assert_eq!((wrote.status, wrote.used), (S_OK, 1));
            let read = rig.run(Ask { cut, ..Ask::read(10, 8192) });
            assert_eq!((read.status, read.used), (S_OK, 8193));
            assert!(read.data == bytes);
            assert_eq!(rig.status(Ask { cut, ..Ask::flush() }), S_OK);
            let id = rig.run(Ask { cut, ..Ask::new(blk::T_GET_ID, 0, &[], 20) });
            assert_eq!((id.status, &id.data[..4]), (S_OK, &b"rig\0"[..]));
        }
        // Nothing to transfer is no error.
        assert_eq!(rig.status(Ask::read(SECTORS, 0)), S_OK);
        assert_eq!(rig.status(Ask::write(0, &[])), S_OK);
    });
}

#[test]
fn a_long_name_is_cut() {
    let options = Options {
        serial: "a serial number of thirty bytes".into(),
        queues_max: 1,
        queue_size_max: 256,
        lock: false,
    };
    let device = Arc::new(Blk::new(open(&DiskSpec::Memory(SECTORS * 512)), options));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    for (room, used) in [(19, 20), (20, 21), (21, 20)] {
        let id = rig.run(Ask::new(blk::T_GET_ID, 0, &[], room));
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
            let fill = Ask::write(0, &[9; 16384]);
            assert_eq!(rig.status(fill), S_OK);
            let ranges = [(1, 1, flags), (8, 0, 0), (4, 2, SEGMENT_UNMAP), (31, 1, 0)];
            let zeroed = rig.run(Ask { cut, ..Ask::on_ranges(blk::T_WRITE_ZEROES, &ranges) });
            assert_eq!((zeroed.status, zeroed.used), (S_OK, 1));
            let read = rig.contents(0..32);
            let zeroes: Vec<usize> = (0..32).filter(|i| read[i * 512..][..512] == [0; 512]).collect();
            assert_eq!(zeroes, [1, 4, 5, 31]);
        }
        assert_eq!(rig.status(Ask::on_ranges(blk::T_DISCARD, &[(64, 256, 0), (1024, 128, 0)])), S_OK);
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
        assert_eq!(rig.status(Ask::on_ranges(blk::T_DISCARD, &[(0, 512, 0), (1024, 512, 0)])), S_OK);
        let zeroed = Ask::on_ranges(blk::T_WRITE_ZEROES, &[(512, 256, SEGMENT_UNMAP), (768, 256, 0)]);
        assert_eq!(rig.status(zeroed), S_OK);
        let given_back = before - fs::metadata(image.path()).unwrap().blocks();
        assert!((1270..=1300).contains(&given_back), "{given_back} sectors");
    }
}

#[test]
fn erasure_where_there_is_one() {
    let mut memory = rig(open(&DiskSpec::Memory(SECTORS * 512)), EngineKind::Threads, false);
    assert_eq!(memory.status(Ask::write(0, &[7; 4096])), S_OK);
    assert_eq!(memory.status(Ask::on_ranges(blk::T_SECURE_ERASE, &[(2, 4, 0)])), S_OK);
    let read = memory.contents(0..8);
    assert!(read[..1024] == [7; 1024] && read[1024..3072] == [0; 2048] && read[3072..] == [7; 1024]);
    assert_eq!(memory.status(Ask::on_ranges(blk::T_SECURE_ERASE, &[(2, 4, SEGMENT_UNMAP)])), S_UNSUPP);
    let (_image, spec) = image();
    let mut file = rig(open(&spec), EngineKind::Threads, false);
    assert_eq!(file.status(Ask::on_ranges(blk::T_SECURE_ERASE, &[(0, 1, 0)])), S_UNSUPP);
    assert_eq!(file.status(Ask::new(blk::T_GET_LIFETIME, 0, &[], 6)), S_UNSUPP);
}

#[test]
fn the_lifetime_of_what_tells_it() {
    let worn = faulty("lifetime=2/3/11", DiskSpec::Memory(SECTORS * 512));
    let mut rig = rig(worn, EngineKind::Threads, true);
    for cut in [usize::MAX, 1] {
        let answer = rig.run(Ask { cut, ..Ask::new(blk::T_GET_LIFETIME, 0, &[], 6) });
        assert_eq!((answer.status, answer.used, &answer.data[..]), (S_OK, 7, &[2, 0, 3, 0, 11, 0][..]));
    }
    let outside = Ask { data: Data::Outside, ..Ask::new(blk::T_GET_LIFETIME, 0, &[], 6) };
    assert_eq!(rig.status(outside), S_IOERR);
}

const OVER: u64 = u64::MAX / 512;

/// Whatever is wrong, and the status that it gets.
fn malformed() -> Vec<(&'static str, Ask, u8)> {
    let with_status = |status| Ask { status, ..Ask::read(0, 512) };
    let with_header = |header: &[u8]| Ask { header: header.to_vec(), ..Ask::read(0, 512) };
    let data = |data, ask| Ask { data, ..ask };
    let (discard, zeroes) = (blk::T_DISCARD, blk::T_WRITE_ZEROES);
    let mut all = vec![
        ("no status", Ask { status: Status::Nowhere, ..Ask::write(0, &[1; 512]) }, UNANSWERED),
        ("no status and no data", Ask { status: Status::Nowhere, ..Ask::flush() }, UNANSWERED),
        (
            "status in the wrong direction",
            Ask { status: Status::Readable, ..Ask::write(0, &[1; 512]) },
            UNANSWERED,
        ),
        ("status outside of memory", with_status(Status::Outside), UNANSWERED),
        ("no header", with_header(&[]), S_IOERR),
        ("short header", with_header(&[0; 15]), S_IOERR),
        ("read of parts of sectors", Ask::read(0, 511), S_IOERR),
        ("write of parts of sectors", Ask::write(0, &[1; 513]), S_IOERR),
        ("read past the end", Ask::read(SECTORS, 512), S_IOERR),
        ("read across the end", Ask::read(SECTORS - 1, 1024), S_IOERR),
        ("write past the end", Ask::write(SECTORS, &[1; 512]), S_IOERR),
        ("write across the end", Ask::write(SECTORS - 1, &[1; 1024]), S_IOERR),
        ("data outside of memory", data(Data::Outside, Ask::read(0, 512)), S_IOERR),
        ("data that leaves memory", data(Data::Straddles, Ask::read(0, 1024)), S_IOERR),
        ("written data outside of memory", data(Data::Outside, Ask::write(0, &[1; 512])), S_IOERR),
        ("written data that leaves memory", data(Data::Straddles, Ask::write(0, &[1; 1024])), S_IOERR),
        ("name outside of memory", data(Data::Outside, Ask::new(blk::T_GET_ID, 0, &[], 20)), S_IOERR),
        ("unknown type", Ask::new(99, 0, &[], 512), S_UNSUPP),
        ("legacy type", Ask::new(2, 0, &[1; 512], 0), S_UNSUPP),
        ("lifetime of what has none", Ask::new(blk::T_GET_LIFETIME, 0, &[], 6), S_UNSUPP),
        ("erasure of what has none", Ask::on_ranges(blk::T_SECURE_ERASE, &[(0, 1, 0)]), S_UNSUPP),
        ("discard with unmap", Ask::on_ranges(discard, &[(0, 1, SEGMENT_UNMAP)]), S_UNSUPP),
    ];
    for sector in [OVER, OVER + 1, u64::MAX, 1 << 55, (1 << 55) - 1] {
        all.push(("overflow", Ask::read(sector, 512), S_IOERR));
        all.push(("overflow", Ask::write(sector, &[1; 512]), S_IOERR));
        all.push(("overflow", Ask::on_ranges(discard, &[(sector, 1, 0)]), S_IOERR));
        all.push(("overflow", Ask::on_ranges(zeroes, &[(0, 1, 0), (sector, 8, 0)]), S_IOERR));
    }
    for kind in [discard, zeroes] {
        all.extend([
            ("no segment", Ask::new(kind, 0, &[], 0), S_IOERR),
            ("part of a segment", Ask::new(kind, 0, &[0; 24], 0), S_IOERR),
            ("too many segments", Ask::on_ranges(kind, &[(0, 1, 0); 65]), S_IOERR),
            ("too long a segment", Ask::on_ranges(kind, &[(0, (1 << 21) + 1, 0)]), S_IOERR),
            ("segment past the end", Ask::on_ranges(kind, &[(SECTORS, 1, 0)]), S_IOERR),
            ("segment across the end", Ask::on_ranges(kind, &[(0, 1, 0), (SECTORS - 1, 2, 0)]), S_IOERR),
            ("unknown flag", Ask::on_ranges(kind, &[(0, 1, 2)]), S_UNSUPP),
            ("unknown flags", Ask::on_ranges(kind, &[(0, 1, 0), (0, 1, 0x8000_0000)]), S_UNSUPP),
            ("segments outside of memory", data(Data::Outside, Ask::on_ranges(kind, &[(0, 1, 0)])), S_IOERR),
            (
                "segments that leave memory",
                data(Data::Straddles, Ask::on_ranges(kind, &[(0, 1, 0); 4])),
                S_IOERR,
            ),
        ]);
    }
    all
}

#[test]
fn what_is_malformed_has_its_status_and_does_nothing() {
    for packed in FORMATS {
        for kind in ENGINES {
            let (image, spec) = image();
            let before = fs::read(image.path()).unwrap();
            let mut rig = rig(open(&spec), kind, packed);
            for (what, ask, status) in malformed() {
                for cut in [usize::MAX, 64] {
                    let answer = rig.run(Ask { cut, ..ask.clone() });
                    assert_eq!(answer.status, status, "{what}");
                    assert!(
                        answer.data.iter().all(|&b| b == 0xee || ask.data != Data::There),
                        "{what}: data"
                    );
                    let prefix = ask.len_in == 0 && status != UNANSWERED;
                    assert_eq!(answer.used, u32::from(prefix), "{what}");
                }
                assert_eq!(rig.status(Ask::read(0, 512)), S_OK, "after {what}");
            }
            assert!(fs::read(image.path()).unwrap() == before, "something was written");
        }
    }
}

/// What has been read of a request before it was refused is not in the one after it.
#[test]
fn what_was_refused_is_not_done_later() {
    let mut rig = rig(open(&DiskSpec::Memory(SECTORS * 512)), EngineKind::Threads, false);
    assert_eq!(rig.status(Ask::write(0, &[7; 8192])), S_OK);
    for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES, blk::T_SECURE_ERASE] {
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(0, 1, 0), (SECTORS, 1, 0)])), S_IOERR);
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(15, 1, 0)])), S_OK);
    }
    let part = Ask { data: Data::Straddles, cut: 512, ..Ask::read(0, 4096) };
    assert_eq!(rig.status(part), S_IOERR);
    assert_eq!(rig.errors(), 4);
    let read = rig.run(Ask::read(0, 8192));
    assert_eq!((read.status, read.used), (S_OK, 8193));
    assert!(read.data[..7680] == [7; 7680] && read.data[7680..] == [0; 512]);
}

/// It has a slot, and what comes after it has others.
#[test]
fn one_that_waits_holds_up_no_other() {
    let device = rig::blk(faulty("delay=20ms@nth=1", DiskSpec::Memory(SECTORS * 512)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    (0..3).for_each(|nth| _ = rig.ask(Ask::read(nth, 512)));
    assert_eq!((rig.poll(), rig.last), (3, Next::Waiting));
    assert_eq!((rig.finish().len(), rig.last), (3, Next::Idle));
}

/// Of a ring with room for one request, which is prepared before it is done.
#[test]
fn a_ring_of_one() {
    let device = rig::blk(open(&DiskSpec::Memory(SECTORS * 512)));
    let options = EngineOptions::new(EngineKind::Threads, 4);
    for packed in FORMATS {
        let mut rig = Rig::start_sized(&device, options, packed, ALL, 1);
        for nth in 0..3 {
            rig.ask(Ask::read(nth, 512));
            assert_eq!((rig.poll(), rig.last), (1, Next::Idle));
            assert_eq!(rig.finish().len(), 1);
        }
    }
}

/// A worker goes on with its engine when a queue leaves it: neither the image nor the guest's memory is kept by that.
#[test]
fn nothing_is_left_in_the_engine() {
    let mut views = Vec::new();
    for way in rig::ways(8) {
        let (image, spec) = image();
        let device = rig::blk(open(&spec));
        let mut rig = Rig::start_with(&device, way, false, ALL);
        assert_eq!(rig.status(Ask::read(0, 512)), S_OK);
        let opened = || {
            let all = fs::read_dir("/proc/self/fd")
                .unwrap()
                .filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
            all.filter(|path| path == image.path()).count()
        };
        // A file that goes through the host's cache, as on tmpfs, has a second description of the disk's.
        assert!(opened() >= 2);
        let held = Arc::strong_count(&rig.view);
        views.push((held, way.fixed_buffers));
        let (engine, view) = rig.detach();
        let released = view.map().slots()[0].mapping().released();
        drop((view, device));
        assert_eq!(opened(), 1, "{way:?}");
        assert!(released.wait(Duration::ZERO), "{way:?}");
        drop(engine);
    }
    // Where memory is registered, the engine holds it meanwhile.
    let most = views.iter().map(|(held, _)| *held).max();
    assert!(views.iter().all(|(held, fixed)| (Some(*held) == most) == *fixed), "{views:?}");
}

/// Once nobody uses it any more, nothing of a view that was replaced is kept.
#[test]
fn memory_that_was_replaced_is_let_go() {
    for way in rig::ways(8) {
        let (_image, spec) = image();
        let mut rig = Rig::start_with(&rig::blk(open(&spec)), way, false, ALL);
        for nth in 0..4 {
            rig.ask(Ask::read(nth, 512));
        }
        rig.finish();
        let before = Arc::downgrade(&rig.view);
        rig.change_memory();
        assert!(before.upgrade().is_none(), "{way:?}");
        // The same in the middle of requests.
        for nth in 0..4 {
            rig.ask(Ask::read(nth, 512));
        }
        rig.poll();
        let before = Arc::downgrade(&rig.view);
        rig.change_memory();
        assert!(rig.finish().values().all(|answer| answer.status == S_OK));
        assert!(before.upgrade().is_none(), "{way:?}");
    }
}

/// What is done is shown when it is, and the driver called, not with the next look; and what had no room for it is told of.
#[test]
fn completions_are_answers() {
    for kind in ENGINES {
        let (_image, spec) = image();
        let mut rig = Rig::start(&rig::blk(open(&spec)), kind, 2, false, ALL);
        let calls = rig.calls();
        rig.ask(Ask::read(0, 512));
        rig.poll();
        assert!(!is_called(&calls));
        assert_eq!(rig.complete(), (1, false), "{kind}");
        assert!(is_called(&calls), "{kind}");
        (0..3).for_each(|nth| _ = rig.ask(Ask::read(nth, 512)));
        rig.poll();
        let (answers, waits) = rig.complete();
        assert!(answers > 0 && waits, "{kind}");
        assert_eq!(rig.finish().len(), 4);
    }
}

/// A look takes what its budget is for: a request costs one, and one for each 4096 bytes.
#[test]
fn large_requests_cost_more() {
    let (_image, spec) = image();
    for (len, served) in [(512, 8), (4096, 4), (16384, 2), (32768, 1)] {
        let mut rig = rig(open(&spec), EngineKind::Threads, false);
        (0..10).for_each(|nth| _ = rig.ask(Ask::read(nth * 64, len)));
        assert_eq!((rig.poll_with(8), rig.last), (served, Next::More), "{len}");
        // Nothing new where there is none.
        assert_eq!((rig.poll_with(0), rig.last), (0, Next::Idle));
        assert_eq!(rig.finish().len(), 10);
    }
}

/// Reading a long chain is work, also where it makes no request.
#[test]
fn refused_chains_cost_their_descriptors() {
    for (descriptors, served) in [(10, 8), (62, 4), (126, 3)] {
        let mut rig = rig(open(&DiskSpec::Memory(1 << 20)), EngineKind::Threads, false);
        for _ in 0..8 {
            let mut ask = Ask::new(99, 0, &[], descriptors);
            ask.cut = 1;
            // One buffer, and not sixteen.
            ask.header = ask.header[..1].to_vec();
            rig.ask(ask);
        }
        assert_eq!((rig.poll_with(8), rig.last), (served, Next::More), "{descriptors}");
    }
}

/// On the disk, and longer or more than the configuration space allows.
#[test]
fn segments_have_a_greatest_length_and_number() {
    let device = rig::blk(open(&DiskSpec::Memory(1 << 30)));
    let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
    let mut space = Config::default();
    device.read_config(0, space.as_mut_bytes());
    for (kind, most, segments) in [
        (blk::T_DISCARD, space.max_discard_sectors.get(), space.max_discard_seg.get()),
        (blk::T_WRITE_ZEROES, space.max_write_zeroes_sectors.get(), space.max_write_zeroes_seg.get()),
        (blk::T_SECURE_ERASE, space.max_secure_erase_sectors.get(), space.max_secure_erase_seg.get()),
    ] {
        let all = vec![(0, 1, 0); segments as usize + 1];
        assert_eq!(rig.status(Ask::on_ranges(kind, &all[1..])), S_OK, "{kind}");
        assert_eq!(rig.status(Ask::on_ranges(kind, &all)), S_IOERR, "{kind}");
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(0, most, 0)])), S_OK, "{kind}");
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(0, 8, 0), (0, most + 1, 0)])), S_IOERR, "{kind}");
    }
}

/// Where there is no buffer for the status, it is the last byte that the device may write.
#[test]
fn a_read_without_a_status_buffer_lacks_a_byte_of_data() {
    let (_image, spec) = image();
    let mut rig = rig(open(&spec), EngineKind::Threads, false);
    let answer = rig.run(Ask { status: Status::Nowhere, ..Ask::read(0, 512) });
    assert_eq!((answer.status, answer.used), (UNANSWERED, 0));
    assert!(answer.data[..511] == [0xee; 511] && answer.data[511] == S_IOERR);
}

#[test]
fn read_only_disks_are_not_written() {
    let (image, spec) = image();
    let before = fs::read(image.path()).unwrap();
    let disk = Disk::open(&spec, &kickless_disk::Options { read_only: true, ..Default::default() }).unwrap();
    let mut rig = rig(disk, EngineKind::Threads, false);
    for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES, blk::T_SECURE_ERASE] {
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(0, 1, 0)])), S_IOERR, "{kind}");
    }
    assert_eq!(rig.status(Ask::write(0, &[9; 512])), S_IOERR);
    assert_eq!(rig.status(Ask::flush()), S_OK);
    assert_eq!(rig.status(Ask::read(0, 512)), S_OK);
    assert!(fs::read(image.path()).unwrap() == before);
}

#[test]
fn what_was_not_negotiated_is_not_there() {
    for (kind, feature) in [
        (blk::T_DISCARD, BlkFeatures::DISCARD),
        (blk::T_WRITE_ZEROES, BlkFeatures::WRITE_ZEROES),
        (blk::T_SECURE_ERASE, BlkFeatures::SECURE_ERASE),
    ] {
        let device = rig::blk(open(&DiskSpec::Memory(SECTORS * 512)));
        let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, feature);
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(0, 1, 0)])), S_UNSUPP);
        let mut rig = Rig::start(&device, EngineKind::Threads, 4, false, ALL);
        assert_eq!(rig.status(Ask::on_ranges(kind, &[(0, 1, 0)])), S_OK);
    }
}

/// A disk whose flushes fail tells which requests flush.
#[test]
fn without_a_write_cache_what_is_done_is_durable() {
    let requests = [
        Ask::on_ranges(blk::T_DISCARD, &[(0, 8, 0)]),
        Ask::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8, 0)]),
        Ask::on_ranges(blk::T_WRITE_ZEROES, &[(0, 8, SEGMENT_UNMAP)]),
    ];
    for kind in ENGINES {
        let (_image, spec) = image();
        let device = rig::blk(faulty("eio@flush", spec));
        let mut rig = Rig::start(&device, kind, 8, false, ALL);
        assert_eq!(rig.status(Ask::flush()), S_IOERR);
        for ask in &requests {
            // Switched under a running queue.
            for (writeback, status) in [(true, S_OK), (false, S_IOERR), (true, S_OK)] {
                rig.set_writeback(writeback);
                assert_eq!(rig.status(ask.clone()), status, "{writeback}");
            }
        }
        let mut rig = Rig::start(&device, kind, 8, false, BlkFeatures::FLUSH);
        for ask in &requests {
            assert_eq!(rig.status(ask.clone()), S_IOERR);
        }
    }
}

/// An engine that is smaller than the ring: the device leaves in the ring what has no room.
#[test]
fn a_full_engine_stops_the_queue_and_nothing_is_lost() {
    for packed in FORMATS {
        for kind in ENGINES {
            let (_image, spec) = image();
            let mut rig = Rig::start(&rig::blk(open(&spec)), kind, 2, packed, ALL);
            for sector in 0..80 {
                rig.ask(Ask::read(sector, 512));
            }
            // One waits for room; nothing else is taken.
            assert_eq!((rig.poll(), rig.last), (3, Next::Blocked));
            assert_eq!((rig.poll(), rig.last), (0, Next::Blocked));
            let answers = rig.finish();
            assert_eq!(answers.len(), 80);
            assert!(answers.values().all(|answer| answer.status == S_OK));
        }
    }
}

/// A kernel that says "again": the same.
#[test]
fn a_refusal_stops_the_queue_until_something_completes() {
    for kind in ENGINES {
        let (_image, spec) = image();
        let device = rig::blk(faulty("eagain@nth=1,eagain@30%", spec));
        let mut rig = Rig::start(&device, kind, 64, false, ALL);
        let first = rig.ask(Ask::read(0, 512));
        // Until it has been refused.
        while !rig.engine.needs_turn() {
            rig.turn();
        }
        for sector in 1..80 {
            rig.ask(Ask::read(sector, 512));
        }
        assert_eq!((rig.poll(), rig.last), (0, Next::Blocked));
        let answers = rig.finish();
        assert_eq!((answers.len(), answers[&first].status), (80, S_OK));
        assert!(answers.values().all(|answer| answer.status == S_OK));
    }
}

/// Somebody cuts the image off under load and removes it: errors, and the device goes on.
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

/// The same to the file behind a block device.
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
            // Gone with the last who has it open.
            assert!(losetup(&["--detach", device]).unwrap().status.success());
        });
    }
}

fn disappears(rig: &mut Rig, disappear: impl FnOnce()) {
    let ask = |rig: &mut Rig, count: u64| {
        let asked = (0..count).map(|i| rig.ask(Ask::read(i * 51 % SECTORS, 512)));
        asked.collect::<Vec<_>>().len()
    };
    ask(rig, 40);
    assert!(rig.finish().values().all(|answer| answer.status == S_OK));
    let asked = ask(rig, 100);
    rig.turn();
    disappear();
    assert_eq!(rig.finish().len(), asked);
    ask(rig, 40);
    for answer in rig.finish().values() {
        assert_eq!(answer.status, S_IOERR);
    }
    for kind in [blk::T_DISCARD, blk::T_WRITE_ZEROES] {
        let status = rig.status(Ask::on_ranges(kind, &[(0, 8, 0)]));
        assert!([S_OK, S_IOERR].contains(&status), "{kind}: {status}");
    }
}

/// The image grows under a running queue.
#[test]
fn a_disk_grows_and_never_shrinks() {
    for kind in ENGINES {
        let (image, spec) = image();
        let device = rig::blk(open(&spec));
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
        assert_eq!((rig.status(Ask::read(SECTORS, 512)), capacity()), (S_IOERR, SECTORS));
        resize(2 * SECTORS);
        assert!(device.config_changes().unwrap().clear(), "nobody is told");
        assert_eq!(capacity(), 2 * SECTORS);
        assert_eq!(rig.status(Ask::write(2 * SECTORS - 1, &[3; 512])), S_OK);
        assert_eq!(rig.contents(2 * SECTORS - 1..2 * SECTORS), [3; 512]);
        assert_eq!(rig.status(Ask::on_ranges(blk::T_DISCARD, &[(SECTORS, SECTORS as u32, 0)])), S_OK);
        assert_eq!(rig.status(Ask::read(2 * SECTORS, 512)), S_IOERR);
        resize(2 * SECTORS);
        resize(SECTORS / 2);
        assert!(!device.config_changes().unwrap().clear());
        assert_eq!((capacity(), rig.status(Ask::read(SECTORS, 512))), (2 * SECTORS, S_IOERR));
        assert_eq!(rig.status(Ask::read(0, 512)), S_OK);
    }
}

/// Another process has had the image while no queue ran, and has made it larger.
#[test]
fn who_opens_the_image_looks_at_its_size() {
    let (image, spec) = image();
    let device = rig::blk(open(&spec));
    device.open().unwrap();
    device.close();
    image.as_file().set_len(2 * SECTORS * 512).unwrap();
    device.open().unwrap();
    let mut sectors = [0; 8];
    device.read_config(0, &mut sectors);
    assert_eq!(u64::from_le_bytes(sectors), 2 * SECTORS);
    assert!(device.config_changes().unwrap().clear());
}
