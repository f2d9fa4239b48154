//! Runs stock Linux guests and both firmwares on disks of the daemon, with every ring format and with
//! `--poll=auto` and `--poll=always`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::process::Command;

use kickless_testing::LoopDevice;
use kickless_tests::daemon::{Daemon, DaemonConfig, Program};
use kickless_tests::guest::qemu::{Boot, DiskConfig, Guest, GuestConfig, LIMIT};
use kickless_tests::guest::scratch::{Scratch, numbers};
use kickless_tests::guest::{Assets, image_dir, make_image, sha256};
use kickless_tests::qcow2::serve;
use rustix::thread::{CpuSet, sched_getaffinity};

/// Returns the arguments of a daemon that always polls. All such daemons share one CPU, because the
/// emulated guest needs another.
fn always() -> Vec<String> {
    let all = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
    vec!["--poll=always".to_owned(), format!("--cpu={first}")]
}

/// Returns the arguments of both polling rules, for a test that boots a guest with each.
fn rules() -> [Vec<String>; 2] {
    [Vec::new(), always()]
}

/// One disk of the guest: its daemon and the expected rings.
struct Case {
    engine: &'static str,
    always: bool,
    event_idx: bool,
    indirect: bool,
    packed: bool,
}

/// Returns the cases: every engine with every ring feature. A daemon that always polls takes a CPU from the
/// guest, so only one of the eight does. The ring format and `many` decide which: in the four guests, it has
/// each engine, each ring feature, and each pair of them.
fn cases(packed: bool, many: bool) -> Vec<Case> {
    let polled = (if packed ^ many { "threads" } else { "io_uring" }, packed, many);
    let mut cases = Vec::new();
    for engine in ["io_uring", "threads"] {
        for event_idx in [true, false] {
            for indirect in [true, false] {
                let always = (engine, event_idx, indirect) == polled;
                cases.push(Case { engine, always, event_idx, indirect, packed });
            }
        }
    }
    cases
}

fn switch(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Boots one guest with a disk and a daemon per case. Compares the data on both ends.
fn check_all_cases(cpus: u32, queues: u16, packed: bool) {
    let mut served = Vec::new();
    let mut disks = Vec::new();
    for (index, case) in cases(packed, queues > 1).into_iter().enumerate() {
        let scratch = Scratch::new().unwrap();
        let mut arguments = if case.always { always() } else { Vec::new() };
        arguments.push(format!("--serial=case-{index}"));
        let daemon = Daemon::start(&DaemonConfig {
            engine: Some(case.engine.to_owned()),
            queues,
            // The guest goes first.
            wrapper: case.always.then(|| "nice".into()),
            arguments,
            ..DaemonConfig::new(scratch.path())
        })
        .unwrap();
        let rings = format!(
            "num-queues={queues},event_idx={},indirect_desc={},packed={}",
            switch(case.event_idx),
            switch(case.indirect),
            switch(case.packed)
        );
        disks.push(DiskConfig::new(daemon.socket(), &rings));
        served.push((case, scratch, daemon));
    }
    let guest = Guest::start(&GuestConfig::new("kl.task=check kl.size=8", disks).cpus(cpus)).unwrap();
    let results = guest.finish().unwrap();
    for (index, (case, scratch, mut daemon)) in served.into_iter().enumerate() {
        let disk = format!("vd{}", char::from(b'a' + index as u8));
        let result = |key: &str| results[&format!("{disk}.{key}")].as_str();
        scratch.compare(&results, &disk).unwrap();
        assert_eq!(result("event_idx"), if case.event_idx { "1" } else { "0" }, "{disk}");
        assert_eq!(result("indirect"), if case.indirect { "1" } else { "0" }, "{disk}");
        assert_eq!(result("packed"), if case.packed { "1" } else { "0" }, "{disk}");
        assert_eq!(result("mq"), queues.to_string(), "{disk}");
        let interrupts = numbers(&results, &format!("{disk}.interrupts")).unwrap();
        assert_eq!(interrupts.len(), usize::from(queues), "{disk}: {interrupts:?}");
        assert!(
            interrupts.iter().all(|&count| count > 0),
            "{disk}: a queue without interrupts: {interrupts:?}"
        );
        if Program::from_environment() == Program::Kickless {
            assert_eq!(result("serial"), format!("case-{index}"), "{disk}");
        }
        println!(
            "{disk}: {queues} queues, {}, polled {}, event_idx {}, indirect {}, packed {}: verified, interrupts by queue {interrupts:?}",
            case.engine,
            if case.always { "always" } else { "adaptively" },
            switch(case.event_idx),
            switch(case.indirect),
            switch(case.packed)
        );
        assert!(daemon.is_running().unwrap());
        let (status, _) = daemon.stop().unwrap();
        assert_eq!(status.code(), Some(0), "{disk}: the daemon's status after SIGTERM");
    }
}

#[test]
fn one_queue_with_every_engine_and_ring_feature() {
    check_all_cases(1, 1, false);
}

#[test]
fn four_queues_with_every_engine_and_ring_feature() {
    check_all_cases(4, 4, false);
}

#[test]
fn one_packed_queue_with_every_engine_and_ring_feature() {
    check_all_cases(1, 1, true);
}

#[test]
fn four_packed_queues_with_every_engine_and_ring_feature() {
    check_all_cases(4, 4, true);
}

#[test]
fn seabios_boots_from_the_disk() {
    const MESSAGE: &str = "second sector, read through the BIOS";
    let scratch = Scratch::new().unwrap();
    let assets = Assets::get().unwrap();
    let mut image = File::options().write(true).open(scratch.path()).unwrap();
    image.write_all(&fs::read(assets.boot_sector()).unwrap()).unwrap();
    image.write_all(MESSAGE.as_bytes()).unwrap();
    image.write_all(&[0]).unwrap();
    drop(image);
    for arguments in rules() {
        let daemon = Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new(scratch.path()) }).unwrap();
        let disk = DiskConfig::new(daemon.socket(), "num-queues=1");
        let guest =
            Guest::start(&GuestConfig { boot: Boot::Bios, ..GuestConfig::new("", vec![disk]) }).unwrap();
        for text in ["boot sector running", MESSAGE] {
            guest.console().wait_for(text, LIMIT, |line| line.contains(text).then_some(())).unwrap();
        }
    }
    println!("SeaBIOS read the boot sector and the boot sector read the next one");
}

/// The image counts in sectors of 512 bytes, and the device has 4096. A guest that sees these does not find
/// the second sector.
#[test]
fn seabios_boots_from_a_device_with_larger_sectors() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: the storage daemon has other options");
        return;
    }
    const MESSAGE: &str = "second sector, read through the BIOS";
    let mut image = tempfile::NamedTempFile::new().unwrap();
    image.write_all(&fs::read(Assets::get().unwrap().boot_sector()).unwrap()).unwrap();
    image.write_all(MESSAGE.as_bytes()).unwrap();
    image.as_file().set_len(4 << 20).unwrap();
    let device = match LoopDevice::new(image, &["--sector-size=4096"]) {
        Ok(device) => device,
        Err(why) => return println!("SKIPPED: no loop device: {why}"),
    };
    for block_size in [None, Some(4096)] {
        let arguments = block_size.map(|bytes: u32| format!("--logical-block-size={bytes}"));
        let arguments = arguments.into_iter().collect();
        let (daemon, disk) = serve(&DaemonConfig { arguments, ..DaemonConfig::new(device.path()) }).unwrap();
        assert_eq!(disk.block_size().unwrap(), block_size.unwrap_or(512));
        disk.close();
        drop(disk);
        if block_size.is_none() {
            let disk = DiskConfig::new(daemon.socket(), "num-queues=1");
            let guest =
                Guest::start(&GuestConfig { boot: Boot::Bios, ..GuestConfig::new("", vec![disk]) }).unwrap();
            for text in ["boot sector running", MESSAGE] {
                guest.console().wait_for(text, LIMIT, |line| line.contains(text).then_some(())).unwrap();
            }
        }
    }
}

/// Creates a FAT filesystem without a partition table, in which OVMF looks for its boot program.
fn make_efi_disk(path: &std::path::Path, files: &[(PathBuf, &str)]) {
    make_image(path, 64, 0).unwrap();
    let run = |program: &str, arguments: &[&std::ffi::OsStr]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let image = path.as_os_str();
    run("mformat", &["-i".as_ref(), image, "-F".as_ref(), "::".as_ref()]);
    for (source, name) in files {
        run("mcopy", &["-i".as_ref(), image, source.as_ref(), format!("::{name}").as_ref()]);
    }
}

/// Boots Linux through OVMF from a disk with these properties. Linux compares the disk's content.
fn boot_through_ovmf(properties: &str) {
    let assets = Assets::get().unwrap();
    let dir = image_dir().unwrap();
    let path = dir.path().join("efi.img");
    // OVMF's shell runs this script from the disk. The kernel is an EFI program and reads its initramfs
    // from the disk through the firmware.
    let script = dir.path().join("startup.nsh");
    fs::write(
        &script,
        "fs0:\r\necho OVMF reads the disk\r\n\
         vmlinuz.efi initrd=\\base.img console=ttyS0 quiet panic=-1 no_timer_check kl.task=firmware\r\n",
    )
    .unwrap();
    make_efi_disk(
        &path,
        &[(script, "startup.nsh"), (assets.kernel_image(), "vmlinuz.efi"), (assets.base(), "base.img")],
    );
    let length = fs::metadata(&path).unwrap().len();
    let before = sha256(&path, 0, length).unwrap();
    for arguments in rules() {
        let daemon = Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new(&path) }).unwrap();
        let disk = DiskConfig::new(daemon.socket(), properties);
        let guest =
            Guest::start(&GuestConfig { boot: Boot::Efi, ..GuestConfig::new("", vec![disk]) }).unwrap();
        let results = guest.finish().unwrap();
        assert_eq!(results["firmware"], "efi");
        assert_eq!(results["vda.content"], before, "the guest that OVMF booted read other bytes");
    }
    println!(
        "OVMF loaded the kernel and the initramfs ({} MiB disk) and Linux found all of it intact",
        length >> 20
    );
}

#[test]
fn ovmf_boots_from_the_disk() {
    boot_through_ovmf("num-queues=1,disable-legacy=on");
}

/// OVMF drives a device on QEMU's root bus, which is transitional, through the legacy interface: its queue
/// size and features are not negotiated as in version 1.
#[test]
fn ovmf_boots_through_the_legacy_interface() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: QEMU's daemon has no legacy devices");
        return;
    }
    boot_through_ovmf("num-queues=1,disable-legacy=off");
}

/// Boots one guest with a disk of each daemon.
fn check_each(daemons: &[Daemon; 2], scratches: &[Scratch; 2], cpus: u32) {
    let disks = daemons.iter().map(|daemon| DiskConfig::new(daemon.socket(), "")).collect();
    let guest = Guest::start(&GuestConfig::new("kl.task=check kl.size=8", disks).cpus(cpus)).unwrap();
    let results = guest.finish().unwrap();
    for (scratch, disk) in scratches.iter().zip(["vda", "vdb"]) {
        scratch.compare(&results, disk).unwrap();
    }
}

#[test]
fn without_io_uring_auto_falls_back_and_says_so_once() {
    if Program::from_environment() != Program::Kickless {
        println!("SKIPPED: only kickless has these engines");
        return;
    }
    let scratches = [Scratch::new().unwrap(), Scratch::new().unwrap()];
    let forbidden = |scratch: &Scratch, arguments| DaemonConfig {
        engine: Some("auto".to_owned()),
        wrapper: Some(env!("CARGO_BIN_EXE_without-io-uring").into()),
        arguments,
        ..DaemonConfig::new(scratch.path())
    };
    let [first, second] = rules();
    let configs = [forbidden(&scratches[0], first), forbidden(&scratches[1], second)];
    let daemons = configs.each_ref().map(|config| Daemon::start(config).unwrap());
    check_each(&daemons, &scratches, 2);
    check_each(&daemons, &scratches, 1);
    for daemon in daemons {
        let told = daemon.log().grep("io_uring");
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains("engine=aio"), "{told:?}");
        println!("fell back: {}", told[0]);
    }

    // With --engine=io_uring, the daemon must not use another engine.
    let [forbidden, _] = configs;
    let Err(refused) = Daemon::start(&DaemonConfig { engine: Some("io_uring".to_owned()), ..forbidden })
    else {
        panic!("--engine=io_uring started although io_uring is forbidden");
    };
    println!("forced: {refused:#}");
    assert!(format!("{refused:#}").contains("io_uring"), "{refused:#}");
}

#[test]
fn the_guest_sees_the_size_of_the_image() {
    for arguments in rules() {
        let scratch = Scratch::new().unwrap();
        let daemon = Daemon::start(&DaemonConfig { arguments, ..DaemonConfig::new(scratch.path()) }).unwrap();
        // The reset counter writes and reads the last sector.
        let disk = DiskConfig::new(daemon.socket(), "");
        let guest = Guest::start(&GuestConfig::new("kl.task=resets kl.rounds=0", vec![disk])).unwrap();
        assert_eq!(guest.finish().unwrap()["boots"], "1");
        let mut last = [0; 512];
        let mut image = File::open(scratch.path()).unwrap();
        image.seek(SeekFrom::End(-512)).unwrap();
        image.read_exact(&mut last).unwrap();
        assert_eq!(last[..2], *b"1\0");
    }
}
