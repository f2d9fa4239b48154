//! Tests that a disk which passes from one owner to another shows what the other has written, and nothing
//! older. Two loop devices over one file stand for two hosts, because each has a page cache of its own.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::qcow2::{Image, qemu_img};
use common::{image, options, worker};
use kickless_disk::medium::TakeError;
use kickless_disk::{Cache, Disk, DiskSpec, Medium, MemoryDisk, Resized};
use kickless_testing::LoopDevice;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const LEN: usize = 1 << 20;
const CACHES: [Cache; 2] = [Cache::None, Cache::Writeback];

/// Two hosts that reach the same bytes.
struct Hosts([LoopDevice; 2]);

impl Hosts {
    /// `block` is the smallest block of direct I/O. `None`: this machine has no loop devices.
    fn new(len: usize, block: u32) -> Option<Self> {
        let block = format!("--sector-size={block}");
        let first = LoopDevice::new(image(&vec![0; len]), &[&block]);
        let both = first.and_then(|first| Ok(Self([first.another(&[&block])?, first])));
        both.inspect_err(|why| println!("SKIPPED: no loop devices: {why}")).ok()
    }

    fn path(&self, host: usize) -> &Path {
        self.0[host].path()
    }

    /// Makes a qcow2 image, on the first host.
    fn create(&self, words: &[&str], size: &str) {
        let path = self.path(0).to_str().unwrap();
        qemu_img("/".as_ref(), &[&["create", "-q", "-f", "qcow2"], words, &[path, size]].concat());
        File::open(path).unwrap().sync_all().unwrap();
    }

    /// Opens the disk on each host, before any of them takes it.
    fn open(&self, kind: fn(std::path::PathBuf) -> DiskSpec, cache: Cache) -> [Medium; 2] {
        [0, 1].map(|host| {
            let disk = Disk::open(&kind(self.path(host).into()), &options(cache, false)).unwrap();
            // Two devices are two files, so the locks do not meet.
            Medium::new(disk, true)
        })
    }
}

/// Writes to the disk through one host and then the other, and reads everything each time.
fn move_to_and_fro(media: &[Medium; 2], what: &str) {
    let mut expected = vec![0; LEN];
    for round in 0..6 {
        let medium = &media[round % 2];
        medium.take().unwrap();
        let disk = medium.disk();
        let mut worker = worker(&disk);
        let (result, bytes) = worker.read(0, LEN);
        assert_eq!(result, Ok(()), "{what}");
        assert!(bytes == expected, "{what}: old bytes in round {round}");
        for chunk in [3 * round, 3 * round + 1, 15] {
            let bytes = vec![round as u8 + 1; LEN / 32];
            assert_eq!(worker.write((chunk * LEN / 32) as u64, &bytes, 0), Ok(()));
            expected[chunk * LEN / 32..][..LEN / 32].copy_from_slice(&bytes);
        }
        drop(worker);
        medium.give_up().unwrap();
    }
}

#[test]
fn another_host_sees_all_writes_of_a_raw_disk() {
    for cache in CACHES {
        let Some(hosts) = Hosts::new(LEN, 4096) else { return };
        move_to_and_fro(&hosts.open(DiskSpec::File, cache), &format!("raw, {cache}"));
    }
}

/// The tables of an image are read early, when the program starts, and are old when the disk is taken.
#[test]
fn another_host_sees_all_writes_of_a_qcow2_image() {
    // An image whose clusters or subclusters are smaller than a block goes through the page cache.
    for (cache, block, shape) in [
        (Cache::Writeback, 512, &["-o", "cluster_size=64k"][..]),
        (Cache::Writeback, 4096, &["-o", "cluster_size=4k"]),
        (Cache::None, 512, &["-o", "cluster_size=64k"]),
        (Cache::None, 4096, &["-o", "cluster_size=512"]),
        (Cache::None, 4096, &["-o", "cluster_size=16k,extended_l2=on"]),
    ] {
        let Some(hosts) = Hosts::new(8 << 20, block) else { return };
        hosts.create(shape, "1M");
        move_to_and_fro(&hosts.open(DiskSpec::Qcow2, cache), &format!("{shape:?}, {cache}, {block}"));
    }
}

/// A disk that is only read shows what another host has written before its guest starts.
#[test]
fn a_read_only_disk_shows_no_old_bytes() {
    for cache in CACHES {
        let Some(hosts) = Hosts::new(LEN, 4096) else { return };
        let spec = DiskSpec::File(hosts.path(1).into());
        let reader = Medium::new(Disk::open(&spec, &options(cache, true)).unwrap(), true);
        let read = |byte| {
            reader.take().unwrap();
            let disk = reader.disk();
            assert_eq!(worker(&disk).read(0, LEN), (Ok(()), vec![byte; LEN]), "{cache}");
            reader.give_up().unwrap();
        };
        read(0);
        let writer = File::options().write(true).open(hosts.path(0)).unwrap();
        writer.write_all_at(&[7; LEN], 0).unwrap();
        writer.sync_all().unwrap();
        read(7);
    }
}

/// An image under the image is read when it is locked, and not from an old page cache.
#[test]
fn another_host_sees_the_writes_of_a_backing_image() {
    for cache in CACHES {
        let Some(hosts) = Hosts::new(8 << 20, 512) else { return };
        hosts.create(&[], "1M");
        let dir = tempfile::tempdir().unwrap();
        let under = hosts.path(1).to_str().unwrap();
        qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", under, "over"]);
        let spec = DiskSpec::Qcow2(dir.path().join("over"));
        let overlay = Medium::new(Disk::open(&spec, &options(cache, false)).unwrap(), true);
        let base = &hosts.open(DiskSpec::Qcow2, cache)[0];
        for round in 1..4 {
            base.take().unwrap();
            let disk = base.disk();
            assert_eq!(worker(&disk).write(0, &[round; 128 << 10], 0), Ok(()));
            base.give_up().unwrap();
            overlay.take().unwrap();
            let disk = overlay.disk();
            assert_eq!(worker(&disk).read(0, 128 << 10), (Ok(()), vec![round; 128 << 10]), "{cache}");
            overlay.give_up().unwrap();
        }
    }
}

/// A disk is opened once, and taken by one guest after another. `change` makes it different in between.
fn changed(image: &Image, cache: Cache, change: impl FnOnce()) -> (Medium, Arc<Disk>) {
    let medium = Medium::new(Disk::open(&image.spec(), &options(cache, false)).unwrap(), true);
    medium.take().unwrap();
    medium.give_up().unwrap();
    change();
    medium.take().unwrap();
    let disk = medium.disk();
    (medium, disk)
}

#[test]
fn the_next_guest_sees_a_smaller_image() {
    for cache in CACHES {
        let image = Image::of(&[1; LEN], &[]);
        image.img(&["snapshot", "-c", "small", "disk.qcow2"]);
        image.img(&["resize", "-q", "disk.qcow2", "4M"]);
        let back = || drop(image.img(&["snapshot", "-a", "small", "disk.qcow2"]));
        let (medium, disk) = changed(&image, cache, back);
        assert_eq!(disk.size(), LEN as u64, "{cache}: snapshot -a");
        assert!(worker(&disk).write(LEN as u64, &[2; 512], 0).is_err());
        medium.give_up().unwrap();
        drop((medium, disk));
        let shrink = || drop(image.img(&["resize", "-q", "--shrink", "disk.qcow2", "512k"]));
        let (medium, disk) = changed(&image, cache, shrink);
        assert_eq!(disk.size(), LEN as u64 / 2, "{cache}: resize --shrink");
        medium.give_up().unwrap();
        common::qcow2::check(&image.path());
    }
}

/// A front-end reads the size before its guest starts.
#[test]
fn a_front_end_sees_the_size_before_the_guest_starts() {
    let image = Image::of(&[1; LEN], &[]);
    let medium = Medium::new(Disk::open(&image.spec(), &options(Cache::None, false)).unwrap(), true);
    image.img(&["resize", "-q", "--shrink", "disk.qcow2", "512k"]);
    medium.look().unwrap();
    assert_eq!(medium.disk().size(), LEN as u64 / 2);
    image.img(&["resize", "-q", "disk.qcow2", "2M"]);
    // A larger least size, which the image gets when it is taken, does not hide its own.
    let grown = Resized::Grown { from: LEN as u64 / 2, to: 2 * LEN as u64 };
    assert_eq!(medium.refresh(4 << 20).unwrap(), grown);
    medium.take().unwrap();
    medium.look().unwrap();
    assert_eq!(medium.refresh(4 << 20).unwrap(), Resized::Grown { from: 2 << 20, to: 4 << 20 });
}

/// A raw file that is shorter for the next guest has the smaller size. An empty one is refused.
#[test]
fn the_next_guest_sees_a_shorter_file() {
    for cache in CACHES {
        let file = image(&[1; LEN]);
        let spec = DiskSpec::File(file.path().into());
        let medium = Medium::new(Disk::open(&spec, &options(cache, false)).unwrap(), true);
        for len in [LEN / 2, 2 * LEN, LEN] {
            file.as_file().set_len(len as u64).unwrap();
            medium.take().unwrap();
            assert_eq!(medium.disk().size(), len as u64);
            medium.give_up().unwrap();
        }
        for len in [0, 100] {
            file.as_file().set_len(len).unwrap();
            let refused = medium.take().unwrap_err();
            assert!(
                matches!(refused, TakeError::Reload(_)) && refused.to_string().contains("is empty"),
                "{refused}"
            );
        }
        file.as_file().set_len(LEN as u64).unwrap();
        medium.take().unwrap();
    }
}

/// `qemu-img create` over an image makes another one in the same file.
#[test]
fn an_image_that_was_made_anew_in_place_is_another_one() {
    for cache in CACHES {
        for words in [&["-o", "cluster_size=512"][..], &["-o", "compat=0.10"], &[]] {
            let image = Image::of(&[1; LEN], &[]);
            let again = || {
                image.img(&[&["create", "-q", "-f", "qcow2"], words, &["disk.qcow2", "512k"]].concat());
            };
            let (medium, disk) = changed(&image, cache, again);
            assert_eq!(disk.size(), LEN as u64 / 2);
            let fresh = Disk::open(&image.spec(), &options(cache, false)).unwrap();
            assert_eq!(disk.limits(), fresh.limits(), "{cache}, {words:?}");
            let mut worker = worker(&disk);
            assert_eq!(worker.read(0, LEN / 2), (Ok(()), vec![0; LEN / 2]));
            assert_eq!(worker.write(LEN as u64 / 2 - 4096, &[5; 4096], 0), Ok(()));
            drop(worker);
            medium.give_up().unwrap();
            assert!(image.contents()[LEN / 2 - 4096..] == [5; 4096], "{cache}, {words:?}");
        }
    }
}

/// The new image has clusters that are smaller than the blocks of the disk's direct I/O.
#[test]
fn an_image_that_was_made_anew_with_small_clusters_is_opened_again() {
    let Some(hosts) = Hosts::new(8 << 20, 4096) else { return };
    hosts.create(&[], "1M");
    let [_, medium] = hosts.open(DiskSpec::Qcow2, Cache::None);
    hosts.create(&["-o", "cluster_size=512"], "1M");
    medium.take().unwrap();
    let disk = medium.disk();
    let mut worker = worker(&disk);
    for at in 0..64 {
        assert_eq!(worker.write(at * 1536, &[at as u8; 512], 0), Ok(()));
    }
    for at in 0..64 {
        assert_eq!(worker.read(at * 1536, 512), (Ok(()), vec![at as u8; 512]));
    }
    drop(worker);
    medium.give_up().unwrap();
    common::qcow2::check(hosts.path(1));
}

/// After a rename, the next guest uses the file that has the name now, and nothing is written to the old one.
#[test]
fn a_file_that_was_replaced_by_rename_is_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let [disk, old, new] = ["disk", "old", "new"].map(|name| dir.path().join(name));
    for qcow2 in [false, true] {
        for cache in CACHES {
            for path in [&disk, &new] {
                fs::write(path, vec![0; LEN]).unwrap();
                if qcow2 {
                    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "1M"]);
                }
            }
            let spec = if qcow2 { DiskSpec::Qcow2(disk.clone()) } else { DiskSpec::File(disk.clone()) };
            // Faults that never happen go with the disk.
            let spec = DiskSpec::Fault("eio@nth=1000000".parse().unwrap(), Box::new(spec));
            let medium = Medium::new(Disk::open(&spec, &options(cache, false)).unwrap(), true);
            medium.take().unwrap();
            fs::rename(&disk, &old).unwrap();
            fs::rename(&new, &disk).unwrap();
            // The guest keeps the file that it has.
            let first = medium.disk();
            medium.refresh(0).unwrap();
            assert!(Arc::ptr_eq(&first, &medium.disk()));
            assert_eq!(worker(&first).write(0, &[1; 4096], 0), Ok(()));
            medium.give_up().unwrap();
            let before = fs::read(&old).unwrap();
            medium.look().unwrap();
            assert!(!Arc::ptr_eq(&first, &medium.disk()));
            medium.take().unwrap();
            let second = medium.disk();
            let mut worker = worker(&second);
            assert_eq!(worker.read(0, 4096), (Ok(()), vec![0; 4096]));
            assert_eq!(worker.write(0, &[2; 4096], 0), Ok(()));
            drop(worker);
            medium.give_up().unwrap();
            assert!(fs::read(&old).unwrap() == before, "{cache}: the old file was written");
            assert!(fs::read(&disk).unwrap().windows(4096).any(|bytes| bytes == [2; 4096]));
        }
    }
}

/// An image that has lost its name is still the one to use: there is no other.
#[test]
fn a_file_without_a_name_is_used_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    fs::write(&path, [3; LEN]).unwrap();
    let medium =
        Medium::new(Disk::open(&DiskSpec::File(path.clone()), &options(Cache::None, false)).unwrap(), true);
    fs::remove_file(path).unwrap();
    medium.take().unwrap();
    let disk = medium.disk();
    assert_eq!(worker(&disk).read(0, LEN), (Ok(()), vec![3; LEN]));
}

/// Another file gets the name while the disk waits for the lock of the one that had it.
#[test]
fn a_file_that_is_replaced_before_it_is_locked_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let [disk, new] = ["disk", "new"].map(|name| dir.path().join(name));
    fs::write(&disk, vec![1; LEN]).unwrap();
    fs::write(&new, vec![2; LEN]).unwrap();
    let open = || {
        let disk = Disk::open(&DiskSpec::File(disk.clone()), &options(Cache::None, false)).unwrap();
        Medium::new(disk, true)
    };
    let (owner, next) = (open(), open());
    owner.take().unwrap();
    thread::scope(|scope| {
        let taken = scope.spawn(|| next.take());
        // The result is the same if the other thread comes later.
        thread::sleep(Duration::from_millis(200));
        fs::rename(&new, &disk).unwrap();
        owner.give_up().unwrap();
        taken.join().unwrap().unwrap();
    });
    assert_eq!(worker(&next.disk()).read(0, LEN), (Ok(()), vec![2; LEN]));
}

/// A front-end that connects sees the size that another host has given to the image.
#[test]
fn a_front_end_sees_the_size_from_another_host() {
    for cache in CACHES {
        let Some(hosts) = Hosts::new(8 << 20, 512) else { return };
        hosts.create(&[], "1M");
        let [_, medium] = hosts.open(DiskSpec::Qcow2, cache);
        // The header comes into the other host's page cache.
        File::open(hosts.path(1)).unwrap().read_exact_at(&mut [0; 512], 0).unwrap();
        let path = hosts.path(0).to_str().unwrap();
        qemu_img("/".as_ref(), &["resize", "-q", "-f", "qcow2", path, "2M"]);
        File::open(path).unwrap().sync_all().unwrap();
        medium.look().unwrap();
        assert_eq!(medium.disk().size(), 2 << 20, "{cache}");
    }
}

/// Two nodes can stand for one block device, which is then not another disk.
#[test]
fn another_node_of_a_block_device_is_the_same_disk() {
    let Some(hosts) = Hosts::new(LEN, 512) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let make_node = |of: &Path| {
        let device = fs::metadata(of).unwrap().rdev();
        let _ = fs::remove_file(&path);
        mknodat(CWD, &path, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, device).unwrap();
    };
    make_node(hosts.path(0));
    let disk = match Disk::open(&DiskSpec::File(path.clone()), &options(Cache::None, false)) {
        Ok(disk) => disk,
        Err(why) => return println!("SKIPPED: no device nodes in {}: {why}", dir.path().display()),
    };
    let medium = Medium::new(disk, true);
    let first = medium.disk();
    make_node(hosts.path(0));
    medium.look().unwrap();
    assert!(Arc::ptr_eq(&first, &medium.disk()));
    make_node(hosts.path(1));
    medium.look().unwrap();
    assert!(!Arc::ptr_eq(&first, &medium.disk()));
}

#[test]
fn the_memory_of_a_disk_passes_to_another_process() {
    let share = |disk: &Disk| match disk {
        Disk::Memory(memory) => memory.share().unwrap(),
        _ => unreachable!("it is a disk in memory"),
    };
    let take = |file| MemoryDisk::of_file(file, LEN as u64, false);
    let first = Disk::Memory(MemoryDisk::new(LEN as u64, false).unwrap());
    worker(&first).write(4096, &[1; 8192], 0).unwrap();
    let second = Disk::Memory(take(share(&first)).unwrap());
    let (result, bytes) = worker(&second).read(0, 16384);
    assert_eq!(result, Ok(()));
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == u8::from((4096..12288).contains(&at))));

    let file = share(&second);
    assert!(MemoryDisk::of_file(file.try_clone().unwrap(), LEN as u64 * 2, false).is_err());
    let third = Disk::Memory(take(file).unwrap());
    worker(&third).write(0, &[2; 4096], 0).unwrap();
    assert_eq!(worker(&second).read(0, 4096).1, [2; 4096], "it is the same memory");
}
