//! Images in QEMU's format: their tables, and the images under them.

use crate::common::{FILE_OPTIONS, OPTIONS, Pair};
use crate::pass_under_requests;
use crate::rig::{Rig, TestRequest};
use kickless_device::{Device, HandOver, Operate};
use kickless_disk::{Cache, Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_spec::blk::{BlkFeatures, S_IOERR, S_OK};
use kickless_testing::LosingDevice;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn qemu_img(words: &[&str], path: &Path) {
    let output = Command::new("qemu-img").args(words).arg(path).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Checks an image, which has leaks at most.
fn check(path: &Path) {
    let status = Command::new("qemu-img").args(["check", "-U", "-q"]).arg(path).status().unwrap();
    assert!(matches!(status.code(), Some(0 | 3)), "{status}");
}

/// An image over a raw one, which has the byte 9 in its second half.
pub(crate) struct Images {
    _dir: TempDir,
    pub(crate) over: PathBuf,
    under: PathBuf,
}

pub(crate) fn images() -> Images {
    let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [over, under] = ["over", "under"].map(|name| dir.path().join(name));
    let raw = File::create_new(&under).unwrap();
    raw.set_len(1 << 20).unwrap();
    raw.write_all_at(&[9; 1 << 19], 1 << 19).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", under.to_str().unwrap()], &over);
    Images { _dir: dir, over, under }
}

#[test]
fn images_pass_under_requests() {
    for options in FILE_OPTIONS {
        let images = images();
        pass_under_requests(&DiskSpec::Qcow2(images.over.clone()), &options, true);
        check(&images.over);
        let faulty = format!("fault:short@20%+write:qcow2:{}", images.over.display());
        pass_under_requests(&faulty.parse().unwrap(), &options, true);
        check(&images.over);
    }
}

/// The new process reads the images under the first one, and holds their locks, whatever has their names now.
#[test]
fn the_images_under_an_image_pass() {
    let images = images();
    let spec = DiskSpec::Qcow2(images.over.clone());
    let mut pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
    let (open, moved) = (File::open(&images.under).unwrap(), images.under.with_extension("moved"));
    std::fs::rename(&images.under, &moved).unwrap();
    let new = pair.pass();
    let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.contents(1024..1032), [9; 4096]);
    let new = pair.end_old();
    assert!(kickless_disk::lock::check(&open, false).is_err());
    drop(rig);
    new.close().unwrap();
    assert!(kickless_disk::lock::check(&open, false).is_ok(), "the image under it stays locked");
}

/// The old process opens its tables again.
#[test]
fn the_old_process_goes_on_after_each_step() {
    for options in FILE_OPTIONS {
        for step in 0..5 {
            let images = images();
            let spec = DiskSpec::Qcow2(images.over.clone());
            let mut pair = Pair::new(Disk::open(&spec, &options).unwrap(), &spec, &options);
            let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
            assert_eq!(rig.status(TestRequest::write(0, &[1; 4096])), S_OK);
            let handed = pair.give();
            let new = (step > 0).then(|| pair.make(handed).unwrap());
            assert_eq!(rig.status(TestRequest::write(1024, &[2; 4096])), S_OK);
            // Other clusters than those that the tables know.
            assert_eq!(rig.status(TestRequest::write(512, &[3; 4096])), S_OK);
            rig.park();
            if step > 1 {
                let last = pair.give_final().unwrap();
                if step > 2 {
                    pair.receive(new.as_ref().unwrap(), last).unwrap();
                }
            }
            if step > 3 {
                let before = std::fs::read(&images.over).unwrap();
                drop(new);
                assert!(std::fs::read(&images.over).unwrap() == before, "the new process has written");
            }
            pair.assert_locked();
            pair.old.take_back().unwrap();
            pair.assert_locked();
            rig.unpark();
            assert_eq!(rig.status(TestRequest::write(16, &[4; 4096])), S_OK);
            assert_eq!(rig.contents(0..8), [1; 4096]);
            assert_eq!(rig.contents(1024..1040), [[2; 4096], [9; 4096]].concat());
            assert_eq!([rig.contents(512..520), rig.contents(16..24)], [[3; 4096], [4; 4096]], "{step}");
            drop(rig);
            pair.pass();
            pair.end_old().close().unwrap();
            check(&images.over);
        }
    }
}

/// The old process keeps its images if their writes cannot reach the medium, and goes on with them.
#[test]
fn an_image_without_room_is_not_given() {
    let losing = match LosingDevice::new() {
        Ok(losing) => losing,
        Err(why) => return println!("SKIPPED: no device that loses writes: {why}"),
    };
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata,size=6M"], losing.path());
    let spec = DiskSpec::Qcow2(losing.path().into());
    let cached = kickless_disk::Options { cache: Cache::Writeback, ..OPTIONS };
    let pair = Pair::new(Disk::open(&spec, &cached).unwrap(), &spec, &cached);
    let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
    for at in 0..80 {
        assert_eq!(rig.status(TestRequest::write(at * 100, &[7; 51200])), S_OK);
    }
    let handed = pair.give();
    let new = pair.make(handed).unwrap();
    rig.park();
    pair.give_final_unsettled().err().unwrap();
    drop(new);
    pair.old.take_back().unwrap();
    rig.unpark();
    losing.grow_file_system();
    assert_eq!(rig.status(TestRequest::write(0, &[8; 4096])), S_OK);
    assert_eq!(rig.contents(0..8), [8; 4096]);
    assert_eq!(rig.status(TestRequest::flush()), S_IOERR);
}

/// The new process writes nothing, so it cannot repair an image. It refuses images that do not fit together.
#[test]
fn images_that_were_not_closed_are_refused() {
    // Version 3: dirty is the first incompatible feature, and bitmaps are the first that clears itself.
    for (at, sentence) in [(79, "was not closed"), (95, "was not closed")] {
        let images = images();
        let spec = DiskSpec::Qcow2(images.over.clone());
        let pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
        let new = pair.make(pair.give()).unwrap();
        let last = pair.give_final().unwrap();
        File::options().write(true).open(&images.over).unwrap().write_all_at(&[1], at).unwrap();
        let refused = pair.receive(&new, last).unwrap_err();
        assert!(refused.contains(sentence), "{refused}");
        drop(new);
        pair.assert_locked();
    }
}

/// Another program may make a free image longer. The device finds that when it looks, in either process.
#[test]
fn a_free_image_passes_as_it_was_known() {
    let images = images();
    let spec = DiskSpec::Qcow2(images.over.clone());
    let mut pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
    pair.old.close().unwrap();
    pair.expects_lock = false;
    let output = Command::new("qemu-img").arg("resize").arg(&images.over).arg("3M").output().unwrap();
    assert!(output.status.success());
    let new = pair.pass();
    pair.end_old();
    assert_eq!(new.disk().size(), 1 << 20);
    new.connected();
    assert_eq!(new.disk().size(), 3 << 20);
    new.open().unwrap();
    let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.status(TestRequest::write(5000, &[1; 4096])), S_OK);
    drop(rig);
    new.close().unwrap();
    check(&images.over);
}

/// An image that grows is another one for its guest, until it is given again.
#[test]
fn a_growth_is_noticed() {
    let images = images();
    let spec = DiskSpec::Qcow2(images.over.clone());
    let mut pair = Pair::new(Disk::open(&spec, &OPTIONS).unwrap(), &spec, &OPTIONS);
    let (before, handed) = (pair.old.changes(), pair.give());
    pair.old.set_size_min(4 << 20);
    pair.old.refresh();
    assert_ne!(pair.old.changes(), before);
    assert!(pair.give_final().is_err());
    pair.old.take_back().unwrap();
    drop(handed);
    assert_eq!(pair.pass().disk().size(), 4 << 20);
    pair.end_old().close().unwrap();
    check(&images.over);
}
