//! Tests merged requests through a real ring: neighbouring requests share an operation of the kernel, but
//! each has its own status and data.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod rig;

use kickless_disk::{Disk, DiskSpec, Options};
use kickless_io::EngineKind;
use kickless_spec::blk::{BlkFeatures, S_IOERR, S_OK};
use rig::{Data, ENGINES, FORMATS, Rig, TestRequest, blk};
use std::fs::File;
use tempfile::NamedTempFile;

const PAGE: usize = 4096;
const PAGES: u64 = 64;

/// Starts a queue on a file. All bytes of a page have the number of the page.
fn start(kind: EngineKind, packed: bool) -> (NamedTempFile, Rig) {
    let image = NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..PAGES as usize * PAGE).map(|at| (at / PAGE) as u8).collect();
    std::fs::write(image.path(), bytes).unwrap();
    let disk = Disk::open(&DiskSpec::File(image.path().into()), &Options::default()).unwrap();
    (image, Rig::start(&blk(disk), kind, 128, packed, BlkFeatures::empty()))
}

fn with_each_engine(test: impl Fn(&File, Rig)) {
    for kind in ENGINES {
        for packed in FORMATS {
            let (image, rig) = start(kind, packed);
            test(image.as_file(), rig);
        }
    }
}

fn read(page: u64) -> TestRequest {
    TestRequest::read(page * PAGE as u64 / 512, PAGE)
}

fn write(page: u64, byte: u8) -> TestRequest {
    TestRequest::write(page * PAGE as u64 / 512, &[byte; PAGE])
}

#[test]
fn each_request_gets_its_own_data() {
    with_each_engine(|_, mut rig| {
        let asked: Vec<_> = (0..PAGES).map(|page| (page, rig.send(read(page)))).collect();
        let answers = rig.finish();
        for (page, id) in asked {
            let answer = &answers[&id];
            assert_eq!((answer.status, answer.used), (S_OK, PAGE as u32 + 1));
            assert!(answer.data.iter().all(|byte| u64::from(*byte) == page), "page {page}");
        }
        let asked: Vec<_> = (0..PAGES).map(|page| rig.send(write(page, 0x80 | page as u8))).collect();
        let answers = rig.finish();
        assert!(asked.iter().all(|id| answers[id].status == S_OK && answers[id].used == 1));
        let contents = rig.contents(0..PAGES * 8);
        assert!(
            contents
                .chunks(PAGE)
                .enumerate()
                .all(|(page, bytes)| { bytes.iter().all(|byte| *byte == 0x80 | page as u8) })
        );
    });
}

/// Some of the neighbours are malformed and must not run.
#[test]
fn refused_requests_do_not_affect_neighbours() {
    with_each_engine(|_, mut rig| {
        let bad = |page| page % 5 == 3;
        let asked: Vec<_> = (0..PAGES)
            .map(|page| {
                let data = if bad(page) { Data::Outside } else { Data::There };
                (page, rig.send(TestRequest { data, ..read(page) }))
            })
            .collect();
        let answers = rig.finish();
        for (page, id) in asked {
            let answer = &answers[&id];
            assert_eq!(answer.status, if bad(page) { S_IOERR } else { S_OK });
            assert!(bad(page) || answer.data.iter().all(|byte| u64::from(*byte) == page));
        }
    });
}

/// The file has become shorter. The kernel does a part of the merged operation, and each request beyond the
/// end fails by itself.
#[test]
fn only_requests_beyond_the_end_fail() {
    with_each_engine(|image, mut rig| {
        let end = 41;
        image.set_len(end * PAGE as u64).unwrap();
        let asked: Vec<_> = (0..PAGES).map(|page| (page, rig.send(read(page)))).collect();
        let answers = rig.finish();
        for (page, id) in asked {
            let answer = &answers[&id];
            assert_eq!(answer.status, if page < end { S_OK } else { S_IOERR }, "page {page}");
            assert!(page >= end || answer.data.iter().all(|byte| u64::from(*byte) == page));
        }
    });
}
