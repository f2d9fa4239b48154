//! Tests qcow2 images whose file another program makes shorter.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::qcow2::Image;
use common::{options, worker};
use kickless_disk::{Cache, Disk, IoError};
use kickless_io::Errno;
use kickless_testing::Random;
use std::fs::{self, File};

const LEN: u64 = 1 << 20;

fn open(image: &Image, cache: Cache) -> Disk {
    Disk::open(&image.spec(), &options(cache, false)).unwrap()
}

/// Another program makes the file of an image, or of a backing image, shorter. Requests for the lost part
/// fail, and the file does not grow again.
#[test]
fn requests_to_a_truncated_image_fail() {
    let contents = Random(1).bytes(LEN);
    for cache in [Cache::None, Cache::Writeback] {
        for cut in ["disk.qcow2", "raw"] {
            let is_backing = cut == "raw";
            let image = Image::of(&contents, &[]);
            if is_backing {
                image.img(&["create", "-q", "-f", "qcow2", "-b", "raw", "-F", "raw", "disk.qcow2"]);
            }
            image.img(&["resize", "-q", "disk.qcow2", "2M"]);
            let disk = open(&image, cache);
            let mut worker = worker(&disk);
            assert_eq!(worker.read(0, 512).0, Ok(()));
            let file = File::options().write(true).open(image.dir.path().join(cut)).unwrap();
            let (whole, short) = (file.metadata().unwrap().len(), 512 * 1024);
            file.set_len(short).unwrap();
            for misaligned in [0, 512, 1] {
                let mut lost = 0;
                for offset in (0..LEN).step_by(32 << 10) {
                    let (result, bytes) = worker.read_into(offset, 32 << 10, misaligned);
                    match result {
                        Ok(()) => assert!(
                            bytes == contents[offset as usize..][..32 << 10],
                            "{cut}, {cache}: {offset}"
                        ),
                        Err(error) => assert_eq!(error, IoError::Shrunk),
                    }
                    lost += u64::from(result.is_err());
                }
                assert!((16..27).contains(&lost), "{cut}, {cache}: {lost}");
            }
            if !is_backing {
                // An old cluster, and a new one.
                assert_eq!(worker.write(LEN - 4096, &[6; 4096], 0), Err(IoError::Shrunk));
                assert_eq!(worker.write(LEN, &[6; 4096], 0), Err(IoError::Os(Errno::IO)));
                assert_eq!(file.metadata().unwrap().len(), short);
            }
            file.set_len(whole).unwrap();
            assert_eq!(worker.read(LEN - 4096, 4096), (Ok(()), vec![0; 4096]), "{cut}");
        }
    }
}

/// The file grows with the image, and can lose the new part as well.
#[test]
fn requests_to_a_truncated_new_part_fail() {
    let image = Image::of(&[0; LEN as usize], &[]);
    let before = fs::metadata(image.path()).unwrap().len();
    let disk = open(&image, Cache::None);
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[6; 4096], 0), Ok(()));
    File::options().write(true).open(image.path()).unwrap().set_len(before).unwrap();
    assert_eq!(worker.read(0, 4096).0, Err(IoError::Shrunk));
}

/// A guest that ends writes the tables. No such write makes a truncated file longer.
#[test]
fn a_truncated_image_stays_short_when_it_is_closed() {
    let image = Image::of(&[0; LEN as usize], &[]);
    let disk = open(&image, Cache::None);
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[6; 4096], 0), Ok(()));
    let file = File::options().write(true).open(image.path()).unwrap();
    file.set_len(64 << 10).unwrap();
    drop(worker);
    disk.write_back().unwrap_err();
    drop(disk);
    assert_eq!(file.metadata().unwrap().len(), 64 << 10);
}
