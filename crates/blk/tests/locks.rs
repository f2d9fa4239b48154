//! Tests that the image of a device and its backing files are locked while a queue runs.
#![expect(clippy::unwrap_used, reason = "a test may")]

use kickless_blk::{Blk, Options};
use kickless_device::Device;
use kickless_disk::lock::{ImageLock, check};
use kickless_disk::{Disk, DiskSpec, Resized};
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use tempfile::{NamedTempFile, TempDir};

fn device(spec: &DiskSpec, read_only: bool, lock: bool) -> Blk {
    let disk = Disk::open(spec, &kickless_disk::Options { read_only, ..Default::default() }).unwrap();
    Blk::new(disk, Options { serial: String::new(), queues_max: 1, queue_size_max: 64, lock })
}

/// Returns whether another process could open the file for writing, and for reading.
fn open_to_others(file: &File) -> (bool, bool) {
    (check(file, false).is_ok(), check(file, true).is_ok())
}

#[test]
fn image_is_locked_while_open() {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let spec = DiskSpec::File(image.path().into());
    for (read_only, lock, expected) in [
        (false, true, (false, false)),
        (true, true, (false, true)),
        (false, false, (true, true)),
        (true, false, (true, true)),
    ] {
        let device = device(&spec, read_only, lock);
        for _ in 0..2 {
            assert_eq!(open_to_others(image.as_file()), (true, true));
            device.open().unwrap();
            assert_eq!(open_to_others(image.as_file()), expected, "{read_only} {lock}");
            device.close().unwrap();
        }
        assert_eq!(open_to_others(image.as_file()), (true, true));
    }
}

/// Makes a raw file, and an image over it.
fn overlay(dir: &TempDir) -> (File, PathBuf) {
    let [under, over] = ["under", "over"].map(|name| dir.path().join(name));
    let file = File::create_new(&under).unwrap();
    file.set_len(1 << 20).unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&under).arg(&over);
    assert!(create.status().unwrap().success());
    (file, over)
}

#[test]
fn backing_files_are_locked_for_reading() {
    let dir = TempDir::new().unwrap();
    let (file, over) = overlay(&dir);
    for lock in [true, false] {
        let device = device(&DiskSpec::Qcow2(over.clone()), false, lock);
        device.open().unwrap();
        assert_eq!(open_to_others(&file), (!lock, true));
        assert_eq!(open_to_others(&File::open(&over).unwrap()), (!lock, !lock));
        device.close().unwrap();
        assert_eq!(open_to_others(&file), (true, true));
    }
}

/// An image that stayed open without its lock could be written after another host has got it.
#[test]
fn an_image_is_closed_if_its_device_cannot_start() {
    let dir = TempDir::new().unwrap();
    let (under, over) = overlay(&dir);
    let writer = ImageLock::acquire(&under, false).unwrap();
    let device = device(&DiskSpec::Qcow2(over.clone()), false, true);
    device.open().unwrap_err();
    assert_eq!(open_to_others(&File::open(&over).unwrap()), (true, true));
    let before = std::fs::read(&over).unwrap();
    assert_eq!(device.disk().grow(2 << 20).unwrap(), Resized::Same);
    assert!(std::fs::read(&over).unwrap() == before, "the image was written");
    drop(writer);
    device.open().unwrap();
    assert_ne!(device.disk().grow(2 << 20).unwrap(), Resized::Same);
    device.close().unwrap();
}

#[test]
fn two_devices_of_one_process_cannot_share_an_image() {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let spec = DiskSpec::File(image.path().into());
    let (first, second) = (device(&spec, false, true), device(&spec, false, true));
    first.open().unwrap();
    let refused = second.open().unwrap_err().to_string();
    assert!(refused.contains("another device of this daemon"), "{refused}");
    first.close().unwrap();
    second.open().unwrap();
    second.close().unwrap();
}
