//! Tests a disk whose write-back fails, and does not fail later.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_blk::{Blk, Options};
use kickless_device::{Device, Driver};
use kickless_disk::DiskSpec;
use kickless_disk::lock::check;
use kickless_io::EngineKind;
use kickless_spec::blk::{S_IOERR, S_OK};
use rig::{Rig, TestRequest, open};
use std::fs::File;
use std::process::Command;
use std::sync::Arc;

/// The kernel reports an error once, so a later write-back succeeds although writes are lost. The disk is
/// kept until a flush has said so. Here the image is too short at the first attempt.
#[test]
fn a_disk_is_kept_until_a_flush_has_failed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("1M");
    assert!(create.status().unwrap().success());
    let options = Options { serial: String::new(), queues_max: 1, queue_size_max: 64, lock: true };
    let device = Arc::new(Blk::new(open(&DiskSpec::Qcow2(path.clone())), options));
    device.reset(Driver::Fresh);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let run = |request| Rig::start_queue(&device, 0, EngineKind::Threads).status(request);
    device.open().unwrap();
    assert_eq!([run(TestRequest::write(0, &[7; 4096])), run(TestRequest::flush())], [S_OK; 2]);
    let whole = file.metadata().unwrap().len();
    file.set_len(whole / 2).unwrap();
    device.close().unwrap_err();
    file.set_len(whole).unwrap();
    // The same guest comes back, and sends no flush.
    for _ in 0..2 {
        device.open().unwrap();
        assert!(check(&file, true).is_err(), "the disk is free");
        let refused = device.close().unwrap_err().to_string();
        assert!(refused.contains("a flush of the guest has to say so"), "{refused}");
    }
    device.open().unwrap();
    assert_eq!([run(TestRequest::flush()), run(TestRequest::flush())], [S_IOERR, S_OK]);
    device.close().unwrap();
    assert!(check(&file, false).is_ok());
}
