//! Files: their locks, what the host has lost of them, and the way back.

use crate::common::{FILE_OPTIONS, OPTIONS, Pair, device_options, image, of_file};
use crate::pass_under_requests;
use crate::rig::{Rig, TestRequest};
use kickless_blk::Blk;
use kickless_device::{Device, HandOver, Operate};
use kickless_disk::lock::check;
use kickless_disk::{Cache, Disk, DiskSpec};
use kickless_io::EngineKind;
use kickless_opener::Descriptors;
use kickless_spec::blk::{BlkFeatures, S_IOERR, S_OK};
use kickless_testing::{LoopDevice, LosingDevice};
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

fn open(spec: &DiskSpec, options: &kickless_disk::Options) -> Disk {
    Disk::open(spec, options).unwrap()
}

/// Returns whether QEMU can open the image for writing.
fn qemu_opens(path: &Path) -> bool {
    let output = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(path).output().unwrap();
    output.status.success()
}

/// The old process goes on with its lock and its data, however far the new one has come.
#[test]
fn the_old_process_goes_on_after_each_step() {
    for options in FILE_OPTIONS {
        for step in 0..6 {
            let image = image();
            let spec = of_file(&image);
            let pair = Pair::new(open(&spec, &options), &spec, &options);
            let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
            assert_eq!(rig.status(TestRequest::write(0, &[1; 4096])), S_OK);
            let handed = pair.give();
            let new = (step > 0).then(|| pair.make(handed).unwrap());
            assert_eq!(rig.status(TestRequest::write(8, &[2; 4096])), S_OK);
            rig.park();
            if step == 2 {
                pair.old.hold();
            }
            if step > 2 {
                let last = pair.give_final().unwrap();
                if step > 3 {
                    pair.receive(new.as_ref().unwrap(), last).unwrap();
                }
            }
            if step > 4 {
                assert!(!qemu_opens(image.path()), "{step}");
            }
            drop(new);
            pair.assert_locked();
            pair.old.take_back().unwrap();
            pair.assert_locked();
            rig.unpark();
            assert_eq!(rig.status(TestRequest::write(16, &[3; 4096])), S_OK);
            assert_eq!(rig.contents(0..24), [[1; 4096], [2; 4096], [3; 4096]].concat(), "{step}");
            // The next attempt succeeds, after a give-up and a new guest too.
            drop(rig);
            let mut pair = pair;
            pair.old.close().unwrap();
            assert!(qemu_opens(image.path()));
            pair.old.open().unwrap();
            pair.pass();
            let new = pair.end_old();
            new.close().unwrap();
            assert!(qemu_opens(image.path()), "the image stays locked");
        }
    }
}

/// Another program tries all the time, while the image passes from process to process, and back.
#[test]
fn no_other_program_gets_the_lock() {
    let image = image();
    let spec = of_file(&image);
    let is_over = AtomicBool::new(false);
    let first = Pair::new(open(&spec, &OPTIONS), &spec, &OPTIONS).old;
    let last = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let file = File::open(image.path()).unwrap();
            let mut tries = 0;
            while !is_over.load(Ordering::Relaxed) {
                assert!(check(&file, false).is_err(), "after {tries} tries");
                tries += 1;
            }
            tries
        });
        let mut device = first;
        for round in 0..200 {
            let mut pair = Pair::of(device, &spec, &OPTIONS);
            if round % 2 == 0 {
                let new = pair.make(pair.give()).unwrap();
                let last = pair.give_final().unwrap();
                pair.receive(&new, last).unwrap();
                drop(new);
                pair.old.take_back().unwrap();
            }
            pair.pass();
            device = pair.end_old();
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(other.join().unwrap() > 200);
        device
    });
    last.close().unwrap();
    assert!(check(&File::open(image.path()).unwrap(), false).is_ok());
}

/// The path of the image names another file, and only the old description has the guest's.
#[test]
fn no_image_is_opened_again() {
    let image = image();
    let spec = of_file(&image);
    let mut pair = Pair::new(open(&spec, &OPTIONS), &spec, &OPTIONS);
    let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.status(TestRequest::write(0, &[1; 4096])), S_OK);
    let moved = image.path().with_extension("moved");
    std::fs::rename(image.path(), &moved).unwrap();
    drop(rig);
    std::fs::hard_link(&moved, image.path()).unwrap();
    let handed = pair.give();
    std::fs::remove_file(image.path()).unwrap();
    std::fs::hard_link(&moved, image.path()).unwrap();
    let new = pair.make(handed).unwrap();
    pair.finish(&new);
    let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.contents(0..8), [1; 4096]);
    std::fs::remove_file(moved).unwrap();
}

#[test]
fn block_devices_pass_under_requests() {
    for block in ["512", "4096"] {
        let block = format!("--sector-size={block}");
        let device = match LoopDevice::new(image(), &[&block]) {
            Ok(device) => device,
            Err(why) => return println!("SKIPPED: no loop devices: {why}"),
        };
        for options in FILE_OPTIONS {
            pass_under_requests(&DiskSpec::File(device.path().into()), &options, true);
        }
    }
}

/// A disk that came as a descriptor has no path. Its description passes like any other.
#[test]
fn a_disk_without_a_path_passes() {
    let image = image();
    let given = Descriptors::from_iter([("image".to_owned(), image.reopen().unwrap().into())]);
    let spec = DiskSpec::File("fd:image".into());
    let disk = Disk::open_given(&spec, &OPTIONS, &given).unwrap();
    let mut pair = Pair::new(disk, &spec, &OPTIONS);
    let new = pair.pass();
    pair.end_old();
    assert!(!qemu_opens(image.path()));
    // It has no path that could name another image.
    new.close().unwrap();
    new.connected();
    new.open().unwrap();
    let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
    assert_eq!(rig.status(TestRequest::write(0, &[1; 4096])), S_OK);
}

/// A free disk passes too, without a lock. The next guest takes it in the new process.
#[test]
fn a_free_disk_passes() {
    let image = image();
    let spec = of_file(&image);
    let mut pair = Pair::new(open(&spec, &OPTIONS), &spec, &OPTIONS);
    pair.old.close().unwrap();
    assert!(qemu_opens(image.path()));
    pair.expects_lock = false;
    let new = pair.pass();
    assert!(qemu_opens(image.path()));
    pair.end_old();
    new.open().unwrap();
    assert!(!qemu_opens(image.path()));
    new.close().unwrap();
}

/// The new process has what was given. So a disk that has changed since is given again.
#[test]
fn a_change_after_the_disk_was_given_is_noticed() {
    let image = image();
    let spec = of_file(&image);
    let mut pair = Pair::new(open(&spec, &OPTIONS), &spec, &OPTIONS);
    let (handed, before) = (pair.give(), pair.old.changes());
    image.as_file().set_len(2 << 20).unwrap();
    pair.old.refresh();
    assert_ne!(pair.old.changes(), before);
    let refused = pair.give_final().err().unwrap();
    assert!(refused.contains("has changed since it was given"), "{refused}");
    pair.old.take_back().unwrap();
    drop(handed);
    let new = pair.pass();
    assert_eq!(new.disk().size(), 2 << 20);
    pair.end_old().close().unwrap();
}

/// The guest keeps the size that it knows, whatever its file has become. The next look finds the other.
#[test]
fn a_file_with_another_length_passes_as_it_was_known() {
    let image = image();
    let spec = of_file(&image);
    for (len, size) in [(3 << 20, 3 << 20), (512 << 10, 3 << 20)] {
        let mut pair = Pair::new(open(&spec, &OPTIONS), &spec, &OPTIONS);
        let before = pair.old.disk().size();
        image.as_file().set_len(len).unwrap();
        let new = pair.pass();
        assert_eq!(new.disk().size(), before);
        let mut rig = Rig::start(&new, EngineKind::Threads, 8, false, BlkFeatures::empty());
        let beyond = rig.status(TestRequest::read(len / 512 - 8 + 8 * u64::from(len < before), 4096));
        assert_eq!(beyond, S_IOERR, "{len} {before}");
        new.refresh();
        assert_eq!(new.disk().size(), size);
        drop(rig);
        pair.end_old().close().unwrap();
    }
}

/// The listener to which the kernel has told the loss when the disk passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// A flush of the guest.
    Guest,
    /// Another program, by its own description.
    Other,
    /// The description of the disk, by a sync that is no flush. Only the witness is left.
    Description,
}

/// Each loss is heard, because the new process has the description, the witness, and what was heard before.
#[test]
fn a_lost_write_is_heard_by_the_new_process() {
    let cached = kickless_disk::Options { cache: Cache::Writeback, ..OPTIONS };
    for told in [Told::Guest, Told::Other, Told::Description] {
        let losing = match LosingDevice::new() {
            Ok(losing) => losing,
            Err(why) => return println!("SKIPPED: no device that loses writes: {why}"),
        };
        let spec = DiskSpec::File(losing.path().into());
        let pair = Pair::new(open(&spec, &cached), &spec, &cached);
        let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
        for at in 0..80 {
            assert_eq!(rig.status(TestRequest::write(at * 100, &[7; 51200])), S_OK);
        }
        match told {
            Told::Guest => assert_eq!(rig.status(TestRequest::flush()), S_IOERR),
            Told::Other => drop(File::open(losing.path()).unwrap().sync_data().unwrap_err()),
            Told::Description => drop(pair.old.disk().file().unwrap().sync_data().unwrap_err()),
        }
        losing.grow_file_system();
        let new = pair.make(pair.give()).unwrap();
        let position = rig.park();
        let task = rig.task_of(&new, &position, false);
        let last = pair.give_final_unsettled().unwrap();
        pair.receive(&new, last).unwrap();
        new.begin();
        rig.go_on_with(&new, task);
        let statuses = [rig.status(TestRequest::flush()), rig.status(TestRequest::flush())];
        assert_eq!(statuses, [S_IOERR; 2], "{told:?}");
    }
}

/// A sync before the pause finds a loss, so that the hand-over is given up early. A loss that is known is
/// none to find.
#[test]
fn a_loss_is_found_before_the_pause() {
    let cached = kickless_disk::Options { cache: Cache::Writeback, ..OPTIONS };
    let Ok(losing) = LosingDevice::new() else { return };
    let spec = DiskSpec::File(losing.path().into());
    let pair = Pair::new(open(&spec, &cached), &spec, &cached);
    let mut rig = Rig::start(&pair.old, EngineKind::Threads, 8, false, BlkFeatures::empty());
    for at in 0..80 {
        assert_eq!(rig.status(TestRequest::write(at * 100, &[7; 51200])), S_OK);
    }
    // A disk that waits for its guest hears nothing of what the present owner loses.
    let free = Blk::new(open(&spec, &cached), device_options());
    free.settle().unwrap();
    pair.old.settle().unwrap_err();
    pair.old.settle().unwrap();
    assert_eq!(rig.status(TestRequest::flush()), S_IOERR);
}
