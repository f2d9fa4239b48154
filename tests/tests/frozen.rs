//! A disk that hangs, and its neighbours on the same worker.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_testing::FileSystem;
use kickless_tests::daemon::Daemon;
use kickless_tests::driver::request::{Layout, Request, pattern};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::{Answer, LIMIT};
use kickless_tests::guest::image_dir;
use kickless_tests::with_each_engine;
use rustix::process::Signal;
use tempfile::TempDir;

with_each_engine! {
    neighbours_of_hung_disks_go_on
    the_end_lets_neighbours_go
}

const BYTES: u64 = 16 << 20;
/// Writes that each queue of a hung disk has in flight, on two queues: more than an engine has slots.
const HUNG: u16 = 600;
/// The neighbours, with what they are opened with.
const NEIGHBOURS: [(&str, &str, &str); 3] =
    [("direct", "", ""), ("cached", "", "cache = 'writeback'"), ("qcow2", "qcow2:", "")];

/// An image with all of its space allocated, as that of a disk that has been in use.
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

/// One worker that serves three disks in a file system that can be frozen, and three neighbours.
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

/// A machine whose queues are full of writes.
fn overwhelm(daemon: &Daemon, name: &str) -> Machine {
    let shape = Shape { queues: 2, size: 1024, indirect: true, ..Shape::default() };
    let mut machine = Machine::start(&daemon.socket_of(name), &shape).unwrap();
    let request = Request::write(0, &pattern(7, 4096));
    for queue in 0..shape.queues {
        (0..HUNG).for_each(|_| machine.submit(queue, &request).unwrap());
    }
    machine
}

/// Writes, reads, flushes and discards again and again, and stops the queue.
fn works(daemon: &Daemon, name: &str) {
    let mut machine =
        Machine::start(&daemon.socket_of(name), &Shape { discard: true, ..Shape::default() }).unwrap();
    let discards =
        machine.frontend.features().contains(Features::from_bits_retain(BlkFeatures::DISCARD.bits()));
    assert!(discards, "{name} has no discards");
    for round in 0..20 {
        let (sector, data) = (round * 64, pattern(round, 8192));
        machine.write(0, sector, &data).unwrap();
        assert!(machine.read(0, sector, data.len()).unwrap() == data, "{name}: reads what was not written");
        let segment = [&(sector + 8).to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
        let discard = Request { kind: blk::T_DISCARD, sector: 0, write: segment, read_len: 0 };
        for request in [Request::flush(), discard, Request::flush()] {
            let done = machine.perform(0, &request, Layout::Usual).unwrap();
            assert_eq!(done.status, blk::S_OK, "{name}: {request}");
        }
    }
    machine.stop().unwrap();
}

fn neighbours_of_hung_disks_go_on(engine: &str) {
    let Rig { daemon, _images, file_system } = match start(engine) {
        Ok(rig) => rig,
        Err(why) => return println!("SKIPPED: no file system that can be frozen: {why}"),
    };
    NEIGHBOURS.iter().for_each(|(name, ..)| works(&daemon, name));
    let frozen = file_system.freeze().unwrap();
    let mut hung = Vec::new();
    // One after the other.
    for name in ["hung1", "hung2", "hung3"] {
        hung.push(overwhelm(&daemon, name));
        NEIGHBOURS.iter().for_each(|(name, ..)| works(&daemon, name));
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

/// SIGTERM stops the neighbours of a disk that hangs, and the process ends when that disk does not hang any more.
fn the_end_lets_neighbours_go(engine: &str) {
    let Rig { daemon, _images, file_system } = match start(engine) {
        Ok(rig) => rig,
        Err(why) => return println!("SKIPPED: no file system that can be frozen: {why}"),
    };
    let frozen = file_system.freeze().unwrap();
    let hung = overwhelm(&daemon, "hung1");
    let mut near =
        Machine::start(&daemon.socket_of("direct"), &Shape { discard: true, ..Shape::default() }).unwrap();
    near.write(0, 0, &pattern(1, 4096)).unwrap();
    daemon.signal(Signal::TERM).unwrap();
    // A session that hangs does not answer, which is an error.
    assert_eq!(near.frontend.answer_to_raw().unwrap(), Answer::Dropped);
    drop(frozen);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{log:#?}");
    drop((hung, near));
}
