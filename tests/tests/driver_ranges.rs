//! Tests discards and writes of zeroes with our driver, on every engine and disk, and disks that fail,
//! refuse or answer late.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use kickless_driver::{Disk, Options};
use kickless_spec::blk::BlkFeatures;
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::image_dir;

const MIB: usize = 1 << 20;
const SIZE: usize = 8 * MIB;
const ENGINES: [&str; 4] = ["auto", "io_uring", "aio", "threads"];

fn serve(disk: &str, engine: &str) -> Daemon {
    let engine = Some(engine.to_owned());
    Daemon::start(&DaemonConfig { engine, program: Program::Kickless, ..DaemonConfig::new(disk) }).unwrap()
}

fn connect(daemon: &Daemon) -> Disk {
    let connect_timeout = Duration::from_secs(30);
    Disk::connect(Options { connect_timeout, ..Options::new(daemon.socket()) }).unwrap()
}

fn image(path: &Path) {
    File::create_new(path).unwrap().set_len(SIZE as u64).unwrap();
}

fn end(daemon: Daemon, disk: &Disk) {
    disk.close();
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{log:#?}");
}

#[test]
fn discards_and_zeroes() {
    let dir = image_dir().unwrap();
    for (number, engine) in ENGINES.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        image(&path);
        for spec in [path.to_str().unwrap(), "mem:8M"] {
            let daemon = serve(spec, engine);
            let disk = connect(&daemon);
            let needed = BlkFeatures::DISCARD | BlkFeatures::WRITE_ZEROES;
            assert!(disk.blk_features().contains(needed), "{spec} {engine}: {:?}", disk.blk_features());
            let full = pattern(7, SIZE);
            disk.write_at(&full, 0).unwrap();
            disk.flush().unwrap();
            disk.write_zeroes(512, MIB as u64, true).unwrap();
            disk.write_zeroes(2 * MIB as u64, 3 * 512, false).unwrap();
            disk.discard(4 * MIB as u64, 2 * MIB as u64).unwrap();
            let mut read = vec![1; SIZE];
            disk.read_at(&mut read, 0).unwrap();
            let mut expected = full;
            expected[512..512 + MIB].fill(0);
            expected[2 * MIB..2 * MIB + 3 * 512].fill(0);
            // Discarded bytes may have any value.
            expected[4 * MIB..6 * MIB].copy_from_slice(&read[4 * MIB..6 * MIB]);
            assert!(read == expected, "{spec} {engine}");
            end(daemon, &disk);
        }
        let space = fs::metadata(&path).unwrap().blocks() * 512;
        assert!(space < 5 * MIB as u64 + 65536, "{engine}: the image takes {space} bytes");
    }
}

/// Temporary faults only take time; the driver gets no error.
#[test]
fn temporary_faults_are_retried() {
    let dir = image_dir().unwrap();
    for (number, engine) in ENGINES.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        image(&path);
        let rules = "short@30%,eagain@20%,delay=100us-2ms@15%";
        let daemon = serve(&format!("fault:{rules}:{}", path.display()), engine);
        let disk = connect(&daemon);
        let full = pattern(number as u64, SIZE);
        disk.write_at(&full, 0).unwrap();
        disk.write_zeroes(0, 65536, true).unwrap();
        disk.flush().unwrap();
        let mut read = vec![1; SIZE];
        disk.read_at(&mut read, 0).unwrap();
        assert!(read[..65536] == [0; 65536] && read[65536..] == full[65536..], "{engine}");
        end(daemon, &disk);
        assert!(fs::read(&path).unwrap() == read, "{engine}");
    }
}

/// The kernel refuses the only request. No completion follows that would make the worker look at the queue
/// again.
#[test]
fn a_refused_request_is_retried_without_others_in_flight() {
    let dir = image_dir().unwrap();
    for (number, engine) in ENGINES.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        image(&path);
        let daemon = serve(&format!("fault:eagain@80%:{}", path.display()), engine);
        let disk = connect(&daemon);
        for sector in 0..20 {
            disk.write_at(&[sector as u8; 512], sector * 512).unwrap();
            disk.flush().unwrap();
        }
        end(daemon, &disk);
        assert_eq!(fs::read(&path).unwrap()[19 * 512..][..512], [19; 512]);
    }
}

/// Permanent faults reach the driver as errors, and the daemon goes on.
#[test]
fn permanent_faults_reach_the_driver() {
    let dir = image_dir().unwrap();
    let path = dir.path().join("disk");
    image(&path);
    for disk in [path.to_str().unwrap(), "mem:8M", "null:8M"] {
        let daemon = serve(&format!("fault:eio@write+100-199,enospc@discard,eio@read+nth=2:{disk}"), "auto");
        let disk = connect(&daemon);
        assert!(disk.write_at(&[1; 512], 150 * 512).is_err());
        disk.write_at(&[1; 512], 99 * 512).unwrap();
        disk.write_at(&[1; 512], 200 * 512).unwrap();
        assert!(disk.discard(0, 4096).is_err());
        disk.write_zeroes(0, 4096, true).unwrap();
        let mut sector = [0; 512];
        disk.read_at(&mut sector, 0).unwrap();
        assert!(disk.read_at(&mut sector, 0).is_err());
        disk.read_at(&mut sector, 0).unwrap();
        disk.flush().unwrap();
        end(daemon, &disk);
    }
}
