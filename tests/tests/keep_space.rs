//! Checks that with `discard=off` no space of an image becomes free, whatever the driver asks for: a
//! preallocated image stays so. Images of all kinds that have space to give back, and changes while a driver
//! uses them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use kickless_driver::{Disk, Options};
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::image_dir;
use kickless_tests::qcow2::{Qcow2Image, serve};
use kickless_tests::remote_disks::nbd::{Kind, NbdServer};
use rustix::fs::{FallocateFlags, fallocate};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
const LIMIT: Duration = Duration::from_secs(30);
const ENGINES: [&str; 3] = ["io_uring", "aio", "threads"];

/// Bytes of a file system's own blocks for a file, such as the tree of its extents. They count as the file's,
/// and become fewer when extents grow together. What a discard returns is far more.
const METADATA: u64 = 64 << 10;

/// Returns the bytes that a file takes.
fn space(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

fn off(config: DaemonConfig) -> DaemonConfig {
    let arguments = vec!["--discard=off".into()];
    DaemonConfig { program: Program::Kickless, arguments, ..config }
}

/// Makes a raw image that has all its space and reads as zeroes.
fn preallocated(path: &Path) {
    let file = File::create_new(path).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, SIZE).unwrap();
    file.sync_all().unwrap();
}

/// Asks for all that gives space back, and checks what the disk reads afterwards.
fn ask_for_space(disk: &Disk) {
    let mut expected = pattern(3, SIZE as usize);
    disk.write_at(&expected, 0).unwrap();
    // Whole clusters, parts of clusters, and parts of blocks.
    for (unmap, at, len) in [(true, MIB, 4 * MIB), (true, 6 * MIB + 512, 3 * 512), (false, 7 * MIB, MIB)] {
        disk.write_zeroes(at, len, unmap).unwrap();
        expected[at as usize..(at + len) as usize].fill(0);
    }
    disk.write_zeroes(9 * MIB - 4096, 128 << 10, true).unwrap();
    expected[9 * MIB as usize - 4096..][..128 << 10].fill(0);
    // Zeroes that were there already.
    disk.write_zeroes(MIB, MIB, true).unwrap();
    for (at, len) in [(0, 512), (10 * MIB, 5 * MIB), (15 * MIB + 4096, MIB - 4096), (2 * MIB, MIB)] {
        disk.discard(at, len).unwrap();
    }
    disk.flush().unwrap();
    let mut read = vec![1; SIZE as usize];
    disk.read_at(&mut read, 0).unwrap();
    assert!(read == expected);
}

#[test]
fn a_preallocated_raw_image_keeps_its_space() {
    let dir = image_dir().unwrap();
    for engine in ENGINES {
        for cache in ["--cache=none", "--cache=writeback"] {
            let path = dir.path().join(format!("{engine}{cache}"));
            preallocated(&path);
            let before = space(&path);
            let mut config = off(DaemonConfig::new(&path));
            config.engine = Some(engine.into());
            config.arguments.push(cache.into());
            let (daemon, disk) = serve(&config).unwrap();
            ask_for_space(&disk);
            disk.close();
            assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
            assert!(space(&path) + METADATA >= before, "{engine} {cache}: {before} became {}", space(&path));
        }
    }
}

#[test]
fn a_preallocated_qcow2_image_keeps_its_space() {
    let words = ["compat=1.1", "compat=0.10", "cluster_size=4k", "cluster_size=2M", "extended_l2=on"];
    for (preallocation, word) in ["falloc", "full"].into_iter().flat_map(|how| words.map(|word| (how, word)))
    {
        let options = format!("preallocation={preallocation},{word}");
        let image = Qcow2Image::create(&["-o", &options], SIZE).unwrap();
        let before = space(&image.path());
        let (daemon, disk) = serve(&off(image.config())).unwrap();
        ask_for_space(&disk);
        let mut contents = vec![0; SIZE as usize];
        disk.read_at(&mut contents, 0).unwrap();
        disk.close();
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
        assert!(
            space(&image.path()) + METADATA >= before,
            "{options}: {before} became {}",
            space(&image.path())
        );
        assert!(image.contents().unwrap() == contents, "{options}");
        let report = image.check().unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{options}");
        // Each cluster has a place in the file.
        let map = image.img(&["map", "--output=json", "-f", "qcow2", "disk"]).unwrap();
        let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
        assert!(map.iter().all(|extent| extent["offset"].is_u64()), "{options}: {map:?}");
    }
}

/// Compressed clusters become free when zeroes replace them, without a discard. Later data go to these
/// clusters, which are zeroed before.
#[test]
fn space_of_free_clusters_stays_with_a_qcow2_image() {
    let [on, off] = ["on", "off"].map(|discard| {
        let image = Qcow2Image::empty().unwrap();
        // Half of each cluster is random.
        let mut contents = pattern(5, 8 * MIB as usize);
        contents.chunks_mut(32 << 10).step_by(2).for_each(|half| half.fill(0));
        fs::write(image.dir().join("raw"), &contents).unwrap();
        image.img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "raw", "disk"]).unwrap();
        let mut config = image.config();
        config.arguments = vec![format!("--discard={discard}")];
        let space_after = |use_disk: &dyn Fn(&Disk)| {
            let (daemon, disk) = serve(&config).unwrap();
            use_disk(&disk);
            disk.flush().unwrap();
            disk.close();
            assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
            let report = image.check().unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0));
            space(&image.path())
        };
        let before = space(&image.path());
        let zeroed = space_after(&|disk| disk.write_zeroes(0, 8 * MIB, false).unwrap());
        assert!(image.contents().unwrap() == vec![0; 8 * MIB as usize]);
        let written = space_after(&|disk| disk.write_at(&[7; 65536], 2 * MIB).unwrap());
        [before, zeroed, written]
    });
    println!("space at first, after zeroes, and after a write: {on:?} with discards, {off:?} without");
    assert!(on[1] < MIB, "the test frees no clusters: {on:?}");
    assert!(off.windows(2).all(|pair| pair[0] <= pair[1] + METADATA), "{off:?}");
}

/// The clusters that were prepared and not used stay holes.
#[test]
fn a_sparse_qcow2_image_takes_what_it_needs() {
    for discard in ["on", "off"] {
        let image = Qcow2Image::create(&[], SIZE).unwrap();
        let mut config = image.config();
        config.arguments = vec![format!("--discard={discard}")];
        let (daemon, disk) = serve(&config).unwrap();
        disk.write_at(&[7; 65536], 0).unwrap();
        disk.flush().unwrap();
        disk.close();
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
        assert!(space(&image.path()) < MIB, "{discard}: {}", space(&image.path()));
    }
}

#[test]
fn an_nbd_server_keeps_the_space() {
    let dir = image_dir().unwrap();
    for (number, kind) in [Kind::Nbdkit, Kind::Qemu].into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        preallocated(&path);
        let before = space(&path);
        let server = NbdServer::start(kind, &path).unwrap();
        let (daemon, disk) = serve(&off(DaemonConfig::new(server.uri(5)))).unwrap();
        ask_for_space(&disk);
        disk.close();
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
        drop(server);
        assert!(space(&path) + METADATA >= before, "{kind:?}: {before} became {}", space(&path));
    }
}

#[test]
fn a_disk_in_memory_keeps_its_data() {
    let (daemon, disk) = serve(&off(DaemonConfig::new("mem:16M"))).unwrap();
    ask_for_space(&disk);
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// The operator changes the configuration file and sends SIGHUP. The driver stays, and uses the features that
/// it negotiated.
#[test]
fn a_reload_changes_disks_in_use() {
    let raw = image_dir().unwrap();
    let raw = raw.path().join("raw");
    preallocated(&raw);
    let image = Qcow2Image::create(&["-o", "preallocation=falloc"], SIZE).unwrap();
    let paths = [raw.clone(), image.path()];
    let before = paths.each_ref().map(|path| space(path));
    let lines = |discard: &str| {
        [raw.display().to_string(), format!("qcow2:{}", image.path().display())]
            .map(|disk| format!("blk-file = '{disk}'\ndiscard = '{discard}'"))
    };
    let [one, two] = lines("off");
    let daemon = Daemon::serve("", &[("raw", &one), ("qcow2", &two)]).unwrap();
    let disks = ["raw", "qcow2"].map(|name| {
        Disk::connect(Options { connect_timeout: LIMIT, ..Options::new(daemon.socket_of(name)) }).unwrap()
    });
    disks.iter().for_each(ask_for_space);
    assert!(space(&paths[0]) + METADATA >= before[0] && space(&paths[1]) + METADATA >= before[1]);
    let [one, two] = lines("on");
    daemon.reload("", &[("raw", &one), ("qcow2", &two)]).unwrap();
    daemon.log().wait_for("the reload", LIMIT, |line| line.contains("was read again").then_some(())).unwrap();
    for disk in &disks {
        disk.discard(0, SIZE).unwrap();
        disk.close();
    }
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    for path in &paths {
        assert!(space(path) < MIB, "{} takes {}", path.display(), space(path));
    }
}
