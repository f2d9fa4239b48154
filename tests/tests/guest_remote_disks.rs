//! Runs guests on qcow2 images and on exports of NBD servers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::scratch::Scratch;
use kickless_tests::guest::{image_dir, make_image, sha256};
use kickless_tests::remote_disks::nbd::{Kind, NbdServer, qemu_img};

const MIB: u64 = 1 << 20;

fn serve(disk: &str) -> Daemon {
    Daemon::start(&DaemonConfig::new(disk)).unwrap()
}

/// fio verifies data in the guest, and the test compares the image afterwards, in both ring formats.
#[test]
fn verified_from_both_ends() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has these disks");
        return;
    }
    let scratches = [(); 4].map(|()| Scratch::new().unwrap());
    let qcow2 = [0, 1].map(|number: usize| {
        let raw = scratches[number].path();
        let path = raw.with_extension("qcow2");
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2"], &[raw, &path]).unwrap();
        path
    });
    let servers = [Kind::Nbdkit, Kind::Qemu];
    let servers =
        [0, 1].map(|number| NbdServer::start(servers[number], scratches[2 + number].path()).unwrap());
    let images = qcow2.iter().map(|path| format!("qcow2:{}", path.display()));
    let exports = servers.iter().map(|server| server.uri(10));
    let daemons: Vec<Daemon> = images.chain(exports).map(|disk| serve(&disk)).collect();
    let rings = ["packed=off", "packed=on", "packed=off", "packed=on"];
    let disks = daemons
        .iter()
        .zip(rings)
        .map(|(daemon, rings)| DiskConfig::new(daemon.socket(), &format!("num-queues=2,{rings}")));
    let guest = Guest::start(&GuestConfig::new("kl.task=check kl.size=16", disks.collect()).cpus(2)).unwrap();
    let results = guest.finish().unwrap();
    for daemon in daemons {
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
    for (path, scratch) in qcow2.iter().zip(&scratches) {
        qemu_img(&["check", "-q"], &[path]).unwrap();
        qemu_img(&["convert", "-f", "qcow2", "-O", "raw"], &[path, scratch.path()]).unwrap();
    }
    for (scratch, disk) in scratches.iter().zip(["vda", "vdb", "vdc", "vdd"]) {
        scratch.compare(&results, disk).unwrap();
    }
    assert_eq!(
        ["vda", "vdb", "vdc", "vdd"].map(|disk| results[&format!("{disk}.packed")].as_str()),
        ["0", "1", "0", "1"]
    );
}

/// Space that a guest discards is free in the file, through each kind of server and image.
#[test]
fn blkdiscard_and_fstrim_give_space_back() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has these disks");
        return;
    }
    let space = |path: &Path| fs::metadata(path).unwrap().blocks() * 512;
    let dir = image_dir().unwrap();
    let (image, export) = (dir.path().join("image.qcow2"), dir.path().join("export"));
    qemu_img(&["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "64M"], &[]).unwrap();
    make_image(&export, 64, 0).unwrap();
    let server = NbdServer::start(Kind::Qemu, &export).unwrap();
    for order in [[0, 1], [1, 0]] {
        let names = [format!("qcow2:{}", image.display()), server.uri(10)];
        let daemons = order.map(|number| serve(&names[number]));
        let disks = daemons.iter().map(|daemon| DiskConfig::new(daemon.socket(), "")).collect();
        let guest = Guest::start(&GuestConfig::new("kl.task=discard", disks)).unwrap();
        let results = guest.finish().unwrap();
        for daemon in daemons {
            assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
        }
        let files = [&image, &export];
        let [discarded, trimmed] = order.map(|number| space(files[number]));
        println!("{:?} takes {} KiB, the other one {} KiB", files[order[0]], discarded >> 10, trimmed >> 10);
        assert!((15 * MIB..18 * MIB).contains(&discarded) && trimmed < 16 * MIB);
        if order[0] == 1 {
            assert_eq!(results["vda.head"], sha256(&export, 0, 8 * MIB).unwrap());
        }
    }
    qemu_img(&["check", "-q"], &[&image]).unwrap();
}
