//! Tests a qcow2 image on a block device that is too small, and grows.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::qcow2::{check, qemu_img};
use common::{image, options, worker};
use kickless_disk::{Cache, Disk, DiskSpec, IoError};
use kickless_io::Errno;
use kickless_testing::LoopDevice;

const CHUNK: u64 = 64 << 10;

#[test]
fn requests_find_room_after_the_device_has_grown() {
    for cache in [Cache::None, Cache::Writeback] {
        let device = match LoopDevice::new(image(&[0; 1 << 20]), &[]) {
            Ok(device) => device,
            Err(why) => return println!("SKIPPED: no loop device: {why}"),
        };
        let path = device.path().to_str().unwrap();
        qemu_img("/".as_ref(), &["create", "-q", "-f", "qcow2", path, "8M"]);
        let disk = Disk::open(&DiskSpec::Qcow2(path.into()), &options(cache, false)).unwrap();
        let mut worker = worker(&disk);
        let mut write = |chunk: u64| worker.write(chunk * CHUNK, &[chunk as u8 + 1; CHUNK as usize], 0);
        let full = (0..128).find(|chunk| write(*chunk).is_err()).unwrap();
        for _ in 0..2 {
            assert_eq!(write(full), Err(IoError::Os(Errno::NOSPC)), "{cache}");
        }
        device.resize(12 << 20);
        disk.refresh_size().unwrap();
        for chunk in full..128 {
            assert_eq!(write(chunk), Ok(()), "{cache}: chunk {chunk} of the larger device");
        }
        for chunk in 0..128 {
            let expected = vec![chunk as u8 + 1; CHUNK as usize];
            assert_eq!(worker.read(chunk * CHUNK, CHUNK as usize), (Ok(()), expected), "{cache}");
        }
        drop(worker);
        disk.write_back().unwrap();
        check(device.path());
    }
}
