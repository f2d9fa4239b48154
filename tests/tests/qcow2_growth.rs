//! Tests qcow2 images that grow while a driver uses them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::thread;
use std::time::Duration;

use kickless_disk::lock::ImageLock;
use kickless_testing::pattern;
use kickless_testing::{Random, eventually};
use kickless_tests::daemon::{Daemon, DaemonConfig};
use kickless_tests::disk_size::{connect, wait_for_size};
use kickless_tests::qcow2::{Qcow2Image, serve};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);
/// Small clusters, so that the L1 table moves at each step.
const SMALL: [&str; 2] = ["-o", "cluster_size=512"];

/// Returns the lines of the configuration file for an image with this size.
fn lines(image: &Qcow2Image, mib: u64) -> String {
    format!("blk-file = 'qcow2:{}'\nblk-size = '{mib}M'", image.path().display())
}

/// The operator changes the configuration file and sends SIGHUP.
#[test]
fn a_driver_sees_the_new_size_of_the_configuration_file() {
    for options in [&SMALL[..], &[]] {
        let image = Qcow2Image::create(options, 4 * MIB).unwrap();
        let daemon = Daemon::serve("", &[("disk", &lines(&image, 4))]).unwrap();
        let disk = connect(&daemon.socket_of("disk")).unwrap();
        let mut contents = pattern(1, 4 * MIB as usize);
        disk.write_at(&contents, 0).unwrap();
        for mib in [8, 24, 60] {
            daemon.reload("", &[("disk", &lines(&image, mib))]).unwrap();
            wait_for_size(&disk, mib * MIB).unwrap();
            let last = pattern(mib, 4096);
            contents.resize((mib * MIB) as usize, 0);
            let at = contents.len() - last.len();
            contents[at..].copy_from_slice(&last);
            disk.write_at(&last, at as u64).unwrap();
            let mut found = vec![0; contents.len()];
            disk.read_at(&mut found, 0).unwrap();
            assert!(found == contents, "{mib} MiB");
        }
        // QEMU's tool cannot: the image is locked.
        let refused = image.img(&["resize", "-f", "qcow2", "disk", "128M"]).unwrap_err();
        assert!(format!("{refused:#}").contains("lock"), "{refused:#}");
        disk.close();
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
        let report = image.check().unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0));
        assert!(image.contents().unwrap() == contents);
    }
}

/// A wrong file changes nothing. Other changes wait for a restart, and the log says so.
#[test]
fn a_disk_in_use_grows_beside_other_changes_of_the_file() {
    let image = Qcow2Image::create(&[], 4 * MIB).unwrap();
    let daemon = Daemon::serve("", &[("disk", &lines(&image, 4)), ("other", "blk-file = 'mem:1M'")]).unwrap();
    let disk = connect(&daemon.socket_of("disk")).unwrap();
    let said = |what: &str| {
        daemon.log().wait_for(what, LIMIT, |line| line.contains(what).then_some(())).unwrap();
    };
    daemon.reload("", &[("disk", &lines(&image, 8)), ("other", "blk-file = 'mem:1'")]).unwrap();
    said("not a multiple of 512");
    assert_eq!(disk.size().unwrap(), 4 * MIB);
    daemon.reload("", &[("disk", &lines(&image, 12)), ("other", "blk-file = 'mem:2M'")]).unwrap();
    said("replaced=other");
    said("the disk has grown");
    wait_for_size(&disk, 12 * MIB).unwrap();
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

/// The option of the command line holds from the first start of the device on. A larger size of the image
/// stays. Between two guests, QEMU's tool can change the size too.
#[test]
fn an_image_grows_when_its_device_starts() {
    let image = Qcow2Image::create(&[], 4 * MIB).unwrap();
    let config = DaemonConfig { arguments: vec!["--blk-size=8M".into()], ..image.config() };
    let daemon = Daemon::start(&config).unwrap();
    let disk = connect(daemon.socket()).unwrap();
    wait_for_size(&disk, 8 * MIB).unwrap();
    disk.close();
    eventually("the image stays locked", || {
        image.img(&["resize", "-q", "-f", "qcow2", "disk", "16M"]).is_ok()
    });
    let disk = connect(daemon.socket()).unwrap();
    wait_for_size(&disk, 16 * MIB).unwrap();
    disk.write_at(&[7; 512], 16 * MIB - 512).unwrap();
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    assert_eq!(image.check().unwrap().corruptions, 0);
}

/// A kill while the image grows, and while a driver writes, leaves the old size or the new one, and all data.
#[test]
fn kills_while_an_image_grows() {
    let image = Qcow2Image::create(&SMALL, 4 * MIB).unwrap();
    let mut random = Random(5);
    let mut contents = vec![0; 4 * MIB as usize];
    for kill in 0..10 {
        let mib = 4 + 4 * (kill + 1);
        let arguments = vec![format!("--blk-size={mib}M")];
        let (daemon, disk) = serve(&DaemonConfig { arguments, ..image.config() }).unwrap();
        let moment = Duration::from_micros(random.below(20_000));
        let first = random.below(64);
        let written = thread::scope(|scope| {
            let write = scope.spawn(|| {
                let mut written = 0;
                for number in first..first + 1000 {
                    let at = number % 1024 * 4096;
                    if disk.write_at(&pattern(number ^ kill << 32, 4096), at).is_err() {
                        break;
                    }
                    written += 1;
                }
                written
            });
            thread::sleep(moment);
            daemon.signal(Signal::KILL).unwrap();
            write.join().unwrap()
        });
        drop((disk, daemon));
        // The kernel may end the I/O of a process, and release its lock, after the process is gone.
        let file = File::options().read(true).write(true).open(image.path()).unwrap();
        eventually("the lock is not released", || ImageLock::acquire(&file, false).is_ok());
        assert_eq!(image.check().unwrap().corruptions, 0, "kill {kill}");
        let found = image.contents().unwrap();
        assert!(
            found.len() as u64 <= mib * MIB && found.len() >= contents.len(),
            "kill {kill}: {}",
            found.len()
        );
        contents.resize(found.len(), 0);
        for number in first..first + written {
            let at = (number % 1024 * 4096) as usize;
            contents[at..at + 4096].copy_from_slice(&pattern(number ^ kill << 32, 4096));
        }
        // The write in flight may be there, or not.
        let unknown = ((first + written) % 1024 * 4096) as usize;
        contents[unknown..unknown + 4096].copy_from_slice(&found[unknown..unknown + 4096]);
        assert!(found == contents, "kill {kill}");
    }
}
