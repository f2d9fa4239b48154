//! Checks that space which a guest discards is free in the image, by `blkdiscard` of a disk and `fstrim` of a
//! file system, and that a preallocated image keeps its space with `discard=off`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::scratch::numbers;
use kickless_tests::guest::{image_dir, make_image, sha256};
use rustix::fs::{FallocateFlags, fallocate};

const MIB: u64 = 1 << 20;

/// Runs a guest that fills and discards two images of 64 MiB: 32 MiB of random bytes on vda, of which 16 MiB
/// are discarded, and a file system on vdb whose file of 32 MiB is deleted. Returns the bytes that the images
/// take afterwards. `None`: this program has no such disks.
fn space_after_discards(preallocate: bool, discard: &str) -> Option<[u64; 2]> {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has these disks");
        return None;
    }
    let dir = image_dir().unwrap();
    let images = ["vda", "vdb"].map(|name| dir.path().join(name));
    for image in &images {
        make_image(image, 64, 0).unwrap();
        if preallocate {
            let file = File::options().write(true).open(image).unwrap();
            fallocate(file, FallocateFlags::empty(), 0, 64 * MIB).unwrap();
        }
    }
    let daemons = [0, 1].map(|number| {
        let engine = Some(["io_uring", "aio"][number].to_owned());
        let arguments = vec![format!("--discard={discard}")];
        Daemon::start(&DaemonConfig { engine, arguments, ..DaemonConfig::new(&images[number]) }).unwrap()
    });
    let rings = ["packed=on", "packed=off"];
    let disks = [0, 1].map(|number| DiskConfig::new(daemons[number].socket(), rings[number]));
    let guest = Guest::start(&GuestConfig::new("kl.task=discard", disks.into())).unwrap();
    let results = guest.finish().unwrap();
    for disk in ["vda", "vdb"] {
        for limit in ["discard_max", "zeroes_max"] {
            assert!(
                numbers(&results, &format!("{disk}.{limit}")).unwrap()[0] > 0,
                "{disk} offers no {limit}"
            );
        }
    }
    assert_eq!(results["vda.head"], sha256(&images[0], 0, 8 * MIB).unwrap());
    for daemon in daemons {
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
    let space = images.map(|image| fs::metadata(image).unwrap().blocks() * 512);
    println!("vda takes {} KiB, vdb {} KiB", space[0] >> 10, space[1] >> 10);
    Some(space)
}

#[test]
fn blkdiscard_and_fstrim_give_space_back() {
    let Some([vda, vdb]) = space_after_discards(false, "on") else { return };
    assert!((15 * MIB..18 * MIB).contains(&vda), "vda takes {vda}");
    assert!(vdb < 16 * MIB, "vdb takes {vdb}");
}

/// The guest succeeds all the same: its file system and its data are whole.
#[test]
fn a_preallocated_image_keeps_its_space() {
    let Some(space) = space_after_discards(true, "off") else { return };
    assert!(space.iter().all(|bytes| *bytes >= 64 * MIB), "{space:?}");
}
