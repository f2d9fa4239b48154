//! Tests a disk that hangs, and other disks on the same worker.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use kickless_spec::blk::{self, BlkFeatures};
use kickless_spec::features::Features;
use kickless_spec::vhost_user::{FrontendRequest, ProtocolFeatures, inflight_head_len};
use kickless_testing::FileSystem;
use kickless_testing::pattern;
use kickless_tests::daemon::Daemon;
use kickless_tests::driver::request::{Layout, Request};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::frontend::{Answer, LIMIT};
use kickless_tests::guest::image_dir;
use kickless_tests::with_each_engine;
use kickless_vhost_user::FrontendMessage as Message;
use rustix::process::Signal;
use tempfile::TempDir;

with_each_engine! {
    other_disks_work_while_one_hangs
    sigterm_stops_other_disks_while_one_hangs
    a_stop_waits_for_what_the_kernel_has
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

/// A front-end that takes the in-flight buffer along still waits for what the kernel has, because that could
/// land after newer writes. What the kernel does not have is left.
fn a_stop_waits_for_what_the_kernel_has(engine: &str) {
    let Rig { daemon, _images, file_system } = match start(engine) {
        Ok(rig) => rig,
        Err(why) => return println!("SKIPPED: no file system can be frozen here: {why}"),
    };
    let protocol = ProtocolFeatures::GET_VRING_BASE_INFLIGHT;
    let shape = Shape { size: 1024, indirect: true, returns: true, protocol, ..Shape::default() };
    let mut machine = Machine::prepare(&daemon.socket_of("hung1"), &shape).unwrap();
    let kept = machine.get_and_set_inflight().unwrap();
    machine.resume().unwrap();
    let frozen = file_system.freeze().unwrap();
    let request = Request::write(0, &pattern(7, 4096));
    (0..HUNG).for_each(|_| machine.submit(0, &request).unwrap());
    let deadline = Instant::now() + LIMIT;
    let mut entry = [0; 1];
    while entry[0] == 0 {
        assert!(Instant::now() < deadline, "nothing is in flight");
        kept.file().unwrap().read_exact_at(&mut entry, inflight_head_len(false) as u64).unwrap();
    }
    machine.frontend.send(&Message::GetVringBase { index: 0 }).unwrap();
    let code = FrontendRequest::GetVringBase;
    assert!(!machine.frontend.replies_within(code, Duration::from_millis(500)).unwrap());
    drop(frozen);
    assert!(machine.frontend.replies_within(code, LIMIT).unwrap());
    let mut answered = 0;
    while machine.queues[0].take_used().unwrap().is_some() {
        answered += 1;
    }
    assert!(answered > 0 && answered < HUNG, "{answered}");
    machine.frontend.set_inflight(&kept.copy().unwrap()).unwrap();
    machine.resume().unwrap();
    for _ in answered..HUNG {
        machine.queues[0].wait_used(Instant::now() + LIMIT).unwrap();
    }
    machine.stop().unwrap();
    assert_eq!(machine.queues[0].in_flight(), 0);
    drop(machine);
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
