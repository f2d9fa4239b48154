//! Tests qcow2 images: their features, images that are refused, and damaged images.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::qcow2::{Image, check};
use common::{loop_device, options, run_on_extent, worker};
use kickless_disk::lock::ImageLock;
use kickless_disk::{Cache, Disk, DiskSpec, Error, Extent, IoError, Request, Resized};
use kickless_io::{Engine, EngineKind, Errno};
use kickless_testing::Random;
use rustix::fs::{OFlags, fcntl_getfl};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const LEN: u64 = 1 << 20;
const CACHES: [Cache; 2] = [Cache::None, Cache::Writeback];

fn open(spec: &DiskSpec, cache: Cache) -> Result<Disk, Error> {
    Disk::open(spec, &options(cache, false))
}

/// Returns the bytes that the file takes on its file system.
fn space(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Returns a word of an image's file.
fn word(file: &File, at: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, at).unwrap();
    u64::from_be_bytes(word)
}

/// Returns the place of an image's first L2 table.
fn table_at(file: &File) -> u64 {
    word(file, word(file, 40)) & !(1 << 63)
}

/// Returns the error for an image that cannot be opened. It names the image.
fn error_of_open(path: &Path) -> String {
    let error = open(&DiskSpec::Qcow2(path.to_owned()), Cache::None).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    error
}

#[test]
fn discards_and_zeroes() {
    let contents = Random(1).bytes(LEN);
    for cache in CACHES {
        let image = Image::of(&contents, &[]);
        let disk = open(&image.spec(), cache).unwrap();
        let limits = disk.limits();
        let alignments = [limits.discard, limits.write_zeroes].map(|ranges| ranges.unwrap().alignment);
        assert_eq!((disk.size(), alignments), (LEN, [128, 1]));
        assert!(limits.zeroes_may_unmap);
        let mut worker = worker(&disk);
        let full = space(&image.path());
        run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, 64 << 10, 64 << 10, false);
        run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, 512, 1024, true);
        assert!(space(&image.path()) + (16 << 10) > full, "zeroes without unmap freed space");
        run_on_extent(
            &mut worker,
            Request::WriteZeroes { durable: true },
            (192 << 10) + 512,
            256 << 10,
            true,
        );
        run_on_extent(&mut worker, Request::Discard { durable: true }, 512 << 10, 256 << 10, false);
        let mut expected = contents.clone();
        for (start, len) in
            [(64 << 10, 64 << 10), (512, 1024), ((192 << 10) + 512, 256 << 10), (512 << 10, 256 << 10)]
        {
            expected[start..start + len].fill(0);
        }
        assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()));
        assert_eq!(worker.flush(), Ok(()));
        assert!(image.contents() == expected);
        assert!(
            space(&image.path()) + (300 << 10) < full,
            "no space was freed: {} of {full}",
            space(&image.path())
        );
    }
}

/// A long range is discarded in pieces. Each cluster that is wholly within it is freed.
#[test]
fn long_discards_leave_no_cluster_behind() {
    const PIECE: u64 = 64 << 20;
    for (request, unmap) in
        [(Request::Discard { durable: false }, false), (Request::WriteZeroes { durable: false }, true)]
    {
        let image = Image::of(&[], &[]);
        image.img(&["resize", "-q", "-f", "qcow2", "disk.qcow2", "192M"]);
        let disk = open(&image.spec(), Cache::None).unwrap();
        let mut worker = worker(&disk);
        for at in [PIECE, 2 * PIECE] {
            assert_eq!(worker.write(at - (64 << 10), &[7; 128 << 10], 0), Ok(()));
        }
        // The range begins and ends in the middle of these two clusters. They stay allocated.
        let len = 2 * PIECE + (128 << 10);
        for at in [512, len] {
            assert_eq!(worker.write(at, &[7; 512], 0), Ok(()));
        }
        let full = space(&image.path());
        run_on_extent(&mut worker, request, 512, len, unmap);
        // Space is freed after the next sync. A close waits for that.
        drop(worker);
        disk.write_back().unwrap();
        let mut worker = common::worker(&disk);
        let left = space(&image.path());
        // The request frees four clusters (256 KiB). The zeroes that it writes into its first cluster take up
        // to 64 KiB. If it left two of the four, it would free less than 160 KiB.
        assert!(left + (160 << 10) < full, "{request:?}: {left} of {full}");
        for at in [PIECE, 2 * PIECE] {
            assert!(worker.read(at - (64 << 10), 128 << 10) == (Ok(()), vec![0; 128 << 10]), "{request:?}");
        }
        image.contents();
    }
}

/// The image ends within its last cluster. Zeroes in this cluster change neither the bytes beside them nor
/// the backing image.
#[test]
fn zeroes_in_a_last_cluster_that_is_short() {
    const CLUSTER: usize = 64 << 10;
    for (whole, backing, compressed) in
        [(0, false, false), (0, true, false), (0, false, true), (1, false, false), (1, true, false)]
    {
        let len = whole * CLUSTER + 5120;
        let contents = Random(11).bytes(len as u64);
        let last = whole * CLUSTER;
        for (from, to) in [(512, 1024), (0, 1024), (1024, 5120), (4608, 5120), (0, 5120)] {
            for unmap in [false, true] {
                let image = Image::of(&contents, if compressed { &["-c"] } else { &[] });
                let mut path = image.path();
                if backing {
                    image.img(&["create", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "top"]);
                    path = image.dir.path().join("top");
                }
                let disk = open(&DiskSpec::Qcow2(path.clone()), Cache::None).unwrap();
                let mut worker = worker(&disk);
                let (at, len_zeroed) = ((last + from) as u64, (to - from) as u64);
                run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, at, len_zeroed, unmap);
                let mut expected = contents.clone();
                expected[last + from..last + to].fill(0);
                let case = format!("{whole} {backing} {compressed} {from}-{to} {unmap}");
                assert!(worker.read(0, len) == (Ok(()), expected.clone()), "{case}");
                assert_eq!(worker.flush(), Ok(()));
                let name = path.to_str().unwrap();
                check(&path);
                image.img(&["convert", "-U", "-f", "qcow2", "-O", "raw", name, "out"]);
                assert!(fs::read(image.dir.path().join("out")).unwrap() == expected, "{case}");
                if unmap && (from, to) == (0, 5120) {
                    let map = image.img(&["map", "-U", "-f", "qcow2", "--output=json", name]);
                    let end = map.lines().find(|line| line.contains(&format!("\"start\": {last},")));
                    assert!(end.is_some_and(|line| line.contains("\"data\": false")), "{case}: {map}");
                }
            }
        }
    }
}

/// The second version of the format cannot mark a cluster as zero. Without a backing image, a cluster can be
/// unmapped instead.
#[test]
fn an_old_image_has_no_discards() {
    let contents = Random(1).bytes(LEN);
    let image = Image::of(&contents, &["-o", "compat=0.10"]);
    let disk = open(&image.spec(), Cache::None).unwrap();
    assert!(disk.limits().discard.is_some());
    image.img(&["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", "raw", "-F", "raw", "above"]);
    let above = open(&DiskSpec::Qcow2(image.dir.path().join("above")), Cache::None).unwrap();
    assert_eq!((above.limits().discard, above.limits().write_zeroes), (None, None));
    let mut worker = worker(&disk);
    assert_eq!(worker.write(4096, &[9; 4096], 0), Ok(()));
    let mut expected = contents;
    expected[4096..8192].fill(9);
    assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()) && image.contents() == expected);
}

#[test]
fn a_read_only_image_is_left_alone() {
    let image = Image::of(&[3; 65536], &[]);
    let before = fs::read(image.path()).unwrap();
    let disk = Disk::open(&image.spec(), &options(Cache::None, true)).unwrap();
    assert!(disk.limits().read_only && disk.limits().discard.is_none());
    let mut worker = worker(&disk);
    assert_eq!(worker.write(0, &[0; 512], 0), Err(IoError::ReadOnly));
    assert_eq!(worker.read(512, 512), (Ok(()), vec![3; 512]));
    assert_eq!(worker.flush(), Ok(()));
    drop(worker);
    assert!(disk.write_back().is_ok());
    drop(disk);
    assert!(fs::read(image.path()).unwrap() == before);
}

/// A completed request is in the file without a flush, because a process that is killed does not flush.
#[test]
fn completed_requests_are_in_the_file() {
    let image = Image::of(&[0; 1 << 20], &[]);
    let disk = open(&image.spec(), Cache::None).unwrap();
    let mut expected = vec![0; 1 << 20];
    for at in [0, 64 << 10, 700 << 10] {
        assert_eq!(worker(&disk).write(at, &[5; 4096], 0), Ok(()));
        expected[at as usize..][..4096].fill(5);
        assert!(image.contents() == expected, "the write at {at} is not there");
    }
    // Zeroes of a whole cluster change only the tables.
    run_on_extent(&mut worker(&disk), Request::WriteZeroes { durable: false }, 0, 64 << 10, false);
    expected[..4096].fill(0);
    assert!(image.contents() == expected, "the zeroes are not there");
    for (request, at, unmap) in [
        (Request::WriteZeroes { durable: false }, 64 << 10, true),
        (Request::Discard { durable: false }, 704 << 10, false),
    ] {
        let has_data = |at: u64| {
            let map = image.img(&["map", "-U", "-f", "qcow2", "--output=json", "disk.qcow2"]);
            // An extent is a line. Adjacent extents may be one.
            let number = |line: &str, key: &str| {
                let rest = line.split_once(&format!("\"{key}\": "))?.1;
                rest.split(',').next()?.trim().parse::<u64>().ok()
            };
            let is_here = |line: &&str| {
                let (start, len) = (number(line, "start"), number(line, "length"));
                start.zip(len).is_some_and(|(start, len)| (start..start + len).contains(&at))
            };
            map.lines().find(is_here).is_some_and(|line| line.contains("\"data\": true"))
        };
        assert_eq!(worker(&disk).write(at, &[5; 64 << 10], 0), Ok(()));
        assert!(has_data(at));
        run_on_extent(&mut worker(&disk), request, at, 64 << 10, unmap);
        assert!(!has_data(at), "{request:?}: the file still has data at {at}");
    }
}

/// A flush of the image flushes the device. The kernel counts the flushes of a device.
#[test]
fn flushes_reach_the_device() {
    let image = Image::of(&[1; 65536], &[]);
    let device = match loop_device(common::image(&vec![0; 4 << 20]), false) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device with blocks of 4096 bytes: {why}"),
    };
    fs::copy(image.path(), device.path()).unwrap();
    for cache in CACHES {
        let disk = open(&DiskSpec::Qcow2(device.path().into()), cache).unwrap();
        let mut worker = worker(&disk);
        assert_eq!(worker.write(0, &[2; 4096], 0), Ok(()));
        let before = device.flushes();
        assert_eq!(worker.flush(), Ok(()));
        assert!(device.flushes() > before, "{cache}");
        assert_eq!(worker.write(0, &[3; 4096], 0), Ok(()));
        let before = device.flushes();
        drop(worker);
        disk.write_back().unwrap();
        assert!(device.flushes() > before, "{cache}: write_back");
    }
}

/// Two hosts use an image in turns. The open of the second one writes nothing, because the first one may
/// still use the image.
#[test]
fn reload_shows_the_writes_of_another_host() {
    let image = Image::of(&[1; 65536], &["-o", "cluster_size=4k"]);
    let before = fs::read(image.path()).unwrap();
    let [one, other] = [(); 2].map(|()| open(&image.spec(), Cache::None).unwrap());
    assert!(fs::read(image.path()).unwrap() == before);
    let mut last = 1;
    // The other host has read tables before, which its reload must drop.
    assert_eq!(worker(&other).read(0, 512), (Ok(()), vec![1; 512]));
    for round in 2..8 {
        for disk in [&one, &other] {
            disk.reload(false).unwrap();
            let mut worker = worker(disk);
            let at = u64::from(round) * 8192;
            assert_eq!(worker.read(0, 512), (Ok(()), vec![last; 512]));
            last = round;
            assert_eq!(worker.write(at, &[round; 4096], 0), Ok(()));
            run_on_extent(&mut worker, Request::Discard { durable: false }, 0, 4096, false);
            assert_eq!(worker.write(0, &[round; 512], 0), Ok(()));
            drop(worker);
            disk.write_back().unwrap();
        }
        let contents = image.contents();
        assert!(
            contents[..512] == [round; 512] && contents[usize::from(round) * 8192..][..4096] == [round; 4096]
        );
    }
}

/// A reload fails when the file is no image any more. Later requests do not use the tables of the old image.
#[test]
fn reload_of_an_overwritten_image_fails() {
    let image = Image::of(&[1; 65536], &[]);
    let before = fs::read(image.path()).unwrap();
    let disk = open(&image.spec(), Cache::None).unwrap();
    disk.reload(false).unwrap();
    fs::write(image.path(), vec![0; before.len()]).unwrap();
    disk.reload(false).unwrap_err();
    let mut engine = Engine::open(EngineKind::Threads, 4).unwrap();
    disk.attach(&mut engine).unwrap_err();
    fs::write(image.path(), before).unwrap();
    disk.reload(false).unwrap();
    assert_eq!(worker(&disk).read(0, 512), (Ok(()), vec![1; 512]));
}

/// After failed writes of data and tables, the image has leaks at most, and all answered requests. The next
/// request that needs a table writes it again.
#[test]
fn a_table_that_could_not_be_written_is_written_later() {
    const CLUSTERS: u64 = 64;
    let mut random = Random(21);
    for round in 0..20 {
        let image = Image::of(&[], &["-o", "cluster_size=4k"]);
        image.img(&["resize", "-q", "-f", "qcow2", "disk.qcow2", "8M"]);
        let faulty = DiskSpec::Fault("eio@20%".parse().unwrap(), Box::new(image.spec()));
        let disk = open(&faulty, Cache::None).unwrap();
        let mut on_disk = worker(&disk);
        // The contents of each cluster: the possible values. A failed request may have had its effect.
        let mut contents = vec![vec![0]; CLUSTERS as usize];
        for value in 1..120 {
            let cluster = random.from(0..CLUSTERS);
            // Each has a table of its own, or shares it with another.
            let at = cluster * 128 * 1024;
            let (result, value) = if random.from(0..4) == 0 {
                on_disk.io(0).extents_mut().push(Extent { offset: at, len: 4096, unmap: true });
                (on_disk.run(Request::WriteZeroes { durable: false }), 0)
            } else {
                (on_disk.write(at, &[value; 4096], 0), value)
            };
            let possible = &mut contents[cluster as usize];
            if result.is_ok() {
                possible.clear();
            }
            possible.push(value);
        }
        drop(on_disk);
        let found = image.contents();
        for (cluster, possible) in contents.iter().enumerate() {
            let found = &found[cluster * 128 * 1024..][..4096];
            assert!(found.iter().all(|byte| possible.contains(byte)), "round {round}: cluster {cluster}");
        }
    }
}

/// The lock on the image is the one that QEMU uses.
#[test]
fn the_image_can_be_locked() {
    let image = Image::of(&[1; 65536], &[]);
    let disk = open(&image.spec(), Cache::None).unwrap();
    let lock = ImageLock::acquire(disk.file().unwrap(), false).unwrap();
    let mut command = std::process::Command::new("qemu-io");
    let output = command.args(["-f", "qcow2", "-c", "write 0 512"]).arg(image.path()).output().unwrap();
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("lock"),
        "{output:?}"
    );
    disk.reload(false).unwrap();
    assert_eq!(worker(&disk).write(0, &[2; 512], 0), Ok(()));
    disk.write_back().unwrap();
    drop(lock);
    assert!(image.contents()[..512] == [2; 512]);
}

/// Returns the flags of each descriptor of this process for a file.
fn open_flags(path: &Path) -> Vec<OFlags> {
    let path = fs::canonicalize(path).unwrap();
    let names = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    let of_file =
        names.filter(|fd| fs::read_link(Path::new("/proc/self/fd").join(fd)).is_ok_and(|link| link == path));
    let flags = of_file.map(|fd| {
        let info = fs::read_to_string(Path::new("/proc/self/fdinfo").join(fd)).unwrap();
        let octal = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        OFlags::from_bits_retain(u32::from_str_radix(octal, 8).unwrap())
    });
    flags.collect()
}

#[test]
fn chains_of_backing_images() {
    let contents = Random(4).bytes(LEN);
    let image = Image::of(&contents, &[]);
    image.img(&["create", "-f", "qcow2", "-b", "raw", "-F", "raw", "one"]);
    image.img(&["create", "-f", "qcow2", "-b", "one", "-F", "qcow2", "two", "2M"]);
    for cache in CACHES {
        let disk = open(&DiskSpec::Qcow2(image.dir.path().join("two")), cache).unwrap();
        assert_eq!(disk.size(), 2 * LEN);
        let mut worker = worker(&disk);
        let (result, bytes) = worker.read(0, 2 * LEN as usize);
        assert_eq!(result, Ok(()));
        assert!(bytes[..LEN as usize] == contents && bytes[LEN as usize..].iter().all(|&b| b == 0));
        // The backing files are open for reading only, and with O_DIRECT if the image is.
        let direct = fcntl_getfl(disk.file().unwrap()).unwrap() & OFlags::DIRECT;
        for name in ["one", "raw"] {
            let flags = open_flags(&image.dir.path().join(name));
            assert!(!flags.is_empty(), "{name}");
            let expected = direct | OFlags::RDONLY;
            assert!(
                flags.iter().all(|flags| *flags & (OFlags::DIRECT | OFlags::ACCMODE) == expected),
                "{cache}"
            );
        }
    }
    let disk = open(&DiskSpec::Qcow2(image.dir.path().join("two")), Cache::None).unwrap();
    let mut worker = worker(&disk);
    assert_eq!(worker.write(512, &[8; 1024], 0), Ok(()));
    run_on_extent(&mut worker, Request::Discard { durable: false }, 64 << 10, 64 << 10, false);
    let (_, bytes) = worker.read(0, 128 << 10);
    assert!(bytes[512..1536] == [8; 1024] && bytes[..512] == contents[..512]);
    assert!(bytes[64 << 10..].iter().all(|&b| b == 0), "the discarded range shows the backing image");
    assert!(fs::read(image.dir.path().join("raw")).unwrap() == contents);
}

/// Writes to the image do not change the clusters of a snapshot in it.
#[test]
fn writes_do_not_change_snapshots() {
    let contents = Random(7).bytes(LEN);
    let image = Image::of(&contents, &[]);
    image.img(&["snapshot", "-c", "then", "disk.qcow2"]);
    let disk = open(&image.spec(), Cache::None).unwrap();
    let mut worker = worker(&disk);
    let mut expected = contents.clone();
    assert_eq!(worker.write(512, &[6; 1024], 0), Ok(()));
    expected[512..1536].fill(6);
    run_on_extent(&mut worker, Request::WriteZeroes { durable: false }, 64 << 10, 192 << 10, true);
    run_on_extent(&mut worker, Request::Discard { durable: false }, 256 << 10, 64 << 10, false);
    expected[64 << 10..320 << 10].fill(0);
    assert_eq!(worker.flush(), Ok(()));
    assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()) && image.contents() == expected);
    image.img(&["convert", "-U", "-l", "then", "-O", "raw", "disk.qcow2", "before"]);
    assert!(fs::read(image.dir.path().join("before")).unwrap() == contents);
}

/// A guest can write a qcow2 header to a raw disk. The disk stays raw, so the header cannot name a file of
/// the host.
#[test]
fn a_raw_disk_with_a_qcow2_header_stays_raw() {
    let secret = Image::of(&[0x5e; 65536], &[]);
    let image = Image::of(&[0; 65536], &[]);
    image.img(&["create", "-f", "qcow2", "-b", secret.path().to_str().unwrap(), "-F", "qcow2", "guest"]);
    let header = fs::read(image.dir.path().join("guest")).unwrap();
    let path = image.dir.path().join("guest");
    let disk = open(&DiskSpec::File(path), Cache::Writeback).unwrap();
    let len = disk.size() as usize;
    assert!(worker(&disk).read(0, len) == (Ok(()), header[..len].to_vec()));
}

/// QEMU writes such a name if it was given one.
#[test]
fn a_name_under_an_image_may_be_of_the_protocol_file() {
    let image = Image::of(&[0x5e; 65536], &[]);
    let under = format!("file:{}", image.dir.path().join("raw").display());
    image.img(&["create", "-q", "-f", "qcow2", "-b", &under, "-F", "raw", "top"]);
    let disk = open(&DiskSpec::Qcow2(image.dir.path().join("top")), Cache::Writeback).unwrap();
    assert!(worker(&disk).read(0, 65536) == (Ok(()), vec![0x5e; 65536]));
}

#[test]
fn images_that_are_refused() {
    let image = Image::of(&[1; 65536], &[]);
    let error_of_new = |name: &str, words: &[&str]| {
        image.img(&[&["create", "-q", "-f", "qcow2"], words].concat());
        let error = error_of_open(&image.dir.path().join(name));
        println!("{name}: {error}");
        error
    };
    assert!(error_of_open(&image.dir.path().join("raw")).contains("is no qcow2 image"));
    assert!(error_of_new("data", &["-o", "data_file=other", "data", "1M"]).contains("another file"));
    assert!(
        error_of_new("json", &["-u", "-b", "json:{}", "-F", "raw", "json", "1M"])
            .contains("it is not a file")
    );
    assert!(
        error_of_new("url", &["-u", "-b", "nbd://h/x", "-F", "raw", "url", "1M"])
            .contains("it is not a file")
    );
    assert!(
        error_of_new("near", &["-u", "-b", "file:raw", "-F", "raw", "near", "1M"]).contains("the whole path")
    );
    assert!(error_of_new("empty", &["empty", "0"]).contains("0 bytes"));
    assert!(error_of_new("gone", &["-u", "-b", "nothing", "-F", "raw", "gone", "1M"]).contains("nothing"));
    // The error names the missing image at the end of the chain.
    let error = error_of_new("top", &["-u", "-b", "gone", "-F", "qcow2", "top", "1M"]);
    assert!(error.contains("\"nothing\"") && !error.contains("\"gone\""), "{error}");
    assert!(error_of_new("vmdk", &["-u", "-b", "raw", "-F", "vmdk", "vmdk", "1M"]).contains("vmdk"));
    image.img(&["create", "-q", "-f", "qcow2", "-u", "-b", "round", "-F", "qcow2", "about", "1M"]);
    assert!(error_of_new("round", &["-u", "-b", "about", "-F", "qcow2", "round", "1M"]).contains("loop"));
    assert!(
        error_of_new("pipe", &["-u", "-b", "/dev/null", "-F", "raw", "pipe", "1M"])
            .contains("character device")
    );
    // This uses the format's first method of encryption. For the second one, LUKS, QEMU measures the speed of
    // the machine, and fails if it is busy.
    let secret = ["--object", "secret,id=s,data=x", "-o", "encrypt.format=aes,encrypt.key-secret=s"];
    image.img(&[&["create", "-q", "-f", "qcow2"], &secret[..], &["crypt", "1M"]].concat());
    assert!(error_of_open(&image.dir.path().join("crypt")).contains("encrypted"));
    image.img(&["create", "-q", "-f", "qcow2", "-u", "-b", "raw", "-F", "raw", "unsaid", "1M"]);
    // Replaces the header extension with the backing format by an unknown one. Old programs omit it.
    let path = image.dir.path().join("unsaid");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(4).position(|w| w == 0xe279_2aca_u32.to_be_bytes()).unwrap();
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(&path, bytes).unwrap();
    assert!(error_of_open(&path).contains("not stated"));
}

/// An image with the dirty bit was not closed when it was used last. It is repaired when it is ours.
#[test]
fn a_dirty_image_is_repaired() {
    let image = Image::of(&[1; 65536], &[]);
    File::options().write(true).open(image.path()).unwrap().write_all_at(&[1], 79).unwrap();
    let disk = open(&image.spec(), Cache::None).unwrap();
    assert_eq!(fs::read(image.path()).unwrap()[79], 1, "the open has written");
    disk.reload(false).unwrap();
    assert_eq!(fs::read(image.path()).unwrap()[79], 0);
    assert_eq!(worker(&disk).write(0, &[2; 512], 0), Ok(()));
    drop(disk);
    image.img(&["check", "-q", "disk.qcow2"]);
    assert!(image.contents()[..513] == [&[2; 512][..], &[1]].concat());
}

/// An entry that cannot be true does not keep an image that was not closed from being used. Only requests
/// that need the entry fail.
#[test]
fn a_dirty_image_with_a_bad_entry_is_used() {
    let image = Image::of(&[1; 256 << 10], &[]);
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    let entry = table_at(&file) + 2 * 8;
    let good = word(&file, entry);
    file.write_all_at(&(good | 1 << 5).to_be_bytes(), entry).unwrap();
    file.write_all_at(&[1], 79).unwrap();
    let disk = open(&image.spec(), Cache::None).unwrap();
    disk.reload(false).unwrap();
    assert_eq!(fs::read(image.path()).unwrap()[79], 0);
    let mut on_disk = worker(&disk);
    assert_eq!(on_disk.read(0, 128 << 10), (Ok(()), vec![1; 128 << 10]));
    assert_eq!(on_disk.read(128 << 10, 512).0, Err(IoError::Os(Errno::IO)));
    drop(on_disk);
    drop(disk);
    assert_eq!(word(&file, entry), good & !(1 << 63) | 1 << 5, "the entry stays, without COPIED");
    assert_eq!(fs::read(image.path()).unwrap()[79], 2, "the read has marked the image as corrupt");
}

/// Each request to an image with random bytes in its tables ends, and nothing panics.
#[test]
fn images_with_damaged_tables() {
    let contents = Random(5).bytes(256 << 10);
    let image = Image::of(&contents, &["-o", "cluster_size=4k"]);
    let sound = fs::read(image.path()).unwrap();
    let tables: Vec<usize> = (0..sound.len()).filter(|&at| sound[at] != 0 && at < 20 << 10).collect();
    let mut random = Random(6);
    let (mut opened, mut failed) = (0, 0);
    for round in 0..300 {
        let mut bytes = sound.clone();
        for _ in 0..random.from(1..4) {
            let at = match random.from(0..4) {
                0 => random.from(0..112) as usize,
                1 => random.from(0..20 << 10) as usize,
                _ => tables[random.from(0..tables.len() as u64) as usize],
            };
            bytes[at] = random.next() as u8;
        }
        fs::write(image.path(), &bytes).unwrap();
        let Ok(disk) = open(&image.spec(), CACHES[round % 2]) else { continue };
        // A dirty bit asks for a repair, which can fail.
        if disk.reload(false).is_err() {
            continue;
        }
        opened += 1;
        let mut worker = worker(&disk);
        let len = disk.size().min(256 << 10);
        for at in (0..len).step_by(16 << 10) {
            let part = (len - at).min(16 << 10) as usize;
            failed += usize::from(worker.read(at, part).0.is_err());
            failed += usize::from(worker.write(at, &vec![1; part.min(8192)], 0).is_err());
        }
        let _ = worker.flush();
    }
    println!("{opened} of 300 images could be opened, {failed} requests to them failed");
    assert!(opened > 20 && failed > 0);
}

#[test]
fn faults_apply_to_an_image() {
    let image = Image::of(&[3; 65536], &[]);
    let faulty = |rules: &str| {
        open(&DiskSpec::Fault(rules.parse().unwrap(), Box::new(image.spec())), Cache::None).unwrap()
    };
    let disk = faulty("short,delay=2ms@write,delay=1ms@flush");
    let mut on_disk = worker(&disk);
    assert_eq!(on_disk.write(4096, &[7; 128 << 9], 0), Err(IoError::Range));
    assert_eq!(on_disk.write(4096, &[7; 8192], 0), Ok(()));
    assert_eq!(on_disk.flush(), Ok(()));
    assert_eq!(on_disk.read(4096, 8192), (Ok(()), vec![7; 8192]));
    drop(on_disk);
    drop(disk);
    let disk = faulty("eio@write");
    let mut on_disk = worker(&disk);
    assert_eq!(on_disk.write(4096, &[8; 4096], 0), Err(IoError::Os(Errno::IO)));
    assert_eq!(on_disk.read(4096, 8192), (Ok(()), vec![7; 8192]));
}

/// The second read of a table reads all of it. If a part of it is unreadable, the wanted part is read alone.
#[test]
fn tables_are_read_ahead() {
    // One part of a table, 4 KiB, maps so many bytes.
    const PART: u64 = 512 * (64 << 10);
    let image = Image::of(&[], &[]);
    image.img(&["resize", "-q", "-f", "qcow2", "disk.qcow2", "512M"]);
    {
        let disk = open(&image.spec(), Cache::None).unwrap();
        let mut on_disk = worker(&disk);
        for part in 0..16 {
            assert_eq!(on_disk.write(part * PART, &[1 + part as u8; 512], 0), Ok(()));
        }
    }
    let file = File::options().read(true).write(true).open(image.path()).unwrap();
    let table = table_at(&file);
    let part_of = |part: u64| table + part * 4096;
    let sectors = |part: u64| (part_of(part) / 512, part_of(part) / 512 + 7);
    let open_with = |rules: String| {
        let spec = DiskSpec::Fault(rules.parse().unwrap(), Box::new(image.spec()));
        Disk::open(&spec, &options(Cache::None, true)).unwrap()
    };
    let expect = |part: u64| (Ok(()), vec![1 + part as u8; 512]);
    // One read of the table succeeds, one of all of it too, and no other one.
    let (first, _) = sectors(0);
    let (_, last) = sectors(15);
    for fails in [false, true] {
        let rules = format!("eio@read+{first}-{last}+nth={}", if fails { 2 } else { 3 });
        let disk = open_with(rules);
        let mut on_disk = worker(&disk);
        for part in [7, 3, 0, 15] {
            assert_eq!(on_disk.read(part * PART, 512), expect(part), "{part}");
        }
    }
    let (first, last) = sectors(5);
    let disk = open_with(format!("eio@read+{first}-{last}"));
    let mut on_disk = worker(&disk);
    for part in [7, 3, 5, 5, 15, 0] {
        let expected = if part == 5 { Err(IoError::Os(Errno::IO)) } else { Ok(()) };
        let (result, bytes) = on_disk.read(part * PART, 512);
        assert_eq!(result, expected, "{part}");
        assert!(result.is_err() || bytes == [1 + part as u8; 512], "{part}");
    }
}

/// Compares images of many options, over a backing image or compressed, with a plain array. Reads and writes
/// begin in the middle of clusters, and QEMU reads the result.
#[test]
fn options_of_images() {
    const BYTES: u64 = 600 << 10;
    let options: [&[&str]; 8] = [
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M"],
        &["-o", "extended_l2=on"],
        &["-o", "extended_l2=on,cluster_size=16k"],
        &["-o", "compat=0.10,cluster_size=4k"],
        &["-o", "refcount_bits=1"],
        &["-c", "-o", "compression_type=zlib"],
        &["-c", "-o", "compression_type=zstd,cluster_size=16k"],
    ];
    let mut random = Random(31);
    for (words, over_backing) in options.into_iter().flat_map(|words| [(words, false), (words, true)]) {
        // Some of it compresses.
        let mut expected = random.bytes(BYTES);
        expected[100 << 10..400 << 10].fill(6);
        let image = Image::of(&expected, words);
        let mut path = image.path();
        if over_backing {
            let create = ["create", "-q", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2"];
            // `-c` is not an option of `create`.
            let above = if words[0] == "-c" { &words[1..] } else { words };
            image.img(&[&create[..], above, &["above"]].concat());
            path = image.dir.path().join("above");
        }
        let case = format!("{words:?} {over_backing}");
        for cache in CACHES {
            let disk = open(&DiskSpec::Qcow2(path.clone()), cache).unwrap();
            let mut worker = worker(&disk);
            for step in 0..60 {
                let at = random.from(0..BYTES / 512) * 512;
                let len = (random.from(1..200) * 512).min(BYTES - at);
                let range = at as usize..(at + len) as usize;
                match random.from(0..5) {
                    0 | 1 => {
                        let bytes = vec![step; len as usize];
                        assert_eq!(worker.write(at, &bytes, random.from(0..2) * 512), Ok(()), "{case}");
                        expected[range].fill(step);
                    }
                    2 if disk.limits().write_zeroes.is_some() => {
                        let request = Request::WriteZeroes { durable: random.from(0..2) == 0 };
                        run_on_extent(&mut worker, request, at, len, random.from(0..2) == 0);
                        expected[range].fill(0);
                    }
                    _ => {
                        let found = worker.read(at, len as usize);
                        assert!(found == (Ok(()), expected[range].to_vec()), "{case}: {at} {len}");
                    }
                }
            }
            drop(worker);
            disk.write_back().unwrap();
            drop(disk);
            check(&path);
            image.img(&["convert", "-f", "qcow2", "-O", "raw", path.to_str().unwrap(), "out"]);
            assert!(fs::read(image.dir.path().join("out")).unwrap() == expected, "{case} {cache}");
        }
    }
}

/// A disk grows while a worker uses it, also when its L1 table has no room. A closed disk does not grow,
/// because another host may use the image.
#[test]
fn an_open_disk_grows() {
    for (options, to) in [(&["-o", "cluster_size=512"][..], 64 << 20), (&[], 64 << 30), (&[], LEN + 512)] {
        let contents = Random(3).bytes(LEN);
        let image = Image::of(&contents, options);
        let disk = open(&image.spec(), Cache::None).unwrap();
        let bytes = fs::read(image.path()).unwrap();
        assert_eq!(disk.grow(to).unwrap(), Resized::Same);
        assert!(fs::read(image.path()).unwrap() == bytes, "a closed image was written");
        disk.reload(false).unwrap();
        let mut worker = worker(&disk);
        assert_eq!(worker.write(0, &[7; 4096], 0), Ok(()));
        assert_eq!(disk.grow(to).unwrap(), Resized::Grown { from: LEN, to });
        assert_eq!((disk.grow(to).unwrap(), disk.size()), (Resized::Same, to));
        assert!(worker.read(to - 512, 512) == (Ok(()), vec![0; 512]));
        assert_eq!(worker.write(to - 512, &[9; 512], 0), Ok(()));
        let expected = [&[7; 4096][..], &contents[4096..]].concat();
        assert!(worker.read(0, LEN as usize) == (Ok(()), expected.clone()));
        drop(worker);
        disk.write_back().unwrap();
        check(&image.path());
        assert_eq!(disk.grow(2 * to).unwrap(), Resized::Same);
        drop(disk);
        let disk = open(&image.spec(), Cache::None).unwrap();
        let mut worker = common::worker(&disk);
        assert_eq!(disk.size(), to);
        assert!(worker.read(0, LEN as usize) == (Ok(()), expected));
        assert!(worker.read(to - 512, 512) == (Ok(()), vec![9; 512]));
    }
}

/// The header of an image that was found corrupt is not changed any more, except for the mark.
#[test]
fn a_corrupt_image_does_not_grow() {
    let image = Image::of(&Random(4).bytes(LEN), &[]);
    let mut bytes = fs::read(image.path()).unwrap();
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = (word(&bytes, word(&bytes, 40) as usize) & !(1 << 63)) as usize;
    // A reserved bit.
    bytes[table + 7] |= 2;
    fs::write(image.path(), &bytes).unwrap();
    let disk = open(&image.spec(), Cache::None).unwrap();
    disk.reload(false).unwrap();
    let mut worker = worker(&disk);
    assert!(worker.write(0, &[7; 512], 0).is_err());
    for to in [LEN + 512, 64 << 40] {
        disk.grow(to).unwrap_err();
    }
    assert_eq!(disk.size(), LEN);
    drop(worker);
    drop(disk);
    let now = fs::read(image.path()).unwrap();
    assert_eq!(now[24..72], bytes[24..72]);
    assert_eq!(now[79] & 2, 2, "the image is not marked");
}

#[test]
fn growth_that_is_refused() {
    let image = Image::of(&[7; 4096], &["-o", "compat=0.10"]);
    image.img(&["snapshot", "-c", "a", "disk.qcow2"]);
    let refused = |disk: &Disk, size| disk.grow(size).unwrap_err().to_string();
    let disk = open(&image.spec(), Cache::None).unwrap();
    disk.reload(false).unwrap();
    assert!(refused(&disk, 1 << 20).contains("version 2 of the format cannot record their sizes"));
    for size in [4097, i64::MAX as u64 + 1] {
        assert!(refused(&disk, size).contains("invalid"), "{size}");
    }
    assert_eq!(disk.size(), 4096);
    drop(disk);
    let disk = Disk::open(&image.spec(), &options(Cache::None, true)).unwrap();
    disk.reload(false).unwrap();
    assert!(refused(&disk, 1 << 20).contains("invalid"));
    drop(disk);
    // The new part would show the bytes of the longer image below.
    image.img(&["create", "-q", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "top", "2048"]);
    let disk = open(&DiskSpec::Qcow2(image.dir.path().join("top")), Cache::None).unwrap();
    disk.reload(false).unwrap();
    assert!(refused(&disk, 1 << 20).contains("its backing image is longer"));
}
