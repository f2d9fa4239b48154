//! Tests a disk that hangs, and other disks on the same worker.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_testing::FileSystem;
use kickless_testing::pattern;
use kickless_tests::daemon::Daemon;
use kickless_tests::driver::request::{Layout, Request};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::{Answer, LIMIT};
use kickless_tests::guest::image_dir;
use kickless_tests::with_each_engine;
use rustix::process::Signal;
use tempfile::TempDir;

with_each_engine! {
    other_disks_work_while_one_hangs
    sigterm_stops_other_disks_while_one_hangs
}

const BYTES: u64 = 16 << 20;
/// Writes in flight on two queues of a hung disk. They are more than an engine has slots.
const HUNG: u16 = 600;
/// The other disks, with their options.
const NEIGHBOURS: [(&str, &str, &str); 3] =
    [("direct", "", ""), ("cached", "", "cache = 'writeback'"), ("qcow2", "qcow2:", "")];

/// Creates an image with all its space allocated, like a disk in use.
fn image(path: &Path) {
    let file = File::create(path).unwrap();
    (0..BYTES >> 20).for_each(|mib| file.write_all_at(&[1; 1 << 20], mib << 20).unwrap());
    file.sync_all().unwrap();
}

struct Rig {
    daemon: Daemon,
    _images: TempDir,
    file_system: FileSystem,
}

/// Starts one worker with three disks in a file system that can be frozen, and three other disks.
fn start(engine: &str) -> Result<Rig, String> {
    let file_system = FileSystem::mount()?;
    let images = image_dir().unwrap();
    let mut devices = Vec::new();
    for (name, options) in [("hung1", ""), ("hung2", "cache = 'writeback'"), ("hung3", "")] {
        let path = file_system.path().join(name);
        image(&path);
        devices.push((name, format!("blk-file = '{}'\n{options}\nqueue-size = 1024", path.display())));
    }
    for (name, prefix, options) in NEIGHBOURS {
        let path = images.path().join(name);
        image(&path);
        if name == "qcow2" {
            fs::remove_file(&path).unwrap();
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("16M");
            create.status().map_err(|error| format!("qemu-img: {error}"))?;
        }
        devices.push((name, format!("blk-file = '{prefix}{}'\n{options}", path.display())));
    }
    let devices: Vec<_> = devices.iter().map(|(name, lines)| (*name, lines.as_str())).collect();
    let daemon = Daemon::serve(&format!("workers = 1\nengine = '{engine}'"), &devices).unwrap();
    Ok(Rig { daemon, _images: images, file_system })
}

/// Connects a machine and fills its queues with writes.
fn fill_queues(daemon: &Daemon, name: &str) -> Machine {
    let shape = Shape { queues: 2, size: 1024, indirect: true, ..Shape::default() };
    let mut machine = Machine::start(&daemon.socket_of(name), &shape).unwrap();
    let request = Request::write(0, &pattern(7, 4096));
    for queue in 0..shape.queues {
        (0..HUNG).for_each(|_| machine.submit(queue, &request).unwrap());
    }
    machine
}

/// Writes, reads, flushes and discards several times, and stops the queue.
fn check_disk(daemon: &Daemon, name: &str) {
    let mut machine =
        Machine::start(&daemon.socket_of(name), &Shape { discard: true, ..Shape::default() }).unwrap();
    let discards =
        machine.frontend.features().contains(Features::from_bits_retain(BlkFeatures::DISCARD.bits()));
    assert!(discards, "{name} has no discards");
    for round in 0..20 {
        let (sector, data) = (round * 64, pattern(round, 8192));
        machine.write(0, sector, &data).unwrap();
        assert!(
            machine.read(0, sector, data.len()).unwrap() == data,
            "{name}: read other bytes than it wrote"
        );
        let segment = [&(sector + 8).to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
        let discard = Request { kind: blk::T_DISCARD, sector: 0, write: segment, read_len: 0 };
        for request in [Request::flush(), discard, Request::flush()] {
            let done = machine.perform(0, &request, Layout::Usual).unwrap();
            assert_eq!(done.status, blk::S_OK, "{name}: {request}");
        }
    }
    machine.stop().unwrap();
}

fn other_disks_work_while_one_hangs(engine: &str) {
    let Rig { daemon, _images, file_system } = match start(engine) {
        Ok(rig) => rig,
        Err(why) => return println!("SKIPPED: no file system can be frozen here: {why}"),
    };
    NEIGHBOURS.iter().for_each(|(name, ..)| check_disk(&daemon, name));
    let frozen = file_system.freeze().unwrap();
    let mut hung = Vec::new();
    // The disks hang one after the other.
    for name in ["hung1", "hung2", "hung3"] {
        hung.push(fill_queues(&daemon, name));
        NEIGHBOURS.iter().for_each(|(name, ..)| check_disk(&daemon, name));
    }
    drop(frozen);
    for machine in &mut hung {
        for queue in 0..2 {
            for _ in 0..HUNG {
                machine.queues[queue].wait_used(Instant::now() + LIMIT).unwrap();
            }
        }
        machine.stop().unwrap();
    }
    drop(hung);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{log:#?}");
}

/// SIGTERM stops the other disks while one hangs. The process ends when that disk continues.
fn sigterm_stops_other_disks_while_one_hangs(engine: &str) {
    let Rig { daemon, _images, file_system } = match start(engine) {
        Ok(rig) => rig,
        Err(why) => return println!("SKIPPED: no file system can be frozen here: {why}"),
    };
    let frozen = file_system.freeze().unwrap();
    let hung = fill_queues(&daemon, "hung1");
    let mut near =
        Machine::start(&daemon.socket_of("direct"), &Shape { discard: true, ..Shape::default() }).unwrap();
    near.write(0, 0, &pattern(1, 4096)).unwrap();
    daemon.signal(Signal::TERM).unwrap();
    // The session of a hung disk does not answer, which is an error.
    assert_eq!(near.frontend.answer_to_raw().unwrap(), Answer::Dropped);
    drop(frozen);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{log:#?}");
    drop((hung, near));
}
