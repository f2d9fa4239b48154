//! Tests qcow2 images beside other processes and files: hand-over to and from QEMU by the lock, writes
//! without space, long chains and loops.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::process::Command;

use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::qcow2::{CheckReport, Qcow2Image, serve};
use tempfile::TempDir;

const SIZE: usize = 16 << 20;
const PART: usize = 300 << 10;

/// QEMU's storage daemon and kickless serve an image by turns. Each one refuses it while the other one has
/// it, and reads what the other one has written.
#[test]
fn programs_hand_an_image_over_by_its_lock() {
    let image = Qcow2Image::create(&[], SIZE as u64).unwrap();
    let mut contents = vec![0; SIZE];
    let config = |program| DaemonConfig { program, ..image.config() };
    for round in 0..6 {
        let (program, other) = match round % 2 {
            0 => (Program::Kickless, Program::StorageDaemon),
            _ => (Program::StorageDaemon, Program::Kickless),
        };
        let (daemon, disk) = serve(&config(program)).unwrap();
        let mut read = vec![0; SIZE];
        disk.read_at(&mut read, 0).unwrap();
        assert!(read == contents, "{program:?} in round {round}");
        let refused = Daemon::start(&config(other)).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|error| error.contains("lock")), "{other:?} in round {round}");
        let start = round * (PART + 512);
        let data = pattern(round as u64, PART);
        disk.write_at(&data, start as u64).unwrap();
        contents[start..start + PART].copy_from_slice(&data);
        disk.write_zeroes(start as u64, 128 << 10, true).unwrap();
        contents[start..start + (128 << 10)].fill(0);
        disk.close();
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0), "{program:?} in round {round}");
        assert_eq!(image.check().unwrap(), CheckReport::default(), "{program:?} in round {round}");
        assert!(image.contents().unwrap() == contents, "{program:?} in round {round}");
    }
}

/// A tmpfs with little space. Dropping it unmounts it.
struct SmallTmpfs(TempDir);

impl SmallTmpfs {
    fn mount(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path());
        mount.status().is_ok_and(|status| status.success()).then(|| Self(dir))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Writes fail while the file system is full. They succeed again when it has space, and nothing that was
/// answered is lost.
#[test]
fn writes_without_space_fail_and_lose_nothing() {
    const PIECE: usize = 64 << 10;
    let Some(tmpfs) = SmallTmpfs::mount("size=4M") else {
        return println!("SKIPPED: no right to mount a tmpfs");
    };
    let image = Qcow2Image::empty_in(tmpfs.0.path()).unwrap();
    image.img(&["create", "-q", "-f", "qcow2", "disk", &SIZE.to_string()]).unwrap();
    let ballast = image.dir().join("ballast");
    std::fs::write(&ballast, vec![1; 2 << 20]).unwrap();
    let mut contents = vec![0; SIZE];
    let mut unknown = vec![false; SIZE / PIECE];
    // tmpfs may lack O_DIRECT.
    let arguments = vec!["--cache=writeback".to_owned()];
    let config = DaemonConfig { arguments, ..image.config() };
    let (daemon, disk) = serve(&config).unwrap();
    let mut failed = 0;
    for round in 0..3_u64 {
        // In the second round there is space.
        if round == 1 {
            std::fs::remove_file(&ballast).unwrap();
        }
        for (piece, unknown) in unknown.iter_mut().enumerate().take(36) {
            let data = pattern(round * 1000 + piece as u64, PIECE);
            let range = piece * PIECE..(piece + 1) * PIECE;
            match disk.write_at(&data, range.start as u64) {
                Ok(()) => {
                    contents[range].copy_from_slice(&data);
                    *unknown = false;
                }
                Err(error) => {
                    assert_eq!(round, 0, "piece {piece}: {error}");
                    failed += 1;
                    *unknown = true;
                }
            }
        }
        for (piece, unknown) in unknown.iter().enumerate() {
            let mut read = vec![0; PIECE];
            disk.read_at(&mut read, (piece * PIECE) as u64).unwrap();
            assert!(*unknown || read == contents[piece * PIECE..][..PIECE], "piece {piece} in round {round}");
        }
        disk.flush().unwrap();
    }
    assert!(failed > 0);
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    let report = image.check().unwrap();
    assert_eq!(report.corruptions, 0, "{report:?}");
    // There is no space for the raw contents beside the image.
    let (daemon, disk) = serve(&config).unwrap();
    let mut read = vec![0; SIZE];
    disk.read_at(&mut read, 0).unwrap();
    assert!(read == contents);
    disk.close();
    drop(daemon);
}

/// An image over 64 others is served. Longer chains, and chains that come back to an image, are refused.
#[test]
fn long_chains_and_loops() {
    let image = Qcow2Image::create(&[], SIZE as u64).unwrap();
    image.io(&["write -q -P 7 0 65536".to_owned()]).unwrap();
    let size = SIZE.to_string();
    let over = |backing: &str, name: &str| {
        let create = ["create", "-q", "-f", "qcow2", "-u", "-F", "qcow2"];
        image.img(&[&create[..], &["-b", backing, name, &size]].concat()).unwrap();
    };
    let config = |name: &str| {
        let mut disk = std::ffi::OsString::from("qcow2:");
        disk.push(image.dir().join(name));
        DaemonConfig { disk, ..image.config() }
    };
    let refused = |name: &str| Daemon::start(&config(name)).err().unwrap().to_string();
    over("disk", "image2");
    for number in 3..=66 {
        over(&format!("image{}", number - 1), &format!("image{number}"));
    }
    let (daemon, disk) = serve(&config("image65")).unwrap();
    let mut read = [0; 512];
    disk.read_at(&mut read, 4096).unwrap();
    assert_eq!(read, [7; 512]);
    disk.write_at(&[8; 512], 4096).unwrap();
    disk.read_at(&mut read, 4096).unwrap();
    assert_eq!(read, [8; 512]);
    disk.close();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    assert!(refused("image66").contains("too long"));

    // QEMU refuses to make an image over its own name.
    for (target, link) in [("itself", "link"), ("one", "other-link")] {
        std::os::unix::fs::symlink(target, image.dir().join(link)).unwrap();
    }
    over("link", "itself");
    over("other", "one");
    over("other-link", "other");
    for name in ["itself", "one", "other"] {
        let error = refused(name);
        assert!(error.contains("its backing image"), "{error}");
    }
}
