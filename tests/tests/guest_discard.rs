//! Checks that space which a guest discards is free in the image: by `blkdiscard` of a disk and `fstrim` of
//! a file system.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs;
use std::os::unix::fs::MetadataExt;

use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{DiskConfig, Guest, GuestConfig};
use kickless_tests::guest::scratch::numbers;
use kickless_tests::guest::{image_dir, make_image, sha256};

const MIB: u64 = 1 << 20;

#[test]
fn blkdiscard_and_fstrim_give_space_back() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has these disks");
        return;
    }
    let dir = image_dir().unwrap();
    let images = ["vda", "vdb"].map(|name| dir.path().join(name));
    let space = |image: usize| fs::metadata(&images[image]).unwrap().blocks() * 512;
    images.iter().for_each(|image| make_image(image, 64, 0).unwrap());
    let daemons = [0, 1].map(|number| {
        let engine = Some(["io_uring", "aio"][number].to_owned());
        Daemon::start(&DaemonConfig { engine, ..DaemonConfig::new(&images[number]) }).unwrap()
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
    // vda has 32 MiB of random bytes, of which 16 MiB are discarded. vdb has a file system whose file of 32
    // MiB is deleted.
    assert!((15 * MIB..18 * MIB).contains(&space(0)), "vda takes {}", space(0));
    assert!(space(1) < 16 * MIB, "vdb takes {}", space(1));
    assert_eq!(results["vda.head"], sha256(&images[0], 0, 8 * MIB).unwrap());
    println!("vda takes {} KiB, vdb {} KiB", space(0) >> 10, space(1) >> 10);
    for daemon in daemons {
        assert_eq!(daemon.stop().unwrap().0.code(), Some(0));
    }
}
