//! Tests which writes are durable when they complete (virtio 1.3, section 5.2.6.2).
//!
//! The tests go through a real ring. They count the flushes of a loop device in the kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may")]

mod rig;

use kickless_disk::DiskSpec;
use kickless_io::EngineKind;
use kickless_spec::blk::{BlkFeatures, S_OK};
use kickless_testing::LoopDevice;
use rig::{ENGINES, Rig, TestRequest, blk, open};
use tempfile::NamedTempFile;

/// Runs a write, which must succeed. Returns whether the kernel flushed the device.
fn is_durable(device: &LoopDevice, rig: &mut Rig) -> bool {
    let before = device.flushes();
    assert_eq!(rig.status(TestRequest::write(8, &[7; 4096])), S_OK);
    device.flushes() > before
}

#[test]
fn without_a_write_cache_writes_are_durable() {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let device = match LoopDevice::new(image, &[]) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device: {why}"),
    };
    let start = |kind: EngineKind, without| {
        let disk = open(&DiskSpec::File(device.path().into()));
        Rig::start(&blk(disk), kind, 8, false, without)
    };
    for kind in ENGINES {
        let mut rig = start(kind, BlkFeatures::empty());
        // The cache mode changes while the queue runs.
        for writeback in [true, false, true] {
            rig.set_writeback(writeback);
            assert_eq!(is_durable(&device, &mut rig), !writeback, "{kind}");
        }
        let before = device.flushes();
        assert_eq!(rig.status(TestRequest::flush()), S_OK);
        assert!(device.flushes() > before, "{kind}");
        // A driver without CONFIG_WCE cannot have changed the cache mode.
        let mut rig = start(kind, BlkFeatures::CONFIG_WCE);
        rig.set_writeback(false);
        assert!(!is_durable(&device, &mut rig), "{kind}");
        // For a driver without FLUSH, every write must be durable.
        for without in [BlkFeatures::FLUSH, BlkFeatures::FLUSH | BlkFeatures::CONFIG_WCE] {
            let mut rig = start(kind, without);
            rig.set_writeback(true);
            assert!(is_durable(&device, &mut rig), "{kind} without {without:?}");
        }
    }
}
