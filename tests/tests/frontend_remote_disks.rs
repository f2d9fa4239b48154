//! Tests sessions whose disk's server stops, dies or comes back, and images in use by several processes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::File;
use std::process::Command;
use std::time::Instant;

use kickless_spec::blk;
use kickless_testing::eventually;
use kickless_testing::pattern;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::driver::memory::Ram;
use kickless_tests::driver::request::{Layout, Request};
use kickless_tests::frontend::LIMIT;
use kickless_tests::frontend::iommu::{self, Iommu, PAGE};
use kickless_tests::frontend::machine::{Machine, Shape};
use kickless_tests::guest::image_dir;
use kickless_tests::remote_disks::nbd::{Kind, NbdServer, qemu_img};
use kickless_vhost_user::FrontendMessage as Message;
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;

fn serve(disk: &str) -> Daemon {
    Daemon::start(&DaemonConfig { program: Program::Kickless, ..DaemonConfig::new(disk) }).unwrap()
}

/// Starts a server with an empty image and a daemon. Requests wait one second for the server.
fn served(kind: Kind) -> (TempDir, NbdServer, Daemon) {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(SIZE).unwrap();
    let server = NbdServer::start(kind, &image).unwrap();
    let daemon = serve(&server.uri(1));
    (dir, server, daemon)
}

/// Flushes on a queue. Returns the status.
fn flush(machine: &mut Machine, queue: u16) -> u8 {
    machine.perform(queue, &Request::flush(), Layout::Usual).unwrap().status
}

fn shapes() -> [Shape; 2] {
    [false, true].map(|packed| Shape { queues: 2, packed, ..Shape::default() })
}

#[test]
fn a_stopped_server_delays_requests_but_no_stop() {
    for (kind, shape) in [Kind::Nbdkit, Kind::Qemu].into_iter().zip(shapes()) {
        let (_dir, server, daemon) = served(kind);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        let data = pattern(1, 4096);
        machine.write(0, 8, &data).unwrap();
        // Otherwise the end of the connection could lose this write.
        assert_eq!(flush(&mut machine, 0), blk::S_OK, "{kind:?}");
        let read = Request::read(8, 4096);

        server.stop().unwrap();
        machine.submit(0, &read).unwrap();
        server.resume().unwrap();
        assert_eq!(machine.status(0, &read).unwrap(), blk::S_OK, "{kind:?}");

        server.stop().unwrap();
        machine.submit(0, &read).unwrap();
        machine.submit(1, &Request::write(64, &data)).unwrap();
        // A stop leaves the requests that were not taken in the rings.
        daemon.wait_until_taken(0, 4).unwrap();
        daemon.wait_until_taken(1, 1).unwrap();
        machine.stop().unwrap();
        assert_eq!(machine.status(0, &read).unwrap(), blk::S_IOERR, "{kind:?}");
        assert_eq!(machine.status(1, &Request::write(64, &data)).unwrap(), blk::S_IOERR, "{kind:?}");
        drop(machine);

        // The end of the process does not wait either.
        let mut next = Machine::start(daemon.socket(), &shape).unwrap();
        next.submit(0, &read).unwrap();
        let (ended, _) = daemon.stop().unwrap();
        assert_eq!(ended.code(), Some(0), "{kind:?}");
        server.resume().unwrap();
    }
}

/// A request holds the memory that it reads into while its server does not answer.
#[test]
fn a_stopped_server_does_not_keep_memory() {
    for (kind, shape) in [Kind::Nbdkit, Kind::Qemu].into_iter().zip(shapes()) {
        let (_dir, server, daemon) = served(kind);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        let read = Request::read(8, 4096);
        assert_eq!(machine.perform(0, &read, Layout::Usual).unwrap().status, blk::S_OK, "{kind:?}");

        // The front-end waits for the answer to each message.
        let more = Ram::new(0x10_0000_0000, 1 << 20).unwrap();
        server.stop().unwrap();
        machine.submit(0, &read).unwrap();
        daemon.wait_until_taken(0, 2).unwrap();
        let Machine { frontend, ram, .. } = &mut machine;
        frontend.share(&[&more]).unwrap();
        frontend.share(&[ram, &more]).unwrap();
        server.resume().unwrap();
        assert_eq!(machine.status(0, &read).unwrap(), blk::S_IOERR, "{kind:?}");
        drop(machine);
        server.stop().unwrap();

        // The end of the process does not wait for such a session either, nor does the end of a session
        // whose front-end has left.
        for ends in [false, true] {
            let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
            machine.submit(0, &read).unwrap();
            machine.frontend.send(&Message::SetMemTable(vec![more.region_and_file().unwrap()])).unwrap();
            if ends {
                let (ended, _) = daemon.stop().unwrap();
                assert_eq!(ended.code(), Some(0), "{kind:?}");
                break;
            }
        }
        server.resume().unwrap();
    }
}

/// A request holds its translation while its server does not answer.
#[test]
fn a_stopped_server_does_not_keep_a_translation() {
    let (_dir, server, daemon) = served(Kind::Nbdkit);
    let mut machine = Machine::prepare(daemon.socket(), &Shape::default()).unwrap();
    let mut iommu = Iommu::connect(&mut machine.frontend).unwrap();
    iommu.map_all(&machine.ram);
    iommu::start(&mut machine.frontend, &machine.ram, &machine.queues[0]).unwrap();
    let buffers =
        machine.request_memory[0].lay_out(&machine.ram, &Request::read(8, 4096), Layout::Usual).unwrap();
    let seen = iommu::at_iova(&buffers);
    let submit = |machine: &mut Machine| {
        machine.queues[0].submit(&machine.ram, &seen, None).unwrap();
        machine.queues[0].flush();
    };
    submit(&mut machine);
    iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();
    server.stop().unwrap();
    submit(&mut machine);
    daemon.wait_until_taken(0, 2).unwrap();
    for buffer in &seen {
        let page = buffer.addr.0 & !(PAGE - 1);
        machine.frontend.order(&iommu::invalidate(page, PAGE)).unwrap();
    }
    server.resume().unwrap();
    iommu.wait_used(&mut machine.frontend, &mut machine.queues[0]).unwrap();
    machine.stop().unwrap();
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}

#[test]
fn requests_wait_for_a_killed_server() {
    for (kind, shape) in [Kind::Nbdkit, Kind::Qemu].into_iter().zip(shapes()) {
        let (_dir, mut server, mut daemon) = served(kind);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        let data = pattern(2, 4096);
        machine.write(0, 8, &data).unwrap();
        server.kill().unwrap();
        let failed = machine.perform(1, &Request::read(8, 4096), Layout::Usual).unwrap();
        assert_eq!(failed.status, blk::S_IOERR, "{kind:?}");
        assert!(daemon.is_running().unwrap());
        server.restart().unwrap();
        let deadline = Instant::now() + LIMIT;
        let again = loop {
            match machine.read(1, 8, 4096) {
                Ok(read) => break read,
                Err(error) => assert!(Instant::now() < deadline, "{kind:?}: {error:#}"),
            }
        };
        assert_eq!(again, data, "{kind:?}");
        // The lost server had acknowledged this write.
        for queue in [0, 1] {
            let flushes = [(); 2].map(|()| flush(&mut machine, queue));
            assert_eq!(flushes, [blk::S_IOERR, blk::S_OK], "{kind:?}, queue {queue}");
        }
        machine.stop().unwrap();
        let (ended, log) = daemon.stop().unwrap();
        assert_eq!(ended.code(), Some(0), "{kind:?}");
        for words in ["server is lost", "server stays away", "server is back"] {
            assert_eq!(log.iter().filter(|line| line.contains(words)).count(), 1, "{words}: {log:#?}");
        }
    }
}

/// No process can write to an image while an image above it is in use.
#[test]
fn backing_images_are_locked() {
    let dir = image_dir().unwrap();
    let (base, top) = (dir.path().join("base"), dir.path().join("top"));
    File::create_new(&base).unwrap().set_len(SIZE).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw"], &[&top]).unwrap();
    let daemon = serve(&format!("qcow2:{}", top.display()));
    let machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    let write = || {
        let output =
            Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&base).output().unwrap();
        output.status.success()
    };
    assert!(!write(), "the image under one that is in use can be written");
    // Another image above the same one does not write to it either.
    let second = dir.path().join("second");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw"], &[&second]).unwrap();
    let beside = serve(&format!("qcow2:{}", second.display()));
    drop(Machine::start(beside.socket(), &Shape::default()).unwrap());
    drop(machine);
    for daemon in [daemon, beside] {
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
    assert!(write());
}

/// Acknowledged writes are in the image, however the process ends.
#[test]
fn a_killed_process_loses_no_acknowledged_write() {
    let dir = image_dir().unwrap();
    let image = dir.path().join("disk.qcow2");
    let words = ["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "16M"];
    qemu_img(&words, &[]).unwrap();
    let disk = format!("qcow2:{}", image.display());
    for (round, shape) in shapes().into_iter().enumerate() {
        let daemon = serve(&disk);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        // QEMU refuses the image while it is in use.
        assert!(qemu_img(&["convert", "-O", "raw"], &[&image, &dir.path().join("out")]).is_err());
        for sector in (0..SIZE / 512).step_by(997) {
            machine.write(0, sector, &pattern(sector + round as u64, 512)).unwrap();
        }
        // Kills the daemon instead of asking it to end.
        drop(daemon);
        // The kernel keeps the lock until the operations of the killed process have ended. A kill leaves
        // clusters that nothing refers to.
        let is_sound = || qemu_img(&["check", "-q", "-r", "leaks"], &[&image]).is_ok();
        eventually("the image is damaged or stays locked", is_sound);
        let daemon = serve(&disk);
        let mut machine = Machine::start(daemon.socket(), &shape).unwrap();
        for sector in (0..SIZE / 512).step_by(997) {
            assert_eq!(machine.read(0, sector, 512).unwrap(), pattern(sector + round as u64, 512));
        }
        machine.stop().unwrap();
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
}

/// A disk whose server has lost writes is given up after one flush has said so.
#[test]
fn a_guest_that_was_told_of_a_loss_can_move() {
    let (_dir, mut server, daemon) = served(Kind::Nbdkit);
    let mut machine = Machine::start(daemon.socket(), &Shape::default()).unwrap();
    machine.write(0, 8, &[1; 4096]).unwrap();
    server.kill().unwrap();
    machine.stop().unwrap_err();
    drop(machine);
    server.restart().unwrap();
    let is_back = |line: &str| line.contains("the NBD server is back").then_some(());
    daemon.log().wait_for("the server", LIMIT, is_back).unwrap();
    let mut machine = Machine::start(daemon.socket(), &Shape { returns: true, ..Shape::default() }).unwrap();
    assert_eq!(flush(&mut machine, 0), blk::S_IOERR);
    machine.stop().unwrap();
    drop(machine);
    assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
}
